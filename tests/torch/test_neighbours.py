"""Nodes of one job that get blocks from each other, over real processes and a real S3 server."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import jwt
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from away import Proxy
from awry import Awry, Mood, awry_server
from dataplane_torch import DataLoader, Pack
from fleet import Service, wait_until
from numpy.typing import NDArray
from servers import S3Server, reach
from shards import arrow_bytes

from dataplane.arena.pages import shared_huge_pages
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


class Told:
    """Return the nodes in `dataplane status`."""

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

        wait_until(lambda: time.monotonic() - seen_s() > asked)
        return self.reads("lent_bytes")

    def all_have_lent(self) -> bool:
        return min(self.reads("lent_bytes")) > 0 < min(self.reads("neighbour_bytes"))

    def know_each_other(self, job: str) -> bool:
        told = self.status()
        (version,) = (one["nodes_version"] for one in told["jobs"] if one["job_id"] == job)
        known = {"job_id": job, "version": version}
        return all(known in node["known"] for node in told["nodes"])


def test_each_block_is_read_from_the_store_by_one_of_the_nodes(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    services = [f"host-{name}-{os.getpid()}:7077" for name in "ab"]
    job = f"job-{os.getpid()}"
    same: dict[str, Any] = {"name": job, "dp_size": 2, "shuffle": True, "lanes": 1}

    def node(service: str) -> Service:
        return Service("--node", "--join", coordinator.address, "--service", service, *BIG)

    def reads(what: str) -> int:
        return sum(told.reads(what))

    with (
        Service("--coordinator", "--listen", "127.0.0.1:0") as coordinator,
        node(services[0]),
        node(services[1]),
        DataLoader(url, 16, service=services[0], dp_rank=0, **same) as first,
        DataLoader(url, 16, service=services[1], dp_rank=1, **same) as second,
    ):
        told = Told(coordinator, capsys)
        assert len(first) == len(second) == ROWS // 32
        wait_until(lambda: told.know_each_other(job))
        for epoch in range(2):
            ids: list[int] = []
            for one, other in zip(first, second, strict=True):
                ids += one["id"].tolist() + other["id"].tolist()
            assert sorted(ids) == list(range(ROWS)), f"epoch {epoch}: a sample is lost or repeated"
        size = ROWS * (ROW_BYTES + 8)
        wait_until(lambda: reads("neighbour_bytes") == reads("lent_bytes") > size // 4)
        of_loaders = sum_of([first.statistics(), second.statistics()])
        # Nodes report it with their next heartbeat.
        wait_until(lambda: of_loaders.memory_bytes <= reads("memory_bytes"))
        # The loaders report what they have consumed; footers are reported by nodes alone.
        assert size // 4 < of_loaders.neighbour_bytes <= reads("neighbour_bytes")
        assert size // 2 < of_loaders.origin_bytes <= reads("read_bytes")
        assert size // 2 < of_loaders.memory_bytes <= reads("memory_bytes")
        assert of_loaders.disk_bytes == 0
        # Of two epochs; footers count, and blocks that were requested twice.
        assert reads("read_bytes") < 1.3 * size


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
        """Yield the rows of each epoch, until it is enough."""
        with (
            DataLoader(dataset, 16, service=services[0], name=job, dp_rank=0, **same) as first,
            DataLoader(dataset, 16, service=services[1], name=job, dp_rank=1, **same) as second,
        ):
            assert len(first) == len(second)
            wait_until(lambda: told.know_each_other(job))
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


MANIFEST_SHARDS, SHARD_ROWS = 6, 100
MANIFEST_ROWS = MANIFEST_SHARDS * SHARD_ROWS
WHERE = "kind == 1"
LENT = "manifest from another node"


def _manifest_shard(number: int) -> bytes:
    ids = np.arange(number * SHARD_ROWS, (number + 1) * SHARD_ROWS)
    table = pa.table({"id": ids, "kind": ids % 3, "tokens": [[int(i)] * 5 for i in ids]})
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=SHARD_ROWS // 2)
    return out.getvalue()


@pytest.fixture
def stored(s3_server: S3Server) -> Iterator[tuple[Proxy, str]]:
    bucket = s3_server.bucket()
    s3_server.put(
        bucket,
        {f"{number}.parquet": _manifest_shard(number) for number in range(MANIFEST_SHARDS)},
    )
    proxy = Proxy(s3_server.server.port)
    yield proxy, f"s3://{bucket}/"
    proxy.close()


class Nodes:
    """Nodes of one coordinator, each with a cache of its own."""

    def __init__(self, folder: Path, environ: dict[str, str], count: int) -> None:
        self.folder, self.environ = folder, environ
        self.names = [f"share-{number}-{os.getpid()}:7077" for number in range(count)]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        environ = self.environ | {"DATAPLANE_STATE_DIR": str(self.folder / "state")}
        listen = ("--coordinator", "--listen", "127.0.0.1:0", "--lease-s", "2")
        coordinator = self._stack.enter_context(Service(*listen, environ=environ))
        self.nodes = []
        for number, name in enumerate(self.names):
            options = ("--node", "--join", coordinator.address, "--service", name)
            options += ("--worker-count", "1", "--block-arena-bytes", "16MiB")
            own = environ | {"DATAPLANE_CACHE_DIR": str(self.cache(number))}
            one = Service(*options, environ=own, log=self.folder / f"{number}.log")
            self.nodes.append(self._stack.enter_context(one))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cache(self, number: int) -> Path:
        return self.folder / f"cache-{number}"

    def loader(self, number: int, url: str, **options: Any) -> DataLoader:
        count, name = len(self.names), f"job-{self.folder.name}"
        return DataLoader(
            url, 4, service=self.names[number], name=name, dp_size=count, dp_rank=number, **options
        )

    def log(self, number: int) -> str:
        found = self.nodes[number].log
        assert found is not None
        return found.read()

    def has(self, number: int, pattern: str) -> bool:
        return any(self.cache(number).glob(pattern))


def _environ(s3_server: S3Server, proxy: Proxy) -> dict[str, str]:
    return {**s3_server.environment(), "AWS_ENDPOINT_URL": proxy.endpoint}


def test_one_node_indexes_counts_and_packs_and_the_others_get_it(
    stored: tuple[Proxy, str], s3_server: S3Server, tmp_path: Path
) -> None:
    proxy, url = stored
    with Nodes(tmp_path, _environ(s3_server, proxy), 3) as nodes:
        pack = {"where": WHERE, "pack": Pack("tokens", 8)}
        with ExitStack() as stack:
            loaders = [stack.enter_context(nodes.loader(n, url, **pack)) for n in range(3)]
            lengths = {len(loader) for loader in loaders}
            steps = list(zip(*loaders, strict=True))
        assert lengths == {len(steps)}
    tokens = [t for step in steps for batch in step for t in batch["tokens"].flatten().tolist()]
    wanted = [i for i in range(MANIFEST_ROWS) if i % 3 == 1]
    assert set(tokens) - {0} == set(wanted)  # short packs are filled with 0
    made = [number for number in range(3) if nodes.has(number, "index/*/shards-*.log")]
    assert len(made) == 1, "one node has indexed the shards"
    for number in range(3):
        is_maker = number in made
        assert (LENT in nodes.log(number)) != is_maker
        assert nodes.has(number, "counts/*") == is_maker, "the others counted no rows"
        assert nodes.has(number, "packs/*") == is_maker, "nor packs"
        assert nodes.has(number, "index/*/*.manifest"), "all of them know it the next time"


KILLED_SHARDS, KILLED_BLOCKS, KILLED_BLOCK_ROWS, WIDTH = 4, 6, 256, 1024


def _values(shard: int) -> NDArray[np.int32]:
    """Distinct rows, which rise in their first column."""
    rows = (
        np.arange(KILLED_BLOCKS * KILLED_BLOCK_ROWS, dtype=np.int32)
        + shard * KILLED_BLOCKS * KILLED_BLOCK_ROWS
    )
    return (rows[:, None] * 7 + np.arange(WIDTH, dtype=np.int32)) % 65_521


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch, small_node: None) -> Iterator[Awry]:
    """A server of 24 blocks of 1 MiB, for nodes that hold a third of them."""
    monkeypatch.setenv("DATAPLANE_BLOCK_ARENA_BYTES", "8MiB")
    objects = {}
    for shard in range(KILLED_SHARDS):
        column = pa.FixedSizeListArray.from_arrays(pa.array(_values(shard).reshape(-1)), WIDTH)
        table = pa.table({"x": column})
        objects[f"bucket/{shard}.arrow"] = arrow_bytes(table, rows=KILLED_BLOCK_ROWS, file=True)
    with awry_server(objects) as server:
        reach(server, monkeypatch)
        yield server


def _in_splice(pid: int) -> bool:
    """Whether the process has both ends of a pipe, as it does only while it moves bytes."""
    folder, links = Path(f"/proc/{pid}/fd"), Counter[str]()
    for descriptor in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            links[str(descriptor.readlink())] += 1
    return any(link.startswith("pipe:") and count > 1 for link, count in links.items())


def _fetchers() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.name() == "dp-fetcher"]


def test_a_fetcher_that_is_killed_in_the_middle_of_a_block_loses_nothing(awry: Awry) -> None:
    killed: list[int] = []

    def kill() -> None:
        """Kill the fetcher once it has half of a block, and waits for the other half."""
        can_splice = shared_huge_pages() in {"never", "deny"}
        wait_until(lambda: awry.seen and (not can_splice or any(map(_in_splice, _fetchers()))))
        killed.extend(_fetchers())
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        awry.be()

    with DataLoader("s3://bucket/", 32, shuffle=False) as loader:
        assert loader.schema  # the dataset is indexed, and no block is read
        awry.be(then=Mood.STALL)
        killer = threading.Thread(target=kill)
        killer.start()
        rows = [batch["x"].numpy().copy() for batch in loader]
        killer.join()
    assert killed
    read = np.concatenate(rows)
    assert len(read) == KILLED_SHARDS * KILLED_BLOCKS * KILLED_BLOCK_ROWS
    assert np.array_equal(read, np.concatenate([_values(shard) for shard in range(KILLED_SHARDS)]))
