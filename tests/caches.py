"""How many blocks simple caches load for the same slabs: the best possible one, and LRU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
