"""The shuffle windows of one epoch: offsets of a lane permuted within windows of W samples.

Lanes reach their next windows at different steps, evenly distributed over W offsets, so that blocks
are fetched and permutations computed at an even rate. docs/order.md defines where windows begin.
1. A window's permutation depends only on (seed, epoch, lane, window) and on its length.
2. Caching only saves time: a dropped permutation is computed again with the same result.
3. Cached windows never take more than `WINDOW_CACHE_BYTES`, or one window if that is larger.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataplane.plan.balance import Turns
from dataplane.plan.loops import number_values
from dataplane.plan.permute import GAMMA, Domain, extended, key, permutations

Int64 = NDArray[np.int64]

# The cache has room for the open window of every lane, and for its predecessor or successor, since
# a long slab may extend into the next window of every lane. Entries take two bytes in windows of up
# to 65,536 samples, of which 1,024 lanes fit, and four bytes in longer windows.
WINDOW_CACHE_BYTES = 256 << 20
_HELD_PER_LANE = 2

# Several short permutations are computed together, up to this many entries, to stay in the CPU's
# cache.
_TOGETHER = 1 << 17

_WORD = (1 << 64) - 1
Balance = tuple[Turns, Callable[[Int64], Int64]]
_Number = TypeVar("_Number", Int64, int)


def distinct(values: Int64) -> tuple[Int64, NDArray[np.intp]]:
    """Return the distinct values in ascending order, and the index of each value among them.

    Shapes:  values: int64[n].   result: int64[m], intp[n].
    """
    if not len(values):
        return values, np.empty(0, np.intp)
    low = values.min()
    span = int(values.max() - low) + 1
    if span > 4 * len(values) + 4096:
        # Do the same as np.unique, which would first import numpy.ma and make the first seek slow.
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        is_new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
        numbers = np.empty(len(values), np.intp)
        numbers[order] = np.cumsum(is_new) - 1
        return ordered[is_new], numbers
    return number_values(values, int(low), span)


class Windows:
    """Maps the offsets of lanes to the places of samples. Not thread-safe.

    The first `sample_count % lanes` lanes have one sample more than the others. The first window of
    each lane is divided into `ramp` + 1 parts. With `balance`, samples are packs; its second part
    is a function that returns, for each place of all lanes together, the row in its block.
    """

    __slots__ = (
        "_balance", "_capacity", "_key", "_lanes", "_lengths", "_pool", "_ramp", "_shifted",
        "_slots", "_window",
    )  # fmt: skip

    def __init__(
        self,
        seed: int,
        epoch: int,
        lanes: int,
        window: int,
        ramp: int,
        sample_count: int,
        balance: Balance | None = None,
    ) -> None:
        self._balance = balance
        self._key = key(seed, Domain.WINDOW, epoch)
        self._lanes = lanes
        self._window = window
        self._ramp = ramp
        self._lengths = divmod(sample_count, lanes)
        # Window borders are shifted from lane to lane, unless each lane is a single window, which a
        # shift would divide.
        self._shifted = lanes > 1 and window * lanes < sample_count
        dtype = np.dtype(np.uint16 if window <= 1 << 16 else np.uint32)
        fitting = WINDOW_CACHE_BYTES // (window * dtype.itemsize)
        self._capacity = max(1, min(_HELD_PER_LANE * lanes, fitting))
        # The pool grows on demand, since a rank opens only the windows of its own lanes.
        self._pool = np.empty((1, window), dtype)
        self._slots: OrderedDict[int, int] = OrderedDict()

    def bounds(self, lane: Int64, offset: Int64) -> tuple[Int64, Int64]:
        """Return where the window of each lane offset begins and ends.

        Shapes:  lane, offset: int64[n].   result: int64[n], int64[n], the end excluded.
        """
        number = self._number(lane, offset)
        return self._start(lane, number), np.minimum(self._stop(lane, number), self._length(lane))

    def bounds_of(self, lane: int, offset: int) -> tuple[int, int]:
        """Return `bounds` of a single lane offset, in a thirtieth of the time."""
        window, ramp, shift = self._window, self._ramp, 0
        if self._shifted:
            share = (lane * GAMMA & _WORD) >> 32
            shift = share * window >> 32
        shared, longer = self._lengths
        number = (offset + shift) // window
        start, stop = number * window - shift, (number + 1) * window - shift
        whole = window - shift
        if ramp and not number:
            parts = [0, *(_divided(whole, halved) for halved in range(ramp, -1, -1))]
            at = bisect.bisect_right(parts, offset)
            start, stop = parts[at - 1], parts[at]
        return max(start, 0), min(stop, shared + (lane < longer))

    def permuted(self, lane: Int64, offset: Int64) -> Int64:
        """Return the place in its lane of the sample at each lane offset.

        Shapes:  lane, offset: int64[n].   result: int64[n].
        """
        return self._mapped(lane, offset, inverse=False)

    def permuted_alone(self, offset: Int64) -> Int64:
        """Return `permuted` for a single lane: most slabs are within one of its windows.

        Shapes:  offset, result: int64[n], n > 0.
        """
        ends = np.array([offset.min(), offset.max()])
        number = self._number(np.zeros_like(ends), ends)
        first, last = number.tolist()
        if first != last or self._window == 1:
            return self.permuted(np.zeros_like(offset), offset)
        start = int(self._start(np.zeros_like(number), number)[0])
        slot = int(self._held(np.array([first]))[0])
        within = offset - start if start else offset
        place: Int64 = self._pool[slot].take(within).astype(np.int64)
        place += start
        return place

    def restored(self, lane: Int64, place: Int64) -> Int64:
        """Return the lane offset of the sample at each place of its lane.

        Shapes:  lane, place: int64[n].   result: int64[n].
        """
        return self._mapped(lane, place, inverse=True)

    def _mapped(self, lane: Int64, offset: Int64, *, inverse: bool) -> Int64:
        if self._window == 1 or not len(lane):
            return offset
        window = self._number(lane, offset)
        start = self._start(lane, window)
        window *= self._lanes
        window += lane
        within = offset - start
        found, number = distinct(window)
        if len(found) <= self._capacity:
            return start + self._looked_up(found, number, within, inverse=inverse)
        # There are more windows than fit into the cache: process them in groups.
        order = np.argsort(number, kind="stable")
        groups = range(0, len(found), self._capacity)
        cuts = np.searchsorted(number[order], [*groups, len(found)])
        for first, begin, end in zip(groups, cuts[:-1], cuts[1:], strict=True):
            some = order[begin:end]
            windows = found[first : first + self._capacity]
            start[some] += self._looked_up(
                windows, number[some] - first, within[some], inverse=inverse
            )
        return start

    def _looked_up(
        self, found: Int64, number: NDArray[np.intp], within: Int64, *, inverse: bool
    ) -> Int64:
        slots = self._held(found)
        if not inverse:
            return self._pool[slots[number], within].astype(np.int64)
        lengths = self._length_of(found)
        result = np.empty_like(within)
        for each, (slot, length) in enumerate(zip(slots, lengths.tolist(), strict=True)):
            back = np.empty(length, np.int64)
            back[self._pool[slot, :length]] = np.arange(length)
            mine = number == each
            result[mine] = back[within[mine]]
        return result

    def _held(self, found: Int64) -> NDArray[np.intp]:
        """Return the cache slots of these windows, computing those that are missing. All of them
        must fit into the cache.
        """
        slots = np.empty(len(found), np.intp)
        missing: list[int] = []
        for each, name in enumerate(found.tolist()):
            slot = self._slots.get(name)
            if slot is None:
                missing.append(each)
            else:
                self._slots.move_to_end(name)
                slots[each] = slot
        if missing:
            for each in missing:
                # The windows of this call are the newest, and all of them fit: none is dropped.
                full = len(self._slots) == self._capacity
                slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
                self._slots[int(found[each])] = slot
                slots[each] = slot
            self._grow(len(self._slots))
            self._fill(found[missing], slots[missing])
        return slots

    def _grow(self, count: int) -> None:
        if count <= len(self._pool):
            return
        count = min(max(count, 2 * len(self._pool)), self._capacity)
        pool = np.empty((count, self._window), self._pool.dtype)
        pool[: len(self._pool)] = self._pool
        self._pool = pool

    def _length(self, lane: Int64) -> Int64:
        shared, longer = self._lengths
        return shared + (lane < longer)

    def _length_of(self, windows: Int64) -> Int64:
        """Return how many samples each window has: the first and the last of a lane may be shorter.

        Shapes:  windows: int64[m], window * lanes + lane.   result: int64[m].
        """
        number, lane = np.divmod(windows, self._lanes)
        stop = np.minimum(self._stop(lane, number), self._length(lane))
        return stop - self._start(lane, number)

    def _shift(self, lane: Int64) -> Int64:
        """Return how many samples the first window of each lane lacks: a share of W that differs
        between lanes, and is evenly distributed over any consecutive lanes.
        """
        if not self._shifted:
            return np.zeros_like(lane)
        share = (lane.astype(np.uint64) * np.uint64(GAMMA)) >> np.uint64(32)
        return (share.astype(np.int64) * self._window) >> 32

    def _number(self, lane: Int64, offset: Int64) -> Int64:
        """Return the index of each lane offset's window in its lane."""
        shift = self._shift(lane)
        number: Int64 = (offset + shift) // self._window
        if not self._ramp:
            return number
        number += self._ramp
        early = np.flatnonzero(number == self._ramp)
        whole, place = self._window - shift[early], offset[early]
        for halved in range(1, self._ramp + 1):
            number[early] -= place < _divided(whole, halved)
        return number

    def _start(self, lane: Int64, number: Int64) -> Int64:
        shift = self._shift(lane)
        start: Int64 = np.maximum((number - self._ramp) * self._window - shift, 0)
        if self._ramp:
            cut = np.flatnonzero((number > 0) & (number <= self._ramp))
            whole = self._window - shift[cut]
            start[cut] = _divided(whole, self._ramp + 1 - number[cut])
        return start

    def _stop(self, lane: Int64, number: Int64) -> Int64:
        """Return where a window ends if its lane is long enough."""
        shift = self._shift(lane)
        stop: Int64 = (number - self._ramp + 1) * self._window - shift
        if self._ramp:
            cut = np.flatnonzero(number < self._ramp)
            stop[cut] = _divided(self._window - shift[cut], self._ramp - number[cut])
        return stop

    def _fill(self, windows: Int64, slots: NDArray[np.intp]) -> None:
        lengths = self._length_of(windows)
        number, lane = np.divmod(windows, self._lanes)
        keys = extended(extended(self._key, lane), number)
        for length in sorted(set(lengths.tolist())):
            alike = np.flatnonzero(lengths == length)
            together = max(1, _TOGETHER // length)
            for begin in range(0, len(alike), together):
                some = alike[begin : begin + together]
                if self._balance is None:
                    self._pool[slots[some], :length] = permutations(keys[some], length)
                    continue
                turns, rows_at = self._balance
                begins = self._start(lane[some], number[some])
                offsets = begins[:, None] + np.arange(length)
                shared, longer = self._lengths
                firsts = lane[some] * shared + np.minimum(lane[some], longer)
                rows = rows_at((offsets + firsts[:, None]).reshape(-1)).reshape(offsets.shape)
                self._pool[slots[some], :length] = turns.permutations(keys[some], offsets, rows)


def _divided(whole: _Number, halved: _Number | int) -> _Number:
    """Divide by 2**halved, rounding up."""
    return -(-whole >> halved)
