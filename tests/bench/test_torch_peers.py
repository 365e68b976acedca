"""The files of torch's loaders: mapped arrays, ranges of them, and batches of lists and crops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_bench.model import (
    BenchCase,
    ColumnType,
    DatasetPlace,
    Mode,
    StorageKind,
    TrialTask,
    Workload,
    WorkloadColumn,
)
from dataplane_bench.peers import torch_streams
from dataplane_bench.peers.base import adapter
from dataplane_bench.peers.ffcv import Ffcv, _padded
from dataplane_bench.peers.own_files import OwnFiles
from dataplane_bench.peers.ray_data import RayData, _tensors
from dataplane_bench.peers.rows import TableBatches
from dataplane_bench.peers.samples import crop_box, padded
from dataplane_bench.trial.checksum import Sum
from dataplane_bench.workloads.generate import generated

SMALL = 0.001
COLUMNS = (
    WorkloadColumn("id", ColumnType.FIXED, "int64"),
    WorkloadColumn("flag", ColumnType.FIXED, "bool"),
    WorkloadColumn("point", ColumnType.FIXED, "float32", (2, 3)),
    WorkloadColumn("score", ColumnType.FIXED, "float32"),
    WorkloadColumn("rank", ColumnType.FIXED, "int64"),
    WorkloadColumn("values", ColumnType.RAGGED, "int32"),
    WorkloadColumn("text", ColumnType.STRING),
)


def mixed(folder) -> Workload:
    """Columns of all kinds, with empty lists and texts, in two shards."""
    for shard, ids in enumerate(np.array_split(np.arange(101), 2)):
        point = pa.array(np.arange(len(ids) * 6, dtype=np.float32))
        point = pa.FixedSizeListArray.from_arrays(point, 3)
        columns = {
            "id": ids,
            "flag": ids % 3 == 0,
            "point": pa.FixedSizeListArray.from_arrays(point, 2),
            "score": ids.astype(np.float32) / 7,
            "rank": -ids,
            "values": pa.array([list(range(one % 5)) for one in ids], pa.list_(pa.int32())),
            "text": ["ä" * (one % 4) for one in ids],
        }
        pq.write_table(pa.table(columns), folder / f"shard-{shard:05d}.parquet")
    return Workload("mixed", COLUMNS, 8, 101, folder, "mixed-101", 1.0)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("workloads")


@pytest.fixture(scope="module", params=["tokens", "mixed"])
def task(request, root):
    """A workload and its files for torch."""
    source, folder = root / f"source-{request.param}", root / f"memmap-{request.param}"
    source.mkdir()
    folder.mkdir()
    is_mixed = request.param == "mixed"
    workload = mixed(source) if is_mixed else generated(request.param, source, SMALL)
    torch_loader = adapter("torch")
    torch_loader.prepare(workload, folder)
    case = BenchCase("here", workload.name, Mode.VERIFY)
    settings = {"fetch": "batch", "num_workers": 0}
    place = DatasetPlace(folder, str(folder))
    return TrialTask("torch", case, workload, place, settings, root, "run")


def summed(*batches) -> str:
    whole = Sum(batches[0][1].workload)
    for epoch, _ in batches:
        for batch in epoch:
            whole.add(batch)
    return whole.digest


def epoch_of(task: TrialTask, number: int = 0):
    loader = adapter("torch").open(task)
    yield from loader.epoch(number)
    loader.close()


def truth(task: TrialTask) -> str:
    return summed((adapter("reference").open(task).epoch(0), task))


def test_a_library_that_scans_or_takes_rows_delivers_each_shuffled_or_in_order(task):
    def take(task):
        table = pq.read_table(task.workload.source)
        return lambda ids: TableBatches(task.workload.columns, 0)(table.take(ids))

    def scan(folder):
        return iter(pq.read_table(task.workload.source).to_batches(max_chunksize=29))

    mine = OwnFiles("mine", "Mine", "pyarrow", (), "tokens", lambda *_: None, take, scan)
    whole = Sum(task.workload)
    for batch in adapter("reference").open(task).epoch(0):
        whole.add(batch)
    for settings in ({"scan": True, "num_workers": 0}, {"num_workers": 0}):
        for in_order in (False, True):
            case = dataclasses.replace(task.case, in_order=in_order)
            loader = mine.open(dataclasses.replace(task, case=case, settings=settings))
            read = Sum(task.workload)
            for batch in loader.epoch(0):
                read.add(batch)
            loader.close()
            assert read.digest == whole.digest
            assert (read.facts() == whole.facts()) == in_order


def ids_of(batches) -> list[int]:
    return [one for batch in batches for one in batch["id"].tolist()]


@pytest.mark.parametrize("fetch", ["batch", "item"])
def test_an_epoch_from_mapped_arrays_is_the_source_in_another_order(task, fetch):
    task = dataclasses.replace(task, settings={"fetch": fetch, "num_workers": 0})
    assert summed((epoch_of(task), task)) == truth(task)
    first, second = ids_of(epoch_of(task, 0)), ids_of(epoch_of(task, 1))
    assert sorted(first) == sorted(second) == list(range(task.workload.sample_count))
    assert first != second != list(range(task.workload.sample_count))


def test_ranks_share_an_epoch_without_a_sample_twice(task):
    ranks = [dataclasses.replace(task, rank=rank, size=3) for rank in range(3)]
    assert summed(*((epoch_of(one), one) for one in ranks)) == truth(task)


@pytest.fixture
def streamed(task, monkeypatch):
    """The same files as if they were in S3, in small blocks."""

    def client(place):
        def read(ranges):
            whole = {name: (place.folder / name).read_bytes() for name, _, _ in ranges}
            return [whole[name][start:end] for name, start, end in ranges]

        return read

    monkeypatch.setitem(torch_streams.CLIENTS, "folder", client)
    case = dataclasses.replace(task.case, store=StorageKind.S3)
    return dataclasses.replace(task, case=case, settings={"client": "folder", "num_workers": 0})


def test_an_epoch_by_ranges_is_the_source_in_another_order(task, streamed):
    ranks = [dataclasses.replace(streamed, rank=rank, size=2) for rank in range(2)]
    assert summed(*((epoch_of(one), one) for one in ranks)) == truth(task)
    assert ids_of(epoch_of(streamed, 0)) != ids_of(epoch_of(streamed, 1))
    sizes = [len(batch["id"]) for batch in epoch_of(streamed)]
    assert set(sizes[:-1]) == {task.workload.batch_size}


def test_a_stream_continues_where_its_state_says(streamed):
    batches = iter(torch_streams.Streamed(streamed))
    for _ in range(3):
        next(batches)
    state = batches.state_dict()
    again = iter(torch_streams.Streamed(streamed))
    again.load_state_dict(state)
    rest = [next(iter(batch.values())).tolist() for batch in batches]
    assert rest
    assert [next(iter(batch.values())).tolist() for batch in again] == rest


def test_windows_grow_to_the_buffer_and_leave_nothing_out():
    blocks = [(start, start + 10) for start in range(0, 1000, 10)]
    windows = list(torch_streams.windowed(blocks, 80))
    assert [len(one) for one in windows[:5]] == [1, 2, 4, 8, 8]
    assert [block for window in windows for block in window] == blocks


def test_arrow_tables_become_batches(tmp_path):
    workload = mixed(tmp_path)
    whole = pa.concat_tables(pq.read_table(path) for path in sorted(tmp_path.glob("*.parquet")))
    sums = [Sum(workload) for _ in range(3)]
    sums[0].add(TableBatches(workload.columns, 0)(whole))
    sums[1].add(TableBatches(workload.columns, 0)(whole.take(np.arange(101)[::-1])))
    offsets = pa.array([0, len(whole)], pa.int32())
    nested = [pa.ListArray.from_arrays(offsets, one.combine_chunks()) for one in whole.columns]
    sums[2].add(
        TableBatches(workload.columns, 0).nested(pa.table(nested, names=whole.column_names))
    )
    assert len({one.digest for one in sums}) == 1


def test_lists_are_padded_with_zeros():
    rows = [np.array(row, np.int16) for row in ([1, 2, 3], [], [4])]
    tensor, lengths = padded(rows)
    assert tensor.tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert (tensor.dtype, lengths.tolist()) == (torch.int16, [3, 0, 1])


@pytest.mark.parametrize("size", [(375, 500), (1, 1), (10, 1000), (1000, 10)])
def test_a_crop_lies_within_the_image(size):
    random = np.random.default_rng(0)
    for _ in range(200):
        top, left, height, width = crop_box(*size, random)
        assert top >= 0
        assert left >= 0
        assert 0 < height <= size[0] - top
        assert 0 < width <= size[1] - left


PEER_COLUMNS = (
    WorkloadColumn("id", ColumnType.FIXED, "int64"),
    WorkloadColumn("flag", ColumnType.FIXED, "bool"),
    WorkloadColumn("wide", ColumnType.FIXED, "float32", (2, 3)),
    WorkloadColumn("ragged", ColumnType.RAGGED, "int32"),
    WorkloadColumn("text", ColumnType.STRING),
)


def source(folder, count: int) -> tuple[Workload, pa.Table]:
    wide = pa.array(np.arange(count * 6, dtype=np.float32))
    pairs = pa.FixedSizeListArray.from_arrays(wide, 3)
    table = pa.table(
        {
            "id": np.arange(count),
            "flag": np.arange(count) % 3 == 0,
            "wide": pa.FixedSizeListArray.from_arrays(pairs, 2),
            "ragged": pa.array([list(range(i % 4)) for i in range(count)], pa.list_(pa.int32())),
            "text": [f"no. {i}" * (i % 2) for i in range(count)],
        }
    )
    pq.write_table(table, folder / "shard-00000.parquet", row_group_size=7)
    return Workload("own", PEER_COLUMNS, 4, count, folder, "own-1", 1.0), table


def test_rays_files_hold_the_samples_and_give_them_back_in_any_order(tmp_path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "ray").mkdir()
    workload, table = source(tmp_path / "source", 50)
    RayData().prepare(workload, tmp_path / "ray")
    files = sorted((tmp_path / "ray").iterdir())
    assert len(files) >= 25  # files are shuffled first
    stored = pa.concat_tables([pq.read_table(file) for file in files])
    assert stored.schema.field("wide").type == pa.binary(24)

    ids = np.random.default_rng(0).permutation(50)[3:]
    taken = stored.take(ids).slice(5)
    batch: dict[str, object] = {}
    for column in PEER_COLUMNS:
        batch |= _tensors(column, taken.column(column.name).combine_chunks())

    ids = ids[5:]
    assert batch["id"].tolist() == ids.tolist()
    assert batch["flag"].tolist() == (ids % 3 == 0).tolist()
    assert batch["wide"].tolist() == [table["wide"][int(i)].as_py() for i in ids]
    assert batch["ragged.length"].tolist() == (ids % 4).tolist()
    assert batch["ragged"].shape == (len(ids), 3)
    for row, i in zip(batch["ragged"].tolist(), ids % 4, strict=True):
        assert row == [*range(i), *[0] * (3 - i)]
    assert batch["text"] == [f"no. {i}" * (i % 2) for i in ids]


def test_what_lies_behind_a_row_of_ffcv_is_no_part_of_the_batch() -> None:
    # Buffers are reused: after a row come the bytes of earlier ones.
    rows = np.full((3, 16), 255, np.uint8)
    rows[0, :8] = np.array([1, 2], np.int32).view(np.uint8)
    rows[2, :4] = np.array([3], np.int32).view(np.uint8)
    found = _padded(WorkloadColumn("ragged", ColumnType.RAGGED, "int32"), rows, np.array([8, 0, 4]))
    assert found["ragged"].tolist() == [[1, 2], [0, 0], [3, 0]]
    assert found["ragged.length"].tolist() == [2, 0, 1]


def test_ffcv_names_the_missing_tools_of_its_build(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs a C++ compiler" in Ffcv().lacks()
    assert "pkg-config" in Ffcv().lacks()
    assert "apt-get install g++" in Ffcv().lacks()
