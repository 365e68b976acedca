"""Inputs and outputs of Ray Data and FFCV, without either installed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from dataplane_bench.model import ColumnType, Workload, WorkloadColumn
from dataplane_bench.peers.ffcv import Ffcv, _padded
from dataplane_bench.peers.ray_data import RayData, _tensors

COLUMNS = (
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
    return Workload("own", COLUMNS, 4, count, folder, "own-1", 1.0), table


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
    for column in COLUMNS:
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
