"""Find the interval that contains each place. A table gives the approximate interval, and one or
two comparisons the exact one. This takes a fraction of the time of a binary search, whose branches
the processor cannot predict.

1. The cost is the same for a thousand intervals and for millions: the table has about one entry per
   interval, and entries outside the caches are prefetched.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataplane.plan.loops import find_places

Int64 = NDArray[np.int64]

# Few intervals get several entries each, which leaves almost nothing to compare.
_PARTS_A_INTERVAL = 8
_PARTS_NEAR = 1 << 15


class Finder:
    """Intervals that lie one after the other: the i-th is [starts[i], starts[i + 1]).

    Shapes:  starts: int64[n + 1], rising, from 0; n < 2**31.
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
