"""A random run of a scheduler with its consumers, stores and workers, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from other_orders import Backwards, Concatenated
from scheduler_consumers import Consumer, Place
from scheduler_disk import Disk
from scheduler_invariants import Invariants
from scheduler_makers import Makers
from scheduler_neighbours import Neighbours
from scheduler_traffic import Traffic, untold
from scheduler_world import BATCH_MAX, PAGE, Outside, World, slab_bytes

from dataplane.arena.slots import SlotLayout, plan_slots
from dataplane.model.config import JobSpec
from dataplane.model.errors import LeaseFenced
from dataplane.model.records import Stream
from dataplane.plan.order import SampleOrder
from dataplane.rpc import messages
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.dataset import DatasetLookup
from dataplane.scheduler.events import GiveUpSlab
from dataplane.scheduler.records import Delivery
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import SlabSizes, Walk


class Mixture(World):
    """All samples of several datasets, in one order of their own."""

    def __init__(self, parts: list[World]) -> None:
        self.chance, self.dataset_id, self.parts = parts[0].chance, parts[0].dataset_id, parts
        self.is_large = parts[0].is_large
        self.sizes = [size for part in parts for size in part.sizes]
        self.sample_count = sum(part.sample_count for part in parts)
        self.spec = self.job()
        self._orders = {}

    @property
    def datasets(self) -> DatasetLookup:
        return DatasetLookup(*(part.blocks for part in self.parts))

    def _order(self, spec: JobSpec, epoch: int) -> SampleOrder:
        orders = [part._order(spec, epoch) for part in self.parts]
        return Backwards(Concatenated(orders, [len(part.sizes) for part in self.parts]))

    def cost_of(self, block: int) -> int:
        dataset, block = self.datasets.find(block)
        (part,) = (part for part in self.parts if part.blocks is dataset)
        return part.cost_of(block)


def arena_of_passes(worlds: Sequence[World], chance: random.Random) -> int:
    """An arena for the rows of any batch of these worlds beside any block, and little more."""
    parts = [(world, i) for world in worlds for i in range(len(world.sizes))]
    largest = max(world.cost_of(i) for world, i in parts)
    excerpts = max(world.excerpts_of(i) for world, i in parts)
    return int((largest + excerpts) * chance.choice([1.3, 1.3, 1.6, 2.5]))


STALL_S = 1000.0
PACES = ((0.0001, 0.001), (0.01, 0.05), (0.5, 5.0))  # seconds: fast, usual and slow
_ACTS_MAX = 20_000


class Run:
    """Some worlds and consumers, and a source of randomness. With `is_timed`, each store, worker
    and consumer has its own speed, and events happen when they are due; otherwise in any order.
    `restless` is how often consumers come, go and change places. With `is_mixed`, there is also an
    order over all worlds. With `is_large`, no arena holds all blocks of a batch, but each holds the
    rows of a batch beside a block. `makers`: other nodes make "some" of the slabs, or "all".
    """

    def __init__(
        self,
        chance: random.Random,
        *,
        tight: bool,
        hoard: bool = False,
        factor: float = 0,
        is_timed: bool = False,
        restless: float = 0.0,
        stall_s: float = STALL_S,
        is_mixed: bool = False,
        is_large: bool = False,
        makers: str = "",
        cache_bytes: int = 0,
    ) -> None:
        self.chance, self.hoard = chance, hoard
        self.is_timed, self.restless, self.is_large = is_timed, restless, is_large
        count = max(chance.choice([1, 1, 1, 2]), 1 + is_mixed)
        self.worlds = {i: World(chance, i, is_large=is_large) for i in range(1, count + 1)}
        self.row_bytes = chance.choice([16, 64, 400])
        self.mixture = Mixture([*self.worlds.values()]) if is_mixed else None
        self.most = {i: self._largest_batch(world) for i, world in self.worlds.items()}
        if self.mixture is not None:
            self.most[0] = self._largest_batch(self.mixture)
        drawn = chance.choice([0.3, 0.6]) if tight else chance.choice([1.0, 1.0, 1.5, 8.0])
        arena_bytes = int(max(self.most.values()) * (factor or drawn))
        if is_large:
            arena_bytes = arena_of_passes([*self.worlds.values()], chance)
        arena_bytes = max(arena_bytes, 4 * PAGE) // PAGE * PAGE if makers != "all" else 0
        for world in self.worlds.values():
            world.keep_restart_indexes(arena_bytes)
        self.outside = Outside(arena_bytes, self.worlds, self.row_bytes)
        self.outside.chance = chance
        waits = (events.PlanSteps, events.Fetch, events.DecodeBlock, events.AssembleSlab)
        waits += (events.CopyKept, events.ExtractRows, *[events.MakeElsewhere] * bool(makers))
        self.outside.pace = {kind: chance.choice(PACES) for kind in waits}
        fetches = chance.choice([1, 2, 8])
        workers = Autoscaler(0, 0, 0) if makers == "all" else Autoscaler(1, 4, 2)
        self.scheduler = Scheduler(arena_bytes, fetches, workers, stall_s, cache_bytes)
        self.outside.find = self.scheduler.block
        worlds = [*self.worlds.values()]
        self.traffic = Traffic(self.scheduler, fetches, stall_s)
        self.invariants = Invariants(self.scheduler, worlds, self.traffic.times)
        self.now = 0.0
        self.acts = 0
        self.places: list[Place] = []
        self.consumers: list[Consumer] = []
        self.notes: list[events.Note] = []
        self.sizes: list[int] = []
        self.layout = self._layout()
        self.neighbours = Neighbours(self)
        self.length: Callable[[], int | None] = lambda: None
        """Draws how many steps a walk has; None for all."""
        self.makers, self.disk = Makers(self, makers), Disk(self, cache_bytes)

    def narrow(self) -> None:
        """There may be batches that fit into no slot, nor into the zone."""
        size = self.chance.choice([256, 512, 2048, PAGE])
        self.layout = SlotLayout(size, self.layout.slot_count, self.chance.choice([1, 2, 4]) * size)

    def _layout(self) -> SlotLayout:
        largest = slab_bytes(messages.Batch(3, BATCH_MAX, 0), self.row_bytes)
        layout = plan_slots(0, self.chance.choice([512, PAGE]))
        zone = max(layout.zone_bytes, largest + 64 * 8 + 64)
        return SlotLayout(layout.slot_bytes, layout.slot_count, -(-zone // PAGE) * PAGE)

    def _largest_batch(self, world: World) -> int:
        """The arena that the blocks of any one batch of any rank could fill."""
        costs = sorted(world.cost_of(i) for i in range(len(world.sizes)))
        return sum(costs[-BATCH_MAX:]) or PAGE

    # -- what happens ----------------------------------------------------------------------------

    def tell(self, event: events.Event) -> None:
        """Pass an event to the scheduler, and perform all effects that follow."""
        self.now += 0.001
        self.outside.now = self.now
        before = self.traffic.before(event, self.now)
        effects = self.scheduler.decide(event, self.now)
        self.traffic.after(event, before, effects)
        for effect in effects:
            match effect:
                case events.Send():
                    self._consumer(effect.stream_id).receive(effect)
                case events.Stalled():
                    consumer = self._consumer(effect.stream_id)
                    consumer.asked -= 1
                    consumer.stalled.append(effect)
                case events.Advanced():
                    self._consumer(effect.stream_id).advanced.append(effect)
                case events.AllPlanned():
                    assert not self._consumer(effect.stream_id).planned
                    self._consumer(effect.stream_id).planned = not effect.has_failed
                    has_failed = isinstance(event, events.Planned) and event.error is not None
                    assert effect.has_failed == has_failed
                case events.Note():
                    self.notes.append(effect)
                    told = ("blocks ", "the block arena is smaller", "the disk ")
                    assert effect.is_failure == effect.event.startswith(told)
                case events.ResizePool():
                    self.sizes.append(effect.count)
                case events.LendBlock() | events.OnlyDecoded() | events.RefuseAsk():
                    if (sent := self.neighbours.answered(effect)) is not None:
                        self.outside.later(effect, sent)
                case events.MakeElsewhere():
                    self.outside.later(effect, self.makers.asked(effect))
                case GiveUpSlab():
                    self.makers.give_up(effect)
                case events.ClearRestartIndexes():
                    self.outside.part(effect.region)[:] = bytes(effect.region.length)
                case _:
                    self.disk.ask(effect)
        self.makers.after(event)
        self.invariants.check()
        for consumer in self.consumers:
            if consumer.held:
                consumer.copy_out()

    def _consumer(self, stream_id: int) -> Consumer:
        return self.consumers[stream_id - 1]

    def settle(self) -> None:
        """Run until the scheduler waits for an event."""
        for _ in range(1000):
            if self.scheduler.is_settled:
                return
            self.tell(events.Settled())
        raise AssertionError("it does not come to rest")

    def deliver_to(
        self,
        world: World,
        group: object = None,
        *,
        is_declared: bool = False,
        spec: JobSpec | None = None,
    ) -> Place:
        memory = memoryview(bytearray(self.layout.arena_bytes))
        number = 100 + len(self.places)
        place = Place(number, world, spec or world.spec, memory, group, is_declared=is_declared)
        self.outside.deliveries[number] = memory
        self.places.append(place)
        self.outside.lookups[number] = world.datasets
        self.tell(events.DeliveryOpened(number, self.layout, world.datasets, group, is_declared))
        return place

    def consume(
        self, place: Place, dp_rank: int, dp_size: int, steps: tuple[int, int] | None = None
    ) -> Consumer:
        """Add a consumer that begins at a random place."""
        chance = self.chance
        epoch, cursor = chance.choice([0, 0, 0, 1]), 0
        if place.group is None and chance.random() < 0.2:
            cursor = chance.randrange(place.world.sample_count)
        first, stride = chance.choice([(0, 1), (0, 1), (0, 1), (1, 2)])
        if steps is not None:
            epoch, (first, stride) = 0, steps
        ahead = [one for one in self.consumers if one.place is place and one.is_open]
        after = chance.choice(ahead) if ahead and chance.random() < 0.5 else None
        return self.begin(place, Stream(epoch, cursor, dp_rank, dp_size, first, stride), after)

    def begin(self, place: Place, at: Stream, after: Consumer | None = None) -> Consumer:
        """A consumer that begins there."""
        chance, spec = self.chance, place.spec
        order, _ = place.world.order(spec, at.epoch)
        most = chance.choice([1, 4, 16]) if not self.consumers else 8
        sizes = SlabSizes(most if place.group is None else 4, 16, 0)
        is_ahead, is_light = after is not None, self.makers.are_all
        is_aligned, count = place.group is not None, self.length()
        walk = Walk(
            spec, order, at, sizes, is_ahead=is_ahead, is_aligned=is_aligned, is_light=is_light
        )
        if count is not None and not (is_aligned or is_ahead or walk.is_planned):
            left = -(-(walk.step_count - at.first_step) // at.step_stride)
            walk = Walk(spec, order, at, sizes, is_light=is_light, count=min(count, left))
        is_worth = any(one.keeps_restart_indexes for one in place.world.datasets.datasets)
        walk.crops = chance.random() < (0.8 if is_worth else 0.2)
        patience = 10**6 if self.hoard else chance.choice([0, 0, 1, 3, 10**6])
        many = len(self.consumers)
        consumer = Consumer(self, many + 1, place, at, walk, patience, self.row_bytes, after)
        consumer.pause = chance.choice(PACES)
        return consumer

    def actions(self) -> list[tuple[float, Callable[[], None]]]:
        """What may happen next, and when it is due."""
        found: list[tuple[float, Callable[[], None]]] = self.makers.actions()
        if pending := self.outside.pending:
            due = min(due for due, _ in pending) if self.is_timed else 0.0
            found += [(due, self.end_one)] * min(3, len(pending))
        for consumer in self.consumers:
            first, at = consumer.after, consumer.ready_at
            if consumer.stopped:
                continue
            if first is not None and first.is_open and consumer.is_open:
                if first.is_done:
                    found.append((at, first.close))
            elif consumer.may_ask:
                found.append((at, lambda one=consumer: self._pause(one, one.ask)))
            if len(consumer.held) > consumer.patience:
                found.append((at, lambda one=consumer: self._pause(one, one.release)))
        return found

    def _pause(self, consumer: Consumer, act: Callable[[], None]) -> None:
        """Let a consumer act; then it is busy for a while."""
        act()
        pause = self.chance.uniform(*consumer.pause)
        consumer.ready_at = self.now + pause * (100 if self.chance.random() < 0.02 else 1)

    def end_one(self) -> None:
        """One of the things that were asked of the outside ends."""
        pending = self.outside.pending
        which = self.chance.randrange(len(pending))
        if self.is_timed:
            which = min(range(len(pending)), key=lambda i: pending[i][0])
        self.tell(pending.pop(which)[1]())

    def act(self, actions: list[tuple[float, Callable[[], None]]]) -> None:
        """Let one of them happen, with its consequences."""
        due, action = self.chance.choice(actions)
        if self.is_timed:
            due, action = min(actions, key=lambda each: each[0])
            self.now = max(self.now, due)
        action()
        if self.neighbours.chance:
            self.neighbours.ask_one()
        self.makers.act()
        if self.chance.random() < 0.7:
            self.settle()
        if self.chance.random() < 0.02:
            self.tick()
        if self.chance.random() < 0.03:
            self.drain()
        if self.chance.random() < self.restless:
            late = self.chance.choice(self.consumers).late
            acts = (self.stop_one, self.move_one, self.refuse_one, self.adopt_one, late)
            self.chance.choice(acts)()

    def go(self, acts_max: int = _ACTS_MAX) -> None:
        """Act until nothing is left to do; then every request must have been answered."""
        self.settle()
        while actions := self.actions():
            self.acts += 1
            if self.acts > acts_max:
                return
            self.act(actions)
            if not self.actions():
                self.settle()
        assert self.acts < _ACTS_MAX, "work is repeated for ever"
        stuck = [c for c in self.consumers if not c.is_done and not c.is_stopped]
        assert not stuck, f"{len(stuck)} streams wait for ever: {self.state()}"

    def tick(self) -> None:
        self.tell(events.Ticked(self.chance.random() * 4, self.chance.random()))

    def stop_one(self) -> None:
        """A consumer leaves, or its process ends."""
        one = self.chance.choice(self.consumers)
        self.chance.choice((one.close, one.leave))()

    def move_one(self) -> None:
        """A consumer returns to its position, or continues as another rank of another dp_size."""
        one = self.chance.choice(self.consumers)
        at, place = one.at, one.place
        if len(self.consumers) > 30 or not place.is_open:
            return
        one.leave()
        if one.next_step >= one.walk._end_step:
            return
        if at.step_stride > 1 or place.group is not None or self.chance.random() < 0.5:
            again = Stream(
                at.epoch, at.cursor, at.dp_rank, at.dp_size, one.next_step, at.step_stride
            )
            self.begin(place, again)
            return
        size = self.chance.randint(1, min(3, place.spec.global_batch))
        cursor = at.cursor + one.next_step * place.spec.global_batch
        place = self.deliver_to(place.world, spec=place.spec)
        self.begin(place, Stream(at.epoch, cursor, self.chance.randrange(size), size, 0, 1))

    def refuse_one(self) -> None:
        """Every request gets the answer that this node was replaced."""
        one = self.chance.choice(self.consumers)
        asked, error = one.asked, LeaseFenced("another member has its place")
        self.tell(events.StreamRefused(one.number, error))
        assert not one.is_open or not one.asked
        assert not asked or not one.is_open or one.error is error

    def adopt_one(self) -> None:
        """A consumer begins with the next epoch before it is through with the last one."""
        waiting = [one for one in self.consumers if one.after is not None and one.is_open]
        if waiting:
            one = self.chance.choice(waiting)
            one.after = None
            self.tell(events.StreamAdopted(one.number))
            stream = self.scheduler._streams.find(one.number)
            assert stream is not None
            assert not stream.is_ahead, "a stream that was adopted still waits for another"

    def forget_one(self) -> None:
        """All jobs over a dataset end, while work for them is under way, and one begins again."""
        world = self.chance.choice([*self.worlds.values()])
        places = [
            place for place in self.places if world.blocks in place.world.datasets and place.is_open
        ]
        for consumer in self.consumers:
            if consumer.place in places:
                self.chance.choice((consumer.leave, consumer.close))()
        for place in places:
            place.is_open = False
            self.tell(events.DeliveryClosed(place.delivery_id))
        self.tell(events.DatasetForgotten(world.blocks))
        for _ in range(self.chance.randint(0, 3)):
            if self.outside.pending:
                self.end_one()
        if len(self.places) < 20:
            self.consume(self.deliver_to(world, spec=world.job()), 0, 1)

    def drain(self) -> None:
        """While consumers do nothing, the scheduler comes to rest and reloads no blocks."""
        self.settle()
        ends = 0
        while self.outside.pending:
            self.end_one()
            self.settle()
            ends += 1
            most = 5000 if self.is_large else 500
            assert ends < most, "the same blocks are loaded again and again"

    def state(self) -> str:
        return "; ".join(
            f"{[(t.phase.name, len(t.missing), t.slot) for t in list(s.tasks)[:9]]} of {len(s.tasks)}"
            for s in self.scheduler._streams
        )

    def end(self) -> None:
        """Close everything, in any order with running work, and check that nothing is left."""
        for consumer in self.consumers:
            if self.chance.random() < 0.5:
                while consumer.held and consumer.place.is_open:
                    consumer.release()
            self.chance.choice((consumer.leave, consumer.close))()
        deliveries: list[Delivery] = []
        for place in self.places:
            if place.is_open:
                deliveries.append(self.scheduler._deliveries.by_id[place.delivery_id])
                self.tell(events.DeliveryClosed(place.delivery_id))
        for world in self.worlds.values():
            self.tell(events.DatasetForgotten(world.blocks))
        self.settle()
        while self.outside.pending:
            self.end_one()
            self.settle()
        self.traffic.check_end(len(self.outside.pending))
        self.neighbours.check_end()
        self.disk.check_end()
        left = [world.blocks.account for world in self.worlds.values()]
        told = self.traffic.told + sum(map(untold, left))
        done = [*self.outside.done, self.scheduler.found_bytes]
        assert told.tolist() == done, "account: told once"
        self.traffic.times.check_end(left)
        for delivery in deliveries:
            assert delivery.slots.free_count == delivery.slots.layout.slot_count
            assert delivery.slots.zone_is_free
            assert not delivery.lent
            assert not delivery.assembling_count
        self.invariants.check_end()
        self.makers.check_end()
