"""A pool of real workers, an arena and a dataset of local files, for jobs by hand."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.index.indexing import index_dataset
from dataplane.model.config import JobSpec
from dataplane.model.records import Region
from dataplane.node.dataset import Dataset, dataset_of
from dataplane.node.pool import WorkerPool
from dataplane.node.pool_worker import PoolTask
from dataplane.rpc import messages, tasks
from dataplane.worker.process import MEMORY_BYTES

MIB = 1 << 20
ROOM = Region(0, 64 << 10)
SLAB = Region(256 << 10, 64 << 10)
OTHER = Region(512 << 10, 64 << 10)


def arrow_shards(folder: Path, blocks: int) -> str:
    """This many shards of one block of four rows each; rows are numbered across shards."""
    schema = pa.schema([("x", pa.int64())])
    for i in range(blocks):
        with pa.ipc.new_file(str(folder / f"{i:03}.arrow"), schema) as writer:
            values = pa.array(np.arange(4) + 4 * i, pa.int64())
            writer.write_batch(pa.record_batch([values], schema=schema))
    return f"{folder}/*.arrow"


class Bench:
    """A pool, an arena and a local dataset, for jobs by hand."""

    def __init__(self, pool: WorkerPool, arena: Arena, dataset: Dataset) -> None:
        self.pool = pool
        self.arena = arena
        self.dataset = dataset
        self.reports: list[tasks.ResultBody] = []
        self._keys = iter(range(1, 1 << 30))
        self._blocks: dict[int, int] = {}

    def allow(self, memory_bytes: int) -> None:
        """Let workers take this much memory for this dataset."""
        message = structs.replace(self.dataset.message, memory_bytes=memory_bytes)
        self.dataset = structs.replace(self.dataset, message=message)

    def another(self, dataset_id: int) -> Bench:
        """The same files as another dataset, with the same pool."""
        message = structs.replace(self.dataset.message, dataset_id=dataset_id)
        dataset = structs.replace(self.dataset, dataset_id=dataset_id, message=message)
        return Bench(self.pool, self.arena, dataset)

    def decode(self, block: int, into: Region, arenas: tuple[int, ...] = (0,)) -> Awaitable[object]:
        body = tasks.Decode(self.dataset.dataset_id, self.dataset.raw_block(block, None), into)
        return self._submit(body, (), arenas, block)

    def assemble(
        self,
        sources: tuple[tasks.BlockSource, ...],
        rows: list[tuple[int, int]],
        slab: Region,
        render: tasks.Render | None = None,
        part: slice = slice(0, 0),
    ) -> Awaitable[object]:
        index = Region(MIB, 8 * len(rows))
        into = np.frombuffer(self.arena.view(index.offset, index.length), np.int32)
        into[:] = np.array(rows, np.int32).reshape(-1)
        batch = messages.Batch(0, len(rows), len(rows))
        keys = tuple(source.key for source in sources)
        body = tasks.Assemble(self.dataset.dataset_id, keys, index, (batch,), 0, slab, render)
        body = structs.replace(body, first_row=part.start, row_count=part.stop - part.start)
        return self._submit(body, sources, (0,), self._blocks.get(keys[0], 0))

    def mapped(self, block: int) -> tasks.BlockSource:
        key, origin = next(self._keys), self.dataset.origin(block)
        self._blocks[key] = block
        return tasks.BlockSource(key, raw=self.dataset.raw_block(block, None), origin=origin)

    def decoded(self, region: Region) -> tasks.BlockSource:
        return tasks.BlockSource(next(self._keys), decoded=region)

    def values(self, slab: Region, count: int) -> list[int]:
        return np.frombuffer(self.arena.view(slab.offset, 8 * count), np.int64).tolist()

    def _submit(
        self,
        body: tasks.Decode | tasks.Assemble,
        sources: tuple[tasks.BlockSource, ...],
        arenas: tuple[int, ...],
        block: int,
    ) -> Awaitable[object]:
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def report(result: tasks.ResultBody) -> None:
            self.reports.append(result)
            done.set_result(result)

        fds = tuple((arena_id, self.arena.fd) for arena_id in arenas)
        by_key = {source.key: source for source in sources}
        job = PoolTask(
            body,
            self.dataset.message,
            fds,
            report,
            lambda: self.dataset.place(block),
            by_key.__getitem__,
            place_of=lambda key: self.dataset.place(self._blocks[key]),
        )
        self.pool.submit(job, 0)
        return asyncio.wait_for(done, 120)


Scene = Callable[[Bench], Awaitable[None]]


@asynccontextmanager
async def bench_on(
    url: str,
    workers: int = 1,
    *,
    arena_bytes: int = 2 * MIB,
    memory_bytes: int = MEMORY_BYTES,
    task_timeout_s: float = math.inf,
) -> AsyncIterator[Bench]:
    """This many workers over the dataset at this url."""
    manifest = index_dataset(url)
    dataset = dataset_of(7, manifest, JobSpec(manifest.fingerprint))
    arena = Arena.create("blocks", arena_bytes)
    arena.reserve(0, 2 * MIB)
    pool = WorkerPool(
        workers, Trace("test"), memory_bytes=memory_bytes, task_timeout_s=task_timeout_s
    )
    pool.start()
    try:
        yield Bench(pool, arena, dataset)
    finally:
        pool.close()
        pool.close()
        arena.close()


def on_bench(url: str, scene: Scene, workers: int = 1, **limits: Any) -> None:
    """Play a scene on such a bench."""

    async def play() -> None:
        async with bench_on(url, workers, **limits) as bench:
            await scene(bench)

    asyncio.run(play())


def instead_of_workers(
    monkeypatch: pytest.MonkeyPatch, folder: Path, while_there: Path, code: str
) -> None:
    """While a file is there, run `code` in place of a worker; `fd` is its socket's."""
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, socket, sys\n"
        "from dataplane.node import fork_server\n"
        "from dataplane.worker import worker\n"
        "be_worker = worker.main\n"
        f"mark = pathlib.Path({str(while_there)!r})\n"
        "def be(fd, memory_bytes):\n"
        "    if mark.exists():\n"
        f"        exec({code!r}, {{**globals(), 'fd': fd}})\n"
        "    else:\n"
        "        be_worker(fd, memory_bytes)\n"
        "fork_server._ROLES['worker'] = lambda: be\n"
        "fork_server.main(int(sys.argv[-1]))\n"
    )
    program.chmod(0o700)
    while_there.touch()
    monkeypatch.setattr(sys, "executable", str(program))
