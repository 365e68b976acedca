"""Arrow IPC: dictionaries, small batches, hostile lengths, and zero copies where they are promised."""

from __future__ import annotations

import io
import itertools
import struct
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec import structs
from shards import (
    NESTED,
    NESTED_ROWS,
    MemoryShard,
    arrow_bytes,
    as_polars,
    decoded,
    raw_block,
    read_rows,
    rows_of,
)

from dataplane.formats import arrow_messages
from dataplane.formats.arrow_ipc import ArrowIpc
from dataplane.formats.arrow_messages import Window, file_footer, is_implied_by_size, messages_of
from dataplane.formats.base import RawBlock
from dataplane.formats.flatbuf import Head, message_head
from dataplane.model.errors import ConfigError, CorruptShard, DataplaneError
from dataplane.model.records import Region

ARROW = ArrowIpc()
TOKENS = pa.table({"ids": pa.FixedSizeListArray.from_arrays(np.arange(400_000, dtype="i4"), 100)})


@given(
    rows=NESTED_ROWS,
    size=st.integers(1, 20),
    file=st.booleans(),
    codec=st.sampled_from([None, "lz4", "zstd"]),
)
def test_nested_values_and_nulls_come_back(
    rows: list[dict], size: int, file: bool, codec: str | None
) -> None:
    table = pa.Table.from_pylist(rows, schema=NESTED)
    assert read_rows(ARROW, arrow_bytes(table, rows=size, file=file, codec=codec)) == rows


@pytest.mark.parametrize("file", [True, False])
def test_dictionaries_before_the_batches_are_the_preamble(file: bool) -> None:
    words = pa.array(["a", "b", None, "a", "c"]).dictionary_encode()
    table = pa.table({"word": words, "n": range(5)})
    content = arrow_bytes(table, rows=2, file=file)
    index = ARROW.index(MemoryShard(content))
    assert not index.zero_copy
    assert index.preamble.length > 0
    assert read_rows(ARROW, content) == table.to_pylist()


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_files_whose_schema_has_no_length(codec: str | None) -> None:
    texts = [None if i % 7 == 0 else f"a text of some length {i}" for i in range(300)]
    views = {
        "s": pa.array(texts, pa.string_view()),
        "b": pa.array([None if t is None else t.encode() for t in texts], pa.binary_view()),
        "l": pa.array([[t] * (i % 3) for i, t in enumerate(texts)], pa.list_(pa.string_view())),
    }
    table = pa.table({"i": range(300), **views})
    for content in (
        as_polars(arrow_bytes(table, rows=100, file=True, codec=codec)),
        as_polars(arrow_bytes(table.slice(0, 0), file=True)),
    ):
        expected = pa.ipc.open_file(content).read_all().to_pylist()
        assert read_rows(ARROW, content) == expected
        assert read_rows(ARROW, content, columns=["l"]) == [{"l": row["l"]} for row in expected]
        for cut in (1, 10, 100, len(content) // 2):
            with pytest.raises(CorruptShard):
                read_rows(ARROW, content[:-cut])


def test_dictionaries_of_files_whose_schema_has_no_length() -> None:
    words = pa.array(["a", "b", None, "a", "c"]).dictionary_encode()
    table = pa.table({"word": words, "n": range(5)})
    for codec in (None, "zstd"):
        content = as_polars(arrow_bytes(table, rows=2, file=True, codec=codec))
        assert pa.ipc.open_file(content).read_all().to_pylist() == table.to_pylist()
        assert read_rows(ARROW, content) == table.to_pylist()
        assert read_rows(ARROW, content, columns=["word"]) == table.select(["word"]).to_pylist()


@pytest.mark.parametrize("file", [True, False])
def test_a_shard_without_columns(file: bool) -> None:
    batch = pa.RecordBatch.from_struct_array(pa.array([{}] * 3, type=pa.struct([])))
    sink = io.BytesIO()
    with (pa.ipc.new_file if file else pa.ipc.new_stream)(sink, batch.schema) as writer:
        writer.write_batch(batch)
    assert read_rows(ARROW, sink.getvalue()) == [{}, {}, {}]


def test_an_error_without_an_expected_value_does_not_mention_one() -> None:
    content = bytearray(arrow_bytes(pa.table({"a": [1]}), file=True))
    content[12:16] = (4).to_bytes(4, "little")
    with pytest.raises(CorruptShard, match=r"(?m)metadata is impossible: found 4$"):
        ARROW.index(MemoryShard(bytes(content)))


def test_dictionaries_that_change_make_one_block() -> None:
    first = pa.record_batch({"w": pa.array(["a", "b"]).dictionary_encode()})
    second = pa.record_batch({"w": pa.array(["c", "d", "c"]).dictionary_encode()})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, first.schema) as writer:
        writer.write_batch(first)
        writer.write_batch(second)
    index = ARROW.index(MemoryShard(sink.getvalue()))
    assert [block.rows for block in index.blocks] == [5]
    assert index.blocks[0].place.length == len(sink.getvalue())
    rows = read_rows(ARROW, sink.getvalue())
    assert [row["w"] for row in rows] == ["a", "b", "c", "d", "c"]


