"""The order of one epoch: which sample is at each position. docs/order.md specifies it.

1. The order is a bijection of [0, N) onto the samples, for every seed, epoch, lanes, window and
   ramp.
2. It does not depend on ranks, nodes or workers.
3. Set-up takes O(K) in blocks; memory is O(K) plus cached windows, never O(N).
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.model.changes import TakenDocument
from dataplane.model.errors import ConfigError
from dataplane.plan.balance import Turns
from dataplane.plan.loops import find_places
from dataplane.plan.permute import Domain, Words, checked_word, extended, key, permutation
from dataplane.plan.windows import Int64, Windows

# -- finder ------------------------------------------------------------------------------------
#
# Find the interval that contains each place. A table gives the approximate interval, and one or
# two comparisons the exact one. This takes a fraction of the time of a binary search, whose
# branches the processor cannot predict.
#
# The cost is the same for a thousand intervals and for millions: the table has about one entry
# per interval, and entries outside the caches are prefetched.

# If there are few intervals, each gets several entries, which leaves almost nothing to compare.
_PARTS_A_INTERVAL = 8
_PARTS_NEAR = 1 << 15


class Finder:
    """Adjacent intervals: the i-th is [starts[i], starts[i + 1]).

    Shapes:  starts: int64[n + 1], ascending, from 0; n < 2**31.
    """

    __slots__ = ("_first", "_shift", "_starts")

    def __init__(self, starts: Int64) -> None:
        self._starts = starts
        count, end = len(starts) - 1, int(starts[-1])
        assert count <= np.iinfo(np.int32).max
        parts = max(min(_PARTS_A_INTERVAL * count, _PARTS_NEAR), count)
        self._shift = (end // parts).bit_length()
        edges = np.arange((end >> self._shift) + 2, dtype=np.int64) << self._shift
        np.minimum(edges, end - 1, out=edges)
        first = np.searchsorted(starts, edges, side="right")
        first -= 1
        self._first = first.astype(np.int32)

    def find(self, places: Int64) -> tuple[Int64, Int64]:
        """Return the interval of each place, and the place within it.

        Shapes:  places: int64[m], each in an interval.   result: int64[m], int64[m].
        """
        return find_places(places, self._first, self._shift, self._starts)


SAMPLE_COUNT_MAX = (1 << 62) - 1
_PIECE = 1 << 16

# A window's permutation is computed in memory as a whole. It takes four bytes a sample, and thirty
# while it is computed.
WINDOW_MAX = 1 << 28
RAMP_MAX = 28


class PassRead(Struct, frozen=True):
    """The part of one pass over a dataset that was read: the positions from `begin` to `end`, and
    some later positions, `others`, in ascending order.
    """

    order: Order
    begin: int
    end: int
    others: Int64


class SampleOrder(Protocol):
    """The sample at each position of one epoch: all that readers need of an order. Filters,
    mixtures and packs implement it, too.

    1. The same positions always give the same samples, for every caller and however the positions
       are grouped.
    2. No sample of a block is outside the block's span.
    """

    @property
    def sample_count(self) -> int:
        """The number of positions."""

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Return the sample at each position: its block, and its row in that block.

        Shapes:  positions: int64[n], any order.   result: int64[n], int64[n].
        Raises:  ConfigError: there is no such position.
        """

    def block_span(self, blocks: Int64) -> tuple[Int64, Int64]:
        """Return the first and the last position at which any sample of each block may be.

        Shapes:  blocks: int64[n].   result: int64[n], int64[n], both inclusive.
        Raises:  ConfigError: there is no such block.
        """


class TracedOrder(SampleOrder, Protocol):
    """An order that also finds the positions of a row."""

    def positions_of(self, block: int, row: int) -> Int64:
        """Return all positions of a row of a block, in ascending order.

        Shapes:  result: int64[n], which may be empty.
        Raises:  ConfigError: no such block, or no such row in it.
        """

    def pack_keys(self, positions: Int64, blocks: Int64) -> Words:
        """Return the key from which the packs of the block at each position are drawn, if samples
        are packs.

        Shapes:  positions, blocks: int64[n].   result: uint64[n].
        """

    def keys_of_packs(self, block: int) -> list[int]:
        """Return the keys from which the packs of a block are drawn in this epoch: one for each
        pass.
        """

    def read_before(self, cursor: int) -> list[list[PassRead]]:
        """Return, for each source, the parts of its passes that the positions before `cursor` have
        read.
        """


