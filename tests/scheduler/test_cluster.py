"""Nodes of a job that lend each other blocks, with memory for a part of the dataset."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler_cluster import Cluster, Shape

SMALL = Shape(
    blocks=256, block_rows=125, window=256, batch=64, arena_bytes=2 << 20, slab_bytes=1 << 15,
    slots_bytes=1 << 19, epochs=1,
)  # fmt: skip
LARGER = Shape(
    blocks=512, block_rows=125, window=256, batch=128, arena_bytes=4 << 20, slab_bytes=1 << 17,
    slots_bytes=1 << 21, lanes=4, epochs=1,
)  # fmt: skip
SCARCE = Shape(
    nodes=2, ranks=1, lanes=1, window=2048, batch=32, blocks=32, shard_blocks=8, block_rows=64,
    row_bytes=4096, arena_bytes=4 << 20, slab_bytes=1 << 19, epochs=1,
)  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SMALL, id="each block is needed by one node"),
        pytest.param(LARGER, id="each block is needed by two nodes"),
        pytest.param(replace(SMALL, lanes=1), id="each block is needed by all nodes"),
        pytest.param(replace(LARGER, arena_bytes=8 << 20), id="there is memory for a half"),
    ],
)
def test_memory_for_a_part_is_enough_to_read_each_block_once(shape: Shape) -> None:
    cluster = Cluster(shape)
    assert (
        shape.nodes * shape.arena_bytes <= shape.blocks * shape.block_rows * shape.row_bytes / 1.9
    )
    assert {block for _, block in cluster.reads} == set(range(shape.blocks))
    assert cluster.epoch_reads(0) <= 1.025, "in the mean over seeds it is 1.01"
    assert cluster.longest_s[0] < 0.2


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SCARCE, id="the open windows are larger than an arena"),
        pytest.param(
            replace(SCARCE, nodes=4, lanes=0, batch=64, arena_bytes=2 << 20), id="in order"
        ),
    ],
)
def test_no_rank_waits_for_room_in_the_memory_of_another_node(shape: Shape) -> None:
    """The ranks go on together: what one node waits for may be what others wait for."""
    cluster = Cluster(shape)
    assert cluster.longest_s[0] < 0.5, cluster.longest_s


@pytest.mark.parametrize("estimate", [1.0, 4.0])
def test_memory_for_most_of_the_dataset_is_used_however_large_the_index_says_blocks_are(
    estimate: float,
) -> None:
    """The four arenas hold three quarters of it."""
    cluster = Cluster(replace(SMALL, epochs=3, arena_bytes=6 << 20, estimate=estimate))
    assert max(map(cluster.epoch_reads, (1, 2))) <= 0.68, "in the mean over seeds it is 0.61"
