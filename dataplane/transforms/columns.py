"""Any Arrow schema -> the columns of a batch, in the few forms that a slab knows.

`plan_columns` decides once, from the dataset's schema, which leaf columns there are and what form
each takes; `canonical` brings one decoded block into that form. Structs become leaves with dotted
names ("image.bytes"); dictionaries, run-end encodings and views become their plain values; bools
become bytes; nulls become NaN, an empty list, None, or what `fill_null` says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dataplane.errors import ConfigError, CorruptShard
from dataplane.model import ColumnSpec, Kind, ListPolicy

_LARGE_BYTES = pa.large_binary()


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """How the blocks of a dataset become batch columns.

    `top_level` are the columns a format must decode; `specs` and `schema` describe the leaves, in
    batch order; `schema` has one canonical Arrow field a leaf; `places` says where a leaf lies: its
    top-level column, then the index of the field in each struct on the way down.
    """

    top_level: tuple[str, ...]
    specs: tuple[ColumnSpec, ...]
    schema: pa.Schema
    places: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """`structs` are the dotted names of the structs that it lies in: names are free to have dots,
    so they cannot be told from the leaf's own.
    """

    name: str
    top: str
    type: pa.DataType
    path: tuple[int, ...] = ()
    structs: tuple[str, ...] = ()


def plan_columns(schema: pa.Schema, columns: Sequence[str], lists: ListPolicy) -> ColumnPlan:
    """Choose leaves: all of them for no `columns`, else those named; a struct's name means all of
    its leaves.

    Raises:  ConfigError: a column that is not there, or is named twice; names what there is.
    """
    _refuse_twins(schema.names)
    leaves = [
        leaf for field in schema for leaf in _leaves(_Leaf(field.name, field.name, field.type))
    ]
    _refuse_twins([leaf.name for leaf in leaves])
    chosen = leaves if not columns else [leaf for name in columns for leaf in _named(name, leaves)]
    _refuse_twins([leaf.name for leaf in chosen])
    return ColumnPlan(
        top_level=tuple(dict.fromkeys(leaf.top for leaf in chosen)),
        specs=tuple(_spec(leaf.name, leaf.type, lists) for leaf in chosen),
        schema=pa.schema([(leaf.name, canonical_type(leaf.type)) for leaf in chosen]),
        places=tuple((leaf.top, leaf.path) for leaf in chosen),
    )


def _leaves(at: _Leaf) -> list[_Leaf]:
    """What there is at this place: the leaves of a struct, or the leaf itself."""
    storage = at.type.storage_type if isinstance(at.type, pa.BaseExtensionType) else at.type
    if not pa.types.is_struct(storage) or not storage.num_fields:
        return [at]
    return [
        leaf
        for i in range(storage.num_fields)
        for leaf in _leaves(
            _Leaf(
                f"{at.name}.{storage.field(i).name}",
                at.top,
                storage.field(i).type,
                (*at.path, i),
                (*at.structs, at.name),
            )
        )
    ]


def _named(name: str, leaves: Sequence[_Leaf]) -> list[_Leaf]:
    found = [leaf for leaf in leaves if leaf.name == name or name in leaf.structs]
    if not found:
        names = ", ".join(leaf.name for leaf in leaves)
        raise ConfigError(f"there is no column {name!r}; the dataset has: {names}", field=name)
    return found


def _refuse_twins(names: Sequence[str]) -> None:
    twins = sorted(name for name, count in Counter(names).items() if count > 1)
    if twins:
        raise ConfigError(f"column {twins[0]!r} occurs twice; name each one once", field=twins[0])


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type below extensions, dictionaries, run-end encodings and views."""
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return _LARGE_BYTES
    return kind


def _dtype(kind: pa.DataType) -> str:
    """The numpy name of a primitive type, "" for any other."""
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return str(kind.to_pandas_dtype().__name__)
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return "int64"
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return f"int{kind.bit_width}"
    return ""


