"""The null counts of a shard: one number for each field node of its schema.

A field node is a field, or a field within a field (the item of a list, the member of a struct), in
depth-first order: the nodes that Arrow IPC lists for a record batch. A dictionary is one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataplane.plan.columns import NEVER, UNKNOWN

ROWS, NONE, NOT_KNOWN = -3, -2, -1
"""Null counts of a field node in a shard: one for each row; none; not known."""

_CHILDLESS = frozenset(
    kind.id
    for kind in (
        *(pa.null(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64()),
        *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64(), pa.decimal128(1), pa.decimal256(1)),
        *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(1)),
        *(pa.date32(), pa.date64(), pa.time32("s"), pa.time64("us")),
        *(pa.timestamp("s"), pa.duration("s")),
    )
)
"""Types without child fields, by id. A fast path: wide tables have tens of thousands of columns."""


def is_flat(schema: pa.Schema) -> bool:
    """Return whether every field is certainly a single field node, and none is a dictionary."""
    return {kind.id for kind in schema.types} <= _CHILDLESS


def children(kind: pa.DataType) -> Sequence[pa.Field]:
    """Return the fields directly below a type."""
    if kind.id in _CHILDLESS:
        return ()
    if isinstance(kind, pa.BaseExtensionType):
        return children(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return ()
    return [kind.field(i) for i in range(kind.num_fields)]


def node_count(fields: Sequence[pa.Field] | pa.Schema) -> int:
    """Return the number of field nodes of these fields."""
    if isinstance(fields, pa.Schema) and is_flat(fields):
        return len(fields)
    return sum(1 + node_count(children(field.type)) for field in fields)


def field_nodes(fields: Sequence[pa.Field] | pa.Schema) -> Iterator[pa.Field]:
    """Yield every field node, in order."""
    for field in fields:
        yield field
        yield from field_nodes(children(field.type))


def declared(schema: pa.Schema, *, otherwise: int = UNKNOWN) -> list[int]:
    """Return NEVER for each node that the schema declares not nullable, and `otherwise` for all
    others.
    """
    return [otherwise if node.nullable else NEVER for node in field_nodes(schema)]


def counted(arrays: Sequence[pa.Array]) -> list[int]:
    """Count the nulls of some columns by their values, ignoring values below a null."""
    counts = []
    for array in arrays:
        counts.append(array.null_count)
        kind = array.type
        if pa.types.is_struct(kind):
            counts += counted(array.flatten())
        elif pa.types.is_list(kind) and not _has_null_type(kind.value_type):
            counts += counted([array.flatten()])
        else:
            counts += [UNKNOWN] * node_count(children(kind))
    return counts


def _has_null_type(kind: pa.DataType) -> bool:
    """Return whether the type contains nulls only: for lists of these, a parser may have created
    fewer values than their offsets say.
    """
    return pa.types.is_null(kind) or any(_has_null_type(child.type) for child in children(kind))


def alignment(expected: pa.Schema, stored: pa.Schema) -> list[int]:
    """Map each field node of the dataset's schema to a count of a shard whose own schema differs:
    the index of the count, or ROWS, NONE or NOT_KNOWN. A column that the shard lacks is null in all
    of its rows.
    """
    starts, at = {}, 0
    for field in stored:
        starts[field.name] = at
        at += node_count([field])
    out: list[int] = []
    for field in expected:
        start = starts.get(field.name)
        if start is None:
            out += [ROWS] + [NONE] * node_count(children(field.type))
        else:
            out += _alignment(field.type, stored.field(field.name).type, start)
    return out


def _alignment(expected: pa.DataType, stored: pa.DataType, at: int) -> list[int]:
    below, others = children(expected), children(stored)
    if pa.types.is_run_end_encoded(stored) and not pa.types.is_run_end_encoded(expected):
        return [NOT_KNOWN] * (1 + node_count(below))  # the shard counts runs of nulls, not nulls
    out, at = [at], at + 1
    if [child.name for child in below] == [other.name for other in others] or (
        len(below) == len(others) == 1
    ):
        for child, other in zip(below, others, strict=True):
            out += _alignment(child.type, other.type, at)
            at += node_count([other])
        return out
    return out + [NOT_KNOWN] * node_count(below)


def aligned(places: NDArray[np.int64], counts: Sequence[int], rows: int) -> NDArray[np.int64]:
    """Convert a shard's counts to the dataset's schema, using their `alignment`."""
    return np.append(np.asarray(counts, np.int64), (rows, 0, UNKNOWN))[places]
