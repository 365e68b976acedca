"""How many fetches a node has under way at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dataplane.arena.allocator import Allocator
from dataplane.model.config import JobSpec
from dataplane.model.records import Region
from dataplane.node.dataset import dataset_of
from dataplane.plan.manifest import Manifest
from dataplane.plan.shards import Shard
from dataplane.scheduler.blocks import BlockTable
from dataplane.scheduler.disk import DiskTier
from dataplane.scheduler.events import BlockFetched, Effect, Fetch
from dataplane.scheduler.holdings import Holdings, WaitingTasks
from dataplane.scheduler.records import Moment
from dataplane.scheduler.streams import SharedSlabs, StreamTable

FETCHES = 4
FETCH_BYTES_MIN = 2 << 20
SMALL_FETCHES = 4


def _manifest(lengths: Iterable[int]) -> Manifest:
    sizes = np.array([*lengths], np.int64)
    return Manifest(
        ("all",),
        "arrow",
        pa.schema([("x", pa.int32())]).serialize().to_pybytes(),
        (Shard("s3:///shard", 1 << 40, "tag", len(sizes), Region(0, 0), zero_copy=True),),
        np.zeros(len(sizes), np.int32),
        np.ones(len(sizes), np.int64),
        np.cumsum(sizes) - sizes,
        sizes,
        sizes,
    )


@given(
    st.lists(st.integers(1, 3 * FETCH_BYTES_MIN), min_size=1, max_size=40)
    | st.just([FETCH_BYTES_MIN] * 8),
    st.data(),
)
def test_small_blocks_are_fetched_more_at_once_within_two_bounds(
    lengths: list[int], drawn: st.DataObject
) -> None:
    effects: list[Effect] = []
    allocator, moment = Allocator(64 * FETCH_BYTES_MIN * 4), Moment()
    shared = SharedSlabs(allocator, StreamTable(), moment)
    waiting = WaitingTasks(moment, Holdings(allocator.size_bytes))
    disk = DiskTier(0, 0, shared.readings)
    table = BlockTable(allocator, FETCHES, shared, waiting, disk, effects.append, moment)
    manifest = _manifest(lengths)
    dataset = dataset_of(1, manifest, JobSpec(manifest.fingerprint)).blocks
    needed, under_way = [*range(len(lengths))], dict[int, int]()
    while needed or under_way:
        while needed and table.start(dataset, needed[0], greedy=False):
            fetch = effects[-1]
            assert isinstance(fetch, Fetch)
            under_way[fetch.key] = lengths[needed.pop(0)]
        count, size = len(under_way), sum(under_way.values())
        assert count <= SMALL_FETCHES * FETCHES
        assert count <= FETCHES or size - max(under_way.values()) < FETCHES * FETCH_BYTES_MIN
        if needed:
            assert count >= FETCHES
            assert count == SMALL_FETCHES * FETCHES or size >= FETCHES * FETCH_BYTES_MIN
        key = drawn.draw(st.sampled_from([*under_way]))
        del under_way[key]
        table.fetched(BlockFetched(key))
    assert table.in_flight_count == 0