def _fixed(kind: pa.DataType) -> tuple[str, tuple[int, ...]] | None:
    """(dtype, shape) of a type whose values all have one size, or None."""
    if isinstance(kind, pa.FixedShapeTensorType):
        order = kind.permutation
        if order is not None and list(order) != sorted(order):
            return None
        dtype = _dtype(kind.value_type)
        return (dtype, tuple(kind.shape)) if dtype else None
    kind = _plain(kind)
    if pa.types.is_fixed_size_list(kind):
        inner = _fixed(kind.value_type)
        return None if inner is None else (inner[0], (kind.list_size, *inner[1]))
    dtype = _dtype(kind)
    return (dtype, ()) if dtype else None


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def _spec(name: str, kind: pa.DataType, lists: ListPolicy) -> ColumnSpec:
    fixed = _fixed(kind)
    if fixed is not None:
        return ColumnSpec(name, Kind.FIXED, *fixed)
    plain = _plain(kind)
    if pa.types.is_string(plain) or pa.types.is_large_string(plain):
        return ColumnSpec(name, Kind.STRING, "")
    if pa.types.is_binary(plain) or pa.types.is_large_binary(plain):
        return ColumnSpec(name, Kind.BYTES, "")
    if pa.types.is_fixed_size_binary(plain) and not pa.types.is_decimal(plain):
        return ColumnSpec(name, Kind.BYTES, "")
    if _is_list(plain) and _dtype(_plain(plain.value_type)):
        kind_of = Kind.PADDED if lists is ListPolicy.PADDED else Kind.RAGGED
        return ColumnSpec(name, kind_of, _dtype(_plain(plain.value_type)))
    return ColumnSpec(name, Kind.OBJECT, "")


def _numeric(dtype: str) -> pa.DataType:
    return pa.uint8() if dtype == "bool" else pa.from_numpy_dtype(dtype)


def canonical_type(kind: pa.DataType) -> pa.DataType:
    """The Arrow type in which a leaf of this type is kept in the block arena."""
    fixed = _fixed(kind)
    if fixed is not None:
        dtype, shape = fixed
        width = math.prod(shape)
        return _numeric(dtype) if not shape else pa.list_(_numeric(dtype), width)
    plain = _plain(kind)
    if _is_list(plain) and _dtype(_plain(plain.value_type)):
        return pa.large_list(_numeric(_dtype(_plain(plain.value_type))))
    if pa.types.is_string(plain) or pa.types.is_binary(plain):
        return pa.large_binary()
    if pa.types.is_large_string(plain) or pa.types.is_large_binary(plain):
        return pa.large_binary()
    if pa.types.is_fixed_size_binary(plain) and not pa.types.is_decimal(plain):
        return pa.large_binary()
    return plain


def canonical(
    batch: pa.RecordBatch, plan: ColumnPlan, fill_null: Mapping[str, float], url: str
) -> pa.RecordBatch:
    """One decoded block in canonical form: the leaves of `plan`, of `plan.schema`'s types.

    Shapes:  rows as in `batch`; nothing is copied of a column that is in canonical form already.
    Raises:  CorruptShard: nulls in a column of integers or bools without a fill value.
    """
    arrays = []
    for spec, field, (top, path) in zip(plan.specs, plan.schema, plan.places, strict=True):
        array = _plain_array(_leaf_array(batch.column(top), path))
        if spec.kind is Kind.OBJECT:
            arrays.append(array)
            continue
        fill = fill_null.get(spec.name)
        if spec.kind is Kind.FIXED and spec.shape:
            arrays.append(_fixed_lists(array, spec, field.type, fill, url))
            continue
        array = _typed(array, spec, field.type)
        arrays.append(_without_nulls(array, spec, fill, url))
    return pa.RecordBatch.from_arrays(arrays, schema=plan.schema)


def _leaf_array(array: pa.Array, path: Sequence[int]) -> pa.Array:
    """The leaf at a place below a top-level column; a null struct has null leaves."""
    for i in path:
        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        if pa.types.is_run_end_encoded(array.type.field(i).type):
            # Arrow forgets that the struct is null when it flattens a run-end encoded field.
            import pyarrow.compute as pc

            child = pc.run_end_decode(array.field(i))
            whole = pa.StructArray.from_arrays([child], ["leaf"], mask=_mask(array))
            array = whole.flatten()[0]
        else:
            array = array.flatten()[i]
    return array


