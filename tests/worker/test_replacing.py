"""Rows whose images cannot be decoded: which rows take their places."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plain import substitute

from dataplane.changes import TakenDocument
from dataplane.errors import ImageError
from dataplane.model import Cut, ImageSpec, Region
from dataplane.rpc import tasks
from dataplane.worker.apart import OpenBlock
from dataplane.worker.columns import open_block
from dataplane.worker.replacing import with_replaced

NOWHERE = Region(0, 0)


def task(seed: int, taken_out: list[list[int]]) -> tasks.Assemble:
    flat = tuple(TakenDocument(row, 0) for rows in taken_out for row in rows)
    image = ImageSpec("jpg", 8, 8, Cut.WHOLE, replaces=True)
    return tasks.Assemble(
        1, tuple(range(len(taken_out))), NOWHERE, (), 1, NOWHERE, tasks.Render((image,), seed, 0),
        taken_out=flat, taken_out_counts=tuple(map(len, taken_out)) if flat else (),
    )  # fmt: skip


def block(number: int, rows: int, numbers=None) -> OpenBlock:
    batch = pa.record_batch({"x": pa.array([0] * rows, pa.int64())})
    origin = tasks.Origin(f"s3://b/{number}", number, 1000 * number)
    return OpenBlock(open_block(batch, ()), None, origin, None, numbers)


def checked_by(bad: list[set[int]], blocks: list[OpenBlock]):
    def check(of: OpenBlock, row: int) -> ImageError | None:
        is_bad = row in bad[next(at for at, each in enumerate(blocks) if each is of)]
        return ImageError(f"row {row}", reason="empty", column="jpg") if is_bad else None

    return check


@st.composite
def jobs(draw):
    """Rows of some blocks, which of them are bad, and which were taken out: one row is left."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    bad, gone, index = [], [], []
    for at, size in enumerate(sizes):
        kinds = draw(st.lists(st.sampled_from("..bg"), min_size=size, max_size=size))
        kinds[draw(st.integers(0, size - 1))] = "."
        bad.append({row for row, kind in enumerate(kinds) if kind == "b"})
        gone.append([row for row, kind in enumerate(kinds) if kind == "g"])
        live = [row for row in range(size) if kinds[row] != "g"]
        index += [(at, row) for row in draw(st.lists(st.sampled_from(live), max_size=8))]
    return sizes, bad, gone, draw(st.permutations(index))


@given(of=jobs(), seed=st.integers(0, 2**64 - 1))
def test_the_row_is_the_first_of_its_sequence_whatever_else_is_in_the_slab(of, seed) -> None:
    sizes, bad, gone, index = of
    blocks = [block(at, size) for at, size in enumerate(sizes)]
    rows = np.array(index, np.int32).reshape(-1, 2)
    before = rows.copy()
    found, told = with_replaced(task(seed, gone), blocks, rows, checked_by(bad, blocks))
    expected = [
        (at, substitute(seed, at, 1000 * at + row, sizes[at], {*bad[at], *gone[at]}))
        if row in bad[at]
        else (at, row)
        for at, row in index
    ]
    assert list(map(tuple, found.tolist())) == expected
    replaced = {
        (one.shard, one.row - 1000 * one.shard): one.instead - 1000 * one.shard for one in told
    }
    assert replaced == {
        pair: other for pair, (_, other) in zip(index, expected, strict=True) if pair[1] != other
    }
    assert len(told) == len(replaced), "each row is told once"
    assert (rows == before).all(), "the trainer's memory is only read"


def test_without_a_row_that_can_be_decoded_the_error_says_so() -> None:
    blocks = [block(0, 3)]
    rows = np.array([(0, 1)], np.int32)
    check = checked_by([{0, 1}], blocks)
    with pytest.raises(ImageError, match="none of the 3 rows of its block can be decoded"):
        with_replaced(task(7, [[2]]), blocks, rows, check)


def test_an_excerpt_has_no_other_rows_and_the_error_says_what_helps() -> None:
    blocks = [block(0, 3, numbers=np.array([0, 1, 2]))]
    rows = np.array([(0, 1)], np.int32)
    with pytest.raises(ImageError, match="raise block_arena_bytes") as caught:
        with_replaced(task(7, [[]]), blocks, rows, checked_by([{1}], blocks))
    assert caught.value.column == "jpg"
