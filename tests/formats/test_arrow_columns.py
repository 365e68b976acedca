"""Of an Arrow record batch, the bytes of requested columns are enough to decode these columns."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from arrow_columns import batches
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from shards import MemoryShard, arrow_bytes, as_polars, raw_block

from dataplane.formats import arrow_columns, arrow_ipc
from dataplane.formats.arrow_ipc import ArrowIpc
from dataplane.formats.base import RawBlock, ShardIndex
from dataplane.formats.flatbuf import root
from dataplane.index import projection
from dataplane.index.projection import Projection
from dataplane.model.errors import CorruptShard, DataplaneError, SchemaMismatch
from dataplane.model.records import Region
from dataplane.plan.columns import ColumnPlaces

ARROW = ArrowIpc()
CODECS = [None, "lz4", "zstd"]


@contextlib.contextmanager
def small_holes() -> Iterator[None]:
    """Batches of a few rows are blocks, and anything that is not requested is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_ipc, "SMALL_BYTES", 0)
        patch.setattr(arrow_columns, "PLACED_BYTES_MIN", 0)
        patch.setattr(projection, "GAP_BYTES_MIN", 1)
        patch.setattr(projection, "EDGE_BYTES_MIN", 1)
        patch.setattr(projection, "_SLACK_BYTES", 0)
        patch.setattr(projection, "_BUFFER_STEP", 8)
        yield


def part_of(content: bytes, index: ShardIndex, block: int, names: Sequence[str]) -> RawBlock:
    """A block as a node fetches it for a job that requests these columns."""
    raw, wanted = raw_block(content, index, block, "u"), index.blocks[block]
    places = ColumnPlaces.of([wanted.columns])
    if places is None:
        return raw
    length = np.array([wanted.place.length])
    flags = [name in names for name in index.schema.names]
    pieces = Projection.of(places, length, length, flags).pieces(0, wanted.place)
    return cut(raw, pieces) if pieces else raw


def cut(raw: RawBlock, pieces: tuple[Region, ...]) -> RawBlock:
    """The same block with nothing but these pieces."""
    start = raw.place.offset
    parts = [bytes(raw.body[p.offset - start : p.offset - start + p.length]) for p in pieces]
    return structs.replace(raw, body=memoryview(b"".join(parts)), pieces=pieces)


def is_valid(drawn: tuple[pa.RecordBatch, Any]) -> bool:
    """Not a date64 within a day."""
    try:
        drawn[0].validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def shown(batch: pa.RecordBatch) -> list[str]:
    """Types and values in full; a NaN equals itself."""
    return [f"{x.type} {x.to_string(window=99, container_window=99)}" for x in batch.columns]


