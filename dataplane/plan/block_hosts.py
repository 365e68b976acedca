"""Count the hosts that may read each block of an order, for any number of hosts, block by block and
for any block sizes. A host whose ranks by chance take no sample of a block is counted, too.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.plan.cluster import Cluster
from dataplane.plan.order import Order
from dataplane.plan.windows import Int64

_PIECE = 1 << 18
_NONE = np.empty(0, np.int64)


class BlockHosts(Struct, frozen=True, eq=False):
    """The lanes that serve each of K blocks: `first`, and for blocks on borders of lanes, which are
    fewer than the lanes, this many `more`.

    Shapes:  first: integer[K].   on_border: int64[m], blocks, rising.   more: int64[m].
    """

    lanes: int
    first: NDArray[np.integer]
    on_border: Int64
    more: Int64

    @classmethod
    def of(cls, order: Order) -> Self:
        """Return the lanes of all blocks of the order."""
        # The narrowest type that holds them: less memory and time.
        count, lanes = order.block_count, np.min_scalar_type(-order.lanes)
        first, on_border, more = np.empty(count, lanes), [_NONE], [_NONE]
        for start in range(0, count, _PIECE):
            blocks = np.arange(start, min(start + _PIECE, count))
            head, tail = order.block_lanes(blocks)
            first[start : start + _PIECE] = head
            on_border.append(blocks[tail != head])
            more.append((tail - head)[tail != head])
        return cls(order.lanes, first, np.concatenate(on_border), np.concatenate(more))

    def counts(self, cluster: Cluster, block_rows: NDArray[np.integer]) -> Int64:
        """Return how many hosts may read each block: at most the number of its samples.

        Shapes:  block_rows: integer[K].   result: int64[K].
        """
        meeting, known = cluster.meeting(self.lanes), dict[tuple[int, int], int]()
        alone = [cluster.hosts_of(lane, 0, self.lanes) for lane in range(meeting)]
        found: Int64 = np.array(alone, np.int64)[self._remainders(meeting)]
        lanes = (self._border_lanes() % meeting).tolist()
        names = list(zip(lanes, np.minimum(self.more, meeting - 1).tolist(), strict=True))
        for lane, more in names:
            if (lane, more) not in known:
                known[lane, more] = cluster.hosts_of(lane, more, self.lanes)
        found[self.on_border] = [known[name] for name in names]
        np.minimum(found, block_rows, out=found)
        return found

    def read_bytes(
        self, cluster: Cluster, block_rows: NDArray[np.integer], block_bytes: NDArray[np.integer]
    ) -> float:
        """Return the bytes that all hosts together read, if each reads these parts of the blocks.

        Shapes:  block_rows, block_bytes: integer[K].
        """
        by_count = np.bincount(self.counts(cluster, block_rows), block_bytes)
        return float(by_count @ np.arange(len(by_count)))

    def are_read(self, cluster: Cluster, host: int) -> NDArray[np.bool_]:
        """Return which blocks a host may read.

        Shapes:  result: bool[K].
        """
        alone = np.arange(cluster.meeting(self.lanes))
        of_lanes = cluster.reads(host, alone, alone, self.lanes)
        found: NDArray[np.bool_] = of_lanes[self._remainders(len(alone))]
        first = self._border_lanes()
        found[self.on_border] = cluster.reads(host, first, first + self.more, self.lanes)
        return found

    def _remainders(self, meeting: int) -> NDArray[np.integer]:
        return self.first if meeting == self.lanes else self.first % self.first.dtype.type(meeting)

    def _border_lanes(self) -> Int64:
        return self.first[self.on_border].astype(np.int64)
