"""Slabs while makers and fetchers are killed, stopped and slow, at random moments of a random history:
each read ends once, with right bytes or an error, and nothing is written after its end; each region
that was given is free once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time

import pytest
from lender import TIMEOUT_S
from slab_makers import SLOT_BYTES, SLOTS, Maker, Reader, makers, reader

from dataplane.rpc.lending import Asked

pytestmark = pytest.mark.usefixtures("one_fork_server")


class History:
    """Play a history of some makers and a reader to its end."""

    def __init__(self, seed: int, at: Reader, nodes: list[Maker], length_s: float) -> None:
        self.chance = random.Random(seed)
        self.at, self.nodes = at, nodes
        self.end = time.monotonic() + length_s
        self.right = 0
        self.gave: dict[str, list[int]] = {node.address: [] for node in nodes}
        for node in nodes:
            node.answer = lambda asked, node=node: self.answer(node, asked)

    @property
    def is_over(self) -> bool:
        late = time.monotonic() - self.end
        return late > 0 and (self.right > 0 or late > TIMEOUT_S)

    def answer(self, node: Maker, asked: Asked) -> None:
        drawn = self.chance.random()
        if drawn < 0.1:
            node.lending.refuse(asked.number)
        elif drawn < 0.3:
            later = asyncio.get_running_loop().call_later
            later(self.chance.uniform(0, 1), self.give, node, asked)
        else:
            self.give(node, asked)

    def give(self, node: Maker, asked: Asked) -> None:
        node.length = self.chance.choice([0, 1, 1000, SLOT_BYTES // 2, SLOT_BYTES])
        node.note = f"{self.nodes.index(node)} {node.length}".encode()
        self.gave[node.address].append(asked.number)
        node.give_slab(asked)

    async def read(self, slot: int) -> None:
        while not self.is_over:
            read = asyncio.ensure_future(self.at.slab(self.chance.choice(self.nodes).maker(), slot))
            if self.chance.random() < 0.3:
                await asyncio.sleep(self.chance.uniform(0, 0.5))
                self.at.fetchers.end_slab(self.at.numbers[-1])
            end = await read
            if end.error is not None:
                continue
            number, length = map(int, end.note.split())
            before = self.at.slot_bytes(slot)
            assert end.neighbour_bytes == length
            assert before[:length] == bytes(self.nodes[number].made.view(0, length))
            self.right += 1
            await asyncio.sleep(self.chance.uniform(0, 0.3))
            assert self.at.slot_bytes(slot) == before, "it was written after its end"

    async def disturb(self) -> None:
        while not self.is_over:
            await asyncio.sleep(self.chance.uniform(0, 0.5))
            drawn, node = self.chance.random(), self.chance.choice(self.nodes)
            pids = [node.lending.pid, *self.at.fetchers.pids]
            self.at.fetchers.tick()
            with contextlib.suppress(ProcessLookupError):
                if drawn < 0.3 and pids[0]:
                    os.kill(pids[0], signal.SIGKILL)
                elif drawn < 0.7 and pids[0]:
                    os.kill(pids[0], signal.SIGSTOP)
                    await asyncio.sleep(self.chance.uniform(0, 1))
                    os.kill(pids[0], signal.SIGCONT)
                elif drawn < 0.8:
                    os.kill(pids[-1], signal.SIGKILL)


@pytest.mark.parametrize(
    ("seed", "length_s"),
    [(1, 1.0), *[pytest.param(seed, 20.0, marks=pytest.mark.slow) for seed in (2, 3)]],
)
def test_every_read_ends_once_with_right_bytes_or_an_error(seed: int, length_s: float) -> None:
    async def play() -> None:
        async with reader(2) as at, makers(3) as nodes:
            history = History(seed, at, nodes, length_s)
            await asyncio.gather(history.disturb(), *map(history.read, range(SLOTS)))
            assert len({read.number for read in at.reads}) == len(at.reads)
            assert history.right > 0
            for node in nodes:
                gave = history.gave[node.address]
                await node.until(lambda node=node, gave=gave: sorted(gave) == sorted(node.given))

    asyncio.run(play())
