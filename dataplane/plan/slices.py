"""The batches of one data-parallel rank: the positions of an epoch that each of its steps reads.

1. Step s covers the positions [cursor + s*G, cursor + (s+1)*G), cut or wrapped at N; where some are
   skipped, the next G positions that are not. Of a ragged end, the last step goes on to N.
2. A rank owns the positions t with t % dp_size == dp_rank: every position has one owner, and the
   owner's batches joined by rising t are the global batch, whatever dp_size is.
3. The number of steps is the same on every rank (`EpochSteps` in dataplane/changes.py), and with
   a ragged end the last one may be joined by fewer rows than there are ranks.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.changes import NO_GAPS, EpochSteps, Gaps
from dataplane.errors import ConfigError
from dataplane.model import End
from dataplane.plan.order import SAMPLE_COUNT_MAX

Int64 = NDArray[np.int64]

GLOBAL_BATCH_MAX = 1 << 31


class Steps(Struct, frozen=True):
    """The positions of some steps of one rank, one step after the other.

    Shapes:  positions: int64[sum of rows].   rows, valid: int64[steps]; `valid` of the rows are
    not padding, and they come first.
    """

    positions: Int64
    rows: Int64
    valid: Int64


class Slice(Struct, frozen=True):
    """What one rank of `dp_size` consumes of an epoch of `sample_count` samples from `cursor` on.

    Raises:  ConfigError: invalid numbers; says what to do.
    """

    sample_count: int
    cursor: int
    global_batch: int
    end: End
    dp_rank: int = 0
    dp_size: int = 1
    gaps: Gaps = NO_GAPS
    weights_from: int = 0

    def __post_init__(self) -> None:
        _check_ranks(self.dp_rank, self.dp_size)
        _check_batch(self.global_batch, self.dp_size)
        if not 1 <= self.sample_count <= SAMPLE_COUNT_MAX:
            raise ConfigError(
                f"a dataset of {self.sample_count} samples has no batches: check its urls",
                field="sample_count",
            )
        if not 0 <= self.cursor <= self.sample_count:
            raise ConfigError(
                f"cursor {self.cursor} is outside of an epoch of {self.sample_count} samples: the"
                " state was saved with another dataset, or is damaged",
                field="cursor",
            )
        if self.end is End.DROP and self.global_batch > self.sample_count:
            raise ConfigError(
                f"a global batch of {self.global_batch} samples is larger than the dataset of"
                f" {self.sample_count}, and incomplete batches are dropped: no step is left."
                " Choose a smaller batch, or keep the last batch (drop_last=False)",
                field="global_batch",
            )

    @property
    def steps(self) -> EpochSteps:
        """Where the steps of all ranks begin and end."""
        return EpochSteps(
            self.sample_count, self.cursor, self.global_batch, self.end, self.dp_size, self.gaps,
            self.weights_from,
        )  # fmt: skip

    @property
    def step_count(self) -> int:
        """Steps from the cursor to the end of the epoch: the same on every rank."""
        return self.steps.count

    def positions(self, step: int) -> Int64:
        """The positions of one step of this rank, in batch order.

        Shapes:  result: int64[local batch], which may be empty.
        Raises:  ConfigError: there is no such step.
        """
        return self.positions_of_steps(step, 1).positions

    def positions_of_steps(self, first: int, count: int, stride: int = 1) -> Steps:
        """The steps first, first + stride, …, `count` of them.

        Raises:  ConfigError: there is no such step.
        """
        self.check_steps(first, count, stride)
        if not count:
            return Steps(*(np.empty(0, np.int64) for _ in range(3)))
        last = first + (count - 1) * stride
        steps, own = range(first, last + 1, stride), self.steps
        begin = np.array(steps, np.int64) * self.global_batch
        begin += self.cursor
        if self.gaps.ranges:
            begin = np.array([own.begin(step) for step in steps], np.int64)
        end = begin + self.global_batch
        if self.end is End.RAGGED and last == own.count - 1:
            end[-1] = self.sample_count
        if any(begin[0] < gap < end[-1] for gap, _ in self.gaps.ranges):
            return self._over_gaps(steps)
        bounded = np.minimum(end, self.sample_count)
        owned = begin + (self.dp_rank - begin) % self.dp_size
        valid = self._owned(owned, bounded)
        rows = self._owned(owned, end) if self.end is End.PAD else valid
        before = np.cumsum(rows) - rows
        positions = np.arange(rows.sum(), dtype=np.int64) * self.dp_size
        positions += np.repeat(owned - before * self.dp_size, rows)
        if self.end is End.PAD:
            positions %= self.sample_count
        return Steps(positions, rows, valid)

    def _over_gaps(self, steps: range) -> Steps:
        """Steps of which some go on behind a gap."""
        found, rows, valid = [], [], []
        own, live_count = self.steps, self.gaps.live(self.sample_count)
        before = self.gaps.live(self.cursor)
        for step in steps:
            first = before + step * self.global_batch
            stop = min(before + own.live_count(step + 1), live_count)
            pieces = [self._owned_range(*piece) for piece in self.gaps.pieces(first, stop)]
            valid.append(sum(map(len, pieces)))
            if self.end is End.PAD:
                padded = first + self.global_batch - stop
                pieces.append(self._owned_range(self.sample_count, self.sample_count + padded))
            rows.append(sum(map(len, pieces)))
            found += pieces
        positions = np.concatenate(found) % self.sample_count
        return Steps(positions, np.array(rows, np.int64), np.array(valid, np.int64))

    def _owned_range(self, begin: int, end: int) -> Int64:
        owned = begin + (self.dp_rank - begin) % self.dp_size
        return np.arange(owned, end, self.dp_size, dtype=np.int64)

    def check_steps(self, first: int, count: int, stride: int) -> None:
        """Raises:  ConfigError: there are no steps first, first + stride, …, `count` of them."""
        if count < 0 or stride < 1:
            raise ConfigError(
                f"{count} steps at a stride of {stride}: count from 0, stride from 1", field="step"
            )
        last = first + (count - 1) * stride
        if count and not 0 <= first <= last < self.step_count:
            raise ConfigError(
                f"there are no steps {first} to {last}: they run from 0 to {self.step_count - 1}"
                f" at cursor {self.cursor}",
                field="step",
            )

    def _owned(self, owned: Int64, end: Int64) -> Int64:
        """How many of owned, owned + dp_size, … are below `end`."""
        count: Int64 = np.maximum(-((owned - end) // self.dp_size), 0)
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
