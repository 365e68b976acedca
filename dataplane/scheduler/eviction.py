"""Which block goes first: the one that is needed again last. Pure.

Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 5(2), 1966. Usually the future must be guessed; here the plan says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dataplane.plan.order import Order
from dataplane.scheduler.block import Block
from dataplane.scheduler.dataset import DatasetBlocks

Ints = npt.NDArray[np.int64]

NEVER = np.iinfo(np.int64).max


def next_use(blocks: Ints, walks: Sequence[tuple[Order, int]]) -> Ints:
    """How many positions away the next use of each block may be, over all walks.

    A walk is an order and the position that it has come to. A block whose window is open may be
    needed at once: 0. One that no walk needs any more this epoch: NEVER.

    Shapes:  blocks: int64[n], of the manifest.   result: int64[n].
    """
    soonest = np.full(len(blocks), NEVER, np.int64)
    for order, position in walks:
        first, last = order.block_span(blocks)
        away = np.where(last < position, NEVER, np.maximum(first - position, 0))
        np.minimum(soonest, away, out=soonest)
    return soonest


def victims(use: Ints, last_touch: Ints) -> Ints:
    """The order in which to evict: farthest use first, then least recently touched.

    Shapes:  use, last_touch: int64[n].   result: int64[n], indices.
    """
    return np.lexsort((last_touch, -use))


def uses_of(
    blocks: Sequence[Block], walks: Callable[[DatasetBlocks], Sequence[tuple[Order, int]]]
) -> Ints:
    """The next use of blocks of several datasets, each of which has its own walks.

    Shapes:  result: int64[blocks], NEVER where there is none.
    """
    use = np.empty(len(blocks), np.int64)
    ids = np.array([block.dataset.dataset_id for block in blocks])
    indices = np.array([block.index for block in blocks], np.int64)
    for dataset_id in np.unique(ids):
        mine = np.flatnonzero(ids == dataset_id)
        use[mine] = next_use(indices[mine], walks(blocks[int(mine[0])].dataset))
    return use
