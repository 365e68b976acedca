"""Choose which maker makes which slab task. Pure.

The node's own workers count as one maker, if there are any. A task goes to the maker that should
finish it first, judged by the speed of each maker so far and by its remaining work.

Invariants:
1. A task has one maker at a time. If the maker is another node, the task needs no block.
2. A maker that fails is left alone, longer each time; then it gets one slab to make, and no other
   until it has sent that one. The tasks of a maker that fails go to other makers, so no task is
   lost.
3. A node without workers has every slab made elsewhere. Other nodes do this only while they are
   short of workers, and only for slabs that are not shared with other consumers.
4. However many makers there are, few are considered for one dp_rank, and different ones for each.
5. A slab that is late is given up, and made by another maker; never if no other can make it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence

from msgspec import Struct

from dataplane.model.errors import NeighbourGone
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.rpc.lending import StepRange
from dataplane.scheduler.autoscaler import Autoscaler, Utilization
from dataplane.scheduler.events import GiveUpSlab, MakeElsewhere, MakersKnown, SlabAssembled
from dataplane.scheduler.records import KnownMaker, Moment, SlabPhase, SlabTask

HUNGRY_LOOKS = 4
"""After this many looks in a row in which a trainer waits and no worker can be added, a node is
short of workers."""
CALM_LOOKS = 60
"""After this many looks in a row in which its own workers could have made every slab, a node is no
longer short of workers."""
COMING_MAX = 16
"""The most upcoming slabs that a maker is told in advance."""
AT_ONCE_MAX = 8
"""The most makers that are considered for a task."""
_LOOKED_AT_MAX = 64
"""The most makers that are examined to find these: some may be left alone now."""
_AT_WORK = 0.9
SILENT_S, LOST_S = 1.0, 3.0
"""The least time after which a maker is silent, and after which a slab of a maker that sends others
is lost."""
FIRST_S = 20.0
"""The time after which a maker is silent while it is unknown how long slabs take: the first slab
may wait for many blocks."""
_LATE_FACTOR = 4.0
"""A slab is late after this many times the usual time."""


class _Makers(Struct):
    """The makers of one delivery by name; makers that failed last come last."""

    by_name: dict[str, KnownMaker]
    is_sorted: bool = False

    def sort(self, dp_rank: int) -> None:
        """Sort the makers differently for each rank, so that not all nodes use the same ones."""

        def rank(one: KnownMaker) -> tuple[bool, int]:
            return one.failures > 0, zlib.crc32(f"{dp_rank} {one.name}".encode())

        self.by_name = {one.name: one for one in sorted(self.by_name.values(), key=rank)}
        self.is_sorted = True


class Elsewhere:
    """The makers of one node's slabs."""

    def __init__(self, workers: Autoscaler, time: Moment) -> None:
        self.has_workers = workers.most > 0
        self._time = time
        self._own = KnownMaker("")
        self._nobody = KnownMaker("")
        self._makers: dict[str, KnownMaker] = {}
        self._of_delivery: dict[int, _Makers] = {}
        self._asked: dict[int, SlabTask] = {}
        """Tasks that other nodes have been asked to make, by number."""
        self._hungry = self._calm = 0
        self._made_here = self._made_elsewhere = 0
        self.is_short = not self.has_workers
        """Whether slabs should come from elsewhere."""

    def known(self, event: MakersKnown) -> None:
        """Note the nodes that make slabs of a delivery."""
        self._of_delivery.pop(event.delivery_id, None)
        found = {name: self._makers.get(name) or KnownMaker(name) for name in event.makers}
        if found:
            self._of_delivery[event.delivery_id] = _Makers(found)
        self._makers |= found
        used = {name for makers in self._of_delivery.values() for name in makers.by_name}
        now = self._time.now
        self._makers = {
            name: one
            for name, one in self._makers.items()
            if name in used or one.batches or one.left_alone_until > now
        }

    def look(self, look: Utilization, workers: Autoscaler) -> None:
        """Determine whether the node is short of workers; called with each tick."""
        here, elsewhere = self._made_here, self._made_elsewhere
        self._made_here = self._made_elsewhere = 0
        if not self.has_workers:
            return
        is_tried = bool(workers.trial)  # workers were just added
        can_add = is_tried or (workers.count < workers.most and not workers.pause)
        is_busy = look.busy >= _AT_WORK * workers.count and not can_add
        is_hungry = look.is_awaited and is_busy
        self._hungry = self._hungry + 1 if is_hungry else 0
        if not self.is_short:
            self.is_short, self._calm = self._hungry >= HUNGRY_LOOKS, 0
            return
        # While other nodes help, no trainer waits. Estimate how busy the own workers would be
        # without that help, to find out whether a trainer would wait then.
        alone = look.busy * (here + elsewhere) / here if here else look.busy
        most = workers.most if can_add else workers.count
        self._calm = 0 if is_hungry or alone >= _AT_WORK * most else self._calm + 1
        self.is_short = self._calm < CALM_LOOKS

    def choose(self, task: SlabTask) -> None:
        """Find a maker for a task that has no maker, or whose maker has gone or failed."""
        if task.maker is not None and self._is_usable(task, task.maker):
            return
        self.leave(task)
        makers = self._usable(task)
        if self.has_workers and not task.is_light:
            makers.insert(0, self._own)
        maker, now = self._soonest(makers, task), self._time.now
        task.maker = maker
        maker.begin(len(task.plan.batches), now)
        if maker is self._nobody:
            task.stamps.wanted = task.stamps.wanted or now

    def leave(self, task: SlabTask) -> None:
        """Remove the task from its maker."""
        maker, count = task.maker, len(task.plan.batches)
        if maker is not None:
            maker.batches -= count
            maker.told -= count if task.is_told else 0
        task.maker, task.is_told = None, False

    def cut(self, task: SlabTask, after: SlabTask) -> None:
        """Assign the rest of a task, which became a task of its own, to the same maker."""
        after.maker, after.is_told = task.maker, task.is_told

    def is_elsewhere(self, task: SlabTask) -> bool:
        """Whether another node makes the task."""
        return task.maker is not None and task.maker is not self._own

    def may_begin(self, task: SlabTask) -> bool:
        """Whether the task's maker can get a request now; if it cannot, another maker is chosen
        first.
        """
        self.choose(task)
        return task.maker is not self._nobody

    def order(self, task: SlabTask, slab: Region) -> MakeElsewhere:
        """Return the request to the maker; the request counts from now on."""
        maker = task.maker
        assert maker is not None
        assert maker.name
        task.stamps.wanted = task.stamps.wanted or self._time.now
        maker.asked += len(task.plan.batches)
        self._asked[task.number] = task
        coming = _coming(task)
        for one in (task, *coming):
            if not one.is_told:
                one.is_told = True
                maker.tell(len(one.plan.batches), self._time.now)
        return MakeElsewhere(
            task.number,
            task.delivery.delivery_id,
            task.stream.walk.stream,
            _steps(task),
            tuple(map(_steps, coming)),
            slab,
            task.delivery.slots.layout.slot_bytes,
            maker.name,
        )

    def ended(self, task: SlabTask, event: SlabAssembled) -> bool:
        """Handle a maker's answer or failure; return whether the slab must be made again. The rest
        of a slab that was cut, or is too large for a slot, stays with its maker.
        """
        maker, count = task.maker, len(task.plan.batches)
        self._asked.pop(task.number, None)
        assert maker is not None
        now, result = self._time.now, event.result
        if maker.name:
            maker.asked -= count
        if isinstance(result, NeighbourGone):
            if not result.working:
                self._failed(task, maker, str(result))
        elif isinstance(result, tasks.Assembled) and result.batch_count:
            stamps = task.stamps
            # `is_slow`: the node's own workers waited for the slab's blocks rather than for a slot.
            is_slow = not maker.name and stamps.gathered_from >= stamps.slotted
            maker.ended(result.batch_count, now, now - (maker.since if is_slow else stamps.slotted))
        if isinstance(result, tasks.Assembled):
            self._made_here += 0 if maker.name else result.batch_count
            self._made_elsewhere += result.batch_count if maker.name else 0
        return isinstance(result, NeighbourGone)

    def given_up(self) -> Iterator[GiveUpSlab]:
        """Yield the tasks that are late, and which another maker can make."""
        for task in self._asked.values():
            assert task.maker is not None
            known = (self._own, *itertools.islice(self._of(task).values(), _LOOKED_AT_MAX))
            usual_s = min((one.seconds for one in known if one.seconds), default=0.0)
            if _is_late(task.maker, task, usual_s, self._time.now) and self._has_another(task):
                yield GiveUpSlab(task.number)

    def _has_another(self, task: SlabTask) -> bool:
        has_own = self.has_workers and not task.is_light
        return has_own or any(one is not task.maker for one in self._usable(task))

    def why_none(self, task: SlabTask) -> str:
        """Explain to people why a task waits for other nodes; "" if it does not."""
        if task.phase is SlabPhase.ASSEMBLING and self.is_elsewhere(task):
            assert task.maker is not None
            return f"being made by node {task.maker.name}"
        if task.maker is not self._nobody or task.phase is not SlabPhase.WAITING:
            return ""
        lately = itertools.islice(reversed(self._of(task).values()), _LOOKED_AT_MAX)
        said = next((f": {one.why}" for one in lately if one.why), "")
        return "waiting for a node that makes slabs" + said

    def _failed(self, task: SlabTask, maker: KnownMaker, why: str) -> None:
        maker.failed(self._time.now, why)
        makers = self._of(task)
        if makers.get(maker.name) is maker:
            makers[maker.name] = makers.pop(maker.name)

    def _of(self, task: SlabTask) -> dict[str, KnownMaker]:
        makers = self._of_delivery.get(task.delivery.delivery_id)
        if makers is None:
            return {}
        if not makers.is_sorted:
            makers.sort(task.stream.walk.stream.dp_rank)
        return makers.by_name

    def _may_leave(self, task: SlabTask) -> bool:
        """Whether other nodes may make the task."""
        return self.is_short and not (self.has_workers and task.delivery.group is not None)

    def _usable(self, task: SlabTask) -> list[KnownMaker]:
        if not self._may_leave(task):
            return []
        now = self._time.now
        looked_at = itertools.islice(self._of(task).values(), _LOOKED_AT_MAX)
        return list(
            itertools.islice((one for one in looked_at if one.may_be_asked(now)), AT_ONCE_MAX)
        )

    def _is_usable(self, task: SlabTask, maker: KnownMaker) -> bool:
        if maker is self._own:
            return True
        is_known = self._may_leave(task) and self._of(task).get(maker.name) is maker
        return is_known and maker.may_be_asked(self._time.now)

    def _soonest(self, makers: Sequence[KnownMaker], task: SlabTask) -> KnownMaker:
        """Return the maker that should make the task first. A new maker counts as being as fast as
        any.
        """
        count, now = len(task.plan.batches), self._time.now
        usual_s = min((one.seconds for one in makers if one.seconds), default=1.0)
        return min(
            makers,
            key=lambda one: (one.batches + count) * one.expected_s(usual_s, now),
            default=self._nobody,
        )


