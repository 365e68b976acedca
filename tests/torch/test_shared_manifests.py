"""A dataset that several nodes open for one launch is indexed, and its rows counted, by one of
them. Real services and a real S3 server.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from away import Away, Proxy
from dataplane_torch import DataLoader, Pack
from fleet import Service
from servers import S3Server

SHARDS, SHARD_ROWS = 6, 100
ROWS = SHARDS * SHARD_ROWS
WHERE = "kind == 1"
LENT = "manifest from another node"


def _shard(number: int) -> bytes:
    ids = np.arange(number * SHARD_ROWS, (number + 1) * SHARD_ROWS)
    table = pa.table({"id": ids, "kind": ids % 3, "tokens": [[int(i)] * 5 for i in ids]})
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=SHARD_ROWS // 2)
    return out.getvalue()


@pytest.fixture
def stored(s3_server: S3Server) -> Iterator[tuple[Proxy, str]]:
    bucket = s3_server.bucket()
    s3_server.put(bucket, {f"{number}.parquet": _shard(number) for number in range(SHARDS)})
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

    def waiting(self) -> set[int]:
        """The nodes that wait for another one."""
        numbers = range(len(self.names))
        return {n for n in numbers if "another node opens the dataset" in self.log(n)}

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
    wanted = [i for i in range(ROWS) if i % 3 == 1]
    assert set(tokens) - {0} == set(wanted)  # short packs are filled with 0
    made = [number for number in range(3) if nodes.has(number, "index/*/shards-*.log")]
    assert len(made) == 1, "one node has indexed the shards"
    for number in range(3):
        is_maker = number in made
        assert (LENT in nodes.log(number)) != is_maker
        assert nodes.has(number, "counts/*") == is_maker, "the others counted no rows"
        assert nodes.has(number, "packs/*") == is_maker, "nor packs"
        assert nodes.has(number, "index/*/*.manifest"), "all of them know it the next time"


def test_when_the_node_that_indexes_is_killed_another_one_does_and_every_rank_goes_on(
    stored: tuple[Proxy, str], s3_server: S3Server, tmp_path: Path
) -> None:
    proxy, url = stored
    with Nodes(tmp_path, _environ(s3_server, proxy), 3) as nodes:
        proxy.be(Away.HANG)
        with ExitStack() as stack, ThreadPoolExecutor(3) as threads:
            loaders = [stack.enter_context(nodes.loader(number, url)) for number in range(3)]
            lengths = [threads.submit(len, loader) for loader in loaders]
            until(lambda: len(nodes.waiting()) == 2)
            (maker,) = {0, 1, 2} - nodes.waiting()
            nodes.nodes[maker].kill()
            proxy.be(Away.WELL)
            others = {0, 1, 2} - {maker}
            # If it came back at once, it might go on.
            until(lambda: any(nodes.has(each, "index/*/shards-*.log") for each in others))
            nodes.nodes[maker].start()
            assert {length.result(60) for length in lengths} == {ROWS // 12}
    assert not nodes.has(maker, "index/*/shards-*.log"), "the node that came back got it, too"


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
