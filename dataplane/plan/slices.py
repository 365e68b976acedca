"""The batches of one data-parallel rank: the positions of an epoch that each of its steps reads.

1. Step s covers the positions [cursor + s*G, cursor + (s+1)*G), cut or wrapped at N. If some of
   these are skipped, step s covers the next G positions that are not. The last step of a ragged end
   extends to N.
2. A rank owns the positions t with t % dp_size == dp_rank. So every position has one owner, and the
   owners' batches, merged by ascending t, are the global batch for any dp_size.
3. The number of steps is the same on every rank (`EpochSteps` in model/changes.py). With a ragged
   end, a rest of fewer rows than there are ranks may be added to the last step.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.model.changes import EpochSteps
from dataplane.model.errors import ConfigError
from dataplane.model.records import End
from dataplane.plan.order import SAMPLE_COUNT_MAX

Int64 = NDArray[np.int64]

GLOBAL_BATCH_MAX = 1 << 31


class Steps(Struct, frozen=True):
    """The positions of several steps of one rank, step after step.

    Shapes:  positions: int64[sum of rows].   rows, valid: int64[steps]; only the first `valid` rows
    of a step are not padding.
    """

    positions: Int64
    rows: Int64
    valid: Int64


class Slice(Struct, frozen=True):
    """One rank's part of the steps that all ranks make.

    Raises:  ConfigError: invalid numbers; says what to do.
    """

    steps: EpochSteps
    dp_rank: int = 0

    def __post_init__(self) -> None:
        own = self.steps
        _check_ranks(self.dp_rank, own.dp_size)
        _check_batch(own.global_batch, own.dp_size)
        if not 1 <= own.sample_count <= SAMPLE_COUNT_MAX:
            raise ConfigError(
                f"a dataset of {own.sample_count} samples has no batches: check its urls",
                field="sample_count",
            )
        if not 0 <= own.cursor <= own.sample_count:
            raise ConfigError(
                f"cursor {own.cursor} is outside of an epoch of {own.sample_count} samples: the"
                " state was saved with another dataset, or is damaged",
                field="cursor",
            )
        if own.end is End.DROP and own.global_batch > own.sample_count:
            raise ConfigError(
                f"a global batch of {own.global_batch} samples is larger than the dataset of"
                f" {own.sample_count}, and incomplete batches are dropped: no step is left."
                " Choose a smaller batch, or keep the last batch (drop_last=False)",
                field="global_batch",
            )

    @property
    def step_count(self) -> int:
        """Steps from the cursor to the end of the epoch: the same on every rank."""
        return self.steps.count

    def positions(self, step: int) -> Int64:
        """Return the positions of one step of this rank, in batch order.

        Shapes:  result: int64[local batch], which may be empty.
        Raises:  ConfigError: there is no such step.
        """
        return self.positions_of_steps(step, 1).positions

    def positions_of_steps(self, first: int, count: int, stride: int = 1) -> Steps:
        """Return the positions of `count` steps: first, first + stride, …

        Raises:  ConfigError: there is no such step.
        """
        self.check_steps(first, count, stride)
        if not count:
            return Steps(*(np.empty(0, np.int64) for _ in range(3)))
        last = first + (count - 1) * stride
        steps, own = range(first, last + 1, stride), self.steps
        begin = np.array(steps, np.int64) * own.global_batch
        begin += own.cursor
        if own.gaps.ranges:
            begin = np.array([own.begin(step) for step in steps], np.int64)
        end = begin + own.global_batch
        if own.end is End.RAGGED and last == own.count - 1:
            end[-1] = own.sample_count
        if any(begin[0] < gap < end[-1] for gap, _ in own.gaps.ranges):
            return self._over_gaps(steps)
        bounded = np.minimum(end, own.sample_count)
        owned = begin + (self.dp_rank - begin) % own.dp_size
        valid = self._owned(owned, bounded)
        rows = self._owned(owned, end) if own.end is End.PAD else valid
        before = np.cumsum(rows) - rows
        positions = np.arange(rows.sum(), dtype=np.int64) * own.dp_size
        positions += np.repeat(owned - before * own.dp_size, rows)
        if own.end is End.PAD:
            positions %= own.sample_count
        return Steps(positions, rows, valid)

    def _over_gaps(self, steps: range) -> Steps:
        """Return the positions of these steps, some of which extend over skipped positions."""
        found, rows, valid = [], [], []
        own = self.steps
        count, gaps = own.sample_count, own.gaps
        live_count, before = gaps.live(count), gaps.live(own.cursor)
        for step in steps:
            first = before + step * own.global_batch
            stop = min(before + own.live_count(step + 1), live_count)
            pieces = [self._owned_range(*piece) for piece in gaps.pieces(first, stop)]
            valid.append(sum(map(len, pieces)))
            if own.end is End.PAD:
                padded = first + own.global_batch - stop
                pieces.append(self._owned_range(count, count + padded))
            rows.append(sum(map(len, pieces)))
            found += pieces
        positions = np.concatenate(found) % count
        return Steps(positions, np.array(rows, np.int64), np.array(valid, np.int64))

    def _owned_range(self, begin: int, end: int) -> Int64:
        ranks = self.steps.dp_size
        owned = begin + (self.dp_rank - begin) % ranks
        return np.arange(owned, end, ranks, dtype=np.int64)

    def check_steps(self, first: int, count: int, stride: int) -> None:
        """Raises:  ConfigError: there are no steps first, first + stride, …, `count` of them."""
        if count < 0 or stride < 1:
            raise ConfigError(
                f"{count} steps with a stride of {stride}: choose 0 steps or more, and a stride"
                " of 1 or more",
                field="step",
            )
        last, step_count = first + (count - 1) * stride, self.step_count
        if count and not 0 <= first <= last < step_count:
            raise ConfigError(
                f"there are no steps {first} to {last}: they run from 0 to {step_count - 1}"
                f" at cursor {self.steps.cursor}",
                field="step",
            )

    def _owned(self, owned: Int64, end: Int64) -> Int64:
        """Return how many of owned, owned + dp_size, … are below `end`."""
        count: Int64 = np.maximum(-((owned - end) // self.steps.dp_size), 0)
        return count


def _check_ranks(dp_rank: int, dp_size: int) -> None:
    if not 1 <= dp_size < 1 << 31:
        raise ConfigError(f"dp_size is {dp_size}: there must be 1 rank or more", field="dp_size")
    if not 0 <= dp_rank < dp_size:
        raise ConfigError(
            f"dp_rank {dp_rank} is not in 0..{dp_size - 1}: ranks count from 0 to dp_size - 1",
            field="dp_rank",
        )


def _check_batch(global_batch: int, dp_size: int) -> None:
    if not 1 <= global_batch < GLOBAL_BATCH_MAX:
        raise ConfigError(
            f"a global batch of {global_batch} samples: choose 1 or more (below 2**31)",
            field="global_batch",
        )
    if global_batch < dp_size:
        raise ConfigError(
            f"a global batch of {global_batch} samples is smaller than dp_size {dp_size}, so some"
            " ranks would never get a sample: choose at least one sample a rank",
            field="global_batch",
        )
