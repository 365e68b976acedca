"""The layout of a slab: pieces are aligned and disjoint, and are read where they were written."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataplane.arena import slab_layout
from dataplane.arena.slab_layout import ALIGN_BYTES, TEXTS
from dataplane.model.records import ColumnSpec, Kind, Region
from dataplane.rpc.messages import Column

VARIABLE = [kind for kind in Kind if kind not in {Kind.FIXED, Kind.ARRAY}]
DTYPES = {Kind.BYTES: "uint8", Kind.STRING: "uint8", Kind.OBJECT: ""}
batches = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70)), min_size=1, max_size=5)


@given(st.sampled_from(VARIABLE), batches, st.integers(0, 3))
def test_pieces_are_aligned_and_follow_one_another(
    kind: Kind, told: list[tuple[int, int]], lines: int
) -> None:
    spec = ColumnSpec("x", kind, DTYPES.get(kind, "int32"))
    rows, width = np.array(told, np.int64).T
    sizes = slab_layout.values_bytes(spec, width, rows)
    sides = slab_layout.side_bytes(kind, rows)
    values, begins, ends = slab_layout.one_after_other(sizes, sides)
    begin = lines * ALIGN_BYTES
    placed = [tuple((begin + each).tolist()) for each in (values, begins)]
    column = Column(placed[0], placed[1], tuple(width.tolist()))
    end = begin
    for i, (count, _) in enumerate(told):
        for offset, length in slab_layout.pieces(spec, column, i, count):
            assert offset % ALIGN_BYTES == 0
            assert end <= offset < end + ALIGN_BYTES
            end = offset + length
        assert end <= begin + ends[i + 1] < end + ALIGN_BYTES


@given(batches, st.sampled_from(sorted(TEXTS)))
def test_texts_are_read_where_their_pieces_lie(told: list[tuple[int, int]], kind: Kind) -> None:
    spec = ColumnSpec("x", kind, "uint8")
    rows, width = np.array(told, np.int64).T
    sizes, sides = slab_layout.values_bytes(spec, width, rows), slab_layout.side_bytes(kind, rows)
    values, begins, ends = slab_layout.one_after_other(sizes, sides)
    memory = np.zeros(int(ends[-1]), np.uint8)
    column = Column(tuple(values.tolist()), tuple(begins.tolist()), tuple(width.tolist()))
    for i, (count, size) in enumerate(told):
        text, offsets, valid = slab_layout.texts(memory, column, i, count)
        assert (len(text), len(offsets), len(valid)) == (size, count + 1, count)
        text[:], offsets[:], valid[:] = 1, -1, 2
    assert (memory == 1).sum() == width.sum()
    assert (memory == 255).sum() == 8 * (rows + 1).sum()
    assert (memory == 2).sum() == rows.sum()


@given(st.integers(0, 1000), st.integers(1, 50))
def test_a_slot_is_a_slab_and_behind_it_the_row_index(rows: int, pages: int) -> None:
    slot = Region(4096, 4096 * pages)
    slab, index = slab_layout.in_slot(slot, rows)
    assert (slab.offset, slab.offset + slab.length) == (slot.offset, index.offset)
    assert index.length == 8 * rows
    assert index.offset % ALIGN_BYTES == 0
    assert 0 <= slot.offset + slot.length - index.offset - index.length < ALIGN_BYTES
