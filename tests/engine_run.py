"""Consumers of an engine, and a run of chance over what they and the outside do."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from engine_world import PAGE, Outside, World, slab_bytes

from dataplane.arena.allocator import rounded
from dataplane.arena.memfd import Arena
from dataplane.arena.slots import SlotLayout, Slots, plan_slots
from dataplane.errors import DataplaneError
from dataplane.model import Stream
from dataplane.node.engine import Engine
from dataplane.node.walk import SlabSizes, Walk
from dataplane.node.work import Delivery, Group, StreamState
from dataplane.plan.order import Order
from dataplane.rpc import messages
from dataplane.trace import Trace


@dataclass(eq=False)
class Consumer:
    """One stream's consumer; `patience` is how many slabs it holds before it lets one go, and
    `after` another that comes first.
    """

    engine: Engine
    delivery: Delivery
    world: World
    at: Stream
    walk: Walk
    patience: int
    row_bytes: int
    after: Consumer | None = None
    stream: StreamState | None = None
    asked: int = 0
    next_step: int = 0
    held: deque[tuple[messages.Slab, bytes]] = field(default_factory=deque)
    ended: bool = False
    error: DataplaneError | None = None
    stopped: bool = False

    def __post_init__(self) -> None:
        self.next_step = self.at.first_step
        before = self.after.stream if self.after is not None else None
        self.stream = self.engine.open_stream(self.delivery, self.walk, self.receive, self, before)

    @property
    def is_done(self) -> bool:
        return self.ended or self.error is not None or self.stream is None

    def ask(self) -> None:
        assert self.stream is not None
        self.asked += 1
        self.engine.request(self.stream, self.asked)

    def receive(self, request_id: int, body: messages.FromNodeBody) -> None:
        assert self.stream is not None, "an answer after the stream was closed"
        assert self.asked
        self.asked -= 1
        if isinstance(body, DataplaneError):
            self.error = body
        elif isinstance(body, messages.EndOfStream):
            assert self.next_step >= self.walk.step_count
            self.ended = True
        else:
            assert isinstance(body, messages.Slab)
            self.check(body)
            # Whoever has a slab may write into it: nobody else may see that.
            content = bytes([body.slab_id % 251]) * body.region.length
            self.delivery.arena.view(body.region.offset, body.region.length)[:] = content
            self.held.append((body, content))
            if body.copy_out:
                self.release(len(self.held) - 1)

    def check(self, slab: messages.Slab) -> None:
        view = self.delivery.arena.view(slab.region.offset, slab.region.length)
        offset = 0
        for batch in slab.batches:
            assert batch.step == self.next_step
            steps = self.walk._slice.positions_of_steps(batch.step, 1)
            assert (batch.rows, batch.valid) == (int(steps.rows[0]), int(steps.valid[0]))
            found = np.frombuffer(view[offset : offset + 16 + 16 * batch.rows], np.int64)
            assert found[0] == batch.step
            expected = np.stack(self.walk.order.locate(steps.positions), 1)
            assert found[2:].reshape(-1, 2).tolist() == expected.tolist()
            offset += slab_bytes(batch, self.row_bytes)
            self.next_step += self.at.step_stride
        assert slab.batches

    def release(self, which: int = 0) -> None:
        slab, content = self.held[which]
        del self.held[which]
        found = self.delivery.arena.view(slab.region.offset, slab.region.length)
        # The tail of a slot holds the row index; nobody may write into a slab that is held.
        assert bytes(found) == content, "a slab was written while it was held"
        self.engine.release(self.delivery, [slab.slab_id])

    def close(self) -> None:
        if self.stream is not None:
            self.engine.close_stream(self.stream)
            self.stream = None


class Run:
    """One world, some consumers, and chance."""

    def __init__(
        self, chance: random.Random, *, tight: bool, hoard: bool = False, factor: float = 0
    ) -> None:
        self.chance = chance
        self.hoard = hoard
        self.worlds = {i: World(chance, i) for i in range(1, chance.choice([1, 1, 2]) + 1)}
        self.row_bytes = chance.choice([16, 64, 400])
        self.most = {i: self._largest_batch(world) for i, world in self.worlds.items()}
        self.needed = max(self.most.values())
        drawn = chance.choice([0.3, 0.6]) if tight else chance.choice([1.0, 1.0, 1.5, 8.0])
        factor = factor or drawn
        self.arena = Arena.create("blocks", max(int(self.needed * factor), 4 * PAGE) // PAGE * PAGE)
        self.outside = Outside(self.arena, self.worlds, self.row_bytes)
        self.engine = Engine(
            self.arena, self.outside, self.outside, chance.choice([1, 2, 8]), Trace("test")
        )
        self.deliveries: list[tuple[Delivery, World]] = []
        self.consumers: list[Consumer] = []
        self.layout = self._layout()

    def _layout(self) -> SlotLayout:
        largest = max(
            slab_bytes(messages.Batch(3, world.spec.global_batch, 0), self.row_bytes)
            for world in self.worlds.values()
        )
        layout = plan_slots(0, self.chance.choice([512, PAGE]))
        zone = max(layout.zone_bytes, largest + 64 * 8 + 64)
        return SlotLayout(layout.slot_bytes, layout.slot_count, -(-zone // PAGE) * PAGE)

    def _largest_batch(self, world: World) -> int:
        """The arena that the blocks of any one batch of any rank could fill."""
        costs = sorted(world.cost_of(i) for i in range(len(world.sizes)))
        return sum(costs[-world.spec.global_batch :]) or PAGE

    def deliver_to(self, world: World, group: Group | None = None) -> Delivery:
        number = 100 + len(self.deliveries)
        arena = Arena.create("delivery", self.layout.arena_bytes)
        self.outside.arenas[number] = arena
        delivery = Delivery(number, arena, Slots(self.layout), world.dataset, group=group)
        if group is not None:
            group.users += 1
        self.deliveries.append((delivery, world))
        return delivery

    def consume(
        self,
        delivery: Delivery,
        world: World,
        dp_rank: int,
        dp_size: int,
        steps: tuple[int, int] | None = None,
    ) -> Consumer:
        chance = self.chance
        spec = world.spec
        epoch, cursor = chance.choice([0, 0, 0, 1]), 0
        if delivery.group is None and chance.random() < 0.2:
            cursor = chance.randrange(world.dataset.manifest.sample_count)
        first, stride = chance.choice([(0, 1), (0, 1), (0, 1), (1, 2)])
        if steps is not None:
            epoch, (first, stride) = 0, steps
        order = Order(
            world.dataset.manifest.block_rows,
            spec.seed,
            spec.shuffle,
            spec.lanes,
            spec.window,
            epoch,
        )
        at = Stream(epoch, cursor, dp_rank, dp_size, first, stride)
        most = chance.choice([1, 4, 16]) if not self.consumers else 8
        is_aligned = delivery.group is not None
        sizes = SlabSizes(4 if is_aligned else most, 16, 0)
        walk = Walk(spec, order, at, sizes, is_aligned=is_aligned)
        patience = 10**6 if self.hoard else chance.choice([0, 0, 1, 3, 10**6])
        ahead = [one for one in self.consumers if one.delivery is delivery and one.stream]
        after = chance.choice(ahead) if ahead and chance.random() < 0.5 else None
        consumer = Consumer(self.engine, delivery, world, at, walk, patience, self.row_bytes, after)
        self.consumers.append(consumer)
        return consumer

    async def settle(self) -> None:
        """Until the engine waits for the outside."""
        for _ in range(3):
            await asyncio.sleep(0)
        # Nothing tells that there is nothing to do.
        engine = self.engine
        while engine._pump_is_due or any(s.planning for s in engine._streams.values()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        self.check_budget()

    def check_budget(self) -> None:
        """What is kept takes half of the arena at most, and everything in the arena has an owner."""
        kept = [slab.region for slab in self.engine._shared._slabs.values()]
        blocks = self.engine.blocks
        assert sum(region.length for region in kept) == self.engine._shared._bytes
        assert self.engine._shared._bytes <= blocks.arena_bytes // 2
        owned = [r for block in blocks._blocks.values() for r in block.regions] + kept
        free = blocks._allocator.free_bytes
        assert sum(rounded(r.length) for r in owned) + free == blocks._allocator.size_bytes

    def actions(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = [self._end_one] * min(3, len(self.outside.pending))
        for consumer in self.consumers:
            first = consumer.after
            if consumer.stopped:
                continue
            if first is not None and first.stream is not None and consumer.stream is not None:
                if first.is_done:
                    found.append(first.close)
            elif not consumer.is_done and consumer.asked < 2:
                found.append(consumer.ask)
            if len(consumer.held) > consumer.patience:
                found.append(consumer.release)
        return found

    def _end_one(self) -> None:
        self.outside.pending.pop(self.chance.randrange(len(self.outside.pending)))()

    async def go(self, acts_max: int = 20_000) -> None:
        """Act until nothing is left to do; then every consumer must have what it asked for."""
        await self.settle()
        acts = 0
        while actions := self.actions():
            acts += 1
            if acts > acts_max:
                return
            self.chance.choice(actions)()
            await self.settle()
            if self.chance.random() < 0.01:
                self.chance.choice(self.consumers).close()
            if self.chance.random() < 0.05:
                await self.drain()
        assert acts < 20_000, "work is repeated for ever"
        stuck = [c for c in self.consumers if not c.is_done and not c.stopped]
        assert not stuck, f"{len(stuck)} streams wait for ever: {self.state()}"

    async def drain(self) -> None:
        """While consumers do nothing, the engine comes to rest: it does not load in circles."""
        await self.settle()
        ends = 0
        while self.outside.pending:
            self._end_one()
            await self.settle()
            ends += 1
            assert ends < 500, "the same blocks are loaded again and again"

    def state(self) -> str:
        return "; ".join(
            f"{[(w.phase.name, len(w.missing), w.slot) for w in list(s.works)[:9]]} of {len(s.works)}"
            for s in self.engine._streams.values()
        )

    async def end(self) -> None:
        """Close everything, in any order with what is under way: nothing is left."""
        for consumer in self.consumers:
            if self.chance.random() < 0.5:
                while consumer.held:
                    consumer.release()
            consumer.close()
            self.engine.release_all(consumer.delivery, consumer)
        for delivery, _ in self.deliveries:
            assert not delivery.lent
            assert not delivery.streams
            self.engine.close_delivery(delivery)
        for world in self.worlds.values():
            self.engine.blocks.forget_dataset(world.dataset)
        await self.settle()
        while self.outside.pending:
            self._end_one()
            await self.settle()
        for delivery, _ in self.deliveries:
            assert delivery.slots.free_count == delivery.slots.layout.slot_count
            assert delivery.slots.zone_is_free
            assert not delivery.streams
            assert not delivery.lent
            assert not delivery.assembling_count
            assert delivery.arena_id in self.outside.detached
        blocks = self.engine.blocks
        assert blocks._allocator.free_bytes == blocks._allocator.size_bytes
        assert not blocks._blocks
        assert not blocks.in_flight_count
        assert not self.engine._works._waiting
        assert not self.engine._works.assembling_count
        self.engine.close()
        self.engine._planner.shutdown()
        self.arena.close()


def simulate(run: Callable[[], Run], scene: Callable[[Run], None], acts_max: int = 20_000) -> Run:
    async def play() -> Run:
        made = run()
        scene(made)
        await made.go(acts_max)
        await made.end()
        return made

    return asyncio.run(play())


def several(run: Run) -> None:
    """Some deliveries, with peers that share them or walk alone."""
    chance = run.chance
    for world in run.worlds.values():
        dp_size = chance.randint(1, min(3, world.spec.global_batch))
        for dp_rank in range(dp_size):
            delivery = run.deliver_to(world, chance.choice([None, Group()]))
            for _ in range(chance.choice([1, 1, 2, 3])):
                run.consume(delivery, world, dp_rank, dp_size)
