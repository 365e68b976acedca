"""Which blocks a node keeps on its disk."""

from __future__ import annotations

import random

import numpy as np
from block_tables import TableParts
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.arena.allocator import rounded
from dataplane.plan.order import Order
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.dataset import (
    GAP_BYTES_MIN,
    JOINED_BYTES_MAX,
    BlockPlaces,
    DatasetBlocks,
    Marks,
)
from dataplane.scheduler.disk import DiskTier, next_uses
from dataplane.scheduler.events import (
    BlockFetched,
    DiskFound,
    DiskMissed,
    DiskName,
    DiskScanned,
    Fetch,
    ScanDisk,
)
from dataplane.scheduler.keeping import PAUSE_S
from dataplane.scheduler.next_use import NEVER, WalkPosition
from dataplane.scheduler.scheduler import Scheduler

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


PAGE_BYTES = 4096
DIGEST = bytes(16)


class Node:
    """A scheduler with blocks 0 to 8 of a dataset on disk."""

    def __init__(self, cache_bytes: int = 100 * PAGE_BYTES, trouble: str = "") -> None:
        raw = np.full(9, PAGE_BYTES, np.int64)
        marks = Marks.of(raw, np.zeros_like(raw), np.ones(9, np.bool_))
        self.dataset = DatasetBlocks(1, "made up", marks, raw, raw, url=str, digest=DIGEST)
        self._scheduler = Scheduler(64 * PAGE_BYTES, 4, Autoscaler(1, 1, 1), 60.0, cache_bytes)
        self.tell(DiskFound(DIGEST, range(9), [PAGE_BYTES] * 9))
        self.tell(DiskScanned(trouble))

    def tell(self, event: events.Event, now: float = 0.0) -> list[str]:
        """Return the log."""
        effects = self._scheduler.decide(event, now)
        return [effect.event for effect in effects if isinstance(effect, events.Note)]

    def scans(self, now: float) -> bool:
        """Whether the disk is scanned again at this time."""
        effects = self._scheduler.decide(events.Ticked(0.0, 0.0), now)
        return any(isinstance(effect, ScanDisk) for effect in effects)

    @property
    def is_known(self) -> bool:
        """Whether blocks may be written."""
        return self._scheduler._tier.is_known

    def asks(self, block: int, now: float) -> bool:
        """Whether the disk is asked for it."""
        self._scheduler.decide(events.Settled(), now)
        return self._scheduler._tier.may_have(self.dataset, block, now)


def test_a_disk_that_fails_is_left_alone_for_longer_each_time_and_told_once() -> None:
    node, now, pause_s = Node(), 0.0, PAUSE_S
    for _ in range(8):
        assert node.asks(0, now)
        failed = [node.tell(DiskMissed(node.dataset, n, "it burns"), now) for n in range(4)]
        assert failed == [["the disk is not read for a while"], [], [], []]
        assert not node.asks(0, now + pause_s - 1.0)
        now += pause_s
        pause_s = min(2 * pause_s, 3600.0)


def test_a_lost_file_is_asked_for_once_and_many_are_told_together() -> None:
    node = Node()
    told = [node.tell(DiskMissed(node.dataset, block), 1.0) for block in range(8)]
    assert [len(each) for each in told] == [1] + [0] * 7
    assert not any(node.asks(block, 2.0) for block in range(8))
    assert node.asks(8, 2.0)
    assert not node.tell(DiskMissed(node.dataset, 0), 1.0), "that it is gone is known"
    assert len(node.tell(DiskMissed(node.dataset, 8), 1.0 + PAUSE_S)) == 1


def test_a_node_without_a_disk_asks_none() -> None:
    assert not Node(0).asks(0, 1.0)


def test_a_scan_that_fails_is_made_again_later_until_one_ends_well() -> None:
    node, now, pause_s = Node(trouble="it burns"), 0.0, PAUSE_S
    for _ in range(3):
        assert not node.is_known
        assert not node.scans(now + pause_s - 1.0)
        now += pause_s
        assert node.scans(now)
        assert not node.scans(now + 4000.0), "one at a time"
        told = node.tell(DiskScanned("it burns"), now)
        assert told == ["the disk is not written for a while"]
        pause_s *= 2
    now += pause_s
    assert node.scans(now)
    node.tell(DiskFound(DIGEST, range(9), [PAGE_BYTES] * 9), now)
    assert not node.tell(DiskScanned(), now)
    assert node.is_known
    assert not node.scans(now + 10_000.0)


