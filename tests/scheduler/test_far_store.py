"""How soon enough is in flight from a store that is far away, and that no more is than helps."""

from __future__ import annotations

import pytest
from scheduler_store import FETCH_COUNT, MIB, FarStoreNode, Link


@pytest.mark.parametrize(
    ("block_bytes", "wanted"), [(4 * MIB, 4e9), (256 << 10, 0.6e9)], ids=["large", "small"]
)
def test_a_store_without_a_limit_gives_what_the_trainer_takes_within_a_second(
    block_bytes: int, wanted: float
) -> None:
    """At first 16 large reads, or 64 small ones, may be in flight: 1.3 GB/s, or 0.3 GB/s."""
    far = Link(0.05)
    node = FarStoreNode(far, block_bytes, wanted)
    node.run(1.2)
    assert node.first_taken < 1.5 * far.latency_s, "only its own blocks are read before it"
    begun = node.first_taken
    assert node.rate(begun, begun + 0.15) < 0.8 * wanted, "so many at first would be enough"
    assert node.rate(begun + 0.5, begun + 1.0) > 0.95 * wanted
    assert node.most_in_flight(begun, begun + 0.5) >= wanted * far.latency_s


@pytest.mark.parametrize("link", [Link(0.05, 1e9), Link(0.001, 1e9), Link(0.05, 1e8)])
def test_a_store_that_gives_no_more_gets_no_more_reads(link: Link) -> None:
    """Twice as many as at first are tried; four times as many only by mistake."""
    node = FarStoreNode(link)
    seconds = 6.0 if link.bytes_per_s > 1e8 else 15.0
    node.run(seconds)
    assert node.most_in_flight(0, seconds) <= 4 * FETCH_COUNT * 4 * MIB
    assert node.most_in_flight(seconds - 0.5, seconds) <= 2 * FETCH_COUNT * 4 * MIB
    assert node.rate(1.0, seconds) > 0.9 * link.bytes_per_s
