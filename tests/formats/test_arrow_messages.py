"""Arrow IPC metadata: what the size of a batch implies, compared with all batches of that size; and
metadata that contradicts itself: no sample is silently left out or changed.
"""

from __future__ import annotations

import io
import itertools
import struct
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pytest
from shards import MemoryShard, arrow_bytes, decoded, read_rows, rows_of

from dataplane.formats import arrow_messages
from dataplane.formats.arrow_ipc import ArrowIpc
from dataplane.formats.arrow_messages import Window, file_footer, is_implied_by_size, messages_of
from dataplane.formats.flatbuf import Head, message_head
from dataplane.model.errors import ConfigError, CorruptShard

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
    implied_count = 0
    for rows, head in plain.items():
        is_alone = by_size[head.body_length] == {(rows, (False,) * nodes)}
        if rows < ROWS_MAX // 2:  # of larger ones, a batch of the same size may not be here
            assert is_implied_by_size(schema, head) == is_alone, rows
            implied_count += is_alone
    assert implied_count or schema.types[0] in {pa.bool_(), pa.int32()}


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


ARROW = ArrowIpc()
TABLE = pa.table({"x": pa.array([1, 2, 3], pa.int32()), "s": ["a", "b", "c"]})


def changed(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def test_old_streams_are_read_however_long_their_schema_is() -> None:
    wide = pa.table({f"column number {i}": [i, i + 1] for i in range(300)})
    content = arrow_bytes(wide, use_legacy_format=True)
    assert int.from_bytes(content[:4], "little") > 10_000
    assert read_rows(ARROW, content) == wide.to_pylist()


@pytest.mark.parametrize(
    "start", [b'{"a": 1}', b"PK\x03\x04\x00\x00", b"\x20\x00\x00\x00" + bytes(60)]
)
def test_what_only_looks_like_a_length_is_no_stream(start: bytes) -> None:
    with pytest.raises(CorruptShard, match="not an Arrow IPC file or stream"):
        ARROW.index(MemoryShard(start.ljust(200, b" ")))


def test_a_footer_with_another_schema_than_the_messages_is_refused() -> None:
    content = arrow_bytes(TABLE, file=True)
    other = arrow_bytes(TABLE.rename_columns(["y", "s"]), file=True)
    start = file_footer(MemoryShard(content)).start
    assert file_footer(MemoryShard(other)).start == start
    with pytest.raises(CorruptShard, match="different schemas"):
        ARROW.index(MemoryShard(content[:start] + other[start:]))


def test_a_footer_with_another_byte_order_than_the_messages_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = arrow_bytes(TABLE, file=True)
    monkeypatch.setattr(arrow_messages, "footer_is_big_endian", lambda _: True)
    with pytest.raises(CorruptShard, match="different schemas"):
        ARROW.index(MemoryShard(content))


def test_a_footer_that_points_to_something_other_than_a_batch_is_refused() -> None:
    content = arrow_bytes(TABLE, rows=2, file=True)
    footer = file_footer(MemoryShard(content))
    for at, length, _ in footer.batches:
        entry = content.index(struct.pack("<qi", at, length), footer.start)
        with pytest.raises(CorruptShard, match=f"names a record batch at byte {at + 8}"):
            ARROW.index(MemoryShard(changed(content, entry, struct.pack("<q", at + 8))))


def test_a_footer_that_names_some_batches_only_says_what_the_file_is() -> None:
    content = arrow_bytes(TABLE, rows=1, file=True)
    footer = file_footer(MemoryShard(content))
    first, second, last = [
        content.index(struct.pack("<qi", *batch[:2]), footer.start) for batch in footer.batches
    ]
    swapped = changed(content, first, content[last : last + 24])
    swapped = changed(swapped, last, content[second : second + 24])
    expected = pa.ipc.open_file(swapped).read_all().to_pylist()
    assert [row["x"] for row in expected] == [3, 2, 2]
    assert read_rows(ARROW, swapped) == expected


def test_no_message_is_skipped() -> None:
    """If one byte of a stream's metadata is changed, all rows are read, or none."""
    content = arrow_bytes(TABLE, rows=1)
    metadata = [
        at
        for message in messages_of(Window(MemoryShard(content)), 0, len(content), file=False)
        for at in range(message.offset, message.offset + message.metadata_length)
    ]
    for at in metadata:
        for byte in (0, 1, 2, 3, 4, 255):
            try:
                rows = rows_of(decoded(ARROW, changed(content, at, bytes([byte]))))
            except (CorruptShard, ConfigError):
                continue
            assert len(rows) == 3, (at, byte)


def test_dictionaries_of_lists_that_change_are_refused_by_name() -> None:
    sink = io.BytesIO()
    pieces = [
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array([[version], [2]]))
        for version in (0, 1)
    ]
    with pa.ipc.new_stream(sink, pa.schema([("d", pieces[0].type), ("x", pa.int8())])) as writer:
        for piece in pieces:
            writer.write_batch(pa.record_batch([piece, pa.array([1, 2], pa.int8())], ["d", "x"]))
    with pytest.raises(ConfigError, match=r"test/shard: not supported: column 'd' is of type dict"):
        decoded(ARROW, sink.getvalue())
    assert rows_of(decoded(ARROW, sink.getvalue(), ["x"])) == [{"x": 1}, {"x": 2}] * 2
