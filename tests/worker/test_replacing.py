"""Rows that cannot be decoded, such as those of images: which rows take their places."""

from __future__ import annotations

import io
from collections import Counter
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from plan.plain import substitute

from dataplane.model.changes import TakenDocument
from dataplane.model.errors import ImageError
from dataplane.model.records import ColumnSpec, Cut, ImageSpec, Kind, Region
from dataplane.rpc import tasks
from dataplane.rpc.messages import Batch
from dataplane.transforms import pixels
from dataplane.worker import salvaging
from dataplane.worker.apart import OpenBlock
from dataplane.worker.columns import open_block
from dataplane.worker.gather import Gather
from dataplane.worker.image_decoding import SlabImages
from dataplane.worker.replacing import ReplacingGather, rows_taken_out, with_replaced

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


def gone_over(of: tasks.Assemble, blocks: list[OpenBlock], rows, check):
    tried = ((place, check(blocks[at], row)) for place, (at, row) in enumerate(rows.tolist()))
    faults = {place: fault for place, fault in tried if fault is not None}
    return with_replaced(of.render.seed, blocks, rows, faults, rows_taken_out(of), check)


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
    check = checked_by(bad, blocks)
    found, told = gone_over(task(seed, gone), blocks, rows, check)
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
        gone_over(task(7, [[2]]), blocks, rows, check)


def test_an_excerpt_has_no_other_rows_and_the_error_says_what_helps() -> None:
    blocks = [block(0, 3, numbers=np.array([0, 1, 2]))]
    rows = np.array([(0, 1)], np.int32)
    with pytest.raises(ImageError, match="raise block_arena_bytes") as caught:
        gone_over(task(7, [[]]), blocks, rows, checked_by([{1}], blocks))
    assert caught.value.column == "jpg"


ROWS, SIDE = 60, 8
TEXT, BYTES = (
    ColumnSpec("text", Kind.STRING, "", ()),
    partial(ColumnSpec, kind=Kind.BYTES, dtype="", shape=()),
)
SPECS = (TEXT, BYTES("a"), BYTES("b"), ColumnSpec("id", Kind.FIXED, "int64", ()))


def picture(number: int) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(np.full((SIDE, SIDE, 3), number, np.uint8)).save(sink, "JPEG")
    return sink.getvalue()


@settings(max_examples=20, deadline=None)
@given(
    bad=st.tuples(*[st.sets(st.integers(0, ROWS - 1), max_size=20)] * 2),
    index=st.lists(st.integers(0, ROWS - 1), min_size=30, max_size=40),
    room=st.sampled_from([1 << 20, 14 << 10]),
)
def test_the_slab_is_that_of_the_other_rows_and_few_images_are_decoded_twice(
    bad, index, room
) -> None:
    """Texts of other lengths move the pixels, and less room takes fewer batches."""
    columns = [[b"no" if n in some else picture(n) for n in range(ROWS)] for some in bad]
    batch = pa.record_batch(
        {
            "text": ["x" * (n * n % 97) for n in range(ROWS)],
            "a": pa.array(columns[0], pa.binary()),
            "b": pa.array(columns[1], pa.binary()),
            "id": pa.array(range(ROWS), pa.int64()),
        }
    )
    one = OpenBlock(open_block(batch, SPECS), None, tasks.Origin("s3://b/0", 0, 0), None, None)
    images = tuple(ImageSpec(c, SIDE, SIDE, Cut.WHOLE, replaces=True) for c in "ab")
    render = tasks.Render(images, 7, 0)
    body = tasks.Assemble(1, (0,), NOWHERE, (), 1, NOWHERE, render)
    batches = tuple(Batch(at, 10, 10) for at in range(len(index) // 10))
    index = index[: 10 * len(batches)]
    rows = np.array([(0, row) for row in index], np.int32)
    decoded: Counter[str] = Counter()

    def gather(some, tried=None):
        slab_images = SlabImages(render, SPECS, [one.origin], [None], some[:, 1].copy(), tried)
        return Gather(slab_images.specs, [one.columns], some, batches, slab_images=slab_images)

    def check(of: OpenBlock, row: int) -> ImageError | None:
        is_bad = any(row in some for some in bad)
        return ImageError("bad", column="a") if is_bad else None

    def render_counted(images, *others, **named):
        decoded["images"] += len(images)
        return render_of(images, *others, **named)

    expected = [
        substitute(7, 0, row, ROWS, bad[0] | bad[1]) if row in bad[0] | bad[1] else row
        for row in index
    ]
    told: dict = {}
    slab, plain = bytearray(room), bytearray(room)
    render_of = pixels.render
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pixels, "render", render_counted)
        made = ReplacingGather(body, [one], rows, gather, check, told).into(memoryview(slab))
    assert made == gather(np.array([(0, row) for row in expected], np.int32)).into(
        memoryview(plain)
    )
    for size, column in zip([3 * SIDE**2, 3 * SIDE**2, 8], made.columns[1:], strict=True):
        for begin in column.values:
            assert slab[begin : begin + 10 * size] == plain[begin : begin + 10 * size]
    seen = index[: 10 * made.batch_count]
    assert {row for _, row in told} >= {row for row in seen if row in bad[0] | bad[1]}
    assert all(
        one.instead == substitute(7, 0, one.row, ROWS, bad[0] | bad[1]) for one in told.values()
    )
    faults = sum(row in some for some in bad for row in index)
    assert decoded["images"] <= 2 * len(index) + (16 + 2) * faults


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["a", "b", None], pa.string_view()),
        pa.array([["a"], ["b", "c"], None], pa.list_(pa.string_view())),
        pa.array([{"a": "x"}, {"a": "y"}, None], pa.struct([("a", pa.string_view())])),
        pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), pa.array(["x", None])),
        pa.array([1, 2, 3]),
    ],
    ids=lambda array: str(array.type),
)
def test_rows_of_each_type_take_the_place_of_others(array: pa.Array) -> None:
    taken = salvaging.taken(pa.record_batch([array], ["x"]), [2, 0, 0])
    assert taken.schema.field("x").type == array.type
    values = array.to_pylist()
    assert taken.column(0).to_pylist() == [values[2], values[0], values[0]]


GONE = f"s3://b/{'x' * 60}: HTTP 404; it was there when the dataset was indexed"


@pytest.mark.parametrize(
    ("why", "shown"),
    [
        ("it is empty", "it is empty"),
        (f"{GONE}: restore it, or pass on_bad=…, which reads other rows in its place", GONE),
        (f"byte 4: {'more words ' * 30}", f"byte 4: {'more words ' * 13}…"),
        ("y" * 400, "y" * 150 + " …"),
    ],
)
def test_a_reason_is_cut_before_its_advice_or_at_a_word(why: str, shown: str) -> None:
    bad, other = (tasks.RawBlockRef("s3://b/0", at, 1, NOWHERE, NOWHERE, 9) for at in range(2))
    (row,) = salvaging.all_replaced(bad, other, [0], why)
    assert row.row.reason == f"{shown}; replaced by a row of block 1"