def stored(batch: pa.RecordBatch, copies: int, *, file: bool, codec: str | None) -> bytes:
    sink = io.BytesIO()
    write = pa.ipc.new_file if file else pa.ipc.new_stream
    with write(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        for _ in range(copies):
            writer.write_batch(batch)
    return sink.getvalue()


def check_columns(content: bytes, table: pa.Table, names: list[str], copies: int = 1) -> int:
    """Decode the first block from the bytes of these columns; returns how many pieces these are."""
    with small_holes():
        index = ARROW.index(MemoryShard(content))
        parts = [part_of(content, index, at, names) for at in range(len(index.blocks))]
    assert len(parts) == copies
    for block, part in zip(index.blocks, parts, strict=True):
        assert len(block.columns) == 3 * len(index.schema)
        batch = ARROW.decode(part, index.schema, names)
        assert (batch.num_rows, batch.schema.names) == (table.num_rows, names)
        if names:
            expected = table.select(names).combine_chunks().to_batches()[0]
            assert shown(batch) == shown(expected)
    return len(parts[0].pieces)


def test_columns_of_files_whose_schema_has_no_length() -> None:
    table = pa.table(
        {"a": range(50), "s": pa.array(["text"] * 50, pa.string_view()), "z": [0.5] * 50}
    )
    content = as_polars(arrow_bytes(table, file=True))
    for names in (["s"], ["z", "a"]):
        check_columns(content, table, names)


@given(st.data(), st.integers(1, 12), st.booleans(), st.sampled_from(CODECS))
def test_columns_are_decoded_from_their_bytes_alone(
    data: st.DataObject, rows: int, file: bool, codec: str | None
) -> None:
    drawn, _ = data.draw(batches(rows, width=6).filter(is_valid))
    batch = drawn.append_column("n", pa.array(range(rows)))
    copies = data.draw(st.integers(1, 3))
    content = stored(batch, copies, file=file, codec=codec)
    names = data.draw(st.lists(st.sampled_from(batch.schema.names), unique=True))
    table = (pa.ipc.open_file if file else pa.ipc.open_stream)(content).read_all()
    check_columns(content, table.slice(0, rows), names, copies)


def wide(rows: int) -> pa.Table:
    """Long values, so that each column has bytes of its own, in types of one to many buffers."""
    texts = [f"{n} is a text that does not fit into a view" for n in range(rows)]
    return pa.table(
        {
            "plain": pa.array(range(rows), pa.int64()),
            "view": pa.array(texts, pa.string_view()),
            "nothing": pa.nulls(rows),
            "words": pa.array([f"word {n % 7}" for n in range(rows)]).dictionary_encode(),
            "views": pa.array([[text, text] for text in texts], pa.list_(pa.binary_view())),
            "runs": pc.run_end_encode(pa.array([n // 2 for n in range(rows)])),
            "pair": pa.array([{"x": text, "y": [1.5] * 3} for text in texts]),
            "map": pa.array([[(text, 1)] for text in texts], pa.map_(pa.string(), pa.int8())),
            "money": pa.array(range(rows), pa.decimal128(20, 2)),
            "last": pa.array(texts, pa.large_string()),
        }
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [1, 2])
def test_any_one_or_two_columns_of_many_types(codec: str | None, count: int) -> None:
    table = wide(60)
    content = arrow_bytes(table, rows=60, codec=codec)
    piece_counts = {
        names: check_columns(content, table, list(names))
        for names in itertools.permutations(table.schema.names, count)
    }
    assert min(piece_counts.values()) > 0
    assert max(piece_counts.values()) == count + 1


def test_columns_of_a_slice_and_of_empty_arrays() -> None:
    table = wide(60).slice(7, 20)
    content = arrow_bytes(table, rows=20)
    table = pa.ipc.open_stream(content).read_all()
    for name in table.schema.names:
        check_columns(content, table, [name])
    empty = pa.table({"a": pa.array([""] * 9), "b": pa.array([[]] * 9, pa.list_(pa.int8()))})
    for name in empty.schema.names:
        check_columns(arrow_bytes(empty, rows=9), empty, [name])


def numbers(columns: int, rows: int) -> pa.Table:
    chance = np.random.default_rng(3)
    return pa.table({f"c{at}": chance.random(rows) for at in range(columns)})


def test_two_of_forty_columns_are_few_bytes_and_not_copied() -> None:
    table = numbers(40, 50_000)
    content = arrow_bytes(table, rows=50_000)
    index = ARROW.index(MemoryShard(content))
    assert index.zero_copy
    part = part_of(content, index, 0, ["c3", "c30"])
    assert [piece.length // 400_000 for piece in part.pieces] == [0, 1, 1]
    assert len(part.body) < 820_000
    batch = ARROW.decode(part, index.schema, ["c30", "c3"])
    assert batch.equals(table.select(["c30", "c3"]).to_batches()[0])
    whole = raw_block(content, index, 0, "u")
    unread = ARROW.decode(whole, index.schema, ["c30", "c3"])
    for column, other in zip(batch.columns, unread.columns, strict=True):
        at, before = place_in(part.body, column), place_in(whole.body, other)
        assert 0 < at < len(part.body)
        assert (before - at) % 64 == 0


def place_in(body: memoryview, column: pa.Array) -> int:
    return int(column.buffers()[1].address) - np.frombuffer(body, np.uint8).ctypes.data


def test_places_are_kept_where_they_save_something() -> None:
    for table, rows in ((numbers(2, 30_000), 30_000), (numbers(1, 99_000), 99_000)):
        index = ARROW.index(MemoryShard(arrow_bytes(table, rows=rows)))
        assert not any(block.columns for block in index.blocks)
    grouped = ARROW.index(MemoryShard(arrow_bytes(numbers(40, 40_000), rows=500)))
    assert not any(block.columns for block in grouped.blocks)


def test_of_unions_nothing_is_left_out() -> None:
    codes = pa.array([0, 1] * 40_000, pa.int8())
    union = pa.UnionArray.from_sparse(codes, [pa.array(range(80_000)), pa.array([0.5] * 80_000)])
    batch = pa.record_batch({"u": union, "n": pa.array(range(80_000))})
    content = stored(batch, 1, file=False, codec=None)
    index = ARROW.index(MemoryShard(content))
    assert index.blocks[0].columns == ()
    raw = part_of(content, index, 0, ["n"])
    assert not raw.pieces
    assert ARROW.decode(raw, index.schema, ["n"]).num_rows == 80_000


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_column_takes_once_decoded_is_not_underrated(codec: str | None) -> None:
    table = wide(5_000)
    keys = [np.random.default_rng(n).bytes(20).hex() for n in range(5_000)]
    table = table.append_column("keys", pa.array(keys).dictionary_encode())
    with small_holes():
        index = ARROW.index(MemoryShard(arrow_bytes(table, rows=5_000, codec=codec)))
    shares = dict(zip(table.schema.names, index.blocks[0].columns[2::3], strict=True))
    for name in ("plain", "money", "view", "last", "pair", "keys"):
        assert shares[name] >= table[name].nbytes
    assert shares["plain"] < 2 * table["plain"].nbytes


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_many_texts_are_not_overrated(codec: str) -> None:
    random = np.random.default_rng(5)
    texts = [f"{key:x} some words" for key in random.integers(0, 1 << 60, 4_000)]
    table = pa.table({f"t{at}": pa.array(random.permutation(texts).tolist()) for at in range(20)})
    content = arrow_bytes(table, rows=4_000, codec=codec)
    [block] = ARROW.index(MemoryShard(content)).blocks
    assert table.nbytes < block.decoded_bytes < 10 * table.nbytes


def buffers_at(content: bytes, block: RawBlock) -> int:
    """Where the list of a batch's buffers begins in its shard."""
    start = block.place.offset
    length = int.from_bytes(content[start + 4 : start + 8], "little")
    metadata = memoryview(content)[start + 8 : start + 8 + length]
    batch = root(metadata).table(2)
    assert batch is not None
    pairs = bytes(batch.vector(2, 16))
    return start + 8 + bytes(metadata).index(pairs)


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (None, 1 << 40),
        (-8, None),
        (0, None),
        (1 << 62, None),
        (None, -1),
        (None, (1 << 63) - 1),
        (40, 1 << 20),
    ],
)
def test_buffers_that_moved_are_refused(
    offset: int | None, length: int | None, codec: str | None
) -> None:
    table = numbers(4, 50_000)
    content = bytearray(arrow_bytes(table, rows=50_000, codec=codec))
    index = ARROW.index(MemoryShard(bytes(content)))
    names = ["c2"]
    before = part_of(bytes(content), index, 0, names)
    at = buffers_at(bytes(content), before) + 16 * 5
    old = struct.unpack_from("<qq", content, at)
    new = (old[0] if offset is None else offset, old[1] if length is None else length)
    struct.pack_into("<qq", content, at, *new)
    after = part_of(bytes(content), index, 0, names)
    assert after.pieces == before.pieces
    with pytest.raises(CorruptShard, match="buffer"):
        ARROW.decode(after, index.schema, names)
    # Indexed like this, columns may overlap; reading the whole batch is no way around the checks.
    changed = ARROW.index(MemoryShard(bytes(content)))
    with contextlib.suppress(CorruptShard):
        whole = part_of(bytes(content), changed, 0, ["c0"])
        assert ARROW.decode(whole, changed.schema, ["c0"]).column(0).equals(table["c0"].chunk(0))


@functools.cache
def damageable() -> tuple[ShardIndex, RawBlock]:
    content = arrow_bytes(wide(200), rows=200)
    with small_holes():
        index = ARROW.index(MemoryShard(content))
        return index, part_of(content, index, 0, ["view", "pair"])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 255)), min_size=1, max_size=3))
