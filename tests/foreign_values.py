"""Expected batches, computed from pyarrow's own table by another way than Dataplane goes.

Values are plain Python: numbers, text, bytes, lists and dicts. Dates, times, timestamps and
durations are the integers that are stored; floats are compared bit by bit but for NaN.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch
from dataplane_torch.tensors import Ragged

_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def leaves(table: pa.Table) -> dict[str, list[Any]]:
    """The values of each column that batches have; structs are flattened, a null struct is null in
    each of its leaves.
    """
    found: dict[str, list[Any]] = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        rows = [value for piece in column.chunks for value in exact_values(piece)]
        for name, _, path in _paths(field.name, field.type):
            values = rows
            for i in path:
                values = [None if row is None else list(row.values())[i] for row in values]
            found[name] = values
    return found


def leaf_types(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    """The same columns, with their Arrow types."""
    found = [leaf for field in schema for leaf in _paths(field.name, field.type)]
    return [(name, kind) for name, kind, _ in found]


def _paths(
    name: str, kind: pa.DataType, path: tuple[int, ...] = ()
) -> Iterator[tuple[str, pa.DataType, tuple[int, ...]]]:
    storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if not pa.types.is_struct(storage) or not storage.num_fields:
        yield name, kind, path
        return
    for i, field in enumerate(storage.fields):
        yield from _paths(f"{name}.{field.name}", field.type, (*path, i))


def exact_values(array: pa.Array) -> list[Any]:
    """Every value as plain Python."""
    if pa.types.is_run_end_encoded(array.type):
        ends, values = array.run_ends.to_pylist(), exact_values(array.values)
        rows = range(array.offset, array.offset + len(array))
        return [values[bisect.bisect_right(ends, row)] for row in rows]
    if pa.types.is_dictionary(array.type):
        values = exact_values(array.dictionary)
        return [None if code is None else values[code] for code in array.indices.to_pylist()]
    return [exact(scalar) for scalar in array]


def exact(scalar: pa.Scalar) -> Any:
    """One value as plain Python; a date, time, timestamp or duration as its integer."""
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if isinstance(scalar, pa.ExtensionScalar | pa.DictionaryScalar | pa.UnionScalar):
        return exact(scalar.value)
    if pa.types.is_run_end_encoded(kind):
        return exact(scalar.value)
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return scalar.value
    if pa.types.is_map(kind):
        keys, values = scalar.values.field(0), scalar.values.field(1)
        return [(exact(key), exact(value)) for key, value in zip(keys, values, strict=True)]
    if any(is_kind(kind) for is_kind in _LISTS):
        return exact_values(scalar.values)
    if pa.types.is_struct(kind):
        return {field.name: exact(scalar[i]) for i, field in enumerate(kind.fields)}
    return scalar.as_py()


def needs_fill(kind: pa.DataType) -> bool:
    """Whether a null of this type has no tensor: `fill_null` must name it."""
    kind = _stored(kind)
    if pa.types.is_fixed_size_list(kind):
        return needs_fill(kind.value_type) and not any(map(_is_list_of, _below(kind)))
    return _is_whole(_stored(kind.value_type) if _is_list_of(kind) else kind)


def _is_whole(kind: pa.DataType) -> bool:
    is_time = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_time)


def _is_list_of(kind: pa.DataType) -> bool:
    return not pa.types.is_fixed_size_list(kind) and any(is_kind(kind) for is_kind in _LISTS)


def _below(kind: pa.DataType) -> Iterator[pa.DataType]:
    while pa.types.is_fixed_size_list(kind):
        kind = _stored(kind.value_type)
        yield kind


def _stored(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _stored(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _stored(kind.value_type)
    return kind


def difference(expected: Mapping[str, list[Any]], batches: Sequence[Mapping[str, Any]]) -> str:
    """Where batches differ from the expected values, as text; "" if nowhere."""
    names = list(batches[0]) if batches else list(expected)
    if names != list(expected):
        return f"columns {names} where {list(expected)} were expected"
    for name, values in expected.items():
        at = 0
        for batch in batches:
            for got in rows(batch[name]):
                if at >= len(values):
                    return f"column {name!r} has more than {len(values)} rows"
                wanted = values[at]
                if isinstance(batch[name], torch.Tensor | Ragged):
                    wanted = filled(wanted, got)
                if comparable(got) != comparable(wanted):
                    return f"column {name!r}, row {at}: {got!r:.200} where {wanted!r:.200} is right"
                at += 1
        if at != len(values):
            return f"column {name!r} has {at} rows, not {len(values)}"
    return ""


def rows(column: Any) -> list[Any]:
    """The rows of one column of a batch."""
    if isinstance(column, Ragged):
        ends = column.offsets.tolist()
        values = column.values.tolist()
        return [values[a:b] for a, b in itertools.pairwise(ends)]
    if isinstance(column, torch.Tensor):
        return [flat(row) for row in column.tolist()] if column.dim() > 1 else column.tolist()
    return list(column)


def flat(value: Any) -> list[Any]:
    """Flatten nested lists."""
    return [v for each in value for v in flat(each)] if isinstance(value, list) else [value]


def filled(wanted: Any, got: Any) -> Any:
    """The values as a tensor holds them: without nulls, and flattened."""
    if isinstance(got, list):
        values = flat([] if wanted is None else wanted)
        if wanted is None and got:
            values = [None] * len(got)
        missing = next((filled(None, one) for one in got), 0)
        return [missing if value is None else value for value in values]
    if wanted is None:
        return float("nan") if isinstance(got, float) else type(got)(0)
    return wanted


def comparable(value: Any) -> Any:
    """The same, but that a NaN equals itself, -0.0 is not 0.0 and True is not 1."""
    if isinstance(value, float | bool):
        return repr(value)
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    if isinstance(value, dict):
        return {name: comparable(one) for name, one in value.items()}
    return value
