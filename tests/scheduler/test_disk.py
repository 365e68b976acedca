"""Which blocks a node keeps on its disk."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.arena.allocator import rounded
from dataplane.plan.order import Order
from dataplane.scheduler.dataset import DatasetBlocks, Marks
from dataplane.scheduler.disk import DiskTier, next_uses
from dataplane.scheduler.events import DiskName
from dataplane.scheduler.next_use import NEVER, WalkPosition

PAGE, ROWS = 4096, 4
FILE_BYTES = 2 * PAGE
FAR = 1 << 40


def dataset_of(count: int, number: int = 1, sizes: list[int] | None = None) -> DatasetBlocks:
    raw = np.array(sizes or [PAGE] * count, np.int64)
    marks = Marks.of(raw, np.zeros_like(raw), np.ones(count, np.bool_))
    rows = np.full(count, ROWS, np.int64)
    return DatasetBlocks(number, "made up", marks, raw, rows, url=str, digest=bytes([number] * 16))


class Tier:
    """A disk for so many blocks of a dataset that is read in a shuffled order."""

    def __init__(self, count: int, room: int, sizes: list[int] | None = None) -> None:
        self.dataset = dataset_of(count, sizes=sizes)
        self.orders = [Order(self.dataset.rows, 5, True, 1, 1, epoch) for epoch in range(2)]
        self.position = 0
        self.readings = [
            WalkPosition(1, self.orders[0], 0),
            WalkPosition(2, self.orders[1], -self.orders[0].sample_count, is_open=False),
        ]
        self.disk = DiskTier(room, 0, lambda dataset: self.readings if dataset.digest else [])
        self.disk.is_known = True

    def keep(self, block: int, dataset: DatasetBlocks | None = None) -> bool:
        """Whether it is kept."""
        change = self.disk.choose(dataset or self.dataset, block)
        if change is not None:
            self.disk.ended(change.name, is_done=True)
        return change is not None

    @property
    def kept(self) -> set[int]:
        blocks = range(len(self.dataset.rows))
        return {block for block in blocks if self.disk.is_kept(self.dataset, block)}

    def next_epoch(self, block: int) -> int:
        """Where the next epoch needs a block."""
        first, _ = self.orders[1].block_span(np.array([block]))
        return int(first[0])


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 200), st.integers(1, 100), st.integers(0, 99))
def test_what_the_next_epoch_needs_first_stays(count: int, room: int, seed: int) -> None:
    tier = Tier(count, room * FILE_BYTES)
    blocks = [*range(count)]
    random.Random(seed).shuffle(blocks)
    # All have been read in this epoch.
    tier.readings[0] = tier.readings[0]._replace(position=tier.orders[0].sample_count)
    for block in blocks:
        tier.keep(block)
    assert tier.kept == {*sorted(blocks, key=tier.next_epoch)[:room]}
    assert tier.disk.used_bytes == min(count, room) * FILE_BYTES


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 5 * PAGE), min_size=2, max_size=60), st.integers(0, 99))
def test_it_never_takes_more_than_it_may_while_writes_are_under_way(
    sizes: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    limit = sum(sizes) // 2 + PAGE
    tier, disk = Tier(len(sizes), limit, sizes), None
    disk = tier.disk
    files: dict[DiskName, int] = {}
    writing = {}
    for _ in range(3 * len(sizes)):
        change = disk.choose(tier.dataset, chance.randrange(len(sizes)))
        if change is not None:
            for name, _ in change.going:
                files.pop(name, None)
            writing[change.name] = change
        taken = sum(files.values()) + sum(one.size for one in writing.values())
        assert taken <= disk.used_bytes <= limit
        if writing and chance.random() < 0.6:
            name = chance.choice([*writing])
            change = writing.pop(name)
            is_done = chance.random() < 0.8
            if is_done:
                files[name] = change.size
            disk.ended(name, is_done=is_done)
    for name in writing:
        disk.ended(name, is_done=False)
    assert {name.block for name in files} <= tier.kept
    assert disk.used_bytes <= limit


def test_datasets_that_nobody_reads_go_first_those_read_last_at_the_end() -> None:
    tier = Tier(4, 3 * FILE_BYTES)
    for number in (8, 9):
        tier.disk.found(DiskName(bytes([number] * 16), 0), FILE_BYTES)
    before = dataset_of(4, 2)
    assert tier.keep(0, before)
    tier.disk.forget_dataset(before)
    assert tier.keep(0)
    left = [tier.disk.is_kept(dataset_of(1, number), 0) for number in (8, 9, 2)]
    assert left == [False, True, True]


def test_a_block_whose_next_use_is_not_known_replaces_none_that_is_read() -> None:
    tier = Tier(4, 2 * FILE_BYTES)
    tier.readings = tier.readings[:1]
    assert tier.keep(0)
    assert tier.keep(1)
    assert not tier.keep(2)


def test_nothing_is_written_before_all_is_known_and_too_much_is_removed() -> None:
    tier = Tier(9, 4 * FILE_BYTES)
    tier.disk.is_known = False
    assert not tier.keep(0)
    for block in range(9):
        tier.disk.found(DiskName(tier.dataset.digest, block), FILE_BYTES)
    tier.disk.is_known = True
    assert tier.kept == {*range(9)}
    change = tier.disk.reduce()
    assert change is not None
    assert len(change.going) == 5
    assert tier.disk.used_bytes == 9 * FILE_BYTES, "they are there until they are removed"
    tier.disk.ended(change.name, is_done=True)
    assert tier.disk.used_bytes == 4 * FILE_BYTES
    assert tier.disk.reduce() is None


def test_what_could_not_be_removed_is_still_counted() -> None:
    tier = Tier(9, 1 * FILE_BYTES)
    tier.readings[0] = tier.readings[0]._replace(position=tier.orders[0].sample_count)
    last, first = sorted(range(9), key=tier.next_epoch)[::-8]
    assert tier.keep(last)
    change = tier.disk.choose(tier.dataset, first)
    assert change is not None
    assert not tier.kept
    tier.disk.ended(change.name, is_done=False)
    assert tier.kept == {last}
    assert tier.disk.used_bytes == FILE_BYTES


def test_a_block_is_kept_once_and_never_one_that_is_too_large() -> None:
    tier = Tier(2, 2 * FILE_BYTES, [PAGE, 9 * PAGE])
    assert tier.keep(0)
    assert not tier.keep(0)
    assert not tier.keep(1)
    change = tier.disk.choose(dataset_of(1, 7), 0)
    assert change is not None
    assert tier.disk.choose(dataset_of(1, 7), 0) is None, "it is being written"


def test_a_lost_file_makes_room() -> None:
    tier = Tier(3, 1 * FILE_BYTES)
    assert tier.keep(1)
    assert tier.disk.lost(tier.dataset, 1)
    assert not tier.disk.lost(tier.dataset, 1)
    assert not tier.disk.used_bytes
    assert tier.keep(2)


def test_of_many_blocks_a_late_one_goes_although_few_are_looked_at() -> None:
    count = 20_000
    tier = Tier(count, (count - 1) * FILE_BYTES)
    tier.readings[0] = tier.readings[0]._replace(position=tier.orders[0].sample_count)
    for block in range(count - 1):
        tier.disk.found(DiskName(tier.dataset.digest, block), FILE_BYTES)
    tier.disk.is_kept(tier.dataset, 0)
    soon = min(range(count), key=tier.next_epoch)
    tier.disk.lost(tier.dataset, soon)
    tier.disk.found(DiskName(bytes(16), 0), FILE_BYTES)
    tier.disk.is_kept(dataset_of(1, 0), 0)
    gone = []
    for block in sorted(range(count), key=tier.next_epoch)[:30]:
        tier.disk.lost(tier.dataset, block)
    for block in sorted(range(count), key=tier.next_epoch)[:30]:
        change = tier.disk.choose(tier.dataset, block)
        assert change is not None
        gone += [name.block for name, _ in change.going if name.digest == tier.dataset.digest]
        tier.disk.ended(change.name, is_done=True)
    assert all(tier.next_epoch(block) > 0.95 * count * ROWS for block in gone)


def test_a_block_in_memory_counts_from_its_use_after_this_one() -> None:
    dataset = dataset_of(6)
    now, later = (Order(dataset.rows, 5, False, 1, 1, epoch) for epoch in range(2))
    readings = [
        WalkPosition(1, now, 4),
        WalkPosition(2, later, -20, is_open=False),
    ]
    blocks, nothing = np.arange(6), np.zeros(6, np.bool_)
    assert next_uses(readings, blocks, nothing).tolist() == [20, 0, 4, 8, 12, 16]
    in_memory = np.ones(6, np.bool_)
    assert next_uses(readings, blocks, in_memory).tolist() == [20, 24, 28, 32, 36, 40]
    assert next_uses(readings[:1], blocks, in_memory).tolist() == [NEVER] * 6
    # What memory keeps until then need not be on disk: the first two blocks of an epoch.
    found = next_uses(readings, blocks, in_memory, held_for=2 * ROWS + 2 * (ROWS - 1))
    assert found.tolist() == [NEVER, NEVER, 28, 32, 36, 40]
    assert next_uses([], blocks, nothing).tolist() == [NEVER] * 6


def test_sizes_are_those_of_whole_pages() -> None:
    tier = Tier(1, FAR)
    tier.disk.found(DiskName(tier.dataset.digest, 0), 5)
    assert tier.disk.used_bytes == rounded(5) == PAGE
