"""A node that makes slabs for others, with a real engine, workers and files, and a lender that keeps
what it is given. Its clock is moved by the test.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import Raw, Struct, structs
from openings import opening

from dataplane.arena.memfd import Arena
from dataplane.arena.slab_layout import pieces
from dataplane.arena.slots import plan_slots
from dataplane.base.trace import Trace
from dataplane.index.indexing import index_dataset
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import DataplaneError
from dataplane.model.records import BlockForm, ColumnSpec, Region, Stream, View
from dataplane.node.dataset import Dataset
from dataplane.node.delivery import DeliveryArena, slab_sizes
from dataplane.node.engine import Engine
from dataplane.node.fetch import Fetcher
from dataplane.node.making import Making
from dataplane.node.opener import DatasetOpener, software_of
from dataplane.node.pool import WorkerPool
from dataplane.plan.manifest import Manifest
from dataplane.rpc.codec import decode, encode
from dataplane.rpc.lending import Asked, MakeSlab, Request, StepRange
from dataplane.rpc.messages import (
    Batch,
    DatasetSource,
    EndOfStream,
    FromNode,
    FromNodeBody,
    Layout,
    OpenJob,
    Slab,
)
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.records import SlabTask
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import Walk
from dataplane.settings import default_node_config
from dataplane.store.outage import Outages
from dataplane.transforms.made_columns import CollatedColumns

MIB = 1 << 20
SLOT_BYTES = 1 << 16
DEADLINE_S = 120
JOB = "a job"
REFUSED = "refused"

Pieces = list[list[bytes]]
"""Of one batch: the bytes of each piece of each column."""


class Given(Struct, frozen=True):
    """Return the answer to an ask."""

    result: FromNodeBody
    content: bytes
    arena_id: int
    region: Region


class KeptSlabs:
    """A lender: it checks that every ask is answered once, and only what is lent."""

    def __init__(self) -> None:
        self.answers: dict[int, Given | str] = {}
        self.asked: set[int] = set()
        self.read: set[int] = set()
        """Asks whose region is being read."""
        self.after: dict[int, Callable[[], object]] = {}
        self.arenas: dict[int, int] = {}
        self.lent_count = 0

    def give(
        self,
        number: int,
        region: Region,
        arena_id: int,
        note: bytes,
        *,
        ends: tuple[int, ...],
        after: Callable[[], object] = bool,
    ) -> None:
        assert ends == ()
        self._once(number)
        self.after[number] = after
        result = decode(FromNode, note).body
        self.answers[number] = Given(result, self._at(arena_id, region), arena_id, region)
        self.read.add(number)

    def refuse(self, number: int) -> None:
        self._once(number)
        self.answers[number] = REFUSED

    def lend_arena(self, arena_id: int, fd: int) -> None:
        assert arena_id not in self.arenas
        self.lent_count += 1
        self.arenas[arena_id] = os.dup(fd)

    def return_arena(self, arena_id: int) -> None:
        os.close(self.arenas.pop(arena_id))

    def is_unchanged(self, number: int) -> bool:
        """Whether what is being read is still there."""
        given = self.answers[number]
        assert isinstance(given, Given)
        return self._at(given.arena_id, given.region) == given.content

    def _once(self, number: int) -> None:
        assert number in self.asked
        assert number not in self.answers, "an ask is answered once"

    def _at(self, arena_id: int, region: Region) -> bytes:
        return os.pread(self.arenas[arena_id], region.length, region.offset)


class MakerNode:
    """Use: `ask` for slabs, wait for `answer`, and say that they are `given`."""

    def __init__(self, url: str, config: NodeConfig, engine: Engine, request: OpenJob) -> None:
        self.now = 1000.0
        self.engine, self.config, self.request = engine, config, request
        self.opened: list[DatasetSource] = []
        """What was indexed, or would have been."""
        self.refusal: DataplaneError | None = None
        """What is wrong with every dataset."""
        self.opener = DatasetOpener(config, engine, self._open)
        self.lender = KeptSlabs()
        self.making = Making(config, engine, self.opener, self.lender, clock=lambda: self.now)
        self._numbers = itertools.count(1)
        self.spec: JobSpec
        self.dataset: Dataset
        self.collated: CollatedColumns | None = None
        self.software = ""
        self._specs: tuple[ColumnSpec, ...] = ()

    def _open(self, source: DatasetSource, _view: View, _given: Manifest | None) -> Manifest:
        self.opened.append(source)
        if self.refusal is not None:
            raise self.refusal
        return index_dataset(source.urls)

    async def start(self) -> None:
        """Learn what the slabs have to be."""
        opened = await self.opener.job(self.request)
        self.spec, (self.dataset,) = opened.spec, opened.datasets
        self.collated, self._specs = opened.collated, opened.columns
        self.software = software_of(opened, "")
        self.opener.forget_unread(self.dataset)

    def wanted(self, first: int, count: int = 1, **others: Any) -> MakeSlab:
        """A request for these steps."""
        place = {"epoch": 0, "cursor": 0, "dp_rank": 0, "dp_size": 1, "step_stride": 1}
        opening = Raw(encode(self.request))
        of_node = {"slot_bytes": SLOT_BYTES, "opening": opening, "software": self.software}
        fields = place | of_node | others
        stream = Stream(**{name: fields.pop(name) for name in (*place, "mix") if name in fields})
        steps = StepRange(first, count)
        return MakeSlab(self.spec.digest(), stream, steps, **fields)

    def ask(
        self,
        wanted: MakeSlab,
        *,
        node_id: str = "asker",
        room: int = SLOT_BYTES,
        job: str = JOB,
        only_under: tuple[str, ...] = (),
    ) -> int:
        """The number of the ask."""
        number = next(self._numbers)
        self.lender.asked.add(number)
        request = Request(1, bytes(16), 0, 0, room, BlockForm.SLAB, slab=encode(wanted))
        asked = Asked(number, job, node_id, request, only_under)
        self.making.asked(asked)
        return number

    async def answer(self, number: int) -> Given | str:
        """What it was answered with; later, if it is not answered yet."""
        await self.until(lambda: number in self.lender.answers)
        return self.lender.answers[number]

    async def open(self) -> None:
        """Ask until it has opened the job."""
        self.given((await self._slab(self.wanted(0)))[0])

    async def slab(self, wanted: MakeSlab, **ask: Any) -> Given:
        """What it gives if it is asked until it gives something; what it has sent was read."""
        number, found = await self._slab(wanted, **ask)
        self.given(number)
        return found

    async def _slab(self, wanted: MakeSlab, **ask: Any) -> tuple[int, Given]:
        while True:
            number = self.ask(wanted, **ask)
            found = await self.answer(number)
            if isinstance(found, Given):
                return number, found
            await asyncio.sleep(0.001)

    def given(self, number: int) -> None:
        """The asker has got it."""
        assert self.lender.is_unchanged(number), "a slab was written while it was sent"
        self.lender.read.discard(number)
        self.lender.after.pop(number)()
        self.making.tick()

    def passes(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.making.tick()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for it."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - of other processes
                await asyncio.sleep(0.001)

    # -- what is expected ------------------------------------------------------------------------

    async def local(self, at: Stream) -> list[tuple[Slab, Layout, bytes]]:
        """All slabs of a stream, as a trainer of this node gets them."""
        sizes = slab_sizes(self.dataset, self.spec, at.dp_size, SLOT_BYTES, 0, self.collated)
        layout = plan_slots(0, sizes.slot_bytes)
        arena = Arena.create("local", layout.arena_bytes)
        number = next(self.engine.numbers)
        delivery = DeliveryArena(number, arena, layout, (self.dataset,), collated=self.collated)
        self.engine.open_delivery(delivery)
        inbox: asyncio.Queue[FromNodeBody] = asyncio.Queue()
        order = await self.opener.orders.of(self.spec, [self.dataset.manifest], at.epoch)
        walk = Walk(self.spec, order, at, sizes)
        stream = self.engine.open_stream(
            delivery, walk, lambda _, body: inbox.put_nowait(body), number
        )
        found: list[tuple[Slab, Layout, bytes]] = []
        while True:
            self.engine.request(stream, 1)
            body = await asyncio.wait_for(inbox.get(), DEADLINE_S)
            if isinstance(body, EndOfStream):
                self.engine.close_stream(stream)
                self.engine.close_delivery(delivery)
                return found
            assert isinstance(body, Slab), body
            content = bytes(arena.view(body.region.offset, body.bytes_used))
            found.append((body, decode(Layout, body.layout), content))
            self.engine.release(delivery, [body.slab_id])

    async def steps(self, at: Stream) -> dict[int, Pieces]:
        """The pieces of each batch of a stream, by step."""
        return {
            batch.step: self.pieces(layout, content, slab.batches, i)
            for slab, layout, content in await self.local(at)
            for i, batch in enumerate(slab.batches)
        }

    def pieces(self, layout: Layout, content: bytes, batches: Sequence[Batch], i: int) -> Pieces:
        """Those of batch `i` of a slab."""
        return [
            [
                content[part.offset : part.offset + part.length]
                for part in pieces(spec, column, i, batches[i].rows)
            ]
            for spec, column in zip(self._specs, layout.columns, strict=True)
        ]

    def check(self, wanted: MakeSlab, given: Given, expected: dict[int, Pieces]) -> int:
        """How many batches it has: they are equal to those that are made for a trainer here."""
        slab, steps = of(given), wanted.steps
        assert slab.bytes_used == len(given.content)
        layout, stride = decode(Layout, slab.layout), wanted.stream.step_stride
        assert 1 <= len(slab.batches) <= steps.count
        for i, batch in enumerate(slab.batches):
            assert batch.step == steps.first + i * stride
            assert self.pieces(layout, given.content, slab.batches, i) == expected[batch.step]
        return len(slab.batches)

    def tasks(self) -> list[SlabTask]:
        """The slabs that are planned or made, and not given."""
        return [task for stream in self.engine.scheduler._streams for task in stream.tasks]

    def lent_count(self) -> int:
        """How many slabs have memory that is not free."""
        return sum(len(each.lent) for each in self.engine.scheduler._deliveries.by_id.values())

    async def until_closed(self) -> None:
        """Wait until nothing of what was made is left."""
        blocks = self.engine.scheduler._blocks
        await self.until(lambda: not self.engine._deliveries and not blocks._blocks)
        assert not self.lender.arenas
        assert not self.engine._streams
        assert not self.opener.datasets
        assert list(self.engine.open_datasets()) == []


@asynccontextmanager
async def maker_node(
    url: str, folder: Path, *, workers: int = 1, stall_s: float = 60.0, **request: Any
) -> AsyncIterator[MakerNode]:
    """A running one; slabs of this job are wanted."""
    config = structs.replace(
        default_node_config(),
        block_arena_bytes=8 * MIB,
        delivery_bytes_per_rank=MIB,
        slab_bytes=SLOT_BYTES,
        cache_dir=str(folder / "cache"),
        worker_count=workers,
        worker_count_max=workers,
        allowed_functions="user_functions:",
    )
    arena, trace = Arena.create("blocks", 8 * MIB), Trace("test")
    fetcher, pool = Fetcher.of(config, arena, trace, Outages()), WorkerPool(workers, trace)
    scheduler = Scheduler(8 * MIB, 4, Autoscaler(workers, workers, workers), stall_s)
    engine = Engine(scheduler, arena, fetcher, pool, trace)
    pool.start()
    fields = {"global_batch": 4, "shuffle": True, "seed": 3} | request
    node = MakerNode(url, config, engine, opening(url, job=JOB, launch="first", **fields))
    try:
        yield node
        node.making.close()
        await node.until_closed()
    finally:
        node.making.close()
        pool.close()
        fetcher.close()
        engine.close()
        arena.close()
        for fd in node.lender.arenas.values():
            os.close(fd)


Scene = Callable[[MakerNode], Awaitable[None]]


def play(scene: Scene, url: str, folder: Path, **options: Any) -> None:
    """A scene with a maker that has opened the job."""

    async def whole() -> None:
        async with maker_node(url, folder, **options) as node:
            await node.start()
            await node.open()
            await scene(node)

    asyncio.run(whole())


def of(given: Given | str) -> Slab:
    """Return the slab of an answer."""
    assert isinstance(given, Given), given
    assert isinstance(given.result, Slab)
    return given.result
