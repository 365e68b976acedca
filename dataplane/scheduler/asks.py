"""Blocks that neighbours request from this node. A block is read if it is not in memory, and lent
while it is sent.

    requested ──in memory──────────> lent ──sent──> over
         └──> waits for the read ──┘
         └──> refused: there is no room now, the read failed, or it took too long to begin

Invariants:
1. Every request is answered exactly once: with a region, with the size of the decoded block, or
   with a refusal. No request waits longer than its patience without a read in progress, no request
   for a run of blocks waits for its read to begin, and no request waits for room: room may come
   only after this node's trainers have gone on, and these may wait for the neighbour's trainers, or
   for a block that this node has requested from that neighbour.
2. A lent block is neither freed nor written until its sending has ended.
3. For a block that no task of this node waits for, nothing is evicted that an open stream needs,
   except blocks already sent to other neighbours: the neighbour can read the block itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from msgspec import Struct

from dataplane.model.records import Region
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.dataset import DatasetBlocks
from dataplane.scheduler.events import Effect, LendBlock, NeighbourAsked, OnlyDecoded, RefuseAsk
from dataplane.scheduler.holdings import WaitingTasks
from dataplane.scheduler.records import BlockChange, BlockPhase, CachedBlock, Moment

# -- borrowed ----------------------------------------------------------------------------------
#
# Blocks whose bytes are read by others than workers: sent to a neighbour, or written to the disk.
#
# Invariants:
# 1. A borrowed block is neither freed nor written until every borrower has given it back.


class Borrowed:
    """The borrowed blocks of one node."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self._borrowed: dict[int, CachedBlock] = {}

    @property
    def count(self) -> int:
        """The number of borrowed blocks; events will report the end of each loan."""
        return len(self._borrowed)

    def borrow(self, block: CachedBlock) -> None:
        """Keep a block's bytes in place."""
        self._borrowed[block.key] = block
        block.lent += 1
        self._blocks.pin(block.dataset, np.array([block.index]))

    def give_back(self, block: CachedBlock) -> None:
        """End one loan of a block."""
        block.lent -= 1
        if not block.lent:
            del self._borrowed[block.key]
            self._blocks.free_lent(block)
        self._blocks.unpin(block.dataset, np.array([block.index]))


_ASKS_MAX = 4096
PATIENCE_S = 0.25
"""After this time a request is refused: the neighbour had better read the block itself, since its
trainers may wait for the block."""


_Name = tuple[int, int]


class _Waiting(Struct, eq=False):
    """The requests that wait for one block, each with its time of arrival."""

    dataset: DatasetBlocks
    index: int
    asks: list[tuple[float, NeighbourAsked]]

    @property
    def name(self) -> _Name:
        return self.dataset.dataset_id, self.index


