"""The numbers of a Parquet footer, by Python: what parquet_facts.c must read, and refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from oracles.thrift import Shape, struct

from dataplane.formats.parquet_footers import (
    ENCRYPTED,
    FIELDS,
    METADATA,
    OTHER_FILE,
    PRESENT,
    FooterFacts,
)

_WIDTHS = (4, 2, 9)
_BOUNDS = (1, 2, 5, 6)
_STATISTICS: Shape = dict.fromkeys((*_BOUNDS, 3))
_METADATA: Shape = {**dict.fromkeys(FIELDS.values()), 12: _STATISTICS, 16: {3: None}}
_FOOTER: Shape = {
    2: {1: None, 2: None, 3: None, 5: None},
    3: None,
    4: {1: {1: None, 3: _METADATA, 8: None}, 3: None},
    8: None,
}


def read_footer(content: bytes | memoryview) -> FooterFacts:
    """The oracle of the function in formats/parquet_footers.py."""
    fields = struct(bytes(content), _FOOTER)
    elements = [
        (_whole(one, 1, -1), _whole(one, 2), _whole(one, 3), _whole(one, 5))
        for one in _structs(fields, 2)
    ]
    rows = _whole(fields, 3, None)
    groups, columns, levels = [], list[tuple[int, ...]](), list[int]()
    for group in _structs(fields, 4):
        found = _structs(group, 1)
        groups.append((_whole(group, 3, None), len(found)))
        for column in found:
            columns.append(_column(column, levels))
    return FooterFacts(
        rows,
        8 in fields,
        np.array(elements, np.int64).reshape(len(elements), _WIDTHS[0]),
        np.array(groups, np.int64).reshape(len(groups), _WIDTHS[1]),
        np.array(columns, np.int64).reshape(len(columns), _WIDTHS[2]),
        np.array(levels, np.int64),
    )


def _column(column: Mapping[int, Any], levels: list[int]) -> tuple[int, ...]:
    """One row of the table of columns; its levels are added to those of others."""
    metadata = _struct(column, 3)
    statistics, counted = _struct(metadata, 12), _struct(metadata, 16).get(3, [])
    if not isinstance(counted, list) or not all(isinstance(each, int) for each in counted):
        raise _other_type(3)
    levels += counted
    flags = (OTHER_FILE if _length(column, 1) else 0) | (METADATA if 3 in column else 0)
    flags |= ENCRYPTED if 8 in column else 0
    flags |= sum(flag for at, flag in PRESENT.items() if FIELDS[at] in metadata)
    numbers = (_whole(metadata, field) for field in FIELDS.values())
    longest = max(_length(statistics, bound) for bound in _BOUNDS)
    return (flags, *numbers, longest, _whole(statistics, 3, -1), len(counted))


def _whole(fields: Mapping[int, Any], field: int, otherwise: int | None = 0) -> int:
    found = fields.get(field, otherwise)
    if isinstance(found, int):
        return found
    raise _missing(field) if field not in fields else _other_type(field)


def _length(fields: Mapping[int, Any], field: int) -> int:
    found = fields.get(field, b"")
    if isinstance(found, bytes):
        return len(found)
    raise _other_type(field)


def _struct(fields: Mapping[int, Any], field: int) -> Mapping[int, Any]:
    found = fields.get(field, {})
    if isinstance(found, dict):
        return found
    raise _other_type(field)


def _structs(fields: Mapping[int, Any], field: int) -> Sequence[Mapping[int, Any]]:
    if field not in fields:
        raise _missing(field)
    found = fields[field]
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        return found
    raise _other_type(field)


def _missing(field: int) -> ValueError:
    return ValueError(f"field {field} of a structure is missing")


def _other_type(field: int) -> ValueError:
    return ValueError(f"field {field} of a structure has another type")