def test_small_batches_are_grouped_and_large_ones_are_not() -> None:
    small = pa.table({"x": range(20_000)})
    index = ARROW.index(MemoryShard(arrow_bytes(small, rows=1)))
    assert len(index.blocks) <= 3
    assert all(block.place.length <= 4 << 20 for block in index.blocks)
    assert sum(block.rows for block in index.blocks) == 20_000
    assert not index.zero_copy
    large = ARROW.index(MemoryShard(arrow_bytes(TOKENS, rows=1000)))
    assert len(large.blocks) == 4
    assert large.zero_copy


@pytest.mark.parametrize("file", [True, False])
def test_plain_batches_are_decoded_without_a_copy(file: bool) -> None:
    content = arrow_bytes(TOKENS, rows=1000, file=file)
    index = ARROW.index(MemoryShard(content))
    start = np.frombuffer(content, np.uint8).ctypes.data
    for block in range(len(index.blocks)):
        batch = ARROW.decode(raw_block(content, index, block, "u"), index.schema, ["ids"])
        for buffer in batch.column("ids").flatten().buffers():
            assert buffer is None or start <= buffer.address < start + len(content)


_ROWS = [{"n": n, "text": "t" * n if n % 3 else None, "of": [n] * (n % 4)} for n in range(20)]
_DAMAGED = arrow_bytes(pa.Table.from_pylist(_ROWS), rows=20)
_DAMAGED_INDEX = ARROW.index(MemoryShard(_DAMAGED))


def _outcome(block: RawBlock) -> tuple[object, ...]:
    try:
        batch = ARROW.decode(block, _DAMAGED_INDEX.schema, _DAMAGED_INDEX.schema.names)
    except DataplaneError as error:
        return type(error), str(error)
    return (batch.serialize().to_pybytes(),)


