"""Documents in packs, best fit: what loops.c must give."""

from __future__ import annotations

import bisect
from collections import deque

import numpy as np

from dataplane.plan.loops import Int64


def best_fit(lengths: Int64, ranked: Int64, room: int, most: int) -> tuple[Int64, Int64]:
    """The oracle of the function in plan/loops.py."""
    order = ranked[np.argsort(-lengths[ranked], kind="stable")].tolist()
    packs: list[list[int]] = []
    # The packs that have some room, the one that has had it the longest first; and those rooms.
    waiting: dict[int, deque[int]] = {}
    rooms: list[int] = []
    for row in order:
        length = int(lengths[row])
        if not length:
            break
        at = bisect.bisect_left(rooms, length)
        if at < len(rooms):
            left = rooms[at]
            pack = waiting[left].popleft()
            if not waiting[left]:
                del waiting[left], rooms[at]
        else:
            left, pack = room, len(packs)
            packs.append([])
        packs[pack].append(row)
        left -= length
        if left and len(packs[pack]) < most:
            if left not in waiting:
                waiting[left] = deque()
                bisect.insort(rooms, left)
            waiting[left].append(pack)
    starts = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    return np.array([row for pack in packs for row in pack], np.int64), starts
