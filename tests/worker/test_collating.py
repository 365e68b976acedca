"""Calling users' functions over batches: what they get, what they may return, and what of it lies
in a slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan import golden

from dataplane.arena.slab_layout import ALIGN_BYTES, pieces
from dataplane.model.errors import CorruptShard, FunctionError
from dataplane.model.records import ColumnSpec, Kind
from dataplane.rpc.messages import Batch, Column
from dataplane.rpc.tasks import Collation
from dataplane.transforms.made_columns import CollatedColumns
from dataplane.worker import collating
from dataplane.worker.collating import CollateGather
from dataplane.worker.columns import RowIndex, open_block
from dataplane.worker.functions import UserFunction, batch_generator
from dataplane.worker.gather import Gather, Gathered

ROW = ColumnSpec("row", Kind.FIXED, "int64")
TEXT = ColumnSpec("text", Kind.STRING, "")
LISTS = ColumnSpec("lists", Kind.RAGGED, "int16")
SPECS = (ROW, TEXT, LISTS)
ROWS = 40
BLOCK = pa.record_batch({
    "row": pa.array(range(ROWS)),
    "text": pa.array([None if row % 6 == 5 else "ö" * row for row in range(ROWS)]).cast("binary"),
    "lists": pa.array([[row] * (row % 4) for row in range(ROWS)], pa.list_(pa.int16())),
})  # fmt: skip
COLLATION = Collation("mine:f", 7, 2, 600, 20, 1)
FOUND = (
    ColumnSpec("wide", Kind.ARRAY, "int16", (0, 0)),
    ColumnSpec("noise", Kind.ARRAY, "float64", (0,)),
    ColumnSpec("count", Kind.ARRAY, "int64", ()),
)


@pytest.fixture(autouse=True)
def function(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What "mine:f" is: `call`, which is named without being imported."""
    found: dict[str, Any] = {"call": wide, "takes_generator": True}

    def loaded(argument: str, name: str) -> UserFunction:
        assert (argument, name) == ("collate", "mine:f")
        return UserFunction(name, reads=None, **found)

    monkeypatch.setattr(collating, "loaded", loaded)
    return found