class Order:
    """The order of one epoch of one dataset. Not thread-safe, since it caches windows.

    `ramp` is how often the first window of a lane is halved in epoch 0, so that its first batches
    need few blocks. If the order is `balanced`, samples are packs, numbered by plan/balance.py, and
    packs of similar cost are at similar positions. `shuffle=False` is the dataset's own order,
    whatever the other arguments: one lane, and windows of one sample.
    """

    __slots__ = (
        "_blocks", "_finder", "_ranks", "_starts", "_windows", "epoch", "lanes", "ramp",
        "sample_count", "seed", "shuffle", "window",
    )  # fmt: skip

    def __init__(
        self,
        block_rows: NDArray[np.integer],
        seed: int,
        shuffle: bool,
        lanes: int,
        window: int,
        epoch: int,
        ramp: int = 0,
        *,
        balanced: bool = False,
    ) -> None:
        """Raises:  ConfigError: lanes or window < 1; ramp not in [0, RAMP_MAX]; seed or epoch not
        uint64; no samples.

        Shapes:  block_rows: integer[K], samples of each block of the manifest.
        """
        self.sample_count = counted(block_rows)
        block_rows = block_rows.astype(np.int64, copy=False)
        self.seed = checked_word(seed, "seed")
        self.epoch = checked_word(epoch, "epoch")
        self.shuffle = shuffle
        check_lanes_window(lanes, window, ramp)
        self.lanes = lanes if shuffle else 1
        # A window longer than the longest lane would only widen the table of permutations.
        self.window = min(window, -(-self.sample_count // lanes)) if shuffle else 1
        if self.window > WINDOW_MAX:
            raise ConfigError(
                f"a window of {self.window} samples would not fit into memory: choose"
                f" {WINDOW_MAX} at most, or more lanes",
                field="window",
            )
        self.ramp = ramp if shuffle and epoch == 0 else 0
        # The block at each place of the order, and the place of each block. Both are computed here,
        # in a thread, since the first caller of `locate` may be on the node's event loop.
        self._blocks: NDArray[np.integer] | None = None
        self._ranks: NDArray[np.integer] | None = None
        self._starts = np.zeros(len(block_rows) + 1, np.int64)
        if shuffle:
            order = permutation(key(seed, Domain.BLOCKS, epoch), len(block_rows))
            # Use the narrowest signed type that holds K, which takes half the memory for any real
            # dataset.
            self._blocks = order.astype(np.min_scalar_type(-len(order)))
            del order
            block_rows = block_rows[self._blocks]
            self._ranks = np.empty_like(self._blocks)
            self._ranks[self._blocks] = np.arange(len(self._blocks), dtype=self._blocks.dtype)
        np.cumsum(block_rows, out=self._starts[1:])
        self._finder = finder = Finder(self._starts)
        balance = None
        if balanced and shuffle:
            balance = Turns(seed, epoch, lanes), lambda places: finder.find(places)[1]
        self._windows = Windows(
            seed, epoch, self.lanes, self.window, self.ramp, self.sample_count, balance
        )

    @property
    def block_count(self) -> int:
        return len(self._starts) - 1

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Return the sample at each position: its block in the manifest, and its row in that block.

        Shapes:  positions: int64[n], any order.   result: int64[n], int64[n].
        Raises:  ConfigError: a position is not in [0, N).
        """
        positions = np.asarray(positions, np.int64)
        self._check(positions, self.sample_count, "position")
        if not len(positions):
            return positions.copy(), positions.copy()
        place = positions
        if self.shuffle and self.lanes == 1:
            place = self._windows.permuted_alone(positions)
        elif self.shuffle:
            offset, lane = np.divmod(positions, self.lanes)
            place = self._windows.permuted(lane, offset)
            place += self.lane_starts(lane)
        found, row = self._finder.find(place)
        return self._block_at(found), row

    def pack_keys(self, positions: Int64, blocks: Int64) -> Words:
        """Return the key from which the packs of the block at each position are drawn, if samples
        are packs: one key for each block.

        Shapes:  positions, blocks: int64[n].   result: uint64[n].
        """
        del positions  # all positions belong to one pass
        return extended(key(self.seed, Domain.PACK, self.epoch), blocks)

    def keys_of_packs(self, block: int) -> list[int]:
        """Return the only key of a block's packs."""
        at = np.array([block])
        return [int(pack_key) for pack_key in self.pack_keys(at, at)]

    def read_before(self, cursor: int) -> list[list[PassRead]]:
        """Implement `TracedOrder.read_before`."""
        return [[PassRead(self, 0, cursor, np.empty(0, np.int64))]]

    def positions_of(self, block: int, row: int) -> Int64:
        """Return the position of one sample, as an array."""
        return self.position_of(np.array([block]), np.array([row]))

    def position_of(self, blocks: Int64, rows: Int64) -> Int64:
        """Return the position of each sample: the inverse of `locate`.

        Shapes:  blocks, rows: int64[n].   result: int64[n].
        Raises:  ConfigError: no such block, or no such row in it.
        """
        blocks, rows = np.asarray(blocks, np.int64), np.asarray(rows, np.int64)
        self._check(blocks, self.block_count, "block")
        start, stop = self._placed(blocks)
        if len(rows) and (rows.min() < 0 or bool((rows >= stop - start).any())):
            raise ConfigError("a row is not in its block: rows count from 0 in each block")
        if not self.shuffle or not len(rows):
            return start + rows
        lane, place = self._lane_of(start + rows)
        return self._windows.restored(lane, place) * self.lanes + lane

    def block_span(self, blocks: Int64) -> tuple[Int64, Int64]:
        """Return the first and the last position at which any sample of each block may be.

        The span depends on lanes and windows only. The block is not needed before `first`, nor
        after `last` in this epoch; in between, a window with some of its samples is open.

        Shapes:  blocks: int64[n].   result: int64[n], int64[n], both inclusive.
        Raises:  ConfigError: no such block.
        """
        blocks = np.asarray(blocks, np.int64)
        # A fast path for one block: eviction requests the span of one block at a time, and a single
        # numpy minimum takes 3 us.
        if len(blocks) == 1 and 0 <= (one := blocks.item()) < self.block_count:
            alone = self._span_of(one)
            return np.array(alone[:1], np.int64), np.array(alone[1:], np.int64)
        self._check(blocks, self.block_count, "block")
        start, stop = self._placed(blocks)
        lanes = self.lanes
        head, head_place = self._lane_of(start)
        tail, tail_place = self._lane_of(stop - 1)
        first = self._windows.bounds(head, head_place)[0] * lanes + head
        last = (self._windows.bounds(tail, tail_place)[1] - 1) * lanes + tail
        # A block that runs over the end of lane `head` continues at offset 0 of the next lane,
        # which is position `head + 1`. The block contains the ends of all of its lanes but `tail`.
        # The latest of these ends is in the last of the longest of these lanes.
        runs_over = head < tail
        first = np.where(runs_over, np.minimum(first, head + 1), first)
        longer = self.sample_count % lanes
        latest = np.where(head < longer, np.minimum(tail, longer), tail) - 1
        end = (self._lane_length(latest) - 1) * lanes + latest
        return first, np.where(runs_over, np.maximum(last, end), last)

    def _span_of(self, block: int) -> tuple[int, int]:
        """Return `block_span` of a single block."""
        rank = block if self._ranks is None else self._ranks.item(block)
        lanes, (shared, longer) = self.lanes, divmod(self.sample_count, self.lanes)
        border = longer * (shared + 1)

        def lane_of(place: int) -> tuple[int, int]:
            if place < border:
                return divmod(place, shared + 1)
            lane, offset = divmod(place - border, max(shared, 1))
            return longer + lane, offset

        head, head_place = lane_of(self._starts.item(rank))
        tail, tail_place = lane_of(self._starts.item(rank + 1) - 1)
        first = self._windows.bounds_of(head, head_place)[0] * lanes + head
        last = (self._windows.bounds_of(tail, tail_place)[1] - 1) * lanes + tail
        if head == tail:
            return first, last
        latest = (min(tail, longer) if head < longer else tail) - 1
        end = (shared + (latest < longer) - 1) * lanes + latest
        return min(first, head + 1), max(last, end)

    def lane_starts(self, lanes: Int64) -> Int64:
        """Return where each lane begins in the sequence of all blocks; lane L is its end.

        Shapes:  lanes: int64[n].   result: int64[n].
        """
        shared, longer = divmod(self.sample_count, self.lanes)
        return lanes * shared + np.minimum(lanes, longer)

    def block_lanes(self, blocks: Int64) -> tuple[Int64, Int64]:
        """Return the first and the last lane that contain samples of each block.

        Shapes:  blocks: int64[n].   result: int64[n], int64[n].
        """
        start, stop = self._placed(blocks)
        return self._lane_of(start)[0], self._lane_of(stop - 1)[0]

    def _lane_length(self, lane: Int64) -> Int64:
        shared, longer = divmod(self.sample_count, self.lanes)
        return shared + (lane < longer).astype(np.int64)

    def _lane_of(self, place: Int64) -> tuple[Int64, Int64]:
        """Return the lane of each place in the sequence of blocks, and the place in the lane."""
        shared, longer = divmod(self.sample_count, self.lanes)
        border = longer * (shared + 1)
        lane = np.where(
            place < border, place // (shared + 1), longer + (place - border) // max(shared, 1)
        )
        return lane, place - self.lane_starts(lane)

    def _block_at(self, found: Int64) -> Int64:
        return found if self._blocks is None else self._blocks.take(found).astype(np.int64)

    def _placed(self, blocks: Int64) -> tuple[Int64, Int64]:
        """Return where each block begins and ends in the sequence of blocks in their order."""
        if self._ranks is None:
            return self._starts[blocks], self._starts[blocks + 1]
        found = self._ranks[blocks].astype(np.int64)
        return self._starts[found], self._starts[found + 1]

    @staticmethod
    def _check(values: Int64, count: int, name: str) -> None:
        if len(values) and (values.min() < 0 or values.max() >= count):
            wrong = int(values.min() if values.min() < 0 else values.max())
            raise ConfigError(
                f"there is no {name} {wrong}: they run from 0 to {count - 1}", field=name
            )


def upcoming(order: SampleOrder, start: int, stop: int, stride: int = 1) -> Int64:
    """Return the distinct blocks of positions start, start + stride, … < stop, by first use.

    A rank's positions are such a sequence: in steps of dp_size, from the first position t at the
    cursor or later with t % dp_size == dp_rank.

    Shapes:  result: int64[m].
    Raises:  ConfigError: there is no such position, or the stride is below 1.
    """
    if stride < 1:
        raise ConfigError(f"stride is {stride}: it must be 1 or more", field="stride")
    found = np.empty(0, np.int64)
    for begin in range(start, stop, _PIECE * stride):
        end = min(begin + _PIECE * stride, stop)
        blocks, _ = order.locate(np.arange(begin, end, stride, dtype=np.int64))
        found = np.concatenate([found, blocks])
        first = np.unique(found, return_index=True)[1]
        first.sort()
        found = found[first]
    return found


def counted(block_rows: NDArray[np.integer]) -> int:
    """Return the number of samples.

    Raises:  ConfigError: no samples, an empty block, or more than 2**62 - 1.
    """
    if block_rows.ndim != 1 or not np.issubdtype(block_rows.dtype, np.integer):
        raise ConfigError("block rows must be one array of whole numbers", field="block_rows")
    if not len(block_rows):
        raise ConfigError("the dataset has no samples: check its urls", field="block_rows")
    if block_rows.min() < 1:
        raise ConfigError(
            f"a block has {block_rows.min()} rows: leave empty blocks out of the manifest",
            field="block_rows",
        )
    if float(block_rows.sum(dtype=np.float64)) > SAMPLE_COUNT_MAX:
        raise ConfigError("more than 2**62 samples: the index is damaged", field="block_rows")
    return int(block_rows.sum(dtype=np.int64))


def check_lanes_window(lanes: int, window: int, ramp: int) -> None:
    """Raises:  ConfigError: a number is not valid for an order."""
    if not 1 <= lanes < 1 << 31:
        raise ConfigError(f"lanes is {lanes}: choose 1 or more (below 2**31)", field="lanes")
    if not 1 <= window <= SAMPLE_COUNT_MAX:
        raise ConfigError(
            f"window is {window}: choose 1 sample or more (below 2**62)", field="window"
        )
    if not 0 <= ramp <= RAMP_MAX:
        raise ConfigError(f"ramp is {ramp}: choose 0 to {RAMP_MAX}", field="ramp")


_NEVER = -1
# -- tombstoned order --------------------------------------------------------------------------
#
# The order of a job from which rows were removed.


class Substitution(Protocol):
    """The rows that replace removed ones (tombstones.py)."""

    lost: Int64
    instead: Int64

    def of(self, blocks: Int64, rows: Int64) -> tuple[Int64, Int64]:
        """Return the row that replaces each of these, and its block; rows that were not removed
        stay.
        """
        ...

    def documents(self, block: int) -> tuple[TakenDocument, ...]:
        """Return the documents that were removed from a block."""
        ...


class TombstonedOrder:
    """An order of samples from which rows were removed."""

    def __init__(self, order: TracedOrder, substitutes: Substitution) -> None:
        self._order, self._substitutes = order, substitutes

    @property
    def sample_count(self) -> int:
        """The number of positions: the same as without removals."""
        return self._order.sample_count

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Implement `SampleOrder.locate`."""
        return self._substitutes.of(*self._order.locate(positions))

    def block_span(self, blocks: Int64) -> tuple[Int64, Int64]:
        """Implement `SampleOrder.block_span`: a block also has the span of the blocks of removed
        shards whose rows it replaces, and those have none.
        """
        first, last = self._order.block_span(blocks)
        lost, (others, begin, end) = self._substitutes.lost, self._lost_spans
        if not len(lost):
            return first, last
        at = np.minimum(others.searchsorted(blocks), len(others) - 1)
        is_other = (others[at] == blocks) & (end[at] >= 0)
        least = np.where((first >= 0) & (first < begin[at]), first, begin[at])
        is_lost = np.isin(blocks, lost)
        first = np.where(is_lost, _NEVER, np.where(is_other, least, first))
        last = np.where(is_lost, _NEVER, np.where(is_other, np.maximum(last, end[at]), last))
        return first, last

    @functools.cached_property
    def _lost_spans(self) -> tuple[Int64, Int64, Int64]:
        """The blocks whose rows replace others, and the spans of those others together."""
        first, last = self._order.block_span(self._substitutes.lost)
        others, at = np.unique(self._substitutes.instead, return_inverse=True)
        begin, end = np.full(len(others), np.iinfo(np.int64).max), np.full(len(others), _NEVER)
        is_read = last >= 0
        np.minimum.at(begin, at[is_read], first[is_read])
        np.maximum.at(end, at[is_read], last[is_read])
        return others, begin, end

    def pack_keys(self, positions: Int64, blocks: Int64) -> Words:
        """Implement `TracedOrder.pack_keys`."""
        return self._order.pack_keys(positions, blocks)

    def taken_out(self, blocks: Int64) -> list[tuple[TakenDocument, ...]]:
        """Return the rows that were removed from each block; if samples are packs, these are
        documents.

        Shapes:  blocks: int64[n].
        """
        return [self._substitutes.documents(block) for block in blocks.tolist()]


class MidwayOrder:
    """An order of samples that changes within the epoch, since rows are removed. Each part is an
    order and the position from which it holds; positions ascend from 0.
    """

    def __init__(self, parts: Sequence[tuple[int, SampleOrder]]) -> None:
        self._begins = [begin for begin, _ in parts]
        self._orders = [order for _, order in parts]

    @property
    def sample_count(self) -> int:
        """The number of positions: the same in all parts."""
        return self._orders[0].sample_count

    def at(self, position: int) -> SampleOrder:
        """Return the order that holds for a step that begins here."""
        return self._orders[bisect_right(self._begins, position) - 1]

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Implement `SampleOrder.locate`."""
        of_part = np.searchsorted(self._begins, positions, side="right") - 1
        blocks, rows = np.empty_like(positions), np.empty_like(positions)
        for part in np.unique(of_part).tolist():
            own = of_part == part
            blocks[own], rows[own] = self._orders[part].locate(positions[own])
        return blocks, rows

    def block_span(self, blocks: Int64) -> tuple[Int64, Int64]:
        """Implement `SampleOrder.block_span`: the span over all parts."""
        firsts, lasts = zip(*(order.block_span(blocks) for order in self._orders), strict=True)
        last = np.max(lasts, axis=0)
        first = np.where(np.array(firsts) < 0, last, firsts).min(axis=0)
        return first, last
