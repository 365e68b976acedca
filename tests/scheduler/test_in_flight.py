"""How many reads are in flight, with a store that is a rate, a latency and a cap per connection."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from block_tables import TableParts, mapped_blocks
from hypothesis import given
from hypothesis import strategies as st

from dataplane.scheduler.events import BlockFetched, Fetch
from dataplane.scheduler.in_flight import (
    FETCH_BYTES_MIN,
    GROWTH_MAX,
    RANGE_BYTES,
    FetchesInFlight,
    ReadLook,
    ReadsInFlight,
)

LOOK_S = 0.5
MINUTE = round(60 / LOOK_S)
looks = st.builds(ReadLook, st.floats(0, 1e10), st.integers(0, 10_000), st.booleans())


@dataclass(frozen=True)
class Link:
    """A store: what it gives in all, its first byte's latency, and what a connection gets."""

    bytes_per_s: float
    latency_s: float
    connection_bytes_per_s: float

    def reads_per_s(self, in_flight: int, length: int) -> float:
        share = min(self.connection_bytes_per_s, self.bytes_per_s / in_flight)
        return min(in_flight / (self.latency_s + length / share), self.bytes_per_s / length)


LINKS = {
    "a server in this rack": Link(1.2e9, 0.0005, 1e9),
    "S3 at 10 Gbit/s": Link(1.2e9, 0.03, 90e6),
    "S3 at 25 Gbit/s, far away": Link(3e9, 0.1, 90e6),
    "S3 at 100 Gbit/s": Link(12e9, 0.03, 90e6),
    "a home line": Link(12e6, 0.05, 12e6),
}


def settled(
    reads: ReadsInFlight, link: Link, minutes: float = 2, length: int = RANGE_BYTES
) -> ReadsInFlight:
    """After so long with a trainer that takes all that comes."""
    owed = 0.0
    for _ in range(round(minutes * MINUTE)):
        owed += LOOK_S * link.reads_per_s(reads.limit, length)
        ended = int(owed)
        owed -= ended
        reads = reads.after(ReadLook(ended * length / LOOK_S, ended, is_short=True))
    return reads


def look(fetches: FetchesInFlight, now: float, *, is_awaited: bool) -> None:
    """Half a second or so has passed, and as many reads as may have begun."""
    fetches.settled(now, is_awaited=is_awaited)
    fetches.ticked(now, is_awaited=is_awaited)


