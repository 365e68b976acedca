"""A run's batches are the planned ones whichever process dies: invariants 2, 3, 6."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fleet import Run, Service, free_address, kill_workers, node_processes, worker_processes
from small_nodes import tiny_budgets

from dataplane.index.indexing import index_dataset
from dataplane.plan.order import Order

COUNT = 970
GLOBAL_BATCH = 12
OPTIONS = {"global_batch_size": GLOBAL_BATCH, "shuffle": True, "seed": 11, "lanes": 4, "window": 50}
EVERY = 5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small budgets, so that blocks are evicted and slots run out on the way."""
    for name in [name for name in os.environ if name.startswith("DATAPLANE_SERVICE")]:
        monkeypatch.delenv(name)
    budgets = {"DELIVERY_BYTES_PER_RANK": "256KiB", "SLAB_BYTES": "4KiB"}
    tiny_budgets(monkeypatch, tmp_path, WORKER_COUNT=2, LINGER_S=0.2, **budgets)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Three shards of fixed, ragged and text columns, 40 rows a block."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard, start in enumerate(range(0, COUNT, 330)):
        ids = list(range(start, min(start + 330, COUNT)))
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "tokens": pa.array([row_of(i)[2] for i in ids], pa.list_(pa.int32(), 16)),
                "text": pa.array([row_of(i)[1] for i in ids]),
            }
        )
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=40)
    return str(folder)


@pytest.fixture
def whole(url: str) -> list[list[object]]:
    """The epoch in planned order."""
    manifest = index_dataset(url)
    order = Order(manifest.block_rows, 11, shuffle=True, lanes=4, window=50, epoch=0)
    blocks, rows = order.locate(np.arange(COUNT))
    first = np.cumsum(manifest.block_rows) - manifest.block_rows
    return [row_of(i) for i in (first[blocks] + rows).tolist()]


def row_of(i: int) -> list[object]:
    return [i, f"row {i} " * (i % 7), [i, -i] * 8]


def test_killed_trainers_resume_on_another_size_twice_with_the_same_suffix(tmp_path, url, whole):
    kept, state, position = [], None, 0
    for leg, (size, steps) in enumerate([(2, 13), (3, 20), (1, None)]):
        with Run(tmp_path / f"leg-{leg}", url, size, OPTIONS, state) as run:
            if steps is None:
                run.finish()
                kept += run.stream(position)
                break
            for _ in range(steps // EVERY):
                states = [told["state"] for told in run.go(EVERY)]
                assert all(one == states[0] for one in states)
            # Steps beyond the checkpoint are lost with the processes, and taken again.
            run.order(f"go {steps % EVERY + 1}")
            run.kill()
            covered = steps // EVERY * EVERY * GLOBAL_BATCH
            kept += run.stream_until(position, covered)
            state, position = states[0], states[0]["cursor"]
            assert position == len(kept)
    assert kept == whole


def test_killed_workers_and_nodes_cost_no_batch(tmp_path, url, whole):
    with Run(tmp_path / "run", url, 2, OPTIONS) as run:
        run.go(7)
        (node,) = node_processes(run.launch)
        kill_workers(node)
        run.go(9)
        kill_workers(node, 1)
        run.order("go 12")
        node.kill()
        run.answers()
        run.go(25)  # more than was handed over before: another node has made it
        (second,) = node_processes(run.launch)
        assert second.pid != node.pid
        second.kill()
        assert len({told["steps"] for told in run.finish()}) == 1
        assert run.stream() == whole


def test_a_killed_coordinator_and_a_killed_node_of_a_service_cost_no_batch(tmp_path, url, whole):
    address = free_address()
    options = {**OPTIONS, "service": address, "name": "run"}
    environ = {"DATAPLANE_LEASE_S": "2"}
    with (
        Service("--coordinator", "--listen", address, environ=environ) as coordinator,
        Service("--node", "--join", address, environ=environ) as node,
        Run(tmp_path / "run", url, 2, options) as run,
    ):
        run.go(6)
        coordinator.kill()
        run.go(6)
        coordinator.start()
        run.go(6)
        node.restart()
        run.go(6)
        states = [told["state"] for told in run.finish()]
        assert run.stream() == whole
        assert states[0] == states[1]
        run.kill()
        assert node.stop() == 0
        assert coordinator.stop() == 0


@pytest.mark.parametrize("when", ["at the start", "in the middle"])
def test_after_sigkill_of_everything_nothing_is_left(tmp_path, url, when):
    with Run(tmp_path / "run", url, 2, OPTIONS) as run:
        if when == "in the middle":
            run.go(3)
        run.order("end")
        nodes = node_processes(run.launch)
        everyone = [*nodes, *(worker for node in nodes for worker in worker_processes(node))]
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.kill()
    # Processes, memfds, descriptors, files and shared memory: the suite's fixture checks them after
    # every test, and ignores those of other test runs.
