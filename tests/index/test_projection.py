"""A job that needs some columns of a block leaves the others unread."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fleet import worker_processes
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_trainer import Node, Trainer
from servers import S3Server
from shards import NESTED, NESTED_ROWS, MemoryShard, arrow_bytes, parquet_bytes, raw_block

from dataplane.formats.base import RawBlock, ShardIndex
from dataplane.formats.parquet import Parquet
from dataplane.index import projection
from dataplane.index.indexing import index_dataset
from dataplane.index.projection import EDGE_BYTES_MIN, Projection
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, Region
from dataplane.plan.columns import ColumnPlaces
from dataplane.rpc import messages
from dataplane.scheduler.dataset import GAP_BYTES_MIN

widths = st.integers(0, 4 * GAP_BYTES_MIN)
columns = st.lists(st.tuples(st.integers(0, 300), widths), min_size=1, max_size=8)


def laid_out(sizes: list[tuple[int, int]], order: list[int]) -> tuple[list[int], int]:
    """(gap, length) of columns as they lie, as an index says it in the order of the schema."""
    at, found = 0, [(0, 0)] * len(sizes)
    for place, (gap, length) in zip(order, sizes, strict=True):
        found[place] = (at + gap, length)
        at += gap + length
    return [number for offset, length in found for number in (offset, length, length)], at


@settings(max_examples=80)
@given(st.data())
def test_whatever_is_wanted_is_read_and_holes_are_worth_a_request(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    sizes = st.lists(st.tuples(st.integers(0, 300), widths), min_size=count, max_size=count)
    blocks, lengths = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        order = data.draw(st.permutations(range(count)))
        numbers, length = laid_out(data.draw(sizes), order)
        is_known = data.draw(st.booleans())
        blocks.append(numbers if is_known else [])
        lengths.append(length)
    wanted = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    places = ColumnPlaces.of(blocks)
    if places is None:
        assert not any(blocks)
        return
    length, estimate = np.array(lengths), np.arange(len(blocks)) + GAP_BYTES_MIN
    found = Projection.of(places, length, estimate, wanted)
    at = found.places(np.zeros(len(blocks), np.int32), np.zeros(len(blocks), np.int64), length)
    for block, numbers in enumerate(blocks):
        place = Region(1000, lengths[block])
        pieces = found.pieces(block, place) or (place,)
        read = sum(piece.length for piece in pieces)
        end = pieces[-1].offset + pieces[-1].length
        assert (1000 + at.offset[block], at.length[block]) == (
            pieces[0].offset, end - pieces[0].offset,
        )  # fmt: skip
        assert (at.read_bytes(block), at.read_count(block)) == (read, len(pieces))
        assert read == place.length - found.skipped[block]
        assert pieces[0].offset >= 1000
        assert pieces[-1].offset + pieces[-1].length <= 1000 + place.length
        for one, other in pairwise(pieces):
            hole = other.offset - one.offset - one.length
            assert hole >= GAP_BYTES_MIN
            assert hole % 64 == 0
        if not numbers or not any(numbers[1::3]):
            assert read == place.length
            assert found.decoded[block] == estimate[block]
            continue
        size = sum(np.array(numbers[2::3])[wanted])
        assert found.decoded[block] == min(size, estimate[block])
        for offset, size, is_wanted in zip(numbers[0::3], numbers[1::3], wanted, strict=True):
            if is_wanted and size:
                start = 1000 + offset
                assert any(
                    piece.offset <= start and start + size <= piece.offset + piece.length
                    for piece in pieces
                )
        # Nothing that is large and unwanted is read, but for a few bytes.
        unwanted = [s for s, is_wanted in zip(numbers[1::3], wanted, strict=True) if not is_wanted]
        large = [s for s in unwanted if s >= GAP_BYTES_MIN + 192]
        assert place.length - read >= sum(large) - 192 * len(large)
        if any(wanted):
            check_requests(pieces, numbers, wanted)


def check_requests(pieces: Sequence[Region], numbers: list[int], wanted: list[bool]) -> None:
    """Each reads a wanted column, but for one that reads what lies before all columns."""
    spans = [
        (1000 + at, 1000 + at + size)
        for at, size, is_wanted in zip(numbers[::3], numbers[1::3], wanted, strict=True)
        if is_wanted
    ]
    for piece in pieces:
        stop = piece.offset + piece.length
        assert (piece.offset == 1000 and min(numbers[::3])) or any(
            piece.offset <= first and last <= stop for first, last in spans
        )


@pytest.mark.parametrize("names", [["c0"], ["c7"], ["c39"], ["c3", "c4"], ["c2", "c30"]])
@pytest.mark.parametrize("rows", [1_000, 20_000])
def test_a_few_columns_of_a_row_group_take_one_request_each_at_most(
    names: list[str], rows: int
) -> None:
    sink = io.BytesIO()
    table = pa.table({f"c{at}": np.random.default_rng(at).random(2 * rows) for at in range(40)})
    pq.write_table(table, sink, row_group_size=rows)
    index = Parquet().index(MemoryShard(sink.getvalue()))
    places = ColumnPlaces.of([block.columns for block in index.blocks])
    assert places is not None
    length = np.array([block.place.length for block in index.blocks])
    found = Projection.of(places, length, length, [n in names for n in index.schema.names])
    for number, block in enumerate(index.blocks):
        pieces = found.pieces(number, block.place)
        read = sum(piece.length for piece in pieces)
        wanted = sum(block.columns[3 * int(name[1:]) + 1] for name in names)
        if names == ["c2", "c30"] and rows == 1_000:  # the gap between them is small
            assert len(pieces) == 1
            assert read < 0.8 * block.place.length
        else:
            assert len(pieces) == (2 if names == ["c2", "c30"] else 1)
            assert wanted <= read < wanted + 2 * EDGE_BYTES_MIN


def test_columns_that_overlap_are_all_read() -> None:
    size = 4 * GAP_BYTES_MIN
    places = ColumnPlaces.of([[0, size, 1, size // 2, size, 1, 2 * size, size, 1]])
    assert places is not None
    length = np.array([3 * size])
    assert not Projection.of(places, length, length, [True, False, False]).skipped.any()


@pytest.mark.parametrize("numbers", [[-1, 5, 5], [0, -1, 0], [90, 11, 0], [0, 5, -5]])
def test_places_that_no_column_can_have_are_refused(numbers: list[int]) -> None:
    places = ColumnPlaces.of([numbers])
    assert places is not None
    length = np.array([100])
    with pytest.raises(ConfigError, match="outside of its block"):
        Projection.of(places, length, length, [True])
    with pytest.raises(ConfigError):
        ColumnPlaces.of([[0, 5, 5], [0, 5, 5, 5, 5, 5]])


def cut(block: RawBlock, pieces: tuple[Region, ...]) -> RawBlock:
    """The same block with only these pieces."""
    start = block.place.offset
    parts = [bytes(block.body[p.offset - start : p.offset - start + p.length]) for p in pieces]
    return RawBlock(
        block.url, block.index, block.rows, block.place, block.shard_bytes, block.preamble_place,
        block.preamble, memoryview(b"".join(parts)), pieces,
    )  # fmt: skip


def check_every_part(content: bytes, wanted: list[list[str]]) -> None:
    """Decoding the pieces of these columns gives the same as decoding the whole block."""
    index: ShardIndex = Parquet().index(MemoryShard(content))
    for number, block in enumerate(index.blocks):
        places = ColumnPlaces.of([block.columns])
        assert places is not None
        assert sum(block.columns[2::3]) == block.decoded_bytes
        length, raw = np.array([block.place.length]), raw_block(content, index, number, "u")
        for names in wanted:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(projection, "GAP_BYTES_MIN", 1)
                patch.setattr(projection, "EDGE_BYTES_MIN", 1)
                patch.setattr(projection, "_SLACK_BYTES", 0)
                flags = [name in names for name in index.schema.names]
                found = Projection.of(places, length, length, flags)
            pieces = found.pieces(0, block.place)
            part = cut(raw, pieces) if pieces else raw
            whole = Parquet().decode(raw, index.schema, names)
            assert Parquet().decode(part, index.schema, names).equals(whole)


@given(NESTED_ROWS, st.sets(st.sampled_from(NESTED.names), min_size=1), st.booleans())
def test_parquet_is_decoded_from_the_pieces_of_its_columns_alone(
    rows: list[dict[str, object]], names: set[str], is_dictionary: bool
) -> None:
    table = pa.Table.from_pylist(rows, schema=NESTED)
    content = parquet_bytes(table, row_group_size=7, use_dictionary=is_dictionary)
    check_every_part(content, [sorted(names)])


@pytest.mark.parametrize("writer", ["none", "lz4", "v1-dictionary", "duckdb", "polars-zstd"])
def test_pieces_of_files_by_other_writers_are_read(data_dir: Path, writer: str) -> None:
    content = (data_dir / "parquet" / f"shakespeare-{writer}.parquet").read_bytes()
    names = Parquet().index(MemoryShard(content)).schema.names
    others = [[other for other in names if other != name] for name in names]
    check_every_part(content, [*([name] for name in names), *others])


def two_orders(folder: Path, form: str = "parquet", codec: str | None = None) -> None:
    """Two shards of the same columns, in another order, of a few MB each."""
    folder.mkdir()
    chance = np.random.default_rng(5)
    for number, names in enumerate((["label", "big", "small"], ["small", "label", "big"])):
        made = {
            "label": pa.array(range(100 * number, 100 * number + 100), pa.int64()),
            "big": pa.array([chance.bytes(20_000) for _ in range(100)]),
            "small": pa.array(chance.integers(0, 9, 100), pa.int8()),
        }
        table = pa.table({name: made[name] for name in names})
        path = folder / f"{number}.{form}"
        if form == "parquet":
            pq.write_table(table, path, row_group_size=50)
        else:
            path.write_bytes(arrow_bytes(table, rows=50, file=bool(number), codec=codec))


def test_places_follow_the_columns_of_the_dataset_and_are_remembered(tmp_path: Path) -> None:
    two_orders(tmp_path / "d")
    cache = tmp_path / "cache"
    manifest = index_dataset(tmp_path / "d", cache_dir=str(cache))
    assert manifest.column_places is not None
    (part,) = manifest.column_places.parts()
    lengths = part.length
    assert lengths.shape == (4, 3)
    assert (lengths[:, 1] > 900_000).all()
    assert (lengths[:, [0, 2]] < 2_000).all()
    for path in cache.rglob("*.manifest"):
        path.unlink()
    again = index_dataset(tmp_path / "d", cache_dir=str(cache))
    assert again.to_bytes() == manifest.to_bytes()
    assert type(manifest).from_bytes(manifest.to_bytes()).to_bytes() == manifest.to_bytes()


@pytest.mark.parametrize(
    ("where", "form", "codec"),
    [
        ("s3", "parquet", None),
        ("local", "parquet", None),
        ("s3", "arrow", None),
        ("s3", "arrow", "zstd"),
    ],
)
def test_a_job_reads_the_columns_it_asked_for_and_no_others(
    tmp_path: Path, s3_server: S3Server, where: str, form: str, codec: str | None
) -> None:
    two_orders(tmp_path / "d", form, codec)
    bucket = s3_server.bucket()
    for path in sorted((tmp_path / "d").iterdir()):
        s3_server.put(bucket, {f"d/{path.name}": path.read_bytes()})
    url = f"s3://{bucket}/d/" if where == "s3" else str(tmp_path / "d")
    environment = s3_server.environment()
    # A single block has a megabyte, of which a few hundred bytes are needed.
    with (
        Node(tmp_path, block_arena_bytes="512KiB", slab_bytes="16KiB", **environment) as node,
        Trainer(node) as trainer,
    ):
        trainer.open(url, column_options=ColumnOptions(("small", "label")), global_batch=10)
        stream = trainer.call(messages.OpenStream("j", 0, 0)).stream_id
        labels, read = [], 0
        while isinstance(slab := trainer.call(messages.NextSlab(stream)), messages.Slab):
            labels += [label for _, values in trainer.values(slab) for label in values]
            read = slab.times.read_bytes
            trainer.tell(messages.Release("j", (slab.slab_id,)))
    assert labels == list(range(200))
    assert read < 100_000


def mapped_bytes(node: Node, path: Path) -> int:
    """How much of a file the workers have in memory."""
    workers = worker_processes(psutil.Process(node.process.pid))
    maps = [one for worker in workers for one in worker.memory_maps() if one.path == str(path)]
    return sum(one.rss for one in maps)


@pytest.mark.parametrize("shuffle", [False, True])
def test_only_the_columns_of_a_job_are_touched_in_a_mapped_arrow_file(
    tmp_path: Path, *, shuffle: bool
) -> None:
    path = tmp_path / "0.arrow"
    table = pa.table(
        {
            "big": pa.array([bytes(80_000)] * 200, pa.large_binary()),
            "label": pa.array(range(200), pa.int64()),
        }
    )
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    touched = []
    for columns in (("label",), ()):
        with Node(tmp_path) as node, Trainer(node) as trainer:
            trainer.open(
                str(path), column_options=ColumnOptions(columns), global_batch=10, shuffle=shuffle
            )
            assert len(trainer.batches()) == 20
            touched.append(mapped_bytes(node, path))
    assert touched[0] < 2_000_000
    assert touched[1] > 12_000_000
