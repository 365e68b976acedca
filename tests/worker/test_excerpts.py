"""Rows gathered from excerpts of blocks are those of the blocks, to the byte."""

from __future__ import annotations

import itertools

import arrow_columns
import numpy as np
import pyarrow as pa
import pytest
from arrow_columns import Leaf
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.arena.slab_layout import row_numbers_bytes
from dataplane.model.errors import RowOutOfBounds
from dataplane.model.records import ColumnOptions, ColumnSpec
from dataplane.rpc.messages import Batch
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns
from dataplane.worker import row_layout
from dataplane.worker.columns import BlockColumns, RowLayout, open_block
from dataplane.worker.excerpts import open_excerpt, places_of, write_excerpt
from dataplane.worker.gather import Gather

RowIndex = np.ndarray[tuple[int, int], np.dtype[np.int32]]


def excerpt_of(
    block: BlockColumns, specs: tuple[ColumnSpec, ...], numbers: np.ndarray, how: RowLayout | None
) -> tuple[BlockColumns, np.ndarray]:
    """As a worker writes it into the arena, with exactly the room that it needs, and finds it."""
    small = bytearray(row_numbers_bytes(len(numbers)))
    small[: 4 * len(numbers)] = numbers.astype(np.int32).tobytes()
    need = write_excerpt(block, specs, memoryview(small), len(numbers))
    region = bytearray(b"\xaa" * need)
    region[: 4 * len(numbers)] = numbers.astype(np.int32).tobytes()
    assert write_excerpt(block, specs, memoryview(region), len(numbers)) == need
    return open_excerpt(memoryview(bytes(region)), specs, how, len(numbers))


def slab_of(
    specs: tuple[ColumnSpec, ...], blocks: list[BlockColumns], index: RowIndex, rows: int
) -> tuple[bytes, object]:
    slab = bytearray(1 << 18)
    batches = [Batch(0, rows // 2, rows // 2), Batch(1, rows - rows // 2, rows - rows // 2)]
    told = Gather(specs, blocks, index, batches).into(memoryview(slab))
    return bytes(slab), told


@settings(max_examples=70)
@given(st.data(), st.integers(2, 14).flatmap(lambda rows: arrow_columns.batches(rows, 4)))
def test_a_slab_from_excerpts_and_whole_blocks_equals_one_from_whole_blocks(
    data: st.DataObject, drawn: tuple[pa.RecordBatch, tuple[Leaf, ...]]
) -> None:
    source, leaves = drawn
    if data.draw(st.booleans(), "enough to pack"):
        for i, dtype in enumerate(("float64", "int8", "uint16", "float32")):
            source = source.append_column(
                f"small{i}", pa.array(np.arange(source.num_rows).astype(dtype))
            )
    plan = plan_columns(
        source.schema, ColumnOptions(fill_null=tuple((leaf.name, 3.0) for leaf in leaves))
    )
    how = row_layout.plan_row_layout(plan.specs) if data.draw(st.booleans(), "pack") else None
    cut = data.draw(st.integers(1, source.num_rows - 1))
    blocks: list[BlockColumns] = []
    for a, b in itertools.pairwise((0, cut, source.num_rows)):
        batch = canonical(source.slice(a, b - a), plan, "url")
        if how is None and data.draw(st.booleans(), "in place"):
            blocks.append(open_block(batch, plan.specs))
            continue
        region = memoryview(bytearray(row_layout.stored_bytes(batch, how)))
        row_layout.store(batch, plan.specs, how, region)
        blocks.append(row_layout.open_stored(region, plan.specs, how))
    of = st.integers(0, 1)
    drawn_rows = data.draw(st.lists(of, min_size=1, max_size=12)), data.draw(st.randoms())
    index = np.array(
        [(b, drawn_rows[1].randrange(blocks[b].rows)) for b in drawn_rows[0]], np.int32
    )
    numbers: list[np.ndarray | None] = [None, None]
    excerpts = list(blocks)
    for b in range(2):
        own = set(index[index[:, 0] == b, 1].tolist())
        own |= data.draw(st.sets(st.integers(0, blocks[b].rows - 1)), "rows of other slabs")
        if own and data.draw(st.booleans(), "excerpt"):
            excerpts[b], numbers[b] = excerpt_of(blocks[b], plan.specs, np.array(sorted(own)), how)
    places = places_of(index, numbers)
    assert slab_of(plan.specs, excerpts, places, len(index)) == slab_of(
        plan.specs, blocks, index, len(index)
    )


def test_a_row_that_an_excerpt_lacks_is_an_error_and_not_another_row() -> None:
    index = np.array([(0, 5), (1, 3), (0, 7)], np.int32)
    with pytest.raises(RowOutOfBounds) as caught:
        places_of(index, [np.array([1, 5, 6]), None])
    assert caught.value.nouns["row"] == 2
    assert places_of(index, [np.array([1, 5, 7]), None]).tolist() == [[0, 1], [1, 3], [0, 2]]


def test_damaged_offsets_are_found_before_arrow_follows_them() -> None:
    offsets = np.array([0, 2, 1 << 40, 6], np.int64)
    array = pa.Array.from_buffers(
        pa.large_string(), 3, [None, pa.py_buffer(offsets), pa.py_buffer(b"abcdef")]
    )
    batch = pa.record_batch([array], names=["s"])
    plan = plan_columns(batch.schema, ColumnOptions())
    block = open_block(batch, plan.specs)
    with pytest.raises(RowOutOfBounds):
        excerpt_of(block, plan.specs, np.array([1]), None)
