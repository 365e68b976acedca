"""Nodes of one job that get blocks from each other, over real processes and a real S3 server."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from fleet import Service
from servers import S3Server, reach

from dataplane.cli import run
from dataplane.client.statistics import sum_of
from dataplane.index.indexing import index_dataset

SHARDS, BLOCKS, BLOCK_ROWS, ROW_BYTES = 12, 3, 64, 4096
"""Many shards, since each has one owner, and each node is to own some."""
ROWS = SHARDS * BLOCKS * BLOCK_ROWS
BIG = ("--block-arena-bytes", "32MiB", "--worker-count", "1")
SMALL = ("--block-arena-bytes", "4MiB", "--worker-count", "1")
"""Half of the dataset: every epoch reads blocks again."""


def _shard(number: int) -> bytes:
    first = number * BLOCKS * BLOCK_ROWS
    ids = np.arange(first, first + BLOCKS * BLOCK_ROWS)
    words = np.random.default_rng(number).bytes(len(ids) * ROW_BYTES)
    kind = pa.binary(ROW_BYTES)
    table = pa.table(
        {"id": ids, "words": pa.Array.from_buffers(kind, len(ids), [None, pa.py_buffer(words)])}
    )
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=BLOCK_ROWS, compression="NONE", use_dictionary=False)
    return out.getvalue()


@pytest.fixture
def url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    reach(s3_server, monkeypatch)
    bucket = s3_server.bucket()
    s3_server.put(bucket, {f"{number}.parquet": _shard(number) for number in range(SHARDS)})
    return f"s3://{bucket}/"


def test_each_block_is_read_from_the_store_by_one_of_the_nodes(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    services = [f"host-{name}-{os.getpid()}:7077" for name in "ab"]
    same: dict[str, Any] = {"name": f"job-{os.getpid()}", "dp_size": 2, "shuffle": True, "lanes": 1}

    def found() -> dict[str, Any]:
        assert run(["status", coordinator.address, "--json"]) == 0
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    def know_each_other() -> bool:
        (job,), nodes = found()["jobs"], found()["nodes"]
        known = [{"job_id": job["job_id"], "version": job["nodes_version"]}]
        return len(job["nodes"]) == 2 and all(node["known"] == known for node in nodes)

    def reads(what: str) -> int:
        return sum(node["reads"][what] for node in found()["nodes"])

    def node(service: str) -> Service:
        return Service("--node", "--join", coordinator.address, "--service", service, *BIG)

    with (
        Service("--coordinator", "--listen", "127.0.0.1:0") as coordinator,
        node(services[0]),
        node(services[1]),
        DataLoader(url, 16, service=services[0], dp_rank=0, **same) as first,
        DataLoader(url, 16, service=services[1], dp_rank=1, **same) as second,
    ):
        assert len(first) == len(second) == ROWS // 32
        until(know_each_other)
        for epoch in range(2):
            ids: list[int] = []
            for one, other in zip(first, second, strict=True):
                ids += one["id"].tolist() + other["id"].tolist()
            assert sorted(ids) == list(range(ROWS)), f"epoch {epoch}: a sample is lost or repeated"
        size = ROWS * (ROW_BYTES + 8)
        until(lambda: reads("neighbour_bytes") == reads("lent_bytes") > size // 4)
        of_loaders = sum_of([first.statistics(), second.statistics()])
        # Nodes tell it with their next heartbeat.
        until(lambda: of_loaders.memory_bytes <= reads("memory_bytes"))
        # The loaders tell what they have consumed; footers are told by nodes alone.
        assert size // 4 < of_loaders.neighbour_bytes <= reads("neighbour_bytes")
        assert size // 2 < of_loaders.origin_bytes <= reads("read_bytes")
        assert size // 2 < of_loaders.memory_bytes <= reads("memory_bytes")
        assert of_loaders.disk_bytes == 0
        # Of two epochs; footers count, and blocks that were asked for twice.
        assert reads("read_bytes") < 1.3 * size


class Told:
    """What `dataplane status` tells of the nodes."""

    def __init__(self, coordinator: Service, capsys: pytest.CaptureFixture[str]) -> None:
        self._coordinator, self._capsys = coordinator, capsys

    def status(self) -> dict[str, Any]:
        assert run(["status", self._coordinator.address, "--json"]) == 0
        found: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return found

    def reads(self, what: str) -> list[int]:
        return [node["reads"][what] for node in self.status()["nodes"]]

    def lent_by_now(self) -> list[int]:
        """As each node has told after this was asked."""
        asked = time.monotonic()

        def seen_s() -> float:
            return max(node["last_seen_s"] for node in self.status()["nodes"])

        until(lambda: time.monotonic() - seen_s() > asked)
        return self.reads("lent_bytes")

    def all_have_lent(self) -> bool:
        return min(self.reads("lent_bytes")) > 0 < min(self.reads("neighbour_bytes"))

    def know_each_other(self, job: str) -> bool:
        told = self.status()
        (version,) = (one["nodes_version"] for one in told["jobs"] if one["job_id"] == job)
        known = {"job_id": job, "version": version}
        return all(known in node["known"] for node in told["nodes"])


def test_a_node_whose_token_is_for_some_urls_lends_and_borrows_what_lies_there_and_nothing_else(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second job's manifest says that it is of these urls too, and names shards elsewhere."""
    secret = "a-token-for-tests-0123456789-0123456789"
    manifest = index_dataset(f"{url}[01].parquet")
    named = Path(tmp_path, "named.manifest")
    named.write_bytes(dataclasses.replace(manifest, urls=(f"{url}train/",)).to_bytes())
    claims = {"aud": "dataplane", "exp": time.time() + 600, "roles": ["node"]}
    limited = jwt.encode({**claims, "datasets": [url, named.as_uri()]}, secret, "HS256")
    for name, value in {"STATE_DIR": str(tmp_path / "state"), "TOKEN": secret}.items():
        monkeypatch.setenv(f"DATAPLANE_{name}", value)
    services = [f"limited-{name}-{os.getpid()}:7077" for name in "ab"]
    same: dict[str, Any] = {"dp_size": 2, "shuffle": False}

    def node(service: str, token: str) -> Service:
        options = ("--node", "--join", coordinator.address, "--service", service, *SMALL)
        log = tmp_path / f"{len(logs)}.log"
        logs.append(log)
        return Service(*options, environ={"DATAPLANE_TOKEN": token}, log=log)

    def is_refused() -> bool:
        return "data request refused" in "".join(log.read_text() for log in logs)

    def epochs(job: str, dataset: str, is_enough: Callable[[], bool]) -> Iterator[list[int]]:
        """What each epoch reads, until it is enough."""
        with (
            DataLoader(dataset, 16, service=services[0], name=job, dp_rank=0, **same) as first,
            DataLoader(dataset, 16, service=services[1], name=job, dp_rank=1, **same) as second,
        ):
            assert len(first) == len(second)
            until(lambda: told.know_each_other(job))
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                found: list[int] = []
                for one, other in zip(first, second, strict=True):
                    found += one["id"].tolist() + other["id"].tolist()
                yield sorted(found)
                if is_enough():
                    return
            pytest.fail(f"never enough: {told.status()}")

    logs: list[Path] = []
    with (
        Service("--coordinator", "--listen", "127.0.0.1:0") as coordinator,
        node(services[0], secret),
        node(services[1], limited),
    ):
        told = Told(coordinator, capsys)
        for found in epochs(f"job-{os.getpid()}", url, told.all_have_lent):
            assert found == list(range(ROWS))
        lent = told.lent_by_now()
        for found in epochs(f"other-{os.getpid()}", str(named), is_refused):
            assert found == list(range(2 * BLOCKS * BLOCK_ROWS))
        assert told.lent_by_now() == lent
    lines = [line for log in logs for line in log.read_text().splitlines()]
    refusals = [line for line in lines if "data request refused" in line]
    assert all(f"lies outside of {url}train/" in line for line in refusals)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
