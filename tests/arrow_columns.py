"""Random columns of any Arrow type, each with its expected values, which are known by construction
and not computed by the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import strategies as st

from dataplane.model.records import Kind

Values = list[Any]


@dataclass(frozen=True)
class Leaf:
    """One leaf as it should arrive. `values` are Python values, with None for every null; in a
    FIXED column with a shape they are nested lists, and None may replace a whole list.
    """

    name: str
    kind: Kind
    values: Values
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Column:
    """An Arrow array and the leaves that it should become."""

    array: pa.Array
    leaves: tuple[Leaf, ...]


_NUMBERS: Mapping[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "uint16": (pa.uint16(), st.integers(0, 65535)),
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "float16": (pa.float16(), st.sampled_from([0.0, -1.5, 65504.0, math.inf])),
    "float32": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "float64": (pa.float64(), st.floats(allow_nan=False)),
}
_TIMES = (
    ("int64", pa.timestamp("us", "UTC")),
    ("int64", pa.timestamp("ns")),
    ("int64", pa.duration("s")),
    ("int64", pa.time64("ns")),
    ("int64", pa.date64()),
    ("int32", pa.date32()),
    ("int32", pa.time32("ms")),
)
_TEXTS = (
    (pa.string(), Kind.STRING),
    (pa.large_string(), Kind.STRING),
    (pa.string_view(), Kind.STRING),
    (pa.binary(), Kind.BYTES),
    (pa.large_binary(), Kind.BYTES),
    (pa.binary_view(), Kind.BYTES),
    (pa.binary(3), Kind.BYTES),
)
_OBJECTS: tuple[tuple[pa.DataType, Sequence[Any]], ...] = (
    (pa.null(), [None]),
    (pa.decimal128(7, 2), [pc.cast(pa.scalar("1.25"), pa.decimal128(7, 2)).as_py(), None]),
    (pa.list_(pa.string()), [["a", None], [], None, ["b" * 20]]),
    (pa.list_(pa.list_(pa.int16())), [[[1], None, []], None, [[2, None]]]),
    (pa.list_(pa.struct([("x", pa.int8())])), [[{"x": 1}, None], None, []]),
    (pa.list_(pa.string(), 2), [["a", "b"], None, [None, "c"]]),
    (pa.map_(pa.string(), pa.int8()), [[("k", 1)], None, []]),
    (pa.struct([]), [{}]),
    (pa.month_day_nano_interval(), [None]),
)


def _with_nulls(value: st.SearchStrategy[Any], count: int) -> st.SearchStrategy[Values]:
    usual = st.lists(value, min_size=count, max_size=count)
    return usual | st.lists(st.none() | value, min_size=count, max_size=count)


def _encoded(draw: Callable[..., Any], array: pa.Array) -> pa.Array:
    """The same values, possibly as a dictionary or as runs."""
    how = draw(st.sampled_from(["plain", "plain", "dictionary", "runs"]))
    if pa.types.is_float16(array.type) or how == "plain":
        return array
    if how == "dictionary":
        return array.dictionary_encode()
    return pc.run_end_encode(array)


@st.composite
def numbers(draw: Callable[..., Any], count: int, *, encoded: bool = True) -> Column:
    """One number a row."""
    if draw(st.integers(0, 3)) == 0:
        dtype, kind = draw(st.sampled_from(_TIMES))
        values = draw(_with_nulls(st.integers(0, 1000), count))
        array = pa.array(values, _NUMBERS[dtype][0]).view(kind)
        return Column(array, (Leaf("", Kind.FIXED, values, dtype),))
    dtype = draw(st.sampled_from(sorted(_NUMBERS)))
    kind, value = _NUMBERS[dtype]
    values = draw(_with_nulls(value, count))
    array = pa.array(values, kind)
    array = _encoded(draw, array) if encoded else array
    return Column(array, (Leaf("", Kind.FIXED, values, dtype),))


@st.composite
def texts(draw: Callable[..., Any], count: int) -> Column:
    """Strings and bytes."""
    kind, form = draw(st.sampled_from(_TEXTS))
    letters = st.text("añ\U0001f600", max_size=20)
    if form is Kind.BYTES:
        letters = st.binary(max_size=20)
    if pa.types.is_fixed_size_binary(kind):
        letters = st.binary(min_size=3, max_size=3)
    values = draw(_with_nulls(letters, count))
    array = pa.array(values, kind)
    if kind in (pa.string(), pa.binary()):
        array = _encoded(draw, array)
    return Column(array, (Leaf("", form, values),))


@st.composite
def objects(draw: Callable[..., Any], count: int) -> Column:
    """Types that have no tensor form."""
    kind, choices = draw(st.sampled_from(_OBJECTS))
    values = draw(st.lists(st.sampled_from(choices), min_size=count, max_size=count))
    array = pa.array(values, kind)
    return Column(array, (Leaf("", Kind.OBJECT, array.to_pylist()),))


def _masks(count: int) -> st.SearchStrategy[list[bool]]:
    usual: st.SearchStrategy[list[bool]] = st.just([False] * count)
    return usual | st.lists(st.booleans(), min_size=count, max_size=count)


def _mask(masked: Sequence[bool]) -> pa.Array | None:
    return pa.array(masked, pa.bool_()) if any(masked) else None


@st.composite
def lists(draw: Callable[..., Any], count: int) -> Column:
    """Lists of numbers; a null list may hide values, and views lie in any order."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    child = draw(numbers(sum(lengths), encoded=False))
    child_values = child.leaves[0].values
    masked = draw(_masks(count))
    starts = [sum(lengths[:i]) for i in range(count + 1)]
    values = [None if masked[i] else child_values[starts[i] : starts[i + 1]] for i in range(count)]
    form = draw(st.sampled_from(["list", "large", "view", "large_view"]))
    if form in {"list", "large"}:
        of = pa.ListArray if form == "list" else pa.LargeListArray
        kind = pa.int32() if form == "list" else pa.int64()
        array = of.from_arrays(pa.array(starts, kind), child.array, mask=_mask(masked))
    else:
        of = pa.ListViewArray if form == "view" else pa.LargeListViewArray
        kind = pa.int32() if form == "view" else pa.int64()
        # Laid out backwards: the last list's values come first.
        pieces = [child.array.slice(starts[i], lengths[i]) for i in reversed(range(count))]
        turned = pa.concat_arrays(pieces) if pieces else child.array
        ends = [sum(lengths[i + 1 :]) for i in range(count)]
        array = of.from_arrays(
            pa.array(ends, kind), pa.array(lengths, kind), turned, mask=_mask(masked)
        )
    return Column(array, (Leaf("", Kind.PADDED, values, child.leaves[0].dtype),))