def wide(columns: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """Lists, padded, and random numbers."""
    lists, rows = columns["lists"], columns["row"]
    out = np.full((len(rows), max(map(len, lists)) + 1), -1, np.int16)
    for at, values in enumerate(lists):
        out[at, : len(values)] = values
    return {"wide": out, "noise": generator.random(2), "count": len(rows)}


class OddArray:
    """A value that raises when numpy takes it."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise LookupError("no array")


def gather_of(
    rows: Sequence[Sequence[int]], columns: tuple[ColumnSpec, ...] = FOUND
) -> CollateGather:
    """The batches of steps 0, 1, …, with these rows of the block."""
    index = np.array([(0, row) for some in rows for row in some], np.int32).reshape(-1, 2)
    batches = [Batch(step, len(some), len(some)) for step, some in enumerate(rows)]
    block = open_block(BLOCK, SPECS)

    def gather(some: tuple[Batch, ...], row_index: RowIndex) -> Gather:
        return Gather(SPECS, [block], row_index, some)

    collation = msgspec.structs.replace(COLLATION, columns=columns)
    return CollateGather(collation, SPECS, index, batches, gather)


def arrays(slab: bytes, columns: Sequence[Column], i: int) -> list[np.ndarray[Any, Any]]:
    """Return the part of batch i that lies there."""
    found = []
    for spec, column in zip(FOUND, columns, strict=True):
        values, side = pieces(spec, column, i, 0)
        shape = np.frombuffer(slab, np.int64, side.length // 8, side.offset)
        found.append(np.ndarray(shape, spec.dtype, slab, values.offset))
        assert values.offset % ALIGN_BYTES == side.offset % ALIGN_BYTES == 0
        assert values.length == found[-1].nbytes
    return found


batches = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=9), min_size=1, max_size=6)


@given(batches, st.integers(0, 5000))
def test_batches_do_not_depend_on_how_many_fit_into_a_slab(
    rows: list[list[int]], size: int
) -> None:
    slab = bytearray(size)
    expected: list[int] = []
    made = gather_of(rows).into(memoryview(slab), expected.append)
    if not made.batch_count:
        assert made.bytes_needed > size
        slab = bytearray(made.bytes_needed)
        made = gather_of(rows).into(memoryview(slab), expected.append)
        assert made.batch_count >= 1
    assert expected[-1] == made.bytes_used <= len(slab)
    for step in range(made.batch_count):
        found = arrays(bytes(slab), made.columns, step)
        if not rows[step]:
            assert [each.shape for each in found] == [(0, 0), (0,), ()]
            continue
        lists = [[row] * (row % 4) for row in rows[step]]
        width = max(map(len, lists)) + 1
        assert found[0].tolist() == [each + [-1] * (width - len(each)) for each in lists]
        noise = batch_generator(7, 2, 600 + 20 * step, 1).random(2)
        assert found[1].tolist() == noise.tolist()
        assert found[2] == len(rows[step])


def test_what_is_found_of_the_first_batch_tells_its_columns() -> None:
    slab = bytearray(1000)
    made = gather_of([[3, 4]], ()).into(memoryview(slab))
    (column,) = made.columns
    begin = column.values[0]
    told = msgspec.json.decode(slab[begin : begin + column.width[0]], type=CollatedColumns)
    assert told.specs == FOUND
    assert told.row_bytes == 3 * ALIGN_BYTES // 2 + 1


def test_columns_come_as_a_loader_delivers_them(function: dict[str, Any]) -> None:
    seen: list[dict[str, Any]] = []

    def look(columns: dict[str, Any], **_: Any) -> dict[str, Any]:
        seen.append(columns)
        return wide(columns, np.random.default_rng())

    function["call"] = look
    gather_of([[5, 2, 2], [7]]).into(memoryview(bytearray(5000)))
    first, second = seen
    assert list(first) == ["row", "text", "lists"]
    assert first["row"].tolist() == [5, 2, 2]
    assert first["text"] == [None, "öö", "öö"]
    assert [each.tolist() for each in first["lists"]] == [[5], [2, 2], [2, 2]]
    assert first["lists"][0].dtype == np.int16
    assert [each.tolist() for each in second["lists"]] == [[7, 7, 7]]
    first["row"][:] = 0  # it may change what it got, and keep it
    assert second["row"].tolist() == [7]


def test_text_that_is_none_is_told_by_its_column() -> None:
    spec = ColumnSpec("text", Kind.STRING, "")
    block = open_block(pa.record_batch({"text": pa.array([b"\xff"])}), [spec])
    gather = CollateGather(
        COLLATION, [spec], np.zeros((1, 2), np.int32), [Batch(0, 1, 1)],
        lambda batches, rows: Gather([spec], [block], rows, batches),
    )  # fmt: skip
    with pytest.raises(CorruptShard, match="column 'text' is declared as text, but holds"):
        gather.into(memoryview(bytearray(1000)))


def returned(function: dict[str, Any], given: Any, later: Any = None) -> Gathered:
    """The slab of a batch for which this is returned, after a first one."""
    function["call"], function["takes_generator"] = lambda _: {"x": given}, False
    slab = bytearray(4000)
    made = gather_of([[1]], ()).into(memoryview(slab))
    begin, length = made.columns[0].values[0], made.columns[0].width[0]
    specs = msgspec.json.decode(slab[begin : begin + length], type=CollatedColumns).specs
    function["call"] = lambda _: {"x": given if later is None else later}
    return gather_of([[1]], specs).into(memoryview(slab))


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (np.zeros((2, 3), np.uint8), np.zeros((0, 9), np.uint8)),
        (torch.zeros(3, dtype=torch.bfloat16).float(), torch.ones(5)),
        (np.arange(6).reshape(2, 3).T, np.arange(6, dtype=">i8").reshape(3, 2)),
        (1.5, 2),
        ([1.5, 2], []),
        ([[1, 2], [3, 4]], np.array([[7]])),
        (np.float16(3), np.float16(4)),
        ([True, False], np.array([True])),
    ],
)
def test_arrays_of_numbers_of_any_shape_are_returned(
    function: dict[str, Any], first: Any, later: Any
) -> None:
    assert returned(function, first, later).batch_count == 1


@pytest.mark.parametrize(
    ("first", "later", "why"),
    [
        ("abc", None, "returned a str in column 'x'"),
        (None, None, "returned None in column 'x'"),
        ({"a": 1}, None, "returned a dict in column 'x'"),
        ([[1], [2, 3]], None, "Pad lists of different lengths"),
        (["a", "b"], None, "tensors have numbers or bools"),
        (np.array([None, 1]), None, "of type object: tensors have numbers or bools"),
        (np.array(["2020-01-01"], "datetime64[D]"), None, "of type datetime64"),
        (torch.zeros(2, dtype=torch.bfloat16), None, "of which numpy makes no array"),
        (torch.zeros(2, requires_grad=True), None, "Use tensor.detach()"),
        (OddArray(), None, "OddArray in column 'x', of which numpy makes no array: no array"),
        (np.zeros(2), np.zeros(2, np.float32), "float32 of 1 dimensions in column 'x', and float6"),
        (np.zeros(2), np.zeros((2, 1)), "float64 of 2 dimensions in column 'x', and float64 of 1"),
        ([1, 2], [1, 2.5], "float64 of 1 dimensions in column 'x', and int64 of 1"),
    ],
)
def test_other_results_are_refused_with_the_step(
    function: dict[str, Any], first: Any, later: Any, why: str
) -> None:
    with pytest.raises(FunctionError) as caught:
        returned(function, first, later)
    assert why in str(caught.value)
    assert "the batch of step 30: collate='mine:f' returned" in str(caught.value)
    assert (caught.value.function, caught.value.step) == ("mine:f", 30)


def test_batches_before_one_that_fails_are_made(function: dict[str, Any]) -> None:
    def fails(columns: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        if 5 in columns["row"]:
            raise ValueError("not to my taste")
        return wide(columns, generator)

    function["call"] = fails
    made = gather_of([[1, 2], [3], [5], [6]]).into(memoryview(bytearray(5000)))
    assert made.batch_count == 2
    with pytest.raises(FunctionError, match="not to my taste"):
        gather_of([[5], [6]]).into(memoryview(bytearray(5000)))


def test_a_later_batch_has_the_columns_of_the_first_one(function: dict[str, Any]) -> None:
    function["call"] = lambda _, **__: {"wide": np.zeros((1, 1), np.int16)}
    with pytest.raises(
        FunctionError, match="the columns wide, and wide, noise, count for the firs"
    ):
        gather_of([[1]]).into(memoryview(bytearray(1000)))
    function["call"] = lambda _, **__: [1]
    with pytest.raises(FunctionError, match="returned a list, and not a dict"):
        gather_of([[1]]).into(memoryview(bytearray(1000)))


@pytest.mark.parametrize(
    ("later", "is_taken"),
    [
        ([1, 2], True),
        ([1.5], True),
        ([1 << 53], True),
        ([(1 << 53) + 1], False),
        ([1 << 64], False),
    ],
)
def test_whole_numbers_of_a_list_become_floats_only_if_they_are_such(
    later: list[float], function: dict[str, Any], *, is_taken: bool
) -> None:
    function["call"] = lambda _, **__: {"x": later}
    columns = (ColumnSpec("x", Kind.ARRAY, "float64", (0,)),)
    memory = memoryview(bytearray(1000))
    if is_taken:
        gather_of([[1]], columns).into(memory)
        assert np.array(later, np.float64).tobytes() in bytes(memory)
        return
    with pytest.raises(FunctionError, match="column 'x'"):
        gather_of([[1]], columns).into(memory)


def test_random_numbers_are_those_of_the_seed_the_epoch_and_the_place_of_the_batch() -> None:
    # Philox is the same in every version of numpy.
    def first(*key: int) -> tuple[int, ...]:
        return tuple(batch_generator(*key).bit_generator.random_raw(2).tolist())

    ((_, words),) = golden.COLLATE_GENERATORS.values()
    assert {key: first(*key) for key in golden.COLLATE_GENERATORS} == {(7, 2, 640, 1): words}
    others = [(8, 2, 640, 1), (7, 3, 640, 1), (7, 2, 641, 1), (7, 2, 640, 0)]
    assert all(first(*key) != words for key in others)
