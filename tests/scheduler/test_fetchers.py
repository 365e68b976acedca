"""How many fetchers there are: in a simulated node, whose fetchers and reads are numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataplane.scheduler.autoscaler import BUSY_SHARE, CALM_LOOKS, FetcherCount, FetchLook

looks = st.builds(FetchLook, st.floats(0, 200), st.integers(0, 999), st.integers(0, 999))


def settled(count: FetcherCount, demand: float, looks: int = 3 * CALM_LOOKS) -> FetcherCount:
    """After looks in which reads take so many processors, and a fetcher one at most."""
    for _ in range(looks):
        count = count.after(FetchLook(min(demand, count.count), 16, 0))
    return count


@given(most=st.integers(1, 128), seen=st.lists(looks, max_size=300))
def test_there_are_never_none_and_never_more_than_allowed(most: int, seen: list[FetchLook]) -> None:
    count = FetcherCount(most)
    for look in seen:
        count = count.after(look)
        assert 1 <= count.count <= most


@given(most=st.integers(1, 128), demand=st.floats(0, 200))
def test_no_fetcher_is_the_limit_if_another_may_be_started(most: int, demand: float) -> None:
    count = settled(FetcherCount(most), demand)
    assert count.count == most or demand < BUSY_SHARE * count.count
    # Not many more than needed, and the number does not swing.
    assert count.count <= max(1, 2 * demand / BUSY_SHARE)
    assert {settled(count, demand, looks).count for looks in (1, 50, CALM_LOOKS)} == {count.count}


def test_reads_that_find_no_thread_get_more_fetchers_however_idle_these_are() -> None:
    assert FetcherCount(8).after(FetchLook(0.01, 64, 10)).count == 2


def test_busy_fetchers_are_doubled_at_each_look() -> None:
    count, counts = FetcherCount(12), list[int]()
    for _ in range(5):
        count = count.after(FetchLook(0.9 * count.count, 16, 0))
        counts.append(count.count)
    assert counts == [2, 4, 8, 12, 12]


def test_a_pause_ends_none_and_a_long_one_ends_all_but_one() -> None:
    busy = settled(FetcherCount(8), 3.0)
    for _ in range(CALM_LOOKS // 2):
        busy = busy.after(FetchLook(0.0, 0, 0))
    assert busy.count > 3
    for _ in range(2 * CALM_LOOKS):
        busy = busy.after(FetchLook(0.0, 0, 0))
    assert busy.count == 1