@hypothesis_settings(max_examples=80, deadline=None)
@given(
    places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=3),
    is_cut=st.booleans(),
    in_preamble=st.booleans(),
)
def test_a_damaged_batch_is_refused_like_a_stream_of_it(
    places: list[tuple[float, int]], is_cut: bool, in_preamble: bool
) -> None:
    block = raw_block(_DAMAGED, _DAMAGED_INDEX, 0, "u")
    preamble, body = bytearray(block.preamble), bytearray(block.body)
    changed = preamble if in_preamble else body
    for share, value in places:
        changed[int(share * (len(changed) - 1))] = value
    if is_cut:
        del changed[-8:]
    damaged = structs.replace(
        block, preamble=memoryview(preamble).toreadonly(), body=memoryview(body).toreadonly()
    )
    outcome = _outcome(damaged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dataplane.formats.arrow_ipc._read_alone", lambda *_: None)
        assert _outcome(damaged) == outcome
    assert places or is_cut or outcome == _outcome(block)


def test_bodies_of_large_batches_are_not_read() -> None:
    table = pa.table({"x": np.zeros(4_000_000)})
    for file in (True, False):
        shard = MemoryShard(arrow_bytes(table, rows=1_000_000, file=file))
        ARROW.index(shard)
        assert shard.size_bytes > 30 << 20
        assert shard.bytes_read < 1 << 20


def test_empty_batches_and_empty_shards() -> None:
    table = pa.table({"x": [1, 2]})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 1), table.slice(0, 0), table.slice(1)):
            writer.write_table(part)
            if not part.num_rows:
                writer.write_batch(pa.record_batch({"x": pa.array([], pa.int64())}))
    assert read_rows(ARROW, sink.getvalue()) == [{"x": 1}, {"x": 2}]
    assert ARROW.index(MemoryShard(arrow_bytes(table.slice(0, 0)))).blocks == ()


def test_messages_from_before_arrow_0_15_are_read() -> None:
    content = arrow_bytes(pa.table({"x": [1, 2, 3]}), use_legacy_format=True)
    assert not content.startswith(b"\xff\xff\xff\xff")
    assert read_rows(ARROW, content) == [{"x": 1}, {"x": 2}, {"x": 3}]


def test_a_stream_that_was_not_closed_is_truncated() -> None:
    content = arrow_bytes(pa.table({"x": [1, 2, 3]}))
    with pytest.raises(CorruptShard, match="truncated: it was not closed"):
        ARROW.index(MemoryShard(content[:-8]))


def test_two_streams_in_one_shard_are_refused() -> None:
    content = arrow_bytes(pa.table({"x": [1, 2, 3]}))
    with pytest.raises(CorruptShard, match="more data follows the end"):
        ARROW.index(MemoryShard(content + content))


def test_unknown_extension_types_stay_storage() -> None:
    metadata = {"ARROW:extension:name": "someone.else", "ARROW:extension:metadata": "x"}
    schema = pa.schema([pa.field("x", pa.int32(), metadata=metadata)])
    [batch] = decoded(ARROW, arrow_bytes(pa.table({"x": [1]}, schema=schema)))
    assert batch.schema.field("x").type == pa.int32()


def test_values_that_point_out_of_bounds_are_refused() -> None:
    content = bytearray(arrow_bytes(pa.table({"x": ["abc", "def"]})))
    at = content.index(np.array([0, 3, 6], "<i4").tobytes())
    content[at + 4 : at + 8] = (2**30).to_bytes(4, "little")
    with pytest.raises(CorruptShard, match="invalid values"):
        decoded(ARROW, bytes(content))


@pytest.mark.parametrize("claim", [2**62, 2**40, 100 << 30])
def test_a_compressed_buffer_may_not_claim_terabytes(claim: int) -> None:
    table = pa.table({"x": np.arange(10_000)})
    content = bytearray(arrow_bytes(table, codec="zstd"))
    at = content.index((8_000).to_bytes(8, "little"))
    content[at : at + 8] = claim.to_bytes(8, "little")
    with pytest.raises(CorruptShard, match="claim an impossible size"):
        decoded(ARROW, bytes(content))


@given(st.binary(max_size=80))
def test_metadata_from_anywhere_is_a_head_or_a_value_error(content: bytes) -> None:
    try:
        message_head(memoryview(content))
    except ValueError as error:
        assert str(error)  # noqa: PT017


