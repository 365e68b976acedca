"""How many blocks simple caches load for the same slabs: the best possible one, and LRU; and what
stays in the best one from one epoch to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dataplane.plan.order import Order
from dataplane.plan.windows import Int64

Slabs = Sequence[Sequence[int]]
Uses = tuple[int, int]
"""When a block was used last, and when it will be used next, as numbers of slabs."""
NEVER = 1 << 62


def loads(slabs: Slabs, room: int, goes_first: Callable[[Uses], int]) -> int:
    """How many blocks a cache of `room` blocks loads for these slabs, one after the other, if the
    block with the largest number always goes first.
    """
    following: list[dict[int, int]] = [{} for _ in slabs]
    known: dict[int, int] = {}
    for at in reversed(range(len(slabs))):
        following[at] = {block: known.get(block, NEVER) for block in slabs[at]}
        known |= dict.fromkeys(slabs[at], at)
    held: dict[int, Uses] = {}
    count = 0
    for at, slab in enumerate(slabs):
        for block in slab:
            if block not in held:
                count += 1
                if len(held) == room:
                    others = [each for each in held if each not in slab]
                    del held[max(others, key=lambda each: goes_first(held[each]))]
            held[block] = at, following[at][block]
    return count


def fewest(slabs: Slabs, room: int) -> int:
    """Belady's MIN, with the whole future known."""
    return loads(slabs, room, lambda uses: uses[1])


def least_recent(slabs: Slabs, room: int) -> int:
    """LRU."""
    return loads(slabs, room, lambda uses: -uses[0])


def open_bytes_max(order: Order, blocks: Int64, kept: Int64) -> int:
    """Return the largest total size of those blocks whose windows are open at the same time.

    Shapes:  blocks: int64[n].   kept: int64[all blocks], bytes in memory.
    """
    first, last = order.block_span(blocks)
    # At equal positions, blocks that end come before blocks that begin.
    by_time = np.argsort(np.concatenate([last + 1, first]), kind="stable")
    sizes = np.concatenate([-kept[blocks], kept[blocks]])
    return int(np.cumsum(sizes[by_time]).max(initial=0))


def kept_share(
    whole: tuple[int, int], memory: int, open_bytes: int, cache: int
) -> tuple[float, float]:
    """Return which part of the dataset stays in memory, and which in memory or on disk, from one
    epoch to the next. `whole` is the size of the dataset, stored and in memory.

    At the end of an epoch, all of the memory may hold blocks that the next one needs first, unless
    open windows take more than half of it.
    """
    stored, in_memory = (max(size, 1) for size in whole)
    kept = max(min(memory, 2 * (memory - open_bytes)), 0) / in_memory
    return kept, kept + cache / stored
