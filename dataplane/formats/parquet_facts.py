"""The parts of a Parquet footer that an index needs, as tables of numbers: read in C, or in Python
if the C reader is not compiled.

pyarrow's own view of row groups crashes the process if a footer contradicts itself (a C++ exception
crosses Python), and costs a Python object a column. Both readers here give the same tables, and
refuse the same footers; the one in C takes a hundredth of the time.

Source:  https://github.com/apache/parquet-format (FileMetaData in parquet.thrift)
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane import compiled
from dataplane.formats.thrift import Shape, struct

SOURCE = Path(__file__).with_name("parquet_facts.c")
LIBRARY = Path(__file__).with_name("libparquet_facts.so")

Int64 = NDArray[np.int64]

# Columns of FooterFacts.elements; an absent type is -1, any other absent number 0.
TYPE, LENGTH, REPETITION, CHILDREN = range(4)
# Columns of FooterFacts.groups.
ROWS, COLUMN_COUNT = range(2)
# Columns of FooterFacts.columns; an absent null count is -1, any other absent number 0.
(
    FLAGS, VALUES, DECODED_BYTES, BYTES, FIRST_PAGE, DICTIONARY, LONGEST_BOUND, NULLS, LEVELS,
) = range(9)  # fmt: skip
# FLAGS: a column is in another file, has metadata, is encrypted; and which numbers are present.
OTHER_FILE, METADATA, ENCRYPTED = 1, 2, 4
TOLD = {VALUES: 8, DECODED_BYTES: 16, BYTES: 32, FIRST_PAGE: 64}
FIELDS = {VALUES: 5, DECODED_BYTES: 6, BYTES: 7, FIRST_PAGE: 9, DICTIONARY: 11}
"""The numeric fields of ColumnMetaData, by their field ids in parquet.thrift."""

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
# The faults of the C reader, by number; the second is about a field or a kind.
_FAULTS = (
    "",
    "the message is cut off",
    "structures are nested too deeply",
    "field {} of a structure occurs twice",
    "field {} of a structure has another type",
    "a value or a list does not fit",
    "a varint does not end",
    "there is no thrift type {}",
    "field {} of a structure is missing",
    "the footer has changed while it was read",
)
_POINTER = ctypes.c_void_p
_SIGNATURES: dict[str, compiled.Signature] = {
    # content, length, tables, counts -> fault
    "read_parquet_facts": (ctypes.c_int64, (_POINTER, ctypes.c_int64, _POINTER, _POINTER)),
    # content, length, groups, counts -> fault
    "cut_parquet_footer": (ctypes.c_int64, (_POINTER, ctypes.c_int64, _POINTER, _POINTER)),
}
_CUT_GROUPS = 512
_NO_ROOM = _FAULTS.index("the footer has changed while it was read")
_ONE_STRUCT = b"\x1c"
"""The head of a list of one structure."""


class FooterFacts(Struct, frozen=True, eq=False):
    """The numbers that a footer states; none of them is verified yet.

    Shapes:  elements: int64[e, 4], the schema's, each group before its children.
    groups: int64[g, 2].   columns: int64[c, 9], one row group after the other.
    levels: int64[l]: for each column in turn, as many numbers as its LEVELS says: how many of its
    entries have each definition level.
    """

    rows: int
    is_encrypted: bool
    elements: Int64
    groups: Int64
    columns: Int64
    levels: Int64


class FooterCuts(Struct, frozen=True, eq=False):
    """The places of the row groups in a footer, so that one can be read without the others.

    Shapes:  starts: int64[g + 1], where each begins, and the end of the last; `list_at` is where
    their list begins.   filled: int64[b], the groups that have rows, which are the blocks.
    """

    list_at: int
    starts: Int64
    filled: Int64

    def footer_of(self, content: memoryview, block: int) -> bytes:
        """The footer of a file with only this row group. `content` is the whole FileMetaData.

        Raises:  IndexError: there is no such block.
        """
        group = self.filled[block]
        begin, end = self.starts[group], self.starts[group + 1]
        parts = content[: self.list_at], _ONE_STRUCT, content[begin:end], content[self.starts[-1] :]
        return b"".join(parts)


def cut_footer(content: memoryview, library: ctypes.CDLL) -> FooterCuts:
    """Where the row groups of this FileMetaData lie. Does not read their content.

    Raises:  ValueError: it is not a FileMetaData.
    """
    given, room = np.frombuffer(content, np.uint8), _CUT_GROUPS
    while True:
        counts, groups = np.array((room, 0, 0, 0), np.int64), np.empty((room, 2), np.int64)
        fault = library.cut_parquet_footer(
            given.ctypes.data, len(given), groups.ctypes.data, counts.ctypes.data
        )
        if fault != _NO_ROOM:
            break
        room *= 8
    if fault:
        raise ValueError(_FAULTS[fault].format(counts[3]))
    count, list_at, end, _ = counts.tolist()
    rows, starts = groups[:count].T
    return FooterCuts(list_at, np.append(starts, end), np.flatnonzero(rows))


@functools.cache
def reader() -> compiled.Compiled:
    """The library, loaded once."""
    return load(LIBRARY, SOURCE)


def load(path: Path, source: Path) -> compiled.Compiled:
    """A library, if it exists and was compiled from this source."""
    return compiled.load(path, source, "parquet_facts_source_crc", _SIGNATURES)


def read_footer(content: bytes | memoryview, library: ctypes.CDLL | None) -> FooterFacts:
    """The FileMetaData that `content` starts with. Its tables take at most 72 bytes for each byte
    of it.

    Raises:  ValueError: it is not a FileMetaData.
    """
    if library is None:
        return _from_fields(struct(bytes(content), _FOOTER))
    counts = np.zeros(7, np.int64)
    given = np.frombuffer(content, np.uint8)
    tables: list[Int64] = []
    for is_counted in (False, True):
        if is_counted:
            shapes = zip(counts[:4].tolist(), (*_WIDTHS, 1), strict=True)
            tables = [np.empty(shape, np.int64) for shape in shapes]
        places = np.array([table.ctypes.data for table in tables], np.uintp)
        fault = library.read_parquet_facts(
            given.ctypes.data,
            len(given),
            places.ctypes.data if is_counted else None,
            counts.ctypes.data,
        )
        if fault:
            raise ValueError(_FAULTS[fault].format(counts[6]))
    elements, groups, columns, levels = tables
    return FooterFacts(
        int(counts[4]), bool(counts[5]), elements, groups, columns, levels.reshape(-1)
    )


def _from_fields(fields: Mapping[int, Any]) -> FooterFacts:
    """The same from thrift.py's structs, if nothing is compiled."""
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
    flags |= sum(flag for at, flag in TOLD.items() if FIELDS[at] in metadata)
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