@given(first=st.integers(1, 64), seen=st.lists(looks, max_size=300))
def test_there_are_never_fewer_than_at_first_nor_more_than_allowed(
    first: int, seen: list[ReadLook]
) -> None:
    reads = ReadsInFlight.at_first(first)
    for look in seen:
        reads = reads.after(look)
        assert first <= reads.limit <= GROWTH_MAX * first


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("length", [256 << 10, RANGE_BYTES])
def test_a_store_gives_nearly_what_it_can_and_no_more_reads_wait_than_that_takes(
    link: Link, length: int
) -> None:
    reads = settled(ReadsInFlight.at_first(16), link, length=length)
    limit = reads.limit if not reads.trial else reads.limit // 2
    best = link.reads_per_s(reads.most, length)
    assert link.reads_per_s(limit, length) >= 0.8 * best
    # Half as many would bring less, unless it is as many as at first.
    assert limit == 16 or link.reads_per_s(limit // 2, length) < 0.9 * best


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_the_number_does_not_swing(link: Link) -> None:
    """Attempts become rare, since each waits twice as long as the last."""
    reads = settled(ReadsInFlight.at_first(16), link)
    limits, before = [], reads.limit
    for _ in range(30 * MINUTE):
        reads = settled(reads, link, 1 / MINUTE)
        limits.append(reads.limit)
    changes = sum(a != b for a, b in zip([before, *limits], limits, strict=False))
    assert changes <= 14


def test_many_connections_are_found_within_seconds() -> None:
    far = LINKS["S3 at 100 Gbit/s"]
    assert settled(ReadsInFlight.at_first(16), far, 0.25).limit >= 128


def test_more_reads_that_bring_nothing_end_the_start_and_are_given_up() -> None:
    """The rates of rounds with 16, 32, 64 and 128 reads, after one of reads of both kinds each."""
    reads, limits = ReadsInFlight.at_first(16), list[int]()
    for rate in (100, 100, 190, 190, 200, 200):
        reads = reads.after(ReadLook(rate, 64, is_short=True))
        limits.append(reads.limit)
    assert limits == [16, 32, 32, 64, 64, 32]
    assert not reads.is_starting


def test_rounds_in_which_no_trainer_waits_say_nothing_of_the_store() -> None:
    reads = ReadsInFlight.at_first(16)
    for _ in range(10):
        reads = reads.after(ReadLook(1.0, 64, is_short=False))
    assert (reads.limit, reads.is_starting) == (16, True)
    for rate in (100, 100, 100, 190):
        reads = reads.after(ReadLook(rate, 64, is_short=True))
    assert reads.limit == 64


def test_only_a_waiting_trainer_gets_more_reads_in_flight() -> None:
    fetches = FetchesInFlight(4)
    for number in range(100):
        keys = itertools.count()
        while fetches.may_begin():
            fetches.began(next(keys), RANGE_BYTES)
        look(fetches, float(number), is_awaited=False)
        for key in range(4):
            fetches.ended(key, RANGE_BYTES)
    assert fetches.limit == 4


def test_a_long_block_counts_as_the_ranges_that_it_is_read_in() -> None:
    fetches = FetchesInFlight(4)
    fetches.began(1, 3 * RANGE_BYTES)
    assert fetches.may_begin()
    fetches.began(2, RANGE_BYTES)
    assert not fetches.may_begin()
    fetches.ended(2, RANGE_BYTES)
    fetches.began(3, FETCH_BYTES_MIN)
    fetches.ended(1, 3 * RANGE_BYTES)
    assert fetches.may_begin()


def test_blocks_that_are_read_together_count_as_one_read_until_all_have_ended() -> None:
    fetches = FetchesInFlight(1)
    fetches.began(1, FETCH_BYTES_MIN)
    fetches.began(2, FETCH_BYTES_MIN, joined_to=1)
    assert not fetches.may_begin()
    for key in (2, 1):
        assert not fetches.may_begin()
        fetches.ended(key, FETCH_BYTES_MIN)
    assert fetches.may_begin()


def test_each_hole_in_a_block_is_one_more_read() -> None:
    """Of the holes of two that are read together, none lies between them."""
    fetches = FetchesInFlight(4)
    fetches.began(1, RANGE_BYTES, read_count=2)
    fetches.began(2, RANGE_BYTES, read_count=2, joined_to=1)
    assert fetches.may_begin()
    fetches.began(3, RANGE_BYTES)
    assert not fetches.may_begin()


def test_a_rate_is_bytes_a_second_however_far_apart_the_looks_are() -> None:
    """A store that gives the same with any number of reads: more are tried, and never kept."""
    fetches, now, limits = FetchesInFlight(4), 0.0, set[int]()
    look(fetches, now, is_awaited=True)
    keys, oldest = itertools.count(), itertools.count()
    for at in range(400):
        seconds = (0.5, 2.0, 1.0)[at % 3]
        while fetches.may_begin():
            fetches.began(next(keys), RANGE_BYTES)
        for _ in range(int(40 * seconds)):
            fetches.ended(next(oldest), RANGE_BYTES)
            fetches.began(next(keys), RANGE_BYTES)
        now += seconds
        look(fetches, now, is_awaited=True)
        limits.add(fetches.limit)
    assert limits == {4, 8}


FETCHES = 4
SMALL_FETCH_BYTES = 2 << 20
SMALL_FETCHES = 4


@given(
    st.lists(st.integers(1, 3 * SMALL_FETCH_BYTES), min_size=1, max_size=40)
    | st.just([SMALL_FETCH_BYTES] * 8),
    st.data(),
)
def test_small_blocks_are_fetched_more_at_once_within_two_bounds(
    lengths: list[int], drawn: st.DataObject
) -> None:
    parts, dataset = TableParts(64 * SMALL_FETCH_BYTES * 4, FETCHES), mapped_blocks(lengths)
    table = parts.blocks
    needed, under_way = [*range(len(lengths))], dict[int, int]()
    while needed or under_way:
        while needed and table.start(dataset, needed[0], greedy=False):
            fetch = parts.effects[-1]
            assert isinstance(fetch, Fetch)
            under_way[fetch.key] = lengths[needed.pop(0)]
        count, size = len(under_way), sum(under_way.values())
        assert count <= SMALL_FETCHES * FETCHES
        assert count <= FETCHES or size - max(under_way.values()) < FETCHES * SMALL_FETCH_BYTES
        if needed:
            assert count >= FETCHES
            assert count == SMALL_FETCHES * FETCHES or size >= FETCHES * SMALL_FETCH_BYTES
        key = drawn.draw(st.sampled_from([*under_way]))
        del under_way[key]
        table.fetched(BlockFetched(key))
    assert table.in_flight_count == 0
