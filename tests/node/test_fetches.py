"""How many fetches a node has under way at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dataplane.arena.memfd import Arena
from dataplane.config import JobSpec
from dataplane.model import Region
from dataplane.node.blocks import FETCH_BYTES_MIN, SMALL_FETCHES, BlockTable
from dataplane.node.dataset import dataset_of
from dataplane.plan.manifest import Manifest
from dataplane.plan.shard import Shard

FETCHES = 4


class Quiet:
    """A store, workers and an engine that let everything wait."""

    def __init__(self) -> None:
        self.ends: list[Any] = []

    def fetch(self, *told: Any) -> None:
        told[4].release()
        self.ends.append(told[5])

    def walks(self, dataset: object) -> tuple[()]:
        return ()

    def spare(self) -> tuple[()]:
        return ()

    def block_ready(self, dataset: object, index: int) -> None: ...

    def block_gone(self, dataset: object, index: int) -> None: ...


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


@given(st.lists(st.integers(1, 3 * FETCH_BYTES_MIN), min_size=1, max_size=40), st.data())
def test_small_blocks_are_fetched_more_at_once_within_two_bounds(
    lengths: list[int], drawn: st.DataObject
) -> None:
    quiet = Quiet()
    arena = Arena.create("test", 64 * FETCH_BYTES_MIN * 4)
    arena.reserve = lambda end: None  # type: ignore[method-assign]
    try:
        outside: Any = quiet
        blocks = BlockTable(arena, outside, outside, FETCHES, outside)
        manifest = _manifest(lengths)
        dataset = dataset_of(1, manifest, JobSpec(manifest.fingerprint))
        waiting, under_way = [*range(len(lengths))], dict[Any, int]()
        while waiting or under_way:
            while waiting and blocks.start(dataset, waiting[0], greedy=False):
                under_way[quiet.ends[-1]] = lengths[waiting.pop(0)]
            count, size = len(under_way), sum(under_way.values())
            assert count <= SMALL_FETCHES * FETCHES
            assert count <= FETCHES or size - max(under_way.values()) < FETCHES * FETCH_BYTES_MIN
            if waiting:
                assert count >= FETCHES
                assert count == SMALL_FETCHES * FETCHES or size >= FETCHES * FETCH_BYTES_MIN
            end = drawn.draw(st.sampled_from([*under_way]))
            del under_way[end]
            end(None)
        assert blocks.in_flight_count == 0
    finally:
        arena.close()
