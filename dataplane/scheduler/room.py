"""Make room in the block arena by evicting blocks that the plan needs last.

Invariants: those of blocks.py about eviction, and:
1. A ready block whose rows planned slabs need is not evicted here while there is memory for
   excerpts: it is listed in `leaving`, so that those rows can be copied first.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from dataplane.arena.allocator import Allocator
from dataplane.model.records import Region
from dataplane.scheduler.holdings import WaitingTasks
from dataplane.scheduler.next_use import NEVER, NextUse, Positions
from dataplane.scheduler.records import BlockPhase, CachedBlock, SharedSlab
from dataplane.scheduler.streams import SharedSlabs

Victims = Generator[tuple[CachedBlock | SharedSlab, int], None, None]
"""An evictable item, and how many positions away its next use is."""

_SPARED_MAX = 64


class ReadMode(NamedTuple):
    """The way in which a block is read. `greedy`: a task waits for it. `is_lent`: only a neighbour
    may want it. The task that needs it is `away` positions from now. With `takes_wanted`, a block
    that is read ahead may evict blocks of which tasks need rows, if they are needed later than it.
    """

    greedy: bool = False
    is_lent: bool = False
    away: int = 0
    takes_wanted: bool = False


class _Fruitless(NamedTuple):
    """A search that found nothing to evict: the distance of the block that needed room, the
    positions of readers, and whether the search included blocks of which tasks need rows.
    """

    limit: int
    positions: Positions
    takes_wanted: bool


class Room:
    """The room of one block arena. `uses` ranks the blocks in it; `give_way` evicts a block;
    `waiting` has the tasks that wait for blocks.
    """

    def __init__(
        self,
        allocator: Allocator,
        shared: SharedSlabs,
        uses: NextUse,
        give_way: Callable[[CachedBlock], None],
        waiting: WaitingTasks,
    ) -> None:
        self._allocator, self._shared, self._uses = allocator, shared, uses
        self._give_way, self._waiting, self._holdings = give_way, waiting, waiting.holdings
        self.leaving: list[CachedBlock] = []
        """Blocks that were not evicted at the last search for room, because their rows must be
        copied first."""
        self.is_full = False
        """Whether the last search for room was in vain."""
        self._fruitless: _Fruitless | None = None

    def became_evictable(self, block: CachedBlock) -> None:
        """Note that a block was loaded."""
        known = self._fruitless
        if known is not None and (
            block.is_guest or self._uses.use_of(block.dataset, block.index) > known.limit
        ):
            self._fruitless = None

    def is_wanted(self, block: CachedBlock) -> bool:
        """Whether a task waits for the block. Padding repeats samples of blocks that no open stream
        needs any more, and such blocks must not evict each other.
        """
        return bool(self._waiting.of_block(block.dataset, block.index))

    def unpinned(self) -> None:
        """Note that blocks may have become evictable."""
        self._fruitless = None

    def of_block(
        self, block: CachedBlock, length: int, *, greedy: bool, away: int = 0
    ) -> Region | None:
        """Make room for the decoded form of a block. `greedy`: a task waits for the block.
        Otherwise the task that needs it is `away` positions from now.
        """
        return self._found(self._needed_less(block, ReadMode(greedy, away=away)), length)

    def of_read(
        self, block: CachedBlock, raw: int, decoded: int, how: ReadMode
    ) -> tuple[Region, Region | None] | None:
        """Make room for a block of `raw` bytes that is about to be read, and for its `decoded`
        bytes if it is read ahead: either for both or for neither. Otherwise, blocks that are read
        ahead would fill the arena, and decoding one would evict another. `decoded` is 0 if the
        block is not decoded.
        """
        if how.is_lent or not decoded:
            into = self._of_raw(block, raw, how, is_brief=decoded > 0)
            return None if into is None else (into, None)
        if not self._holdings.is_tight:
            both = self._of_both(block, raw, decoded, how)
            if both is not None or not how.greedy:
                return both
        into = self._of_raw(block, raw, how, is_brief=True)
        if into is None or not self._holdings.is_tight:
            return None if into is None else (into, None)
        later = self.of_block(block, decoded, greedy=how.greedy, away=how.away)
        if later is None:
            self._allocator.free(into.offset)
            return None
        return into, later

    def _of_raw(
        self, block: CachedBlock, length: int, how: ReadMode, *, is_brief: bool
    ) -> Region | None:
        """Make room for a block's raw bytes. If only a neighbour waits for the block, no block is
        evicted that an open stream needs, or that is needed sooner. If the block is read for a
        neighbour, blocks that other neighbours have got may be evicted, too.
        """
        if how.is_lent and not self.is_wanted(block):
            limit = max(self._uses.use_of(block.dataset, block.index), how.away)
            going = self._needed_by_nobody(limit)
        else:
            going = self._needed_less(block, how)
        if how.is_lent:
            going = self._then_lent(going)
        return self._found(going, length, is_brief=is_brief)

    def _of_both(
        self, block: CachedBlock, raw: int, decoded: int, how: ReadMode
    ) -> tuple[Region, Region] | None:
        """Make room for a block that is read ahead, and for its decoded form."""
        self.leaving = []
        has_room = self._allocator.trial().has_room(raw, decoded)
        going = self._needed_less(block, how._replace(greedy=False))
        if not (has_room or self._evict_until(going, raw, decoded)):
            self.is_full = True
            return None
        self.is_full = False
        # Allocate the longer region first: the other one fits beside it.
        if decoded >= raw:
            later = self._allocated(decoded)
            return self._allocated(raw, is_brief=True), later
        into = self._allocated(raw, is_brief=True)
        return into, self._allocated(decoded)

    def _allocated(self, length: int, *, is_brief: bool = False) -> Region:
        at = self._allocator.allocate(length, is_brief=is_brief)
        assert at is not None
        return Region(at, length)

    def of_slab(self, length: int, going: Sequence[SharedSlab]) -> Region | None:
        """Make room for a slab: from free memory, then from blocks that no open stream needs, then
        from `going`.
        """
        return self._found(self._unneeded(going), length)

    def of_excerpts(self, length: int) -> Region | None:
        """Make room for many excerpts, and evict whatever is necessary."""
        return self._found(self._all(), length, spares_rows=False)

    def _found(
        self, going: Victims, length: int, *, spares_rows: bool = True, is_brief: bool = False
    ) -> Region | None:
        self.leaving = []
        at = self._allocator.allocate(length, is_brief=is_brief)
        if at is None and self._evict_until(going, length, spares_rows=spares_rows):
            at = self._allocator.allocate(length, is_brief=is_brief)
        self.is_full = at is None
        return None if at is None else Region(at, length)

    def _unneeded(self, going: Sequence[SharedSlab]) -> Victims:
        with contextlib.closing(self._uses.farthest()) as farthest:
            yield from itertools.takewhile(lambda each: self._is_spare(*each), farthest)
        for slab in going:
            yield slab, NEVER

    def _needed_by_nobody(self, limit: int) -> Victims:
        """Yield blocks that no open stream needs, and that nobody else needs before `limit`."""
        with contextlib.closing(self._uses.farthest()) as farthest:
            for block, use in farthest:
                if not self._is_spare(block, use):
                    break
                if use > limit or use == NEVER:
                    yield block, use

    def _then_lent(self, going: Victims) -> Victims:
        """Yield these blocks, then blocks that neighbours have got and no task here waits for."""
        named = set[int]()
        with contextlib.closing(going):
            for each, use in going:
                if isinstance(each, CachedBlock):
                    named.add(each.key)
                yield each, use
        for block in self._holdings.lent():
            if block.key not in named:
                yield block, NEVER

    def _all(self) -> Victims:
        yield from ((slab, NEVER) for slab in self._shared.spare())
        with contextlib.closing(self._uses.farthest()) as farthest:
            yield from farthest

    def _needed_less(self, block: CachedBlock, how: ReadMode) -> Victims:
        """Yield the blocks that may be evicted for this block, least needed first: all blocks if a
        task waits for it.
        """
        use = self._uses.use_of(block.dataset, block.index)
        limit = -1 if how.greedy else max(use, how.away)
        kept: list[SharedSlab] | None = self._shared.spare()
        # Remember searches that found nothing, to skip their repetition: while much is being read
        # ahead, most searches are in vain, and examine all of these blocks.
        positions = self._uses.positions() if 0 <= limit < NEVER and not kept else None
        sought = None if positions is None else _Fruitless(limit, positions, how.takes_wanted)
        if sought is not None and self._finds_nothing(sought):
            return
        with contextlib.closing(self._uses.farthest()) as farthest:
            for other, use in farthest:
                if kept is not None and not self._is_spare(other, use):
                    yield from ((slab, NEVER) for slab in kept)
                    kept = None
                if use != NEVER and use <= limit:
                    break
                is_spared = other.is_wanted and not how.takes_wanted
                if limit >= 0 and (is_spared or self._holdings.may_be_asked(other)):
                    continue
                sought = None
                is_padding = limit >= 0 and self._is_spare(block, limit)
                if other is not block and not (is_padding and self.is_wanted(other)):
                    yield other, use
            else:
                yield from ((slab, NEVER) for slab in kept or ())
        if sought is not None:
            self._fruitless = sought

    def _finds_nothing(self, sought: _Fruitless) -> bool:
        """Whether a search with this limit or a lower one found nothing, and nothing has changed
        since.
        """
        known = self._fruitless
        return (
            known is not None
            and known.limit <= sought.limit
            and known.positions == sought.positions
            and known.takes_wanted >= sought.takes_wanted
        )

    def _is_spare(self, block: CachedBlock, use: int) -> bool:
        return self._uses.is_spare(block.dataset, use)

    def _evict_until(
        self, going: Victims, length: int, beside: int = 0, *, spares_rows: bool = True
    ) -> bool:
        """Evict the first of these blocks, as many as needed to make room for both lengths; evict
        none if all of them are not enough. Return whether there is room.

        Blocks apart from that room stay, unless there are many: later searches would have to
        examine them again.
        """
        # Check first: evicting blocks without gaining enough room would mean loading them again.
        trial = self._allocator.trial()
        chosen: list[tuple[CachedBlock | SharedSlab, int]] = []
        with contextlib.closing(going):
            for each, use in going:
                chosen.append((each, use))
                for region in each.regions:
                    trial.free(region.offset)
                if trial.has_room(length, beside):
                    break
            else:
                return False
        if len(chosen) <= _SPARED_MAX:
            chosen = [one for one in chosen if trial.is_in_room(one[0].regions, length, beside)]
        self.leaving = [
            each
            for each, use in chosen
            if isinstance(each, CachedBlock) and spares_rows and self._leaves(each, use)
        ]
        if self.leaving:
            return False
        for each, _use in chosen:
            if isinstance(each, SharedSlab):
                self._shared.evict(each)
            else:
                self._give_way(each)
        return True

    def _leaves(self, block: CachedBlock, use: int) -> bool:
        """Whether rows of a block about to be evicted must be copied first."""
        if block.phase is not BlockPhase.READY or self._is_spare(block, use):
            return False
        is_tight = self._holdings.is_tight
        tasks = self._waiting.of_block(block.dataset, block.index)
        is_wanted = any(not task.stream.is_ahead for task in tasks)
        if is_wanted and not is_tight and not use:
            self._holdings.lose(block)
        return is_wanted and is_tight
