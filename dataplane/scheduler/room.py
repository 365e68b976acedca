"""Makes room in the block arena: evicts what the plan needs last.

Invariants: those of blocks.py about eviction, and:
1. A ready block that `leaves_rows` is never evicted here: it is named in `leaving`, so that those
   rows can be copied first.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from dataplane.arena.allocator import Allocator, rounded
from dataplane.model import Region
from dataplane.scheduler.block import BlockPhase, CachedBlock
from dataplane.scheduler.next_use import NEVER, NextUse, Positions
from dataplane.scheduler.read_again import ReadAgain
from dataplane.scheduler.records import Moment, SharedSlab
from dataplane.scheduler.shared import SharedSlabs

Victims = Generator[tuple[CachedBlock | SharedSlab, int], None, None]
"""An evictable item, and how many positions away its next use is."""

Leaves = Callable[[CachedBlock, int], bool]
"""Whether planned slabs need rows of a block that is about to be evicted, although its next use is
so many positions away, and those rows can be copied."""


class _Fruitless(NamedTuple):
    """A search that found nothing to evict: how soon the block was needed that it was for, and
    where the readers were.
    """

    limit: int
    positions: Positions


class Room:
    """Of one block arena. `uses` ranks the blocks in it; `evict` drops one."""

    def __init__(
        self,
        allocator: Allocator,
        shared: SharedSlabs,
        uses: NextUse,
        evict: Callable[[CachedBlock], None],
        again: ReadAgain,
        time: Moment,
    ) -> None:
        self._allocator, self._shared, self._uses = allocator, shared, uses
        self._evict, self._again, self._time = evict, again, time
        self.leaves_rows: Leaves = lambda _block, _use: False
        self.is_wanted: Callable[[CachedBlock], bool] = lambda _block: False
        """Whether a task waits for it. Padding repeats samples of blocks that have no next use, and
        such blocks must not evict each other."""
        self.leaving: list[CachedBlock] = []
        """Blocks that would have made room for the last one, had their rows been copied."""
        self.is_full = False
        """Whether there was no room for the last one."""
        self._fruitless: _Fruitless | None = None

    def became_evictable(self, block: CachedBlock) -> None:
        """A block was loaded."""
        known = self._fruitless
        if known is not None and self._uses.use_of(block.dataset, block.index) > known.limit:
            self._fruitless = None

    def unpinned(self) -> None:
        """Blocks may have become evictable."""
        self._fruitless = None

    def of_block(self, block: CachedBlock, length: int, *, greedy: bool) -> Region | None:
        """Room for a block; `greedy`: a task waits for it."""
        return self._found(self._needed_less(block, greedy=greedy), length)

    def of_slab(self, length: int, going: Sequence[SharedSlab]) -> Region | None:
        """Room for a slab: free memory, then that of blocks without a next use, then of `going`."""
        return self._found(self._unneeded(going), length)

    def of_excerpts(self, length: int) -> Region | None:
        """Room for many excerpts, whatever is evicted for it."""
        return self._found(self._all(), length, spares_rows=False)

    def _found(self, going: Victims, length: int, *, spares_rows: bool = True) -> Region | None:
        self.leaving = []
        at = self._allocator.allocate(length)
        if at is None:
            at = self._evict_until(going, length, spares_rows=spares_rows)
        self.is_full = at is None
        return None if at is None else Region(at, length)

    def _unneeded(self, going: Sequence[SharedSlab]) -> Victims:
        with contextlib.closing(self._uses.farthest()) as farthest:
            yield from itertools.takewhile(lambda each: each[1] == NEVER, farthest)
        for slab in going:
            yield slab, NEVER

    def _all(self) -> Victims:
        yield from ((slab, NEVER) for slab in self._shared.spare())
        with contextlib.closing(self._uses.farthest()) as farthest:
            yield from farthest

    def _needed_less(self, block: CachedBlock, *, greedy: bool) -> Victims:
        """What may be evicted for this block, least needed first: everything if a task waits for
        it.
        """
        limit = -1 if greedy else self._uses.use_of(block.dataset, block.index)
        kept: list[SharedSlab] | None = self._shared.spare()
        # While much is being read ahead, most searches are in vain, and pass over all of it.
        positions = self._uses.positions() if 0 <= limit < NEVER and not kept else None
        if positions is not None and self._finds_nothing(limit, positions):
            return
        with contextlib.closing(self._uses.farthest()) as farthest:
            for other, use in farthest:
                if use != NEVER and kept is not None:
                    yield from ((slab, NEVER) for slab in kept)
                    kept = None
                if use != NEVER and use <= limit:
                    break
                positions = None
                if other is not block and not (limit == NEVER and self.is_wanted(other)):
                    yield other, use
            else:
                yield from ((slab, NEVER) for slab in kept or ())
        if positions is not None:
            self._fruitless = _Fruitless(limit, positions)

    def _finds_nothing(self, limit: int, positions: Positions) -> bool:
        """Whether nothing has changed since a search with a limit as low found nothing."""
        known = self._fruitless
        return known is not None and known.limit <= limit and known.positions == positions

    def _evict_until(self, going: Victims, length: int, *, spares_rows: bool) -> int | None:
        """Evict the first of these, as many as needed, or none if all of them are not enough."""
        # Check first: evicting blocks without gaining enough room would mean loading them again.
        trial, need = self._allocator.trial(), rounded(length)
        chosen: list[tuple[CachedBlock | SharedSlab, int]] = []
        with contextlib.closing(going):
            for each, use in going:
                chosen.append((each, use))
                if max(trial.free(region.offset) for region in each.regions) >= need:
                    break
            else:
                return None
        self.leaving = [
            each
            for each, use in chosen
            if isinstance(each, CachedBlock) and spares_rows and self._leaves(each, use)
        ]
        if self.leaving:
            return None
        for each, use in chosen:
            if isinstance(each, SharedSlab):
                self._shared.evict(each)
            else:
                self._evict(each)
                if not use:  # although its window is open
                    self._again.note([each], self._time.now)
        return self._allocator.allocate(length)

    def _leaves(self, block: CachedBlock, use: int) -> bool:
        is_needed = block.phase is BlockPhase.READY and use != NEVER
        return is_needed and self.leaves_rows(block, use)