def test_damaged_metadata_is_an_error_or_harmless(changes: list[tuple[int, int]]) -> None:
    index, part = damageable()
    assert part.pieces[0].length > 900
    body = bytearray(part.body)
    for at, value in changes:
        body[at] = value
    damaged = structs.replace(part, body=memoryview(body).toreadonly())
    with contextlib.suppress(DataplaneError):
        batch = ARROW.decode(damaged, index.schema, ["view", "pair"])
        batch.validate(full=True)
        assert batch.num_rows == 200


def test_a_block_that_is_not_one_batch_is_refused() -> None:
    content = arrow_bytes(numbers(4, 50_000), rows=50_000)
    index = ARROW.index(MemoryShard(content))
    part = part_of(content, index, 0, ["c1"])
    schema = MemoryShard(content).read(0, part.place.offset)
    first, *others = part.pieces
    for body, pieces in (
        (bytes(len(part.body)), part.pieces),
        (schema.ljust(len(part.body), b"\0"), part.pieces),
        (bytes(part.body[first.length :]), tuple(others)),
        (bytes(part.body), (Region(first.offset, 100), *others)),
    ):
        broken = structs.replace(part, body=memoryview(body), pieces=pieces)
        with pytest.raises(CorruptShard):
            ARROW.decode(broken, index.schema, ["c1"])
    with pytest.raises(SchemaMismatch):
        ARROW.decode(part, index.schema.append(pa.field("more", pa.int8())), ["more"])


def test_images_saved_by_another_library_are_left_out(data_dir: Path) -> None:
    content = (data_dir / "huggingface-disk" / "data-00000-of-00001.arrow").read_bytes()
    index = ARROW.index(MemoryShard(content))
    table = pa.ipc.open_stream(content).read_all()
    part = part_of(content, index, 0, ["label"])
    assert sum(piece.length for piece in part.pieces) < 2_000 < len(content) // 100
    batch = ARROW.decode(part, index.schema, ["label"])
    assert batch.to_pydict() == {"label": table["label"].to_pylist()}
    check_columns(content, table, ["image"])