KIB = 1 << 10
lengths = st.integers(1, 300 * KIB) | st.sampled_from([JOINED_BYTES_MAX, JOINED_BYTES_MAX + 1])
gaps = st.sampled_from([0, 0, 0, 8, 5 * KIB, 64 * KIB, GAP_BYTES_MIN - 1, GAP_BYTES_MIN])
blocks = st.lists(st.tuples(st.booleans(), gaps, lengths), min_size=1, max_size=40)


def places_of(drawn: list[tuple[bool, int, int]]) -> BlockPlaces:
    """Of blocks that may begin a shard, at some distance behind the one before, of some length."""
    shard, offset, at = [], [], 0
    for is_first, gap, length in drawn:
        at = 0 if is_first else at
        shard.append((shard[-1] if shard else 0) + is_first)
        offset.append(at + gap)
        at += gap + length
    length = np.array([length for *_, length in drawn], np.int64)
    return BlockPlaces(np.array(shard, np.int32), np.array(offset, np.int64), length)


def check_request(places: BlockPlaces, request: list[int]) -> None:
    """One that reads these blocks."""
    first, last = request[0], request[-1]
    assert request == [*range(first, last + 1)]
    assert places.shard[first] == places.shard[last]
    wanted = int(places.length[first : last + 1].sum())
    length = int(places.offset[last] + places.length[last] - places.offset[first])
    if len(request) > 1:
        assert wanted <= length <= JOINED_BYTES_MAX
        ends = places.offset[first:last] + places.length[first:last]
        assert (places.offset[first + 1 : last + 1] - ends < GAP_BYTES_MIN).all()


@given(blocks, st.sets(st.integers(0, 39)), st.data())
def test_each_wanted_block_is_read_once_and_no_other(
    drawn: list[tuple[bool, int, int]], unwanted: set[int], data: st.DataObject
) -> None:
    places, count = places_of(drawn), len(drawn)
    parts = TableParts(1 << 30, 2)
    table, effects = parts.blocks, parts.effects
    none = np.zeros(count, np.int64)
    marks = Marks.of(places.length, none, np.ones(count, np.bool_))
    rows = np.ones(count, np.int64)
    dataset = DatasetBlocks(1, "d", marks, places.length, rows, str, places=places)
    wanted = [block for block in range(count) if block not in unwanted]
    parts.waiting.requested.update({(1, index): None for index in wanted})
    needed, read, under_way = data.draw(st.permutations(wanted)), list[int](), list[int]()
    requests: list[list[int]] = []
    while needed or under_way:
        while needed and table.start(dataset, needed[0], greedy=False):
            needed.pop(0)
        for fetch in effects:
            if isinstance(fetch, Fetch):
                read.append(fetch.block)
                under_way.append(fetch.key)
                if fetch.is_joined:
                    requests[-1].append(fetch.block)
                else:
                    requests.append([fetch.block])
        effects.clear()
        if under_way:
            which = data.draw(st.integers(0, len(under_way) - 1))
            table.fetched(BlockFetched(under_way.pop(which)))
    assert sorted(read) == wanted
    for request in requests:
        check_request(places, request)
    assert table.fetches._reads == table.fetches._bytes == 0


def neighbours(count: int, length: int, gap: int = 0) -> BlockPlaces:
    return places_of([(False, gap, length)] * count)


def test_small_neighbours_are_joined_up_to_the_limit_and_large_ones_are_not() -> None:
    assert [*neighbours(40, 128 * KIB).following(3)] == [*range(4, 19)]
    assert [*neighbours(4, JOINED_BYTES_MAX // 2).following(0)] == [1]
    assert not [*neighbours(4, JOINED_BYTES_MAX // 2 + 1).following(0)]


def test_a_gap_that_costs_more_than_a_request_is_not_read() -> None:
    assert [*neighbours(4, 80 * KIB, 10 * KIB).following(0)] == [1, 2, 3]
    assert [*neighbours(20, KIB, GAP_BYTES_MIN - 1).following(0)] == [*range(1, 8)]
    assert not [*neighbours(4, 80 * KIB, GAP_BYTES_MIN).following(0)]


def test_holes_in_blocks_are_not_bytes_of_the_request() -> None:
    length = np.full(4, JOINED_BYTES_MAX, np.int64)
    offset, count = np.cumsum(length) - length, np.ones(4, np.int64)
    hole_bytes = length - 100 * KIB
    places = BlockPlaces(np.zeros(4, np.int32), offset, length, count, hole_bytes)
    assert [*places.following(0)] == [1, 2, 3]
    assert places.read_count(0) == 2
