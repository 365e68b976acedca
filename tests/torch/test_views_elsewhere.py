"""Views over nodes that share blocks and slabs, keep blocks on disk, and read an object store."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from fleet import Service
from servers import S3Server, reach

from dataplane.cli import run

SHARDS, BLOCKS, BLOCK_ROWS, ROW_BYTES = 4, 8, 64, 4096
SHARD_ROWS = BLOCKS * BLOCK_ROWS
ROWS = SHARDS * SHARD_ROWS
HALF = SHARDS // 2 * SHARD_ROWS
BIG = ("--block-arena-bytes", "32MiB")
VIEW: dict[str, Any] = {"where": f"id >= {HALF} and kind in ('a', 'b')", "sample": 0.9}


def _shard(number: int) -> bytes:
    ids = np.arange(number * SHARD_ROWS, (number + 1) * SHARD_ROWS)
    words = np.random.default_rng(number).bytes(len(ids) * ROW_BYTES)
    made = pa.Array.from_buffers(pa.binary(ROW_BYTES), len(ids), [None, pa.py_buffer(words)])
    table = pa.table({"id": ids, "kind": ["abc"[i % 3] for i in ids.tolist()], "words": made})
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=BLOCK_ROWS, compression="NONE")
    return out.getvalue()


@pytest.fixture
def url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    reach(s3_server, monkeypatch)
    bucket = s3_server.bucket()
    s3_server.put(bucket, {f"{number}.parquet": _shard(number) for number in range(SHARDS)})
    return f"s3://{bucket}/"


def status(address: str) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(["status", address, "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def reads(address: str, what: str) -> int:
    return sum(node["reads"][what] for node in status(address)["nodes"])


def know_each_other(address: str) -> bool:
    found = status(address)
    (job,), nodes = found["jobs"], found["nodes"]
    known = [{"job_id": job["job_id"], "version": job["nodes_version"]}]
    return len(job["nodes"]) == 2 and all(node["known"] == known for node in nodes)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


@pytest.mark.slow
def test_neighbours_and_disks_hold_a_view_and_no_block_without_rows_is_read(
    url: str, tmp_path: Path
) -> None:
    names = [f"host-{name}-{os.getpid()}:7077" for name in "ab"]
    same: dict[str, Any] = {"name": f"job-{os.getpid()}", "dp_size": 2, "shuffle": True, "lanes": 1}

    def node(at: int) -> Service:
        disk = ("--cache-dir", str(tmp_path / names[at][:6]), "--cache-bytes", "64MiB")
        joins = ("--node", "--join", coordinator.address, "--service", names[at])
        return Service(*joins, *BIG, *disk, "--worker-count", "1")

    with (
        Service("--coordinator", "--listen", "127.0.0.1:0") as coordinator,
        node(0),
        node(1),
        DataLoader(url, 16, service=names[0], dp_rank=0, **same, **VIEW) as first,
        DataLoader(url, 16, service=names[1], dp_rank=1, **same, **VIEW) as second,
    ):
        assert len(first) == len(second)
        until(lambda: know_each_other(coordinator.address))
        epochs = []
        for _ in range(2):
            ids: list[int] = []
            for one, other in zip(first, second, strict=True):
                ids += one["id"].tolist() + other["id"].tolist()
            epochs.append(sorted(ids))
        assert epochs[0] == epochs[1]
        assert len(set(epochs[0])) == len(epochs[0])
        assert all(i >= HALF and i % 3 < 2 for i in epochs[0])
        assert 0.75 < len(epochs[0]) / (ROWS - HALF) / (2 / 3) < 1
        until(lambda: reads(coordinator.address, "neighbour_bytes") > 0)
        # Each node reads each block once at most, and nothing of the first half, which has no rows.
        assert reads(coordinator.address, "read_bytes") < 2.2 * (ROWS - HALF) * ROW_BYTES


def test_slabs_of_a_view_that_are_made_elsewhere_are_those_made_here(url: str) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 5, "lanes": 2, **VIEW}
    with DataLoader(url, 16, columns=["id"], **options) as loader:
        expected = [batch["id"].tolist() for batch in loader]
    small = ("--slab-bytes", "64KiB", "--delivery-bytes-per-rank", "2MiB", *BIG)
    with Service("--coordinator", "--listen", "127.0.0.1:0") as coordinator:
        joins, name = ("--node", "--join", coordinator.address), f"trainers-{os.getpid()}:7077"
        maker = f"maker-{os.getpid()}:7077"
        with (
            Service(*joins, "--service", name, "--worker-count", "0", *small),
            Service(*joins, "--service", maker, "--worker-count", "1", *small),
            DataLoader(url, 16, columns=["id"], service=name, **options) as loader,
        ):
            assert [batch["id"].tolist() for batch in loader] == expected
