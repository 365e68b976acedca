"""A dataset reports the same facts of each block as its shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from manifests import small
from msgspec.structs import replace

from dataplane.index.indexing import index_dataset
from dataplane.model.config import JobSpec
from dataplane.model.records import ColumnOptions, NullPolicy, Region, View
from dataplane.node.dataset import Dataset, dataset_of
from dataplane.worker.death import WorkerBytes
from dataplane.worker.row_layout import stored_bytes
from dataplane.worker.stacking import canonical_stacked

SCHEMA = pa.schema([("x", pa.int64())]).serialize().to_pybytes()


@pytest.fixture
def dataset() -> Dataset:
    shards = [
        replace(shard, url=f"file:///data/{number}") if number == 2 else shard
        for number, shard in enumerate(small().shards)
    ]
    manifest = small(schema=SCHEMA, shards=shards)
    return dataset_of(1, manifest, JobSpec(manifest.fingerprint))


def test_a_block_comes_with_facts_about_its_shard(dataset: Dataset) -> None:
    manifest = dataset.manifest
    for block in range(manifest.block_count):
        shard = manifest.shards[int(manifest.block_shard[block])]
        raw = dataset.raw_block(block, None)
        assert (raw.url, raw.etag, raw.shard_bytes) == (shard.url, shard.etag, shard.size_bytes)
        assert raw.preamble_place == shard.preamble
        assert raw.index == manifest.block_in_shard(block)
        assert raw.rows == manifest.block_rows[block]
        place = Region(int(manifest.block_offset[block]), int(manifest.block_length[block]))
        assert raw.place == place
        assert dataset.url(block) == shard.url
        assert dataset.blocks.needs_decode(block) == (not shard.zero_copy)


def test_a_block_of_a_local_file_is_not_fetched(dataset: Dataset) -> None:
    assert [dataset.path(block) for block in range(3)] == [None, None, "/data/2"]
    assert [dataset.blocks.needs_fetch(block) for block in range(3)] == [True, True, False]
    assert dataset.raw_block(2, None).path == "/data/2"
    assert dataset.raw_block(2, Region(0, 56)).path is None
    assert (dataset.blocks.marks.raw > 0).tolist() == [True, True, False]


def test_samples_are_counted_from_the_beginning_of_their_shard(dataset: Dataset) -> None:
    assert [dataset.place(block).first_row for block in range(3)] == [0, 10, 0]


def test_the_block_that_takes_most_is_known() -> None:
    sizes = np.array([80, 100_000, 56])
    manifest = small(schema=SCHEMA, block_rows=np.array([1, 1, 1]), block_decoded=sizes)
    dataset = dataset_of(1, manifest, JobSpec(manifest.fingerprint))
    needs = dataset.blocks.marks.raw + dataset.blocks.marks.decoded
    assert dataset.largest_block == 1
    assert needs[1] == needs.max()


def test_blocks_of_arrow_fit_into_the_memory_that_is_planned_for_them(tmp_path: Path) -> None:
    """Otherwise each is decoded twice, the first time only to find its size."""
    rows = 20_000
    numbers = np.arange(rows)
    table = pa.table(
        {
            "flag": pa.array(numbers % 3 == 0),
            "flags": pa.FixedSizeListArray.from_arrays(pa.array(np.ones(4 * rows, np.bool_)), 4),
            "text": pa.array([str(n) for n in numbers]),
            "view": pa.array([str(n) for n in numbers], pa.string_view()),
            "raw": pa.array([b"%d" % n for n in numbers]),
            "short": pa.array([[n] for n in numbers], pa.list_(pa.int32())),
            "large": pa.array([[n % 2] for n in numbers], pa.large_list(pa.int16())),
            "code": pa.array([b"abc", b"d"] * (rows // 2), pa.binary()),
            "maybe": pa.array([None if n % 5 else n for n in numbers], pa.float32()),
        }
    )
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=rows // 2)
    manifest = index_dataset(str(tmp_path))
    with pa.ipc.open_file(tmp_path / "a.arrow") as stored:
        batch = stored.get_batch(0)
    for options in (
        ColumnOptions(),
        ColumnOptions(columns=("view", "short")),
        ColumnOptions(columns=("flag", "maybe"), nulls=NullPolicy.MASK),
        ColumnOptions(columns=("large",), dtype=(("large", "float64"),)),
        ColumnOptions(columns=("maybe", "flag"), dtype=(("maybe", "float64"), ("flag", "int64"))),
    ):
        dataset = dataset_of(1, manifest, JobSpec(manifest.fingerprint, column_options=options))
        assert dataset.blocks.needs_decode(0)
        size = stored_bytes(canonical_stacked(batch, dataset.columns, "a.arrow"), None)
        assert size <= dataset.blocks.marks.decoded[0]


def test_jobs_that_convert_columns_differently_share_no_blocks(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([1, 2], pa.uint16())})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    manifest = index_dataset(str(tmp_path))
    casts: list[tuple[tuple[str, str], ...]] = [(), (("x", "int64"),), (("x", "float32"),)]
    found = [
        dataset_of(
            1, manifest, JobSpec(manifest.fingerprint, column_options=ColumnOptions(dtype=d))
        )
        for d in casts
    ]
    assert len({dataset.digest for dataset in found}) == 3
    # Stored as it is delivered, a block is used in place; otherwise it must be decoded.
    assert [dataset.blocks.needs_decode(0) for dataset in found] == [False, True, True]


LISTS = pa.list_(pa.int32())


@pytest.mark.parametrize(
    ("array", "is_direct"),
    [
        (pa.array(["a", None]), True),
        (pa.array([b"a", None]), True),
        (pa.array(["a", None], pa.large_string()), True),
        (pa.array([[1], []], LISTS), True),
        (pa.array([[1], []], pa.large_list(pa.int32())), True),
        (pa.array([[1], None], LISTS), False),
        (pa.array([[1], [None]], LISTS), False),
        (pa.array([[True], []], pa.list_(pa.bool_())), False),
        (pa.array(["a", None], pa.string_view()), False),
        (pa.array(["a", None]).dictionary_encode(), False),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else None,
)
def test_arrow_is_gathered_from_where_it_lies_whatever_the_width_of_its_offsets(
    tmp_path: Path, array: pa.Array, *, is_direct: bool
) -> None:
    batch = pa.record_batch([array], names=["x"])
    with pa.ipc.new_file(tmp_path / "a.arrow", batch.schema) as file:
        file.write_batch(batch)
    manifest = index_dataset(str(tmp_path))
    dataset = dataset_of(1, manifest, JobSpec(manifest.fingerprint))
    assert dataset.blocks.needs_decode(0) != is_direct


def test_blocks_of_a_view_know_what_they_store_and_have_memory_to_decode_all_of_it() -> None:
    whole = small(schema=SCHEMA, block_decoded=np.array([80, 64 << 20, 56]))
    view = View(sample=1 << 31, limit=12)
    manifest = whole.viewed(np.array([0, 2, 10]))
    spec, limits = JobSpec(whole.fingerprint, view=view), WorkerBytes(1 << 20, 1 << 40)
    made = dataset_of(1, manifest, spec, worker_bytes=limits)
    raw = [made.raw_block(block, None) for block in range(2)]
    assert [(one.rows, one.stored_rows, one.first_row) for one in raw] == [(2, 20, 10), (10, 30, 0)]
    assert [one.index for one in raw] == [2, 0]
    assert raw[0].shard_word != raw[1].shard_word
    assert made.is_decoded(1), "the rows of a share are not found in place"
    assert made.message.memory_bytes >= 3 * (64 << 20)
    assert made.digest != dataset_of(1, whole, JobSpec(whole.fingerprint)).digest