class Asks:
    """The requests of all neighbours. `do` emits an effect."""

    def __init__(
        self,
        blocks: BlockTable,
        tasks: WaitingTasks,
        borrowed: Borrowed,
        do: Callable[[Effect], None],
        time: Moment,
    ) -> None:
        self._blocks, self._do, self._time = blocks, do, time
        self._borrowed = borrowed
        self._waiting: dict[_Name, _Waiting] = {}
        self._idle = tasks.requested
        self._of_runs: set[_Name] = set()
        """Blocks that are requested in runs."""
        self._lent: dict[int, CachedBlock] = {}
        self._count = 0

    def asked(self, ask: NeighbourAsked) -> None:
        """Handle a neighbour's request for a part of a block."""
        dataset, index = ask.dataset, ask.block
        self._blocks.holdings.is_asked = True
        block = self._blocks.find(dataset, index)
        is_read = not ask.is_decoded and dataset.needs_fetch(index)
        is_read = is_read and dataset.dataset_id not in self._blocks.forgotten
        if block is not None and block.phase is not BlockPhase.FETCHING:
            self._answer(ask, block)
        elif not is_read or self._count >= _ASKS_MAX:
            self._do(RefuseAsk(ask.number))
        else:
            name = dataset.dataset_id, index
            waiting = self._waiting.get(name)
            if waiting is None:
                waiting = self._waiting[name] = _Waiting(dataset, index, [])
                if block is None:
                    self._idle[name] = None
            waiting.asks.append((self._time.now, ask))
            if ask.is_of_run:
                self._of_runs.add(name)
            self._count += 1

    def sent(self, number: int) -> None:
        """Note that the region that was lent for this request is no longer read."""
        block = self._lent.pop(number)
        self._borrowed.give_back(block)
        if self._blocks.find(block.dataset, block.index) is block:
            self._blocks.holdings.sent(block)

    def load(self) -> None:
        """Begin to read requested blocks, and refuse requests for blocks for which there is no
        room.
        """
        while self._idle and self._blocks.fetches.may_begin():
            waiting = self._waiting[next(iter(self._idle))]
            del self._idle[waiting.name]
            if not self._blocks.read(waiting.dataset, waiting.index):
                self._refuse(waiting)

    def refuse_unread(self, asked_before: float = math.inf) -> None:
        """Refuse requests for blocks that are not being read."""
        for waiting in [self._waiting[name] for name in self._idle]:
            is_read = self._blocks.find(waiting.dataset, waiting.index) is not None
            if not is_read and waiting.asks[0][0] < asked_before:
                self._refuse(waiting)

    def refuse_idle_of_runs(self) -> None:
        """Refuse requests for runs whose blocks are not being read, since the other blocks of a run
        wait for these.
        """
        # Examine only requests whose reads have not begun: thousands of blocks may be being read,
        # and this is called for each event.
        for name in sorted(self._idle.keys() & self._of_runs):
            waiting = self._waiting[name]
            if self._blocks.find(waiting.dataset, waiting.index) is not None:
                continue
            self._of_runs.discard(name)
            alone = [each for each in waiting.asks if not each[1].is_of_run]
            for _, ask in waiting.asks:
                if ask.is_of_run:
                    self._do(RefuseAsk(ask.number))
            self._count -= len(waiting.asks) - len(alone)
            waiting.asks = alone
            if not alone:
                self._forget(waiting)

    def block_changed(self, changed: BlockChange) -> None:
        """Answer the requests that wait for this block, if the change decides them."""
        waiting = self._waiting.get((changed.dataset.dataset_id, changed.index))
        if waiting is None:
            return
        block = self._blocks.find(changed.dataset, changed.index)
        if changed.error is not None:
            self._refuse(waiting)
        elif block is None:
            self._idle[waiting.name] = None
        elif block.phase is not BlockPhase.FETCHING:
            self._forget(waiting)
            for _, ask in waiting.asks:
                self._answer(ask, block)

    def forget_dataset(self, dataset: DatasetBlocks) -> None:
        """Refuse the requests for a dataset without readers here, and drop its blocks."""
        for waiting in [*self._waiting.values()]:
            if waiting.dataset is dataset:
                self._refuse(waiting)
        self._blocks.holdings.is_asked = False
        self._blocks.forget_dataset(dataset)

    def look(self) -> None:
        """Refuse requests that have waited too long for their read to begin."""
        self.refuse_unread(self._time.now - PATIENCE_S)

    def _refuse(self, waiting: _Waiting) -> None:
        self._forget(waiting)
        for _, ask in waiting.asks:
            self._do(RefuseAsk(ask.number))

    def _forget(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.name]
        self._idle.pop(waiting.name, None)
        self._of_runs.discard(waiting.name)
        self._count -= len(waiting.asks)

    def _answer(self, ask: NeighbourAsked, block: CachedBlock) -> None:
        is_ready = block.phase is BlockPhase.READY
        whole = block.raw_bytes if not ask.is_decoded else block.decoded if is_ready else None
        if whole is None and not ask.is_decoded and is_ready and block.decoded is not None:
            self._do(OnlyDecoded(ask.number, block.decoded.length))
        elif whole is None or ask.part.offset + ask.part.length > whole.length:
            self._do(RefuseAsk(ask.number))
        else:
            self._borrowed.borrow(block)
            self._lent[ask.number] = block
            part = Region(whole.offset + ask.part.offset, ask.part.length)
            self._do(LendBlock(ask.number, part))
