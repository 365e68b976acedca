"""Infer schemas from a shard's first samples for formats that store none, and mark them as
inferred.

Two inferred schemas may differ only because a sample lacked some values, so a dataset keeps the
first one unless another contradicts it. Decoding checks the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

MARK = b"dataplane.inferred"


def inferred_schema(columns: Mapping[str, pa.DataType], *, closed: bool = False) -> pa.Schema:
    """Make a schema of nullable columns, marked as inferred. `closed`: decoding refuses a column
    that the schema lacks.
    """
    return pa.schema(list(columns.items()), metadata={MARK: b"closed" if closed else b"open"})


def is_inferred(schema: pa.Schema) -> bool:
    """Whether a schema was inferred."""
    return MARK in (schema.metadata or {})


def is_closed(schema: pa.Schema) -> bool:
    """Whether this inferred schema refuses shards with columns that it lacks."""
    return bool((schema.metadata or {}).get(MARK) == b"closed")


def contradicts(expected: pa.DataType, found: pa.DataType, *, closed: bool) -> bool:
    """Whether values of an inferred type cannot be read as `expected`. `closed`: a single value
    does not count as a list.
    """
    if expected.equals(found) or pa.types.is_null(found):
        return False
    if pa.types.is_list(expected):
        if closed and not pa.types.is_list(found):
            return True
        inner = found.value_type if pa.types.is_list(found) else found
        return contradicts(expected.value_type, inner, closed=closed)
    if pa.types.is_struct(expected) and pa.types.is_struct(found):
        fields = {field.name: field.type for field in expected.fields}
        return any(
            field.name not in fields or contradicts(fields[field.name], field.type, closed=closed)
            for field in found.fields
        )
    if pa.types.is_uint64(expected):
        return not pa.types.is_int64(found)
    return not (pa.types.is_float64(expected) and pa.types.is_integer(found))