def _coming(task: SlabTask) -> list[SlabTask]:
    """Return the tasks of this stream that the maker will be asked for next."""
    later = itertools.dropwhile(lambda one: one is not task, task.stream.tasks)
    same = (
        one
        for one in itertools.islice(later, 1, None)
        if one.phase is SlabPhase.WAITING and one.maker is task.maker and not one.oversize
    )
    return list(itertools.islice(same, COMING_MAX))


def _steps(task: SlabTask) -> StepRange:
    return StepRange(task.plan.batches[0].step, len(task.plan.batches))


def _is_late(maker: KnownMaker, task: SlabTask, usual_s: float, now: float) -> bool:
    """Whether a maker has finished no slab for much longer than one takes, while it had the request
    for this one, or all slabs that were requested from it should be here long since. Other makers
    take `usual_s` for a batch, 0 if unknown.
    """
    asked_for_s, batch_s = now - task.stamps.slotted, maker.seconds or usual_s
    if not batch_s:
        return asked_for_s >= FIRST_S
    silent_s = min(now - maker.since, asked_for_s)
    slab_s = _LATE_FACTOR * batch_s * len(task.plan.batches)
    is_silent = silent_s >= max(SILENT_S, slab_s)
    return is_silent or asked_for_s >= max(LOST_S, _LATE_FACTOR * batch_s * maker.asked)
