"""What the size of an Arrow record batch says of its rows, compared with every batch of that size."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pytest

from dataplane.formats.arrow_messages import is_implied_by_size
from dataplane.formats.flatbuf import Head, message_head

ROWS_MAX = 160
SCHEMAS = (
    pa.schema({"x": pa.int32()}),
    pa.schema({"x": pa.bool_()}),
    pa.schema({"x": pa.list_(pa.int16(), 40)}),
    pa.schema({"x": pa.binary(7), "y": pa.bool_()}),
    pa.schema({"x": pa.list_(pa.list_(pa.float32(), 3), 5), "y": pa.timestamp("us")}),
    pa.schema({"x": pa.struct({"a": pa.float64(), "b": pa.int8()})}),
)
NEVER_TOLD = (pa.string(), pa.list_(pa.int32()), pa.null(), pa.dictionary(pa.int8(), pa.string()))


def _array(kind: pa.DataType, rows: int, nulls: list[bool]) -> pa.Array:
    """Of this type, with nulls at the last place of each array that is to have some."""
    mask = np.zeros(rows, np.bool_)
    mask[-1:] = nulls.pop(0)
    valid = pa.array(~mask) if mask.any() else None
    if pa.types.is_fixed_size_list(kind):
        inner = _array(kind.value_type, rows * kind.list_size, nulls)
        return pa.FixedSizeListArray.from_arrays(inner, kind.list_size, mask=_mask(mask))
    if pa.types.is_struct(kind):
        parts = [_array(kind.field(at).type, rows, nulls) for at in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=_mask(mask))
    size = -(-rows * kind.bit_width // 8)
    validity = valid.buffers()[1] if valid is not None else None
    return pa.Array.from_buffers(kind, rows, [validity, pa.py_buffer(bytes(size))])


def _mask(mask: np.ndarray) -> pa.Array | None:
    return pa.array(mask) if mask.any() else None


def _node_count(kind: pa.DataType) -> int:
    inner = [kind.field(at).type for at in range(kind.num_fields)]
    return 1 + sum(map(_node_count, inner))


def _head(schema: pa.Schema, rows: int, nulls: tuple[bool, ...]) -> Head:
    left = list(nulls)
    batch = pa.record_batch([_array(kind, rows, left) for kind in schema.types], schema=schema)
    return message_head(memoryview(batch.serialize())[8:])


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_size_tells_the_rows_only_if_no_other_batch_has_it(schema: pa.Schema) -> None:
    nodes = sum(map(_node_count, schema.types))
    by_size, plain = defaultdict(set), {}
    for rows in range(1, ROWS_MAX):
        for nulls in itertools.product((False, True), repeat=nodes):
            head = _head(schema, rows, nulls)
            by_size[head.body_length].add((rows, nulls))
            if not any(nulls):
                plain[rows] = head
    told = 0
    for rows, head in plain.items():
        is_alone = by_size[head.body_length] == {(rows, (False,) * nodes)}
        if rows < ROWS_MAX // 2:  # of larger ones, a batch of the same size may not be here
            assert is_implied_by_size(schema, head) == is_alone, rows
            told += is_alone
    assert told or schema.types[0] in {pa.bool_(), pa.int32()}


@pytest.mark.parametrize("kind", NEVER_TOLD, ids=str)
def test_sizes_of_other_types_tell_nothing(kind: pa.DataType) -> None:
    schema = pa.schema({"x": kind})
    assert not is_implied_by_size(schema, Head(3, 64, 8, [8], [0, 0], [0, 64], nulls=[0]))


def test_a_batch_with_nulls_tells_nothing() -> None:
    schema = SCHEMAS[2]
    assert is_implied_by_size(schema, _head(schema, 10, (False, False)))
    assert not is_implied_by_size(schema, _head(schema, 10, (False, True)))


@pytest.mark.parametrize("kind", [pa.list_(pa.int8(), 0), pa.struct([])], ids=str)
def test_a_head_that_claims_impossible_rows_tells_nothing(kind: pa.DataType) -> None:
    rows = (1 << 63) - 1
    schema, buffers = (
        pa.schema({"x": kind}),
        sum(1 + (node > 0) for node in range(_node_count(kind))),
    )
    for size in (0, 64):
        head = Head(3, size, rows, [rows], [0] * buffers, [0] * buffers, nulls=[0])
        assert not is_implied_by_size(schema, head)
    assert not is_implied_by_size(SCHEMAS[0], Head(3, 64, 8, [8], [], [0, 32], nulls=[0]))
