"""Blocks that a node keeps on its disk, over real processes and a real S3 server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import time
from collections import Counter
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

SHARDS, BLOCKS, BLOCK_ROWS, ROW_BYTES = 4, 64, 16, 8 << 10
TIMES = 4
"""So many more blocks, each so much smaller, where they are counted."""
ROWS = SHARDS * BLOCKS * BLOCK_ROWS
MIB = 1 << 20
DATASET_BYTES = ROWS * ROW_BYTES


def _shard(number: int, times: int = 1) -> bytes:
    rows, row_bytes = times * BLOCKS * BLOCK_ROWS, ROW_BYTES // times
    ids = np.arange(number * rows, (number + 1) * rows)
    words = np.random.default_rng(number).bytes(len(ids) * row_bytes)
    kind = pa.binary(row_bytes)
    table = pa.table(
        {"id": ids, "words": pa.Array.from_buffers(kind, len(ids), [None, pa.py_buffer(words)])}
    )
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=BLOCK_ROWS, compression="NONE", use_dictionary=False)
    return out.getvalue()


@pytest.fixture
def url(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DATAPLANE_SLAB_BYTES", "64KiB")
    monkeypatch.setenv("DATAPLANE_DELIVERY_BYTES_PER_RANK", "2MiB")
    reach(s3_server, monkeypatch)
    bucket = s3_server.bucket()
    s3_server.put(bucket, {f"{number}.parquet": _shard(number) for number in range(SHARDS)})
    return f"s3://{bucket}/"


@pytest.fixture
def many(url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """As much in more and smaller blocks, and smaller slabs."""
    monkeypatch.setenv("DATAPLANE_SLAB_BYTES", "16KiB")
    bucket = s3_server.bucket()
    s3_server.put(bucket, {f"{n}.parquet": _shard(n, TIMES) for n in range(SHARDS)})
    return f"s3://{bucket}/"


OPTIONS: dict[str, Any] = {"shuffle": True, "lanes": 2, "window": 32, "seed": 7}


class Job:
    """One rank that reads epochs through a node of its own, which keeps blocks in a folder."""

    def __init__(
        self, url: str, folder: Path, cache_bytes: int, arena_bytes: int, rows: int = ROWS
    ) -> None:
        self._url, self._rows = url, rows
        self.held: dict[str, int] = {}
        self._settings = (
            *("--cache-dir", str(folder / "cache"), "--cache-bytes", f"{cache_bytes}"),
            *("--worker-count", "1", "--lease-s", "0.8"),
            *("--block-arena-bytes", f"{arena_bytes}"),
        )

    def epochs(self, count: int) -> list[dict[str, int]]:
        """What was read in each epoch of a new node."""
        found, service_name = [], f"disk-{os.getpid()}:7077"
        listens = ("--listen", "127.0.0.1:0", "--service", service_name)
        with (
            Service(*listens, *self._settings) as service,
            DataLoader(self._url, 8, service=service_name, name="job", **OPTIONS) as loader,
        ):
            before = Counter[str]()
            for epoch in range(count):
                ids = [i for batch in loader for i in batch["id"].tolist()]
                assert sorted(ids) == list(range(self._rows)), f"epoch {epoch}"
                now = reads(service.address)
                found.append(now - before)
                before = now
            self.held = status(service.address)["nodes"][0]["held"]
            of_loader = loader.statistics()
            assert of_loader.disk_bytes <= of_loader.read_bytes
            assert bool(of_loader.disk_bytes) == bool(before["disk_bytes"])
        return found


def status(address: str) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(["status", address, "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def reads(address: str) -> Counter[str]:
    """What the node has read, once it reads no more."""

    def now() -> Counter[str]:
        nodes, names = status(address)["nodes"], ("read_bytes", "disk_bytes")
        return Counter({name: sum(node["reads"][name] for node in nodes) for name in names})

    deadline, last, since = time.monotonic() + 60, Counter[str](), time.monotonic()
    while time.monotonic() < deadline:
        found = now()
        if found != last:
            last, since = found, time.monotonic()
        elif time.monotonic() - since > 1.0:
            return found
        threading.Event().wait(0.05)
    raise AssertionError("it reads for ever")


@pytest.mark.slow
def test_later_epochs_and_runs_come_from_the_disk(url: str, tmp_path: Path) -> None:
    job = Job(url, tmp_path, 2 * DATASET_BYTES, 8 * MIB)
    first, *later = job.epochs(3)
    assert DATASET_BYTES <= first["read_bytes"] < 1.1 * DATASET_BYTES
    assert all(not epoch["read_bytes"] for epoch in later)
    assert all(epoch["disk_bytes"] > DATASET_BYTES / 2 for epoch in later)
    blocks, held = tmp_path / "cache" / "blocks", job.held
    files = [each for each in blocks.rglob("*") if each.name.isdecimal() and each.is_file()]
    assert held["disk_blocks"] == len(files)
    assert sum(each.stat().st_size for each in files) <= held["disk_bytes"] < 1.1 * DATASET_BYTES
    assert held["disk_limit_bytes"] == 2 * DATASET_BYTES
    assert 0 < held["memory_bytes"] <= held["memory_limit_bytes"] == 8 * MIB
    (again,) = job.epochs(1)
    assert again["read_bytes"] < MIB  # preambles
    assert again["disk_bytes"] >= DATASET_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("part", [2])
def test_later_epochs_read_little_more_than_what_disk_and_memory_lack(
    many: str, tmp_path: Path, part: int
) -> None:
    cache_bytes, arena_bytes = DATASET_BYTES // part, 4 * MIB
    found = Job(many, tmp_path, cache_bytes, arena_bytes, TIMES * ROWS).epochs(3)
    least = DATASET_BYTES - cache_bytes - arena_bytes
    for epoch in (1, 2):
        assert 0.95 * least <= found[epoch]["read_bytes"] < 1.1 * (least + arena_bytes)
    kept = sum(e.stat().st_size for e in (tmp_path / "cache" / "blocks").rglob("*") if e.is_file())
    assert 0.9 * cache_bytes < kept <= cache_bytes


@pytest.mark.slow
def test_damaged_and_lost_files_cost_no_sample(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(url, tmp_path, 2 * DATASET_BYTES, 4 * MIB)
    job.epochs(1)
    files = [
        each
        for each in (tmp_path / "cache" / "blocks").rglob("*")
        if each.name.isdecimal() and each.is_file()
    ]
    assert (
        len(files) > 0.9 * SHARDS * BLOCKS
    )  # what is being written when the node is killed is lost
    for number, file in enumerate(files):
        if number % 3 == 0:
            file.unlink()
        elif number % 3 == 1:
            file.write_bytes(file.read_bytes()[:-9] + b"?" * 9)
    capfd.readouterr()
    (again,) = job.epochs(1)
    assert again["read_bytes"] == pytest.approx(2 / 3 * DATASET_BYTES, rel=0.1)
    assert capfd.readouterr().err.count("blocks on disk were missing or damaged") == 1


@pytest.mark.slow
def test_nodes_that_are_started_again_own_the_blocks_that_their_disks_have(
    url: str, tmp_path: Path
) -> None:
    services = [f"disk-{name}-{os.getpid()}:7077" for name in "ab"]
    same: dict[str, Any] = {"name": f"job-{os.getpid()}", "dp_size": 2, **OPTIONS}

    def node(number: int, coordinator: Service) -> Service:
        cache = (
            "--cache-dir",
            str(tmp_path / f"{number}"),
            "--cache-bytes",
            f"{2 * DATASET_BYTES}",
        )
        few = ("--block-arena-bytes", f"{8 * MIB}", "--worker-count", "1", "--lease-s", "0.8")
        joins = ("--node", "--join", coordinator.address, "--service", services[number])
        return Service(*joins, *cache, *few)

    def epoch(coordinator: Service) -> Counter[str]:
        with (
            node(0, coordinator), node(1, coordinator),
            DataLoader(url, 4, service=services[0], dp_rank=0, **same) as first,
            DataLoader(url, 4, service=services[1], dp_rank=1, **same) as second,
        ):  # fmt: skip
            assert len(first) == len(second)
            wait_for_two(coordinator.address)
            ids: list[int] = []
            for one, other in zip(first, second, strict=True):
                ids += one["id"].tolist() + other["id"].tolist()
            assert sorted(ids) == list(range(ROWS))
            return reads(coordinator.address)

    with Service("--coordinator", "--listen", "127.0.0.1:0", "--lease-s", "0.8") as coordinator:
        once, both = epoch(coordinator), epoch(coordinator)
    again = both - once  # of all nodes that there were
    assert once["read_bytes"] > DATASET_BYTES
    # Each has on disk what it owned, and owns it again.
    assert again["disk_bytes"] > 0.9 * DATASET_BYTES
    assert again["read_bytes"] < 0.1 * DATASET_BYTES


def wait_for_two(address: str) -> None:
    """Wait until two nodes know each other."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = status(address)
        (job,) = found["jobs"]
        ids = {node["node_id"] for node in job["nodes"]}
        known = [{"job_id": job["job_id"], "version": job["nodes_version"]}]
        if [node["known"] for node in found["nodes"] if node["node_id"] in ids] == [known] * 2:
            return
        threading.Event().wait(0.05)
    raise AssertionError("they never know each other")
