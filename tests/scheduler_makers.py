"""Nodes that make slabs, in the scheduler's tests: they may be slow, fail, vanish and come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from scheduler_world import slab_bytes

from dataplane.model.errors import NeighbourGone, StoreDenied
from dataplane.rpc import messages, tasks
from dataplane.rpc.lending import StepRange
from dataplane.scheduler import events
from dataplane.scheduler.elsewhere import COMING_MAX, SILENT_S
from dataplane.scheduler.events import GiveUpSlab
from dataplane.scheduler.records import KnownMaker, SlabPhase, SlabTask
from dataplane.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from scheduler_run import Run

_NAMES = ("a", "b", "c", "d", "e")
_PAUSE_S, _PAUSE_S_MAX = 0.25, 10.0


def is_elsewhere(scheduler: Scheduler, task: SlabTask) -> bool:
    """Whether another node makes it, or will."""
    return task.maker is not None and task.maker is not scheduler._elsewhere._own


def has_maker(scheduler: Scheduler, task: SlabTask) -> bool:
    """Whether one that could be asked for it now is known."""
    elsewhere, now = scheduler._elsewhere, scheduler._time.now
    known = elsewhere._of_delivery.get(task.delivery.delivery_id)
    makers = [] if known is None else [*known.by_name.values()]
    usable = [
        one
        for one in makers
        if now >= one.left_alone_until and not (one.failures and _asked(scheduler)[id(one)])
    ]
    return elsewhere.is_short and bool(usable)


def stage_elsewhere(scheduler: Scheduler, task: SlabTask) -> str | None:
    """How the stage begins that a stall names for a task of other nodes; None for any other."""
    if not is_elsewhere(scheduler, task):
        return None
    assert task.maker is not None
    if task.phase is SlabPhase.ASSEMBLING:
        return f"being made by node {task.maker.name}"
    return None if task.maker.name else "waiting for a node that makes slabs"


def _asked(scheduler: Scheduler) -> Counter[int]:
    found: Counter[int] = Counter()
    for task in scheduler._tasks._assembling.values():
        if is_elsewhere(scheduler, task):
            found[id(task.maker)] += len(task.plan.batches)
    return found


class Makers:
    """Those of one run, which make none, "some" or "all" of its slabs."""

    def __init__(self, run: Run, which: str) -> None:
        self._run, self.are_all, self.is_on = run, which == "all", bool(which)
        shares = (0, 0, 0.1, 0.7)
        self._gone = {name: run.chance.choice(shares) for name in _NAMES if self.is_on}
        self.broken = 0.0
        """The share of slabs that cannot be made, since their data is damaged."""
        self._names: dict[int, tuple[str, ...]] = {}
        self._orders: dict[int, events.MakeElsewhere] = {}
        self._asked_at: dict[int, float] = {}
        self._given_up: set[int] = set()
        self._until: dict[str, float] = {}
        self._streak: Counter[str] = Counter()
        self._ends: dict[int, str] = {}
        self._seen: dict[int, KnownMaker] = {}
        self.made = self.failed = 0

    # -- what happens ----------------------------------------------------------------------------

    def act(self) -> None:
        """Now and then, other nodes make slabs than before, or the node becomes short of workers."""
        run = self._run
        if not self.is_on:
            return
        for place in run.places:
            is_new = place.delivery_id not in self._names
            if place.is_open and run.chance.random() < (0.5 if is_new else 0.02):
                self._tell(place.delivery_id)
        if not self.are_all and run.chance.random() < 0.05:
            run.scheduler._elsewhere.is_short = run.chance.random() < 0.7

    def _tell(self, delivery_id: int, least: int = 0) -> None:
        chance = self._run.chance
        names = tuple(chance.sample(_NAMES, chance.choice([least, 1, 2, 5])))
        self._names[delivery_id] = names
        self._run.tell(events.MakersKnown(delivery_id, names))

    def actions(self) -> list[tuple[float, Callable[[], None]]]:
        """Time passes, if slabs wait for nodes that make them."""
        scheduler = self._run.scheduler
        waiting = (task for stream in scheduler._streams for task in stream.tasks)
        nobody = scheduler._elsewhere._nobody
        return [(self._run.now + 0.5, self._wake)] * any(one.maker is nobody for one in waiting)

    def _wake(self) -> None:
        run = self._run
        run.now += run.chance.choice([0.1, 1.0, 11.0])
        for place in run.places:
            if place.is_open and not self._names.get(place.delivery_id):
                self._tell(place.delivery_id, least=run.chance.choice([0, 1]))
        run.tick()
        run.settle()

    def asked(self, effect: events.MakeElsewhere) -> Callable[[], events.Event]:
        """A maker is asked: what it does at the end."""
        self._check_order(effect)
        run = self._run
        memory = run.outside.deliveries[effect.delivery_id]
        at, size = effect.slab.offset, effect.slab.length
        mark = bytes([effect.number % 251]) * size
        memory[at : at + size] = mark
        self._orders[effect.number] = effect
        self._asked_at[effect.number] = run.now
        task = run.scheduler._tasks._assembling[effect.number]
        stream_id = task.stream.stream_id

        def ended() -> events.Event:
            assert memory[at : at + size] == mark, "scheduler 6: memory was reused"
            assert effect.delivery_id not in run.outside.dropped, "scheduler 6: it was dropped"
            return self._ended(effect, memory[at : at + size], stream_id)

        return ended

    def give_up(self, effect: GiveUpSlab) -> None:
        """Nobody waits for this slab any more. All of it may be here by then."""
        run, order = self._run, self._orders[effect.number]
        task = run.scheduler._tasks._assembling[effect.number]
        asked_for_s = run.now - self._asked_at[effect.number]
        assert asked_for_s >= SILENT_S, "elsewhere 5: it is not silent"
        others = {*self._names.get(order.delivery_id, ())} - {order.maker}
        can_make = any(run.now >= self._until.get(name, 0.0) for name in others)
        has_own = run.scheduler._elsewhere.has_workers and not task.is_light
        assert has_own or can_make, "elsewhere 5: nobody else can make it"
        self._given_up.add(effect.number)

    def _ended(
        self, effect: events.MakeElsewhere, into: memoryview, stream_id: int
    ) -> events.SlabAssembled:
        chance, number = self._run.chance, effect.number
        gone = max(self._gone[effect.maker], 0.9 * (number in self._given_up))
        if chance.random() < gone:
            into[:] = bytes(len(into))
            self.failed += 1
            return events.SlabAssembled(number, NeighbourGone(f"{effect.maker} is gone"), 0.0)
        if chance.random() < self.broken:
            return events.SlabAssembled(number, StoreDenied("damaged"), 0.0)
        result = self._write(effect, into, stream_id)
        self.made += 1
        return events.SlabAssembled(number, result, 0.0, is_kept=False)

    def _write(
        self, effect: events.MakeElsewhere, into: memoryview, stream_id: int
    ) -> tasks.Assembled:
        """The batches of these steps, as many as fit, and now and then fewer."""
        run, consumer = self._run, self._run.consumers[stream_id - 1]
        assert effect.stream == consumer.at
        most = run.chance.choice([effect.steps.count, effect.steps.count, 1])
        used = count = needed = 0
        for which in range(effect.steps.count):
            step = effect.steps.first + which * consumer.at.step_stride
            rows, valid, samples = consumer._steps[step]
            size = slab_bytes(messages.Batch(step, rows, valid), run.row_bytes)
            needed = needed or size
            if used + size > len(into) or count == most:
                break
            values = np.frombuffer(into[used : used + 16 * rows + 16], np.int64)
            values[0], values[2:] = step, [x for sample in samples for x in sample]
            used, count = used + size, count + 1
        disk = run.outside._disk()
        return tasks.Assembled(count, 0 if count else needed, used, disk=disk)

    # -- checks ----------------------------------------------------------------------------------

    def _check_order(self, effect: events.MakeElsewhere) -> None:
        run, names = self._run, self._names.get(effect.delivery_id, ())
        elsewhere = run.scheduler._elsewhere
        task = run.scheduler._tasks._assembling[effect.number]
        assert elsewhere.is_short, "elsewhere 3"
        assert self.are_all or task.delivery.group is None, "elsewhere 3"
        assert effect.maker in names, "a node is asked that makes no slabs of it"
        pause_end = self._until.get(effect.maker, 0.0)
        assert run.now >= pause_end, "elsewhere 2: asked before its pause ends"
        others = [one for one in self._orders.values() if one.maker == effect.maker]
        assert not (self._streak[effect.maker] and others), "elsewhere 2: not one slab at a time"
        assert effect.slot_bytes == run.layout.slot_bytes
        batches = task.plan.batches
        assert effect.steps == StepRange(batches[0].step, len(batches))
        self._check_coming(effect, task)

    def _check_coming(self, effect: events.MakeElsewhere, task: SlabTask) -> None:
        """Later tasks of the same stream and maker. It may have been asked for some of them since,
        or others, since it is asked for one at a time after a failure; some may be halved since.
        """
        in_stream = [*task.stream.tasks]
        later = {one.plan.batches[0].step: one for one in in_stream[in_stream.index(task) + 1 :]}
        assert len(effect.coming) <= COMING_MAX
        steps = [each.first for each in effect.coming]
        assert steps == sorted(set(steps)), "what comes is not in order"
        for each in effect.coming:
            maker = later[each.first].maker
            assert maker is not None, "what comes is made already"
            assert maker.name == effect.maker or self._streak[effect.maker], "another's task comes"

    def after(self, event: events.Event) -> None:
        """Check the tasks and makers after each event.

        Raises:  AssertionError: names the invariant.
        """
        if not self.is_on:
            return
        scheduler, elsewhere = self._run.scheduler, self._run.scheduler._elsewhere
        if isinstance(event, events.SlabAssembled):
            self._learn(event)
        if isinstance(event, events.DeliveryClosed):
            self._names.pop(event.delivery_id, None)
        for name in {*_NAMES} - {*elsewhere._makers}:
            self._streak[name] = 0  # it was forgotten
        batches, told = Counter[int](), Counter[int]()
        for stream in scheduler._streams:
            for task in stream.tasks:
                self._check_task(task)
                batches[id(task.maker)] += len(task.plan.batches)
                told[id(task.maker)] += len(task.plan.batches) * task.is_told
            if isinstance(event, events.Settled) and scheduler.is_settled:
                self._check_nobody([*stream.tasks])
        for task in scheduler._tasks._assembling.values():
            if task.phase is SlabPhase.GONE:
                batches[id(task.maker)] += len(task.plan.batches)
                told[id(task.maker)] += len(task.plan.batches) * task.is_told
        every = (elsewhere._own, elsewhere._nobody, *elsewhere._makers.values())
        self._seen |= {id(one): one for one in every}
        asked = _asked(scheduler)
        for key, maker in self._seen.items():
            assert maker.batches == batches[key], "elsewhere 1: what a maker has to make"
            assert maker.told == told[key], "elsewhere 1: what a maker was told of"
            assert maker.asked == asked[key], "elsewhere 1: what a maker was asked for"

    def _check_task(self, task: SlabTask) -> None:
        scheduler = self._run.scheduler
        is_to_be_made = task.phase in {SlabPhase.WAITING, SlabPhase.ASSEMBLING}
        assert (task.maker is not None) == is_to_be_made, "elsewhere 1: one maker"
        if not is_elsewhere(scheduler, task):
            assert not self.are_all or not is_to_be_made, "elsewhere 3"
            return
        assert self.are_all or task.maker is not scheduler._elsewhere._nobody, "elsewhere 2"
        assert not len(task.pinned), "elsewhere 1: it has blocks"
        assert not task.excerpts, "elsewhere 1: it has excerpts"
        assert not task.missing, "elsewhere 1: it waits for blocks"
        for some in scheduler._tasks._waiting._waiting.values():
            assert task not in some, "elsewhere 1: it waits for blocks"

    def _check_nobody(self, of_stream: list[SlabTask]) -> None:
        """Nobody waits for a maker while one can be asked."""
        waiting = (one for one in of_stream if one.phase is SlabPhase.WAITING and not one.oversize)
        first = next(waiting, None)
        if first is None or first.maker is not self._run.scheduler._elsewhere._nobody:
            return
        busy = {one.maker for one in self._orders.values()}
        for name in self._names.get(first.delivery.delivery_id, ()):
            is_tried = self._streak[name] and name in busy
            assert is_tried or self._run.now < self._until.get(name, 0.0), "it waits for nobody"

    def _learn(self, event: events.SlabAssembled) -> None:
        """Which makers have failed, and for how long they are left alone."""
        order = self._orders.pop(event.number, None)
        if order is None:
            return
        name, result = order.maker, event.result
        if isinstance(result, NeighbourGone):
            self._pause(name)
        elif isinstance(result, tasks.Assembled) and result.batch_count:
            self._streak[name] = 0

    def _pause(self, name: str) -> None:
        now = self._run.now
        if now >= self._until.get(name, 0.0):
            self._streak[name] += 1
            pause_s = min(_PAUSE_S * 2 ** (self._streak[name] - 1), _PAUSE_S_MAX)
            self._until[name] = now + pause_s

    def check_end(self) -> None:
        """Nothing is left to make when all is closed.

        Raises:  AssertionError: something is.
        """
        assert not self._orders
        elsewhere = self._run.scheduler._elsewhere
        assert not elsewhere._of_delivery
        for maker in (elsewhere._own, elsewhere._nobody, *self._seen.values()):
            assert not maker.batches
            assert not maker.told
            assert not maker.asked
