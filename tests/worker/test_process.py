"""A worker process that dies late, or never: the event loop does not wait for it."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from undead import undead

from dataplane.base.trace import Trace
from dataplane.node.pool import WorkerPool
from dataplane.worker import process as processes
from dataplane.worker.forking import fork_server
from dataplane.worker.process import WorkerProcess


def test_the_loop_turns_while_a_killed_worker_does_not_die() -> None:
    async def play() -> None:
        process, ended, statuses = WorkerProcess.start(None), asyncio.Event(), []

        def on_end(status: int) -> None:
            statuses.append(status)
            ended.set()

        with undead(process.pid):
            process.end(on_end)  # returns at once
            for _ in range(1000):
                await asyncio.sleep(0)
            assert not statuses
        async with asyncio.timeout(60):
            await ended.wait()
        assert statuses == [-signal.SIGKILL]

    with fork_server.held():
        asyncio.run(play())


def test_a_worker_that_does_not_die_keeps_its_place_until_it_does() -> None:
    async def play() -> None:
        pool = WorkerPool(2, Trace("test"))
        pool.start()
        try:
            first, second = pool.pids
            with undead(first):
                os.kill(first, signal.SIGKILL)
                while first in pool.pids:  # noqa: ASYNC110 - the pool has no event for it
                    await asyncio.sleep(0)
                assert pool.pids == (second,)
                pool.start()  # as with every job that is submitted
                assert pool.pids == (second,)
            async with asyncio.timeout(60):
                while len(pool.pids) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        finally:
            pool.close()

    asyncio.run(play())


def test_a_node_ends_although_a_worker_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_CLOSE_S", 0.1)

    async def play() -> None:
        pool = WorkerPool(1, Trace("test"))
        pool.start()
        (process,) = [worker.process for worker in pool._workers]
        with undead(process.pid):
            pool.close()
        assert str(process.pid) in caplog.text
        assert process.wait(60)

    asyncio.run(play())
