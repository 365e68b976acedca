"""Arrow IPC: dictionaries, small batches, hostile lengths, and zero copies where they are promised."""

from __future__ import annotations

import io
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
)

from dataplane.formats.arrow_ipc import ArrowIpc
from dataplane.formats.base import RawBlock
from dataplane.formats.flatbuf import message_head
from dataplane.model.errors import CorruptShard, DataplaneError
from dataplane.model.records import Region

ARROW = ArrowIpc()
TOKENS = pa.table({"ids": pa.FixedSizeListArray.from_arrays(np.arange(400_000, dtype="i4"), 100)})


@hypothesis_settings(max_examples=40)
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
    with pytest.raises(CorruptShard, match=r"metadata is impossible: found 4$"):
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


@hypothesis_settings(max_examples=150, deadline=None)
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