class Together(MemoryShard):
    """Notes how many ranges are read at once."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.together: list[int] = []

    def read_all(self, places: Sequence[Region]) -> list[bytes]:
        self.together.append(len(places))
        return super().read_all(places)


def test_the_metadata_of_large_batches_is_read_at_once() -> None:
    rows, batches = 150_000, 9
    wide = pa.table({"x": np.arange(rows * batches)})
    content = arrow_bytes(wide, rows=rows, file=True)
    shard = Together(content)
    index = ARROW.index(shard)
    mark = 1
    assert shard.together == [batches + mark]
    start_and_end = 2
    assert len(shard.reads) == batches + mark + start_and_end
    assert [block.rows for block in index.blocks] == [rows] * batches
    assert shard.bytes_read < len(content) / 20
    batch = ARROW.decode(raw_block(content, index, 7, "u"), index.schema, ["x"])
    assert batch.column("x").to_numpy().tolist() == list(range(7 * rows, 8 * rows))
    for cut in (1, 10, 300, len(content) // 2):
        with pytest.raises(CorruptShard):
            ARROW.index(MemoryShard(content[:-cut]))


def test_equal_batches_of_fixed_width_are_indexed_by_their_sizes() -> None:
    rows, batches, width = 400, 6, 1024
    count = rows * batches - 1
    cells = pa.array(np.arange(count * width, dtype=np.int32))
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(cells, width)})
    content = arrow_bytes(table, rows=rows, file=True)
    shard = Together(content)
    index = ARROW.index(shard)
    last, mark = 1, 1
    assert shard.together == [last + mark]
    assert [block.rows for block in index.blocks] == [*[rows] * (batches - 1), rows - 1]
    assert [block.place.length for block in index.blocks[:-1]] == [index.blocks[0].place.length] * 5
    batch = ARROW.decode(raw_block(content, index, 4, "u"), index.schema, ["tokens"])
    assert batch.column("tokens").equals(table.column("tokens").chunk(0)[4 * rows : 5 * rows])
    # Whoever decodes a block reads its own metadata.
    at = index.blocks[3].place.offset
    changed = bytearray(content)
    place = changed.index(rows.to_bytes(8, "little"), at)
    while place < at + 512:
        changed[place : place + 8] = (rows - 1).to_bytes(8, "little")
        place = changed.index(rows.to_bytes(8, "little"), place + 1)
    with pytest.raises(CorruptShard):
        ARROW.decode(raw_block(bytes(changed), index, 3, "u"), index.schema, ["tokens"])


def _odd(kind: pa.DataType, *numbers: int) -> pa.Array:
    """Two values that are these numbers in memory, whether the type allows them or not."""
    width = kind.bit_width // 8
    body = b"".join(number.to_bytes(width, "little", signed=True) for number in numbers)
    return pa.Array.from_buffers(kind, 2, [None, pa.py_buffer(body)])


_ODD = {
    "day": _odd(pa.date64(), 1, 86_400_000),
    "clock": _odd(pa.time32("s"), -1, 86_400),
    "nanoseconds": _odd(pa.time64("ns"), 5, 1 << 62),
    "price": _odd(pa.decimal128(4, 2), 1_234_567, 5),
}


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("name", _ODD)
def test_times_and_decimals_beyond_their_type_come_as_stored(name: str, codec: str | None) -> None:
    odd = _ODD[name]
    with pytest.raises(pa.ArrowInvalid):
        odd.validate(full=True)
    nested = {
        "odd": odd,
        "list": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), odd),
        "struct": pa.StructArray.from_arrays([odd], ["x"]),
        "map": pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array([1, 2]), odd),
        "dictionary": pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), odd),
    }
    table = pa.table(nested)
    (batch,) = decoded(ArrowIpc(), arrow_bytes(table, codec=codec))
    assert pa.table(batch).equals(table)


def test_a_column_with_invalid_values_is_named() -> None:
    text = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(bytes(4) + b"\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    both = pa.table(
        {"fine": [1, 2], "struct": pa.StructArray.from_arrays([text, _ODD["day"]], "xy")}
    )
    with pytest.raises(CorruptShard, match=r"column 'struct' decodes to invalid values .*UTF"):
        decoded(ArrowIpc(), arrow_bytes(both))


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
