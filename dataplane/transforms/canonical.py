"""Convert a decoded block to the canonical form of its leaves, from which slabs are gathered.

Nulls become NaN, an empty list, None, or the value given by the job's `fill_null`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataplane.formats.arrays import LIST_VIEWS, decoded, record_batch
from dataplane.model.records import ColumnSpec, Kind
from dataplane.transforms.annotations import marks_nulls
from dataplane.transforms.casts import converted, is_written, read_written
from dataplane.transforms.codes import NULL_CODE, codes_of, distinct_of
from dataplane.transforms.columns import ColumnPlan, LeafPart
from dataplane.transforms.leaves import canonical_type
from dataplane.transforms.lists import LISTS
from dataplane.transforms.nulls import Fills, NullsFound
from dataplane.transforms.plain import list_ends, objects

_WIDE = frozenset({pa.large_string().id, pa.large_binary().id})


def canonical(batch: pa.RecordBatch, plan: ColumnPlan, url: str) -> pa.RecordBatch:
    """Convert one decoded block to canonical form: the leaves and types of `plan`.

    Shapes:  rows as in `batch`; a column that is already in canonical form is not copied.
    Raises:  ConfigError: columns of integers, bools or times have nulls and no value to replace
    them; names all such columns of the block.
    """
    nulls = _Nulls(plan)
    arrays, stored = [], pa.nulls(0)
    columns = zip(plan.specs, plan.schema, plan.leaves, plan.parts, strict=True)
    for spec, field, leaf, part in columns:
        if part is LeafPart.IS_NULL:  # this column marks the nulls of the previous one
            arrays.append(stored.is_null().cast(pa.uint8()))
            continue
        stored = leaf_array(batch.column(leaf.top), leaf.path)
        if part is LeafPart.CODES:
            code, is_list = nulls.code_of(spec), spec.kind in LISTS
            values = decoded(stored).flatten() if is_list else stored
            codes = codes_of(values, leaf, plan.categories[leaf.name], code, url)
            stored = decoded(stored)
            kind = field.type.value_type if is_list else field.type
            codes = converted(codes, kind, spec.name, url)
            arrays.append(_lists(list_ends(stored), codes) if is_list else codes)
            continue
        stored = decoded(stored)
        if part is LeafPart.DISTINCT:
            arrays.append(distinct_of(stored, leaf))
            continue
        arrays.append(_values(stored, spec, field.type, nulls, url))
    nulls.found.check(url)
    return record_batch(arrays, plan.schema)


def _values(
    array: pa.Array, spec: ColumnSpec, target: pa.DataType, nulls: _Nulls, url: str
) -> pa.Array:
    if spec.kind is Kind.OBJECT:
        return objects(array)
    if spec.kind is Kind.FIXED and spec.shape:
        return _fixed_lists(array, spec, target, nulls, url)
    return _without_nulls(_typed(array, spec, target, url), spec, nulls)


class _Nulls:
    """The values that replace the nulls of one block. It also collects the columns that have nulls
    but no such value.
    """

    def __init__(self, plan: ColumnPlan) -> None:
        self._fills = Fills.of(plan.options)
        self._is_marking = marks_nulls(plan.options)
        self.found = NullsFound(plan)

    def filled(self, array: pa.Array, spec: ColumnSpec, *, of_rows: bool = False) -> pa.Array:
        """Replace the nulls of a column of numbers. `of_rows` means that whole rows are null, and
        not values within a row.
        """
        if array.null_count == 0:
            return array
        import pyarrow.compute as pc

        fill = self._fills.value(spec, is_marked=of_rows and self._is_marking)
        self.found.add(spec, fill)
        return pc.fill_null(array, _scalar(fill or 0.0, spec, array.type))

    def code_of(self, spec: ColumnSpec) -> int:
        """Return the code for null rows of a coded column."""
        fill = self._fills.value(spec)
        return NULL_CODE if fill is None else int(fill)

    def without_null_rows(self, values: pa.Array, spec: ColumnSpec, rows: pa.Array) -> pa.Array:
        """Return the values of fixed-size lists. If nulls are marked, the values of null rows are
        replaced.

        Shapes:  values: [rows * values per row].
        """
        fill = self._fills.value(spec, is_marked=True)
        if not self._is_marking or fill is None or not rows.null_count:
            return values
        import pyarrow.compute as pc

        valid = rows.is_valid().to_numpy(zero_copy_only=False).repeat(math.prod(spec.shape))
        return pc.if_else(pa.array(valid), values, _scalar(fill, spec, values.type))


def _scalar(value: float, spec: ColumnSpec, kind: pa.DataType) -> pa.Scalar:
    if spec.dtype == "bool":
        value = float(value != 0)  # a bool is exactly 0 or 1
    return pa.scalar(value if pa.types.is_floating(kind) else int(value), type=kind)


def leaf_array(array: pa.Array, path: Sequence[int]) -> pa.Array:
    """Return the leaf at `path` below a top-level column; the leaves of a null struct are null."""
    for i in path:
        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        child = array.field(i)
        array = _within(child, array.is_null()) if array.null_count else child
    return array


def _within(child: pa.Array, null: pa.Array) -> pa.Array:
    """Return a struct's child, which is null wherever the struct is null. Arrow's flatten() would
    lose these nulls for run-end encodings, and crash the process for unions, since neither type has
    a validity buffer of its own.
    """
    if pa.types.is_union(child.type):
        rows = pa.array(np.arange(len(child)), mask=null.to_numpy(zero_copy_only=False))
        return child.take(rows)
    if pa.types.is_run_end_encoded(child.type):
        child = decoded(child)
    return pa.StructArray.from_arrays([child], ["leaf"], mask=null).flatten()[0]


def _typed(array: pa.Array, spec: ColumnSpec, target: pa.DataType, url: str) -> pa.Array:
    if array.type == target:
        return array
    if spec.kind in LISTS:
        return _retyped_list(array, spec, target, url)
    if spec.kind in {Kind.STRING, Kind.BYTES}:
        if pa.types.is_binary(target) and array.type.id not in _WIDE:
            return array.cast(target)  # does not copy
        if pa.types.is_string_view(array.type) or pa.types.is_string(array.type):
            array = array.cast(pa.large_string())
        return array.cast(pa.large_binary())
    if is_written(array.type):
        return read_written(array, target, spec.name, url)
    return converted(_number(array), target, spec.name, url)


def _number(array: pa.Array) -> pa.Array:
    """Convert bools to uint8, and dates, times and durations to their integers."""
    array = decoded(array)
    kind = array.type
    if pa.types.is_boolean(kind):
        return array.cast(pa.uint8())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return array
    return array.view(canonical_type(kind))


def _fixed_lists(
    array: pa.Array, spec: ColumnSpec, target: pa.DataType, nulls: _Nulls, url: str
) -> pa.Array:
    """Convert nested fixed-size lists to one fixed-size list of numbers.

    A null list, on any level, becomes a list of nulls: the values below it are undefined.
    """
    values, valid = array, None
    while pa.types.is_fixed_size_list(values.type):
        width = values.type.list_size
        inner = values.values.slice(values.offset * width, len(values) * width)
        if values.null_count:
            here = values.is_valid().to_numpy(zero_copy_only=False)
            valid = here if valid is None else here & valid
        valid = None if valid is None else valid.repeat(width)
        values = decoded(inner)
    if array.type == target and valid is None and not values.null_count:
        return array
    width = math.prod(spec.shape)
    if not width:
        return pa.array([[]] * len(array), target)
    values = _number(values)
    if valid is not None:
        import pyarrow.compute as pc

        values = pc.if_else(pa.array(valid), values, pa.scalar(None, values.type))
    values = converted(values, target.value_type, spec.name, url, width=width)
    if valid is not None:
        values = nulls.without_null_rows(values, spec, array)
    return pa.FixedSizeListArray.from_arrays(nulls.filled(values, spec), width)


def _retyped_list(array: pa.Array, spec: ColumnSpec, target: pa.DataType, url: str) -> pa.Array:
    is_cast = canonical_type(array.type).value_type != target.value_type
    if is_cast or array.type.id in LIST_VIEWS:
        # Convert the values instead of casting the lists: Arrow's cast gives wrong offsets for null
        # lists and for views in another order, and checks values that belong to no row of the
        # batch.
        values = converted(_number(array.flatten()), target.value_type, spec.name, url, width=0)
        ends = list_ends(array)
        if pa.types.is_list(target):
            ends = ends.cast(pa.int32())
        return _lists(ends, values, _mask(array))
    if pa.types.is_list(array.type) and pa.types.is_large_list(target):
        array = array.cast(pa.large_list(array.type.value_type))
    if array.type == target:
        return array
    mask = _mask(array)
    if mask is not None and array.offset:
        array = pa.concat_arrays([array])
    values = _number(array.values)
    return _lists(array.offsets, values, mask)


def _mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _without_nulls(array: pa.Array, spec: ColumnSpec, nulls: _Nulls) -> pa.Array:
    if spec.kind in {Kind.STRING, Kind.BYTES}:
        return array
    if spec.kind is Kind.FIXED:
        return nulls.filled(array, spec, of_rows=True)
    if array.null_count == 0 and array.values.null_count == 0:
        return array
    flat = nulls.filled(array.flatten(), spec)
    return _lists(list_ends(array).cast(array.offsets.type), flat)


def _lists(offsets: pa.Array, values: pa.Array, mask: pa.Array | None = None) -> pa.Array:
    """Make lists, with the offset type of `offsets`."""
    is_short = pa.types.is_int32(offsets.type)
    kind = pa.ListArray if is_short else pa.LargeListArray
    return kind.from_arrays(offsets, values, mask=mask)
