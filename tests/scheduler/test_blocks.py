"""What the block table evicts, and in which order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dataplane.arena.allocator import GRANULE_BYTES, Allocator
from dataplane.arena.slots import Slots, plan_slots
from dataplane.config import JobSpec
from dataplane.model import Region, Stream
from dataplane.plan.order import Order
from dataplane.rpc import tasks
from dataplane.scheduler import blocks as blocks_module
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.dataset import DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.events import BlockFetched, Effect, Fetch, ForgetBlock
from dataplane.scheduler.records import Delivery, Group, Moment, SharedSlab, StreamState
from dataplane.scheduler.shared import SharedSlabs
from dataplane.scheduler.streams import StreamTable
from dataplane.scheduler.walk import SlabSizes, Walk

COUNT = 12
ROWS = np.full(COUNT, 2, np.int64)
IN_ORDER = JobSpec("f", shuffle=False, global_batch=2)


class Table:
    """A block table over one dataset, whose blocks take a page each; one reader in order."""

    def __init__(
        self,
        pages: int,
        *,
        position: int = 0,
        is_remote: bool = True,
        spec: JobSpec = IN_ORDER,
    ) -> None:
        raw = np.full(COUNT, GRANULE_BYTES if is_remote else 0, np.int64)
        marks = Marks.of(raw, np.zeros(COUNT, np.int64), np.full(COUNT, is_remote))
        self.dataset = DatasetBlocks(1, "d", marks, raw, url=str)
        self.allocator, moment, streams = Allocator(pages * GRANULE_BYTES), Moment(), StreamTable()
        self.shared = SharedSlabs(self.allocator, streams, moment)
        self.effects: list[Effect] = []
        self.blocks = BlockTable(self.allocator, 4, self.shared, self.effects.append, moment)
        self.group = Group("g", is_declared=True)
        delivery = Delivery(1, Slots(plan_slots(0, 4096)), DatasetLookup(self.dataset), None)
        order = Order(ROWS, 0, spec.shuffle, spec.lanes, spec.window, 0)
        walk = Walk(spec, order, Stream(0, 0, 0, 1), SlabSizes(1, 1, 0))
        self.stream = StreamState(1, delivery, walk, 1, position)
        streams.add(self.stream)

    def load(self, index: int, *, greedy: bool = False) -> bool:
        is_started = self.blocks.start(self.dataset, index, greedy=greedy)
        if is_started and self.effects and isinstance(self.effects[-1], Fetch):
            self.blocks.fetched(BlockFetched(self.effects[-1].key))
        return is_started

    def keep_slab(self) -> SharedSlab:
        slab = SharedSlab(self.group, (0, 0, 1, 1), 1, Region(0, 1))
        at = self.allocator.allocate(1)
        assert at is not None
        self.shared.begin(slab, Region(at, 1))
        slab.made = tasks.Assembled(1, bytes_needed=0, bytes_used=1)
        return slab

    @property
    def resident(self) -> list[int]:
        return np.flatnonzero(self.dataset.marks.keys).tolist()


def test_what_is_no_longer_needed_goes_first_then_kept_slabs_then_what_is_needed_last() -> None:
    table = Table(4, position=4)  # blocks 0 and 1 are behind it
    for index in (1, 7, 5):
        assert table.load(index)
    table.keep_slab()
    assert table.load(2)
    assert table.resident == [2, 5, 7]
    assert len(table.shared.spare()) == 1
    assert table.load(3)
    assert table.resident == [2, 3, 5, 7]
    assert not table.shared.spare()
    assert table.load(4)
    assert table.resident == [2, 3, 4, 5]


def test_what_nobody_waits_for_evicts_only_what_is_needed_later_than_it() -> None:
    table = Table(2)
    assert table.load(3)
    assert table.load(5)
    assert not table.load(8)
    assert table.resident == [3, 5]
    assert table.load(8, greedy=True)
    assert table.resident == [3, 8]
    assert table.load(4)
    assert table.resident == [3, 4]


def test_pinned_blocks_stay_and_a_block_that_finds_no_room_evicts_nothing() -> None:
    table = Table(3)
    for index in (2, 6, 9):
        assert table.load(index)
    table.blocks.pin(table.dataset, np.array([9]))
    wide = replace(table.dataset.marks, raw=table.dataset.marks.raw * 3)
    object.__setattr__(table.dataset, "marks", wide)
    before = len(table.effects)
    assert not table.load(0, greedy=True)
    assert table.effects[before:] == []
    assert table.resident == [2, 6, 9]


def test_too_many_mapped_blocks_forget_the_one_that_is_needed_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks_module, "_DIRECT_BLOCKS_MAX", 3)
    table = Table(1, is_remote=False)
    for index in (1, 8, 4):
        assert table.load(index)
    assert table.effects == []
    assert table.load(2)
    assert table.resident == [1, 2, 4]
    assert [type(effect) for effect in table.effects] == [ForgetBlock]
    table.blocks.pin(table.dataset, np.array([1, 2, 4]))
    assert table.load(0)  # however many there are, a block that is waited for gets room
    assert table.resident == [0, 1, 2, 4]


def test_in_open_windows_the_least_recently_used_block_is_evicted_first() -> None:
    table = Table(3, spec=JobSpec("f", shuffle=True, lanes=1, window=1000, global_batch=2))
    assert table.load(2)
    assert table.load(6)
    for index in (2, 6, 2):
        table.blocks.pin(table.dataset, np.array([index]))
        table.blocks.unpin(table.dataset, np.array([index]))
    assert table.load(9)
    assert table.load(0, greedy=True)
    assert table.resident == [0, 2, 9]
    assert table.load(1, greedy=True)
    assert table.resident == [0, 1, 9]
    assert table.load(3, greedy=True)
    assert table.resident == [0, 1, 3]
