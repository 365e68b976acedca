"""Consumers of a scheduler, and a run of chance over what they and the outside do, on a clock that
goes on by itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scheduler_invariants import check
from scheduler_world import PAGE, Outside, World, slab_bytes

from dataplane.arena.slots import SlotLayout, plan_slots
from dataplane.errors import DataplaneError
from dataplane.model import Stream
from dataplane.plan.order import Order
from dataplane.rpc import messages
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.records import Delivery
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import SlabSizes, Walk

STALL_S = 1000.0


@dataclass(eq=False)
class Place:
    """A delivery arena."""

    delivery_id: int
    world: World
    memory: memoryview
    group: object = None
    is_declared: bool = False


@dataclass(eq=False)
class Consumer:
    """One stream's consumer; `patience` is how many slabs it holds before it lets one go, and
    `after` another that comes first.
    """

    run: Run
    number: int
    place: Place
    at: Stream
    walk: Walk
    patience: int
    row_bytes: int
    after: Consumer | None = None
    is_open: bool = True
    asked: int = 0
    next_step: int = 0
    held: deque[tuple[messages.Slab, bytes]] = field(default_factory=deque)
    ended: bool = False
    planned: bool = False
    error: DataplaneError | None = None
    stalled: list[events.Stalled] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        self.next_step = self.at.first_step
        before = self.after.number if self.after is not None else None
        opened = events.StreamOpened(
            self.number, self.place.delivery_id, self.walk, self.number, before
        )
        self.run.consumers.append(self)
        self.run.tell(opened)

    @property
    def world(self) -> World:
        return self.place.world

    @property
    def is_done(self) -> bool:
        return self.ended or self.error is not None or not self.is_open

    def ask(self) -> None:
        assert self.is_open
        self.asked += 1
        self.run.tell(events.Requested(self.number, self.asked))

    def receive(self, effect: events.Send) -> None:
        assert self.is_open, "an answer after the stream was closed"
        assert self.asked
        self.asked -= 1
        body = effect.body
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
            self.memory(body)[:] = content
            self.held.append((body, content))

    def memory(self, slab: messages.Slab) -> memoryview:
        return self.place.memory[slab.region.offset : slab.region.offset + slab.region.length]

    def check(self, slab: messages.Slab) -> None:
        view, offset = self.memory(slab), 0
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
        # The tail of a slot holds the row index; nobody may write into a slab that is held.
        assert bytes(self.memory(slab)) == content, "a slab was written while it was held"
        self.run.tell(events.Released(self.place.delivery_id, [slab.slab_id]))

    def copy_out(self) -> None:
        """Give back at once what is not to be held."""
        for which, (slab, _) in enumerate(self.held):
            if slab.copy_out:
                self.release(which)
                return

    def close(self) -> None:
        if self.is_open:
            self.run.tell(events.StreamClosed(self.number))
            self.is_open = False


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
        arena_bytes = max(int(self.needed * factor), 4 * PAGE) // PAGE * PAGE
        self.outside = Outside(arena_bytes, self.worlds, self.row_bytes)
        fetches, workers = chance.choice([1, 2, 8]), Autoscaler(1, 4, 2)
        self.scheduler = Scheduler(arena_bytes, fetches, workers, STALL_S)
        self.outside.locate = self._locate
        self.now = 0.0
        self.places: list[Place] = []
        self.consumers: list[Consumer] = []
        self.notes: list[events.Note] = []
        self.sizes: list[int] = []
        self.layout = self._layout()

    def _locate(self, key: int) -> tuple[object, int]:
        block = self.scheduler.block(key)
        return block.dataset, block.index

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

    # -- what happens ----------------------------------------------------------------------------

    def tell(self, event: events.Event) -> None:
        """Something has happened: whatever follows from it is done."""
        self.now += 0.001
        for effect in self.scheduler.decide(event, self.now):
            match effect:
                case events.Send():
                    self._consumer(effect.stream_id).receive(effect)
                case events.Stalled():
                    consumer = self._consumer(effect.stream_id)
                    consumer.asked -= 1
                    consumer.stalled.append(effect)
                case events.AllPlanned():
                    assert not self._consumer(effect.stream_id).planned
                    self._consumer(effect.stream_id).planned = True
                case events.Note():
                    self.notes.append(effect)
                case events.Resize():
                    self.sizes.append(effect.count)
                case events.ClearTrails():
                    self.outside.part(effect.region)[:] = bytes(effect.region.length)
                case _:
                    self.outside.ask(effect)
        check(self.scheduler)
        for consumer in self.consumers:
            consumer.copy_out()

    def _consumer(self, stream_id: int) -> Consumer:
        return next(one for one in self.consumers if one.number == stream_id)

    def settle(self) -> None:
        """Until the scheduler waits for the outside."""
        for _ in range(1000):
            if self.scheduler.is_settled:
                return
            self.tell(events.Settled())
        raise AssertionError("it does not come to rest")

    def deliver_to(self, world: World, group: object = None, *, is_declared: bool = False) -> Place:
        memory = memoryview(bytearray(self.layout.arena_bytes))
        place = Place(100 + len(self.places), world, memory, group, is_declared)
        self.outside.deliveries[place.delivery_id] = memory
        self.places.append(place)
        opened = events.DeliveryOpened(
            place.delivery_id, self.layout, world.blocks, group, is_declared
        )
        self.tell(opened)
        return place

    def consume(
        self,
        place: Place,
        dp_rank: int,
        dp_size: int,
        steps: tuple[int, int] | None = None,
    ) -> Consumer:
        chance, world = self.chance, place.world
        spec = world.spec
        epoch, cursor = chance.choice([0, 0, 0, 1]), 0
        if place.group is None and chance.random() < 0.2:
            cursor = chance.randrange(world.manifest.sample_count)
        first, stride = chance.choice([(0, 1), (0, 1), (0, 1), (1, 2)])
        if steps is not None:
            epoch, (first, stride) = 0, steps
        rows = world.manifest.block_rows
        order = Order(rows, spec.seed, spec.shuffle, spec.lanes, spec.window, epoch)
        at = Stream(epoch, cursor, dp_rank, dp_size, first, stride)
        most = chance.choice([1, 4, 16]) if not self.consumers else 8
        is_aligned = place.group is not None
        sizes = SlabSizes(4 if is_aligned else most, 16, 0)
        walk = Walk(spec, order, at, sizes, is_aligned=is_aligned)
        patience = 10**6 if self.hoard else chance.choice([0, 0, 1, 3, 10**6])
        ahead = [one for one in self.consumers if one.place is place and one.is_open]
        after = chance.choice(ahead) if ahead and chance.random() < 0.5 else None
        number = len(self.consumers) + 1
        return Consumer(self, number, place, at, walk, patience, self.row_bytes, after)

    # -- chance ----------------------------------------------------------------------------------

    def actions(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = [self.end_one] * min(3, len(self.outside.pending))
        for consumer in self.consumers:
            first = consumer.after
            if consumer.stopped:
                continue
            if first is not None and first.is_open and consumer.is_open:
                if first.is_done:
                    found.append(first.close)
            elif not consumer.is_done and consumer.asked < 2:
                found.append(consumer.ask)
            if len(consumer.held) > consumer.patience:
                found.append(consumer.release)
        return found

    def end_one(self) -> None:
        """One of the things that were asked of the outside ends."""
        self.tell(self.outside.pending.pop(self.chance.randrange(len(self.outside.pending)))())

    def go(self, acts_max: int = 20_000) -> None:
        """Act until nothing is left to do; then every consumer must have what it asked for."""
        self.settle()
        acts = 0
        while actions := self.actions():
            acts += 1
            if acts > acts_max:
                return
            self.chance.choice(actions)()
            if self.chance.random() < 0.7:
                self.settle()
            if self.chance.random() < 0.01:
                self.chance.choice(self.consumers).close()
            if self.chance.random() < 0.02:
                self.tell(events.Ticked(self.chance.random() * 4, self.chance.random()))
            if self.chance.random() < 0.05:
                self.drain()
            if not self.actions():
                self.settle()
        assert acts < 20_000, "work is repeated for ever"
        stuck = [c for c in self.consumers if not c.is_done and not c.stopped]
        assert not stuck, f"{len(stuck)} streams wait for ever: {self.state()}"

    def drain(self) -> None:
        """While consumers do nothing, the scheduler comes to rest: it does not load in circles."""
        self.settle()
        ends = 0
        while self.outside.pending:
            self.end_one()
            self.settle()
            ends += 1
            assert ends < 500, "the same blocks are loaded again and again"

    def state(self) -> str:
        return "; ".join(
            f"{[(t.phase.name, len(t.missing), t.slot) for t in list(s.tasks)[:9]]} of {len(s.tasks)}"
            for s in self.scheduler._streams
        )

    def end(self) -> None:
        """Close everything, in any order with what is under way: nothing is left."""
        for consumer in self.consumers:
            if self.chance.random() < 0.5:
                while consumer.held:
                    consumer.release()
            consumer.close()
            self.tell(events.HolderGone(consumer.place.delivery_id, consumer.number))
        deliveries: list[Delivery] = []
        for place in self.places:
            delivery = self.scheduler._deliveries[place.delivery_id]
            assert not delivery.lent
            assert not delivery.streams
            deliveries.append(delivery)
            self.tell(events.DeliveryClosed(place.delivery_id))
        for world in self.worlds.values():
            self.tell(events.DatasetForgotten(world.blocks))
        self.settle()
        while self.outside.pending:
            self.end_one()
            self.settle()
        for delivery in deliveries:
            assert delivery.slots.free_count == delivery.slots.layout.slot_count
            assert delivery.slots.zone_is_free
            assert not delivery.lent
            assert not delivery.assembling_count
            assert delivery.delivery_id in self.outside.dropped
        blocks = self.scheduler._blocks
        assert blocks._allocator.free_bytes == blocks._allocator.size_bytes
        assert not blocks._blocks
        assert not blocks._by_key
        assert not blocks.in_flight_count
        assert not self.scheduler._tasks._waiting
        assert not self.scheduler._tasks.assembling_count
        assert not self.scheduler._deliveries
        assert not self.scheduler._groups


def simulate(run: Callable[[], Run], scene: Callable[[Run], None], acts_max: int = 20_000) -> Run:
    """A whole run, from its beginning to its end."""
    made = run()
    scene(made)
    made.go(acts_max)
    made.end()
    return made


def several(run: Run) -> None:
    """Some deliveries, with peers that share them or walk alone."""
    chance = run.chance
    for world in run.worlds.values():
        dp_size = chance.randint(1, min(3, world.spec.global_batch))
        for dp_rank in range(dp_size):
            place = run.deliver_to(world, chance.choice([None, ("peers", len(run.places))]))
            for _ in range(chance.choice([1, 1, 2, 3])):
                run.consume(place, dp_rank, dp_size)
