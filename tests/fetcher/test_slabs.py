"""Which slabs are asked for at a second maker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dataplane.fetcher.slabs import LATE_S, RULE, MadeSlabs, _Making
from dataplane.model.records import Region
from dataplane.rpc.fetches import ReadSlab, SlabMaker

LENGTH = 64 << 20
FIRST, SECOND = (SlabMaker(f"host:{n}", "job", 1, bytes(32), "a", f"b{n}") for n in (1, 2))


def making(*, hedge: SlabMaker | None = SECOND, began: float = 10.0) -> _Making:
    return _Making(ReadSlab(1, FIRST, hedge, b"x", b"", 1, Region(0, LENGTH)), began)


@pytest.fixture
def slabs() -> Iterator[MadeSlabs]:
    made = MadeSlabs(lambda _: None)
    yield made
    made.close()


def test_what_waits_for_a_silent_maker_is_hedged_without_a_budget(slabs: MadeSlabs) -> None:
    assert not slabs._is_to_hedge(making(), 10.0 + LATE_S / 2)
    assert not slabs._is_to_hedge(making(hedge=None), 10.0 + LATE_S)
    for _ in range(9):
        assert slabs._is_to_hedge(making(), 10.0 + LATE_S)
    hedged = making()
    hedged.is_hedged = True
    assert not slabs._is_to_hedge(hedged, 10.0 + LATE_S)


def test_a_maker_that_answers_others_is_hedged_within_the_budget(slabs: MadeSlabs) -> None:
    slabs._answered_at[FIRST.address] = 10.5
    assert not slabs._is_to_hedge(making(), 10.0 + LATE_S)
    for _ in range(40):
        slabs._hedging.ended(LENGTH, 1.0)
    assert not slabs._is_to_hedge(making(), 10.0 + 0.99 * RULE.late_factor)
    late = 10.0 + RULE.late_factor
    assert [slabs._is_to_hedge(making(), late) for _ in range(3)] == [True, True, False]


def test_a_maker_that_has_answered_and_is_silent_since_needs_no_budget(slabs: MadeSlabs) -> None:
    slabs._answered_at[FIRST.address] = 12.0
    assert not slabs._is_to_hedge(making(), 12.0 + 0.99 * LATE_S)
    for _ in range(9):
        assert slabs._is_to_hedge(making(), 12.0 + LATE_S)


def test_no_slab_is_late_before_a_fifth_of_a_second(slabs: MadeSlabs) -> None:
    for _ in range(RULE.reads_min):
        slabs._hedging.ended(LENGTH, 0.001)
    assert not slabs._is_to_hedge(making(), 10.19)
    assert slabs._is_to_hedge(making(), 10.21)
