"""Which blocks are read in one request."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataplane.arena.allocator import Allocator
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.dataset import (
    GAP_BYTES_MIN,
    JOINED_BYTES_MAX,
    BlockPlaces,
    DatasetBlocks,
    Marks,
)
from dataplane.scheduler.disk import DiskTier
from dataplane.scheduler.events import BlockFetched, Effect, Fetch
from dataplane.scheduler.holdings import Holdings, WaitingTasks
from dataplane.scheduler.records import Moment
from dataplane.scheduler.streams import SharedSlabs, StreamTable

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
    effects: list[Effect] = []
    allocator, moment = Allocator(1 << 30), Moment()
    shared = SharedSlabs(allocator, StreamTable(), moment)
    waiting = WaitingTasks(moment, Holdings(allocator.size_bytes))
    disk = DiskTier(0, 0, shared.readings)
    table = BlockTable(allocator, 2, shared, waiting, disk, effects.append, moment)
    none = np.zeros(count, np.int64)
    marks = Marks.of(places.length, none, np.ones(count, np.bool_))
    rows = np.ones(count, np.int64)
    dataset = DatasetBlocks(1, "d", marks, places.length, rows, str, places=places)
    wanted = [block for block in range(count) if block not in unwanted]
    waiting.requested.update({(1, index): None for index in wanted})
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
