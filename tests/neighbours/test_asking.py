"""Connections with neighbours that are used again, and those that are not."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lender import GENERATION, JOB, free, lending_node

from dataplane.neighbours import asking
from dataplane.neighbours.connection import Limits

pytestmark = pytest.mark.usefixtures("one_fork_server")


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_connection_is_used_again_and_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with lending_node() as node:
        before = _open_descriptors()
        for _ in range(3):
            await node.ask(node.neighbour())
        assert _open_descriptors() == before + 1
        node.lending.keys(JOB, GENERATION + 1, node.key)
        later = node.neighbour(generation=GENERATION + 1)
        await node.ask(later)
        assert _open_descriptors() == before + 2
        monkeypatch.setattr(asking, "_IDLE_S", 0.0)
        await node.ask(later)
        assert _open_descriptors() == before + 1


async def test_a_read_from_a_lender_that_dies_ends_with_right_bytes_or_none() -> None:
    async with lending_node() as node:
        reads = [asyncio.ensure_future(node.ask(node.neighbour(n), 70_000)) for n in range(8)]
        await node.until(lambda: node.asked)
        os.kill(node.lending.pid, signal.SIGKILL)
        for n, end in enumerate(await asyncio.gather(*reads, return_exceptions=True)):
            lost = isinstance(end, asking.NeighbourGone)
            assert lost or end == node.block(n, 0, 70_000)
        await node.until(lambda: len(node.given) == len(node.asked))


async def test_many_reads_at_once_are_no_attack() -> None:
    """More than a lender allows a host that has not shown the key yet."""

    async with lending_node() as node:
        node.answer = lambda _: None
        count = 3 * Limits().admission.silent_of_source_max

        def read() -> None:
            while True:
                into = memoryview(bytearray(10))
                try:
                    node.lines.read(node.neighbour(), [into], free, bool)
                except asking.NeighbourGone as error:
                    if isinstance(error.__cause__, TimeoutError):  # the machine is busy
                        continue
                    raise
                return

        with ThreadPoolExecutor(count) as threads:
            reads = [threads.submit(read) for _ in range(count)]
            await node.until(lambda: len(node.asked) >= count)
            node.answer = lambda asked: node.lending.refuse(asked.number)
            for asked in node.asked[:]:
                node.lending.refuse(asked.number)
            await asyncio.gather(*map(asyncio.wrap_future, reads))
