"""What a consumer feeds to its walk: ranges of steps, mostly in rising order, some of them again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dataplane.model.records import Stream
from dataplane.plan.order import SampleOrder
from dataplane.rpc.lending import StepRange
from dataplane.rpc.messages import Batch
from dataplane.scheduler.walk import SlabSizes, Walk

if TYPE_CHECKING:
    from scheduler_consumers import Place


class Feeder:
    """Use: `feed()` some ranges, then `next_step` says where the next slab begins, and `came` what
    it had.
    """

    def __init__(self, walk: Walk, chance: random.Random) -> None:
        self._walk, self._chance = walk, chance
        self._stride = walk.stream.step_stride
        self._left = self._drawn()
        self.count = 0
        """Ranges that were fed and have not come."""

    def _drawn(self) -> list[StepRange]:
        chance, at, found = self._chance, self._walk.stream.first_step, list[StepRange]()
        while at < self._walk.step_count:
            steps = -(-(self._walk.step_count - at) // self._stride)
            count = min(chance.randint(1, 5), steps)
            found.append(StepRange(at, count))
            at += count * self._stride * chance.choice([1, 1, 1, 2])
        again = [each for each in found if chance.random() < 0.2]
        for each in again:
            found.insert(chance.randint(0, len(found)), each)
        return found

    @property
    def is_fed_up(self) -> bool:
        """Whether there is nothing left to feed."""
        return not self._left

    @property
    def is_through(self) -> bool:
        """Whether all slabs have come."""
        return not self._left and not self.count

    def feed(self, asked: int) -> None:
        """Feed some more, or take something back, so that more has been fed than asked for."""
        for _ in range(self._chance.choice([1, 1, 2, 4])):
            if self._left:
                self._walk.feed(self._left.pop(0))
                self.count += 1
        if self._walk.fed and self.count > asked + 1 and self._chance.random() < 0.1:
            at = self._chance.randrange(len(self._walk.fed))
            self._left.append(self._walk.fed.pop(at))
            self.count -= 1

    @property
    def next_step(self) -> int:
        """The first step of the next slab, once it is planned."""
        return self._walk.taken[0].first if self._walk.taken else 0

    def came(self, batches: Sequence[Batch]) -> None:
        """A slab has come: the range that was fed first, or as much of it as fitted."""
        steps = self._walk.taken.popleft()
        assert len(batches) <= steps.count, "a slab has more than it was fed"
        assert batches[0].step == steps.first
        if len(batches) < steps.count:
            first = steps.first + len(batches) * self._stride
            self._walk.taken.appendleft(StepRange(first, steps.count - len(batches)))
        else:
            self.count -= 1


def walk_of(
    may_feed: Callable[[], bool],
    place: Place,
    order: SampleOrder,
    at: Stream,
    sizes: SlabSizes,
    *,
    is_ahead: bool,
    is_light: bool,
) -> Walk:
    """The walk of a stream to this place; some of those that are not shared, and that this node
    makes, are fed.
    """
    is_aligned = place.group is not None
    is_fed = not is_aligned and not is_ahead and not is_light and may_feed()
    return Walk(
        place.spec, order, at, sizes, is_ahead=is_ahead, is_aligned=is_aligned, is_light=is_light,
        is_fed=is_fed,
    )  # fmt: skip