def _plain_array(array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        return _plain_array(array.storage)
    if pa.types.is_dictionary(array.type):
        return _plain_array(array.dictionary_decode())
    if pa.types.is_run_end_encoded(array.type):
        import pyarrow.compute as pc

        return _plain_array(pc.run_end_decode(array))
    return array


def _typed(array: pa.Array, spec: ColumnSpec, target: pa.DataType) -> pa.Array:
    if array.type == target:
        return array
    if spec.kind in {Kind.PADDED, Kind.RAGGED}:
        return _retyped_list(array, target)
    if spec.kind in {Kind.STRING, Kind.BYTES}:
        if pa.types.is_string_view(array.type) or pa.types.is_string(array.type):
            array = array.cast(pa.large_string())
        return array.cast(pa.large_binary())
    return _number(array, target)


def _number(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Bools as uint8; dates, times and durations as their integers."""
    array = _plain_array(array)
    if array.type == target:
        return array
    if pa.types.is_boolean(array.type):
        return array.cast(pa.uint8())
    return array.view(target)


def _fixed_lists(
    array: pa.Array, spec: ColumnSpec, target: pa.DataType, fill: float | None, url: str
) -> pa.Array:
    """Nested fixed-size lists as one fixed-size list of numbers.

    A null list, on any level, is a list of nulls: what lies below it is undefined.
    """
    values, valid = array, None
    while pa.types.is_fixed_size_list(values.type):
        width = values.type.list_size
        inner = values.values.slice(values.offset * width, len(values) * width)
        if values.null_count:
            here = values.is_valid().to_numpy(zero_copy_only=False)
            valid = here if valid is None else here & valid
        valid = None if valid is None else valid.repeat(width)
        values = _plain_array(inner)
    if array.type == target and valid is None and not values.null_count:
        return array
    if not math.prod(spec.shape):
        return pa.array([[]] * len(array), target)
    values = _number(values, target.value_type)
    if valid is not None:
        import pyarrow.compute as pc

        values = pc.if_else(pa.array(valid), values, pa.scalar(None, values.type))
    return pa.FixedSizeListArray.from_arrays(
        _filled(values, spec, fill, url), math.prod(spec.shape)
    )


def _retyped_list(array: pa.Array, target: pa.DataType) -> pa.Array:
    if pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        # Arrow's own cast gives broken offsets where a list is null, or out of order.
        values = _number(array.flatten(), target.value_type)
        return pa.LargeListArray.from_arrays(_ends(array), values, mask=_mask(array))
    if pa.types.is_list(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    if array.type == target:
        return array
    mask = _mask(array)
    if mask is not None and array.offset:
        array = pa.concat_arrays([array])
    values = _number(array.values, target.value_type)
    return pa.LargeListArray.from_arrays(array.offsets, values, mask=mask)


def _mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _ends(array: pa.Array) -> pa.Array:
    """The offsets of an array's lists within its flattened values; a null list is empty."""
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pa.int64())


def _without_nulls(array: pa.Array, spec: ColumnSpec, fill: float | None, url: str) -> pa.Array:
    if spec.kind in {Kind.STRING, Kind.BYTES}:
        return array
    if spec.kind is Kind.FIXED:
        return _filled(array, spec, fill, url)
    if array.null_count == 0 and array.values.null_count == 0:
        return array
    flat = _filled(array.flatten(), spec, fill, url)
    return pa.LargeListArray.from_arrays(_ends(array), flat)


def _filled(array: pa.Array, spec: ColumnSpec, fill: float | None, url: str) -> pa.Array:
    if array.null_count == 0:
        return array
    import pyarrow.compute as pc

    if fill is None and pa.types.is_floating(array.type):
        fill = math.nan
    if fill is None:
        where = int(pc.index(array.is_null(), value=True).as_py())
        raise CorruptShard(
            f"{url}: column {spec.name!r} ({spec.dtype}) has a null at value {where} of its block, "
            f"and a tensor of {spec.dtype} has no null: "
            f"pass fill_null={{{spec.name!r}: 0}}, or leave the column out with columns=[…]",
            shard=url,
            field=spec.name,
            expected=spec.dtype,
            found="null",
        )
    if spec.dtype == "bool":
        fill = fill != 0  # any other byte is no bool
    value = fill if pa.types.is_floating(array.type) else int(fill)
    return pc.fill_null(array, pa.scalar(value, type=array.type))
