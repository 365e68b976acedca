"""Arrow arrays of every layout within every kind of parent, as other writers may send them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

Make = Callable[[int], pa.Array]
Wrap = Callable[[pa.Array], pa.Array]


def _int32(*values: int) -> pa.Array:
    return pa.array(values, pa.int32())


def _codes(values: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), values)


def _run_ends(values: pa.Array) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(_int32(2, 3), values)


def _of(kind: pa.DataType, *values: Any) -> Make:
    return lambda version: pa.array(values, kind)


_TYPE_CODES = pa.array([0, 1, 0], pa.int8())
_NS = pa.timestamp("ns", "Europe/Berlin")

# Three rows each; the second version has other dictionaries.
ARRAYS: Mapping[str, Make] = {
    "dictionary": lambda v: pa.array(["a", "c" if v else "b", None]).dictionary_encode(),
    "dictionary of structs": lambda v: _codes(pa.array([{"x": 1 + v}, {"x": 2}])),
    "dictionary of lists": lambda v: _codes(pa.array([[1 + v], None])),
    "dictionary of times": lambda v: _codes(pa.array([1 + v, 2], pa.timestamp("ns"))),
    "dictionary of views": lambda v: _codes(pa.array(["a", "b"], pa.string_view())),
    "dictionary in dictionary": lambda v: _codes(
        pa.StructArray.from_arrays([pa.array(["a", f"b{v}"]).dictionary_encode()], ["d"])
    ),
    "run ends": lambda v: _run_ends(pa.array(["a", None])),
    "run ends of codes": lambda v: _run_ends(pa.array(["a", f"b{v}"]).dictionary_encode()),
    "string view": _of(pa.string_view(), "a" * 20, None, "c"),
    "binary view": _of(pa.binary_view(), b"a" * 20, None, b"\xff"),
    "list view": _of(pa.list_view(pa.int32()), [1], None, [2, 3]),
    "large list view": _of(pa.large_list_view(pa.string()), ["a"], None, ["b"]),
    "dense union": lambda v: pa.UnionArray.from_dense(
        _TYPE_CODES, _int32(0, 0, 1), [pa.array([1, 2]), pa.array(["x"])]
    ),
    "sparse union": lambda v: pa.UnionArray.from_sparse(
        _TYPE_CODES, [pa.array([1, None, 3]), pa.array(["x", "y", "z"])]
    ),
    "null": lambda v: pa.nulls(3),
    "bool": _of(pa.bool_(), True, None, False),
    "float16": _of(pa.float16(), 1.5, None, 65504.0),
    "decimal32": _of(pa.decimal32(5, 2), Decimal("1.5"), None, Decimal("-1.2")),
    "decimal256": _of(pa.decimal256(60, 2), Decimal("9" * 58 + ".25"), None, Decimal(0)),
    "interval": _of(pa.month_day_nano_interval(), (1, -2, 3), None, (4, 5, 2**63 - 1)),
    "map": _of(pa.map_(pa.string(), pa.int8()), [("a", 1), ("a", None)], None, []),
    "empty struct": _of(pa.struct([]), {}, None, {}),
    "uuid": _of(pa.uuid(), b"1" * 16, None, b"2" * 16),
    "tensor": lambda v: pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [2]),
        pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
    ),
    "timestamp": _of(_NS, 1, None, -(2**63)),
    "seconds": _of(pa.timestamp("s"), 2**63 - 1, None, 0),
    "duration": _of(pa.duration("us"), 2**63 - 1, None, -1),
    "days": _of(pa.date32(), 2**31 - 1, None, -(2**31)),
    "date64": _of(pa.date64(), 86_400_000, None, 0),
    "time of day": _of(pa.time64("ns"), 86_399_999_999_999, None, 1),
    "time32": _of(pa.time32("s"), 86_399, None, 0),
}

# Below a parent of three rows; some of its rows are null or empty, where a parent can be.
PARENTS: Mapping[str, Wrap] = {
    "": lambda a: a,
    "list": lambda a: pa.ListArray.from_arrays(_int32(0, 1, 1, 3), a),
    "null list": lambda a: pa.ListArray.from_arrays(
        _int32(0, 1, 2, 3), a, mask=pa.array([False, True, False])
    ),
    "list view": lambda a: pa.ListViewArray.from_arrays(_int32(1, 0, 2), _int32(2, 1, 1), a),
    "fixed list": lambda a: pa.FixedSizeListArray.from_arrays(
        a, 1, mask=pa.array([True, False, False])
    ),
    "struct": lambda a: pa.StructArray.from_arrays([a], ["f"]),
    "null struct": lambda a: pa.StructArray.from_arrays(
        [a, pa.array([1, 2, 3])], ["f", "g"], mask=pa.array([True, False, False])
    ),
    "list of null structs": lambda a: pa.ListArray.from_arrays(
        _int32(0, 1, 1, 3),
        pa.StructArray.from_arrays([a], ["f"], mask=pa.array([False, True, False])),
    ),
    "list of lists": lambda a: pa.ListArray.from_arrays(
        _int32(0, 1, 1, 3), pa.ListArray.from_arrays(_int32(0, 1, 1, 3), a)
    ),
    "map": lambda a: pa.MapArray.from_arrays(_int32(0, 1, 1, 3), pa.array(["p", "q", "r"]), a),
    "union": lambda a: pa.UnionArray.from_sparse(_TYPE_CODES, [a, pa.array([1, 2, 3])]),
    "dictionary": lambda a: pa.DictionaryArray.from_arrays(pa.array([2, 0, 1]), a),
    "run ends": lambda a: pa.RunEndEncodedArray.from_arrays(_int32(1, 2, 3), a),
}


def cases() -> Iterator[tuple[str, list[pa.Array]]]:
    """Every array below every parent: a name, and two arrays of one type and three rows."""
    for parent, wrap in PARENTS.items():
        for name, make in ARRAYS.items():
            try:
                yield f"{parent}/{name}", [wrap(make(0)), wrap(make(1))]
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                continue  # Arrow has no such type
