"""The numbered invariants of scheduler/holdings.py."""

from __future__ import annotations

import numpy as np

from dataplane.model.records import Region
from dataplane.scheduler.dataset import DatasetBlocks, Marks
from dataplane.scheduler.holdings import LENT_PARTS, LOADING_PARTS, Holdings
from dataplane.scheduler.records import BlockPhase, CachedBlock

PAGE = 4096
COUNT = 60
ARENA = COUNT * PAGE


class Arena:
    """Blocks of a page each."""

    def __init__(self) -> None:
        pages = np.full(COUNT, PAGE, np.int64)
        marks = Marks.of(pages, np.zeros(COUNT, np.int64), np.ones(COUNT, np.bool_))
        self.dataset = DatasetBlocks(1, "d", marks, pages, pages, url=str)
        self.holdings = Holdings(ARENA)

    def load(self, index: int) -> CachedBlock:
        block = CachedBlock(self.dataset, index, index + 1, BlockPhase.READY)
        block.raw = Region(index * PAGE, PAGE)
        self.holdings.changed(block)
        return block

    def drop(self, block: CachedBlock) -> None:
        block.raw = None
        self.holdings.gone(block)


def test_what_is_being_loaded_takes_a_part_of_the_arena_or_is_two_blocks():
    arena = Arena()
    assert arena.holdings.may_read_ahead(ARENA)
    arena.holdings.loading(arena.load(50))
    assert arena.holdings.may_read_ahead(ARENA)
    for name in ("is_asked", "is_tight"):
        setattr(arena.holdings, name, True)
        assert not arena.holdings.may_read_ahead(ARENA)
        setattr(arena.holdings, name, False)
    arena.holdings.loading(arena.load(51))
    assert not arena.holdings.may_read_ahead(ARENA)
    arena = Arena()
    blocks = []
    while arena.holdings.may_read_ahead(PAGE):
        blocks.append(arena.load(len(blocks)))
        arena.holdings.loading(blocks[-1])
    assert len(blocks) == COUNT // LOADING_PARTS
    arena.holdings.loaded(blocks[0])
    assert arena.holdings.may_read_ahead(PAGE)
    arena.holdings.loaded(blocks[0])
    assert not arena.holdings.may_read_ahead(2 * PAGE)


def test_wanted_blocks_leave_room_for_neighbours_that_ask():
    arena = Arena()
    holdings = arena.holdings
    holdings.want(arena.dataset, np.arange(COUNT))
    blocks = [arena.load(index) for index in range(COUNT - COUNT // LENT_PARTS)]
    assert holdings.may_read_ahead(PAGE)
    holdings.is_asked = True
    assert not holdings.may_read_ahead(PAGE)
    arena.drop(blocks[0])
    assert holdings.may_read_ahead(PAGE)
    holdings.want(arena.dataset, np.array([1, 2]))
    holdings.want_no_more(arena.dataset, np.arange(1, COUNT))
    assert holdings.may_read_ahead((COUNT - COUNT // LENT_PARTS - 2) * PAGE)
    assert not holdings.may_read_ahead((COUNT - COUNT // LENT_PARTS - 1) * PAGE)


def test_what_was_sent_last_is_kept_for_others_and_what_was_sent_first_may_go():
    arena = Arena()
    blocks = [arena.load(index) for index in range(30)]
    for block in [*blocks, blocks[0]]:
        arena.holdings.sent(block)
    kept = [block for block in blocks if arena.holdings.may_be_asked(block)]
    assert kept == [blocks[0], *blocks[30 - COUNT // LENT_PARTS + 1 :]]
    arena.holdings.want(arena.dataset, np.array([1]))
    assert list(arena.holdings.lent()) == [*blocks[2:], blocks[0]]
    arena.drop(blocks[0])
    assert not arena.holdings.may_be_asked(blocks[0])
    assert list(arena.holdings.lent()) == blocks[2:]
