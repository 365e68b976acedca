"""The places of restart indexes, and the blocks that have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from block_tables import TableParts, mapped_blocks
from hypothesis import given
from hypothesis import strategies as st
from kernels import without
from pictures import drawn, encoded

from dataplane.model.records import ColumnSpec, Cut, ImageSpec, Kind, Region
from dataplane.rpc import tasks
from dataplane.scheduler.dataset import DatasetBlocks
from dataplane.scheduler.events import ClearRestartIndexes
from dataplane.scheduler.streams import StreamTable
from dataplane.transforms.pixels_library import maker
from dataplane.transforms.restart_indexes import places, restart_index_bytes
from dataplane.worker.columns import open_block
from dataplane.worker.image_decoding import SlabImages
from dataplane.worker.rows import Rows

BLOCK_BYTES = 1 << 20
COUNT = 8


@given(st.lists(st.lists(st.integers(0, 5000), max_size=20), min_size=1, max_size=4))
def test_restart_indexes_are_within_those_of_their_block_and_apart(blocks: list[list[int]]) -> None:
    regions, place = [], 1 << 20
    for sizes in blocks:
        regions.append((place, restart_index_bytes(sum(sizes))))
        place += 1 << 20
    of = np.repeat(np.arange(len(blocks)), [len(sizes) for sizes in blocks])
    lengths = np.array([size for sizes in blocks for size in sizes], np.int64)
    starts = np.array(
        [start for sizes in blocks for start in np.cumsum([0, *sizes])[:-1]], np.int64
    )
    found = places(np.array(regions, np.int64), of, starts, lengths)
    assert (found[:, 1] >= lengths // 16 - 16).all()
    for block, (first, room) in enumerate(regions):
        end = first
        for address, length in found[of == block].tolist():
            if not length:
                continue
            assert address % 8 == 0
            assert first <= end <= address <= address + length <= first + room
            end = address + length


def test_images_of_a_block_without_restart_indexes_have_none() -> None:
    regions = np.array([(0, 0), (4096, 64)], np.int64)
    of = np.array([0, 1, 1])
    starts, lengths = np.array([0, 0, 900]), np.array([900, 900, 900])
    assert places(regions, of, starts, lengths).tolist() == [[0, 0], [4096, 56], [0, 0]]


def test_crops_use_restart_indexes_of_other_epochs_and_columns() -> None:
    if maker().missing:
        without(maker().missing)
    rows, specs = 6, [ColumnSpec(name, Kind.BYTES, "") for name in "ab"]
    images = [
        ImageSpec(name, 16, 16, Cut.RANDOM, scale=(0.08, 1.0), ratio=(0.75, 1.3)) for name in "ab"
    ]
    batch = pa.record_batch(
        [
            pa.array([encoded(drawn(200, 300, seed=seed + i)) for i in range(rows)], "large_binary")
            for seed in (0, rows)
        ],
        names=["a", "b"],
    )
    block, index = open_block(batch, specs), np.array([(0, row) for row in range(rows)], np.int32)
    kept = np.zeros(restart_index_bytes(batch.nbytes), np.uint8)

    def drawn_in(epoch: int, restart_indexes: Sequence[np.ndarray | None]) -> list[bytes]:
        render = tasks.Render(tuple(images), 1, epoch)
        origins = [tasks.Origin("s3://shard", 0, 0)]
        pictures = SlabImages(render, specs, origins, restart_indexes, index[:, 1])
        out = np.zeros((2, rows * 16 * 16 * 3), np.uint8)
        for at in range(2):
            pictures.write(at, [block], index, Rows([block], index), out[at])
        return [bytes(each) for each in out]

    alone = [drawn_in(epoch, [None]) for epoch in range(4)]
    assert [drawn_in(epoch, [kept]) for epoch in range(4)] == alone
    for column, before in ((0, 0), (1, block.values[0].length)):
        sizes = np.array([len(value.as_py()) for value in batch.column(column)])
        regions = np.array([(kept.ctypes.data, len(kept))])
        starts = before + np.cumsum(sizes) - sizes
        for address, length in places(regions, np.zeros(rows, np.int64), starts, sizes).tolist():
            first = address - kept.ctypes.data
            assert 0 < kept[first : first + 4].view(np.uint32)[0] * 11 < length


class Streams(StreamTable):
    """The consumers, each of which crops or does not."""

    def __init__(self, *, crops: bool) -> None:
        super().__init__()
        self._crops = crops

    def crops(self, dataset: DatasetBlocks) -> bool:
        return self._crops


@pytest.mark.parametrize(
    ("column", "arena_bytes", "crops", "expected"),
    [
        (pa.large_binary(), 1 << 20, True, COUNT),
        (pa.large_binary(), 1 << 20, False, 0),
        (pa.int32(), 1 << 20, True, 0),
        (pa.large_binary(), 1 << 19, True, 0),  # they would not stay
    ],
)
def test_blocks_of_images_have_restart_indexes_while_a_job_crops(
    column: pa.DataType, arena_bytes: int, crops: bool, expected: int
) -> None:
    parts = TableParts(arena_bytes, 4, Streams(crops=crops))
    table, sizes = parts.blocks, [BLOCK_BYTES] * COUNT
    dataset = mapped_blocks(sizes, "file:///shard", column, arena_bytes=arena_bytes)
    for index in range(COUNT):
        assert table.start(dataset, index, greedy=False)
    found = {int(key): table.block(int(key)).restart_indexes for key in dataset.marks.keys}
    given = {key: region for key, region in found.items() if region is not None}
    assert len({region.offset for region in given.values()}) == len(given) == expected
    assert all(region.length == restart_index_bytes(BLOCK_BYTES) for region in given.values())
    assert parts.effects == [ClearRestartIndexes(key, region) for key, region in given.items()]
    table.forget_dataset(dataset)
    assert table.room.of_slab(arena_bytes, ()) == Region(0, arena_bytes)
