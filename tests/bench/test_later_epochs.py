"""The trial of an epoch that is not the first one."""

from __future__ import annotations

import sys

import pytest
from dataplane_bench.model import (
    BenchCase,
    ColumnType,
    DatasetPlace,
    Mode,
    Workload,
    WorkloadColumn,
)
from dataplane_bench.trial.launch import Contestant, Timing, run_trial

COLUMNS = (
    WorkloadColumn("id", ColumnType.FIXED, "int64"),
    WorkloadColumn("x", ColumnType.FIXED, "float32", (4,)),
)


def test_a_later_epoch_is_measured_after_those_before_it(tmp_path):
    workload = Workload("mine", COLUMNS, 8, 100, tmp_path / "source", "mine-100", 5.0)
    place = DatasetPlace(tmp_path / "prepared" / "awry", str(tmp_path / "prepared" / "awry"))
    journal = tmp_path / "journal"
    who = Contestant("bench_loaders:Loader", sys.executable, place, {"journal": str(journal)})
    server = iter([1.0, 2.0, 5.0])
    found = run_trial(
        who,
        BenchCase("steady", "mine", Mode.EPOCH, epoch=2),
        workload,
        Timing(),
        tmp_path / "trials",
        lambda: next(server),
    )
    told = [line for line in journal.read_text().splitlines() if line.startswith("epoch")]
    assert told == ["epoch 0", "epoch 1", "epoch 2"]
    assert found["sample_count"] == 100, "of the last one"
    assert found["first_batch_s"] > 0
    assert found["server_cpu_s"] == 3.0, "from its beginning on"
    assert found["server_cpu_s_per_million"] == pytest.approx(3.0 / 100 * 1e6)