@st.composite
def fixed_lists(draw: Callable[..., Any], count: int) -> Column:
    """Fixed-size lists of numbers, up to three levels, nulls on any of them; or tensors."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    child = draw(numbers(count * math.prod(shape), encoded=False))
    leaf = child.leaves[0]
    array, values = child.array, leaf.values
    as_tensor = draw(st.booleans())
    for level in reversed(range(1 if as_tensor else len(shape))):
        width = math.prod(shape) if as_tensor else shape[level]
        size = count if as_tensor else count * math.prod(shape[:level])
        masked = draw(_masks(size))
        values = [None if masked[i] else values[i * width : i * width + width] for i in range(size)]
        array = pa.FixedSizeListArray.from_arrays(array, width, mask=_mask(masked))
    if as_tensor:
        values = [None if v is None else _nested(v, shape) for v in values]
        array = pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(child.array.type, shape), array
        )
    return Column(array, (Leaf("", Kind.FIXED, values, leaf.dtype, shape),))


def _nested(flat: Values, shape: tuple[int, ...]) -> Values:
    width = math.prod(shape[1:])
    parts = [flat[i * width : i * width + width] for i in range(shape[0])]
    return [_nested(part, shape[1:]) for part in parts] if len(shape) > 1 else flat


@st.composite
def structs(draw: Callable[..., Any], count: int, depth: int = 2) -> Column:
    """Structs of anything, null here and there; field names may have dots."""
    names = draw(st.lists(st.sampled_from("pqr"), min_size=1, max_size=3, unique=True))
    children = [draw(columns(count, depth - 1)) for _ in names]
    names = [draw(st.sampled_from([name, f"{name}.s"])) for name in names]
    masked = draw(_masks(count))
    array = pa.StructArray.from_arrays([c.array for c in children], names, mask=_mask(masked))
    leaves = [
        Leaf(
            f".{name}{leaf.name}",
            leaf.kind,
            [None if null else v for null, v in zip(masked, leaf.values, strict=True)],
            leaf.dtype,
            leaf.shape,
        )
        for name, child in zip(names, children, strict=True)
        for leaf in child.leaves
    ]
    return Column(array, tuple(leaves))


def columns(count: int, depth: int = 2) -> st.SearchStrategy[Column]:
    """Any column with this many rows."""
    flat = st.one_of(numbers(count), texts(count), objects(count), lists(count), fixed_lists(count))
    return flat | structs(count, depth) if depth else flat


@st.composite
def batches(
    draw: Callable[..., Any], rows: int, width: int = 4
) -> tuple[pa.RecordBatch, tuple[Leaf, ...]]:
    """A record batch, possibly a slice of a longer one, and its leaves."""
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    drawn = draw(st.lists(columns(before + rows + after), min_size=1, max_size=width))
    names = [f"c{i}" for i in range(len(drawn))]
    whole = pa.RecordBatch.from_arrays([one.array for one in drawn], names)
    leaves = tuple(
        Leaf(
            name + leaf.name, leaf.kind, leaf.values[before : before + rows], leaf.dtype, leaf.shape
        )
        for name, one in zip(names, drawn, strict=True)
        for leaf in one.leaves
    )
    return whole.slice(before, rows), leaves


def canonical_values(leaf: Leaf, fill: float | None) -> Values | None:
    """The leaf's rows in canonical form; None if a null makes that impossible."""
    if leaf.kind is Kind.OBJECT:
        return leaf.values
    if leaf.kind is Kind.STRING:
        return [None if v is None else v.encode() for v in leaf.values]
    if leaf.kind is Kind.BYTES:
        return leaf.values
    if leaf.kind is Kind.PADDED:
        rows = [[] if v is None else v for v in leaf.values]
    elif leaf.shape:
        rows = [flattened(v, leaf.shape) for v in leaf.values]
    else:
        rows = [[v] for v in leaf.values]
    if any(v is None for row in rows for v in row) and fill is None:
        if not leaf.dtype.startswith("float"):
            return None
        fill = math.nan
    filled = [[_number(fill if v is None else v, leaf.dtype) for v in row] for row in rows]
    return filled if leaf.kind is Kind.PADDED or leaf.shape else [row[0] for row in filled]


def flattened(value: Any, shape: tuple[int, ...]) -> Values:
    """Flatten nested lists; a null list is a list of nulls."""
    if not shape:
        return [value]
    inner = [None] * shape[0] if value is None else value
    return [v for each in inner for v in flattened(each, shape[1:])]


def _number(value: Any, dtype: str) -> Any:
    if dtype == "bool":
        return int(bool(value))
    return float(value) if dtype.startswith("float") else int(value)


def comparable(value: Any) -> Any:
    """Equality, except that a NaN equals itself and -0.0 differs from 0.0."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return [comparable(v) for v in value]
    return value
