"""Reads of a node that can start no fetcher."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from no_forks import NO_MORE, no_forks

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.model.errors import DataplaneError, StoreError
from dataplane.model.records import Region
from dataplane.node.fetchers import Fetchers
from dataplane.rpc import fetches, tasks
from dataplane.store.connect import connect
from dataplane.store.outage import Outages
from dataplane.worker import forking

ARENA_BYTES = 1 << 20
TIMEOUT_S = 60.0


async def _ends_of(fetchers: Fetchers, count: int) -> list[DataplaneError | None]:
    ends = [asyncio.get_running_loop().create_future() for _ in range(count)]
    url = Path(__file__).as_uri()
    info = connect(url).head(url)
    order = fetches.ReadRange(0, url, 0, info.etag, tasks.BLOCK_ARENA, Region(0, 1))
    for end in ends:
        fetchers.read(order, end.set_result)
    async with asyncio.timeout(TIMEOUT_S):
        return await asyncio.gather(*ends)


async def test_reads_fail_while_no_fetcher_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = Arena.create("blocks", ARENA_BYTES), Arena.create("preambles", ARENA_BYTES)
    start = fetches.StartFetching((), 60.0, 30.0)
    fetchers = Fetchers(1, start, arenas, Trace("test"), Outages())
    try:
        assert await _ends_of(fetchers, 1) == [None]
        fetcher = psutil.Process(fetchers.pids[0])
        server = fetcher.parent()
        assert server is not None
        with monkeypatch.context() as broken:
            broken.setattr(forking, "_MODULE", "dataplane.no_such_module")
            server.kill()
            psutil.wait_procs([fetcher], TIMEOUT_S)
            errors = await _ends_of(fetchers, 3)
            assert [type(error) for error in errors] == [StoreError] * 3
        assert await _ends_of(fetchers, 1) == [None]
    finally:
        fetchers.close()
        for arena in arenas:
            arena.close()


async def test_a_machine_that_starts_no_process_is_to_blame_and_not_what_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    no_forks(monkeypatch, tmp_path, mark)

    arenas = Arena.create("blocks", ARENA_BYTES), Arena.create("preambles", ARENA_BYTES)
    start = fetches.StartFetching((), 60.0, 30.0)
    fetchers = Fetchers(1, start, arenas, Trace("test"), Outages())
    try:
        for error in await _ends_of(fetchers, 2):
            assert type(error) is DataplaneError
            assert NO_MORE in str(error)
            assert "limit of processes" in str(error)
        mark.unlink()
        assert await _ends_of(fetchers, 1) == [None]
    finally:
        fetchers.close()
        for arena in arenas:
            arena.close()
