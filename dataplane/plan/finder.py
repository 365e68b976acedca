"""Which of many intervals does each place lie in? A table answers that nearly, and a comparison or
two the rest: a fraction of the time of a search, which the processor cannot foresee.

1. It costs the same for a thousand intervals and for millions: the table has about a part for each
   of them, and what lies outside of the caches is asked for ahead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataplane.plan.loops import find_places, loops

Int64 = NDArray[np.int64]

# Of few intervals there are several parts each, which nearly leaves nothing to compare.
_PARTS_A_INTERVAL = 8
_PARTS_NEAR = 1 << 15


class Finder:
    """Intervals that lie one after the other: the i-th is [starts[i], starts[i + 1]).

    Shapes:  starts: int64[n + 1], rising, from 0.
    """

    __slots__ = ("_first", "_library", "_shift", "_starts")

    def __init__(self, starts: Int64) -> None:
        self._starts = starts
        count, end = len(starts) - 1, int(starts[-1])
        parts = max(min(_PARTS_A_INTERVAL * count, _PARTS_NEAR), count)
        self._shift = (end // parts).bit_length()
        edges = np.arange((end >> self._shift) + 2, dtype=np.int64) << self._shift
        np.minimum(edges, end - 1, out=edges)
        first = np.searchsorted(starts, edges, side="right")
        first -= 1
        self._first = first.astype(np.int32)
        self._library = loops().library if count <= np.iinfo(np.int32).max else None

    def find(self, places: Int64) -> tuple[Int64, Int64]:
        """The interval of each place, and the place within it.

        Shapes:  places: int64[m], each in an interval.   result: int64[m], int64[m].
        """
        return find_places(places, self._first, self._shift, self._starts, self._library)
