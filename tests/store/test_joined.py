"""Which reads go into one request: invariants for any reads, and the limits."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dataplane.model import Region
from dataplane.store.joined import GAP_BYTES_MIN, JOINED_BYTES_MAX, joined_reads

KIB = 1 << 10
offsets = st.integers(0, 4 * JOINED_BYTES_MAX)
lengths = st.integers(0, 300 * KIB) | st.sampled_from([0, JOINED_BYTES_MAX, JOINED_BYTES_MAX + 1])


def end(region: Region) -> int:
    return region.offset + region.length


@given(st.lists(st.builds(Region, offsets, lengths), max_size=30))
def test_every_read_is_in_one_request_that_contains_it(wanted: list[Region]) -> None:
    found = joined_reads(wanted)
    assert sorted(at for one in found for at in one.reads) == list(range(len(wanted)))
    for one in found:
        reads = [wanted[at] for at in one.reads]
        assert one.place.offset == reads[0].offset
        assert end(one.place) == end(reads[-1])
        assert len(reads) == 1 or one.place.length <= JOINED_BYTES_MAX
        for left, right in pairwise(reads):
            assert 0 <= right.offset - end(left) < GAP_BYTES_MIN
    firsts = [min(one.reads) for one in found]
    assert firsts == sorted(firsts)


def neighbours(count: int, length: int, gap: int = 0) -> list[Region]:
    return [Region(at * (length + gap), length) for at in range(count)]


def test_small_neighbours_are_joined_up_to_the_limit() -> None:
    found = joined_reads(neighbours(40, 64 * KIB))
    assert [len(one.reads) for one in found] == [16, 16, 8]
    assert found[0].place == Region(0, JOINED_BYTES_MAX)
    assert [len(one.reads) for one in joined_reads(neighbours(3, 400 * KIB))] == [2, 1]
    assert [len(one.reads) for one in joined_reads(neighbours(3, 600 * KIB))] == [1, 1, 1]


def test_gaps_that_cost_more_than_a_request_are_not_read() -> None:
    assert len(joined_reads(neighbours(2, KIB, GAP_BYTES_MIN - 1))) == 1
    assert len(joined_reads(neighbours(2, KIB, GAP_BYTES_MIN))) == 2


def test_the_read_asked_for_first_is_in_the_first_request() -> None:
    far = 10 * JOINED_BYTES_MAX
    wanted = [Region(far, KIB), Region(KIB, KIB), Region(far - KIB, KIB), Region(0, KIB)]
    assert [one.reads for one in joined_reads(wanted)] == [(2, 0), (3, 1)]


def test_reads_of_the_same_bytes_are_requests_of_their_own() -> None:
    assert len(joined_reads([Region(0, KIB), Region(KIB - 1, KIB), Region(0, KIB)])) == 3
