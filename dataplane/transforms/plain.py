"""Arrow arrays without encodings: their rows can be taken, joined and made Python objects.

Arrow has several layouts for one value (dictionaries, run ends, views, 32 and 64 bit offsets), and
its kernels support only some of them. Values without a tensor form are therefore kept in one layout
of each kind: large lists, large strings, structs, maps, unions. Dates, times, timestamps and
durations are the stored integers, nested or not: Python's types lack nanoseconds and range.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def is_any_list(kind: pa.DataType) -> bool:
    """Lists of any length, in any layout."""
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def is_list_view(kind: pa.DataType) -> bool:
    """Lists whose values may lie in any order."""
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def decoded(array: pa.Array) -> pa.Array:
    """The same values without extension, dictionary or run ends around them."""
    if isinstance(array, pa.ExtensionArray):
        return decoded(array.storage)
    if pa.types.is_dictionary(array.type):
        return _without_views(decoded(array.dictionary)).take(array.indices)
    if pa.types.is_run_end_encoded(array.type):
        # Arrow's own kernel does not support dictionaries.
        ends = array.run_ends.to_numpy()
        places = np.arange(array.offset, array.offset + len(array))
        runs = np.searchsorted(ends, places, side="right")
        return _without_views(decoded(array.values)).take(pa.array(runs))
    return array


def list_ends(array: pa.Array) -> pa.Array:
    """The offsets of an array's lists within its flattened values; a null list is empty.

    Shapes:  result: int64[len(array) + 1].
    """
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pa.int64())


def object_type(kind: pa.DataType) -> pa.DataType:
    """The type in which values of `kind`, which have no tensor form, are kept."""
    if isinstance(kind, pa.BaseExtensionType):
        return object_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return object_type(kind.value_type)
    if is_any_list(kind):
        return pa.large_list(object_type(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(object_type(kind.value_type), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(object_type(kind.key_type), object_type(kind.item_type))
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        parts = [kind.field(i) for i in range(kind.num_fields)]
        fields = [pa.field(part.name, object_type(part.type)) for part in parts]
        if pa.types.is_struct(kind):
            return pa.struct(fields)
        return pa.union(fields, mode=kind.mode, type_codes=kind.type_codes)
    return _scalar_type(kind)


def _scalar_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary(kind) or pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    return kind


def objects(array: pa.Array) -> pa.Array:
    """The same values as an array of `object_type`."""
    target = object_type(array.type)
    return array if array.type.equals(target) else _objects(array, target)


def _objects(array: pa.Array, target: pa.DataType) -> pa.Array:
    array = decoded(array)
    if array.type.equals(target):
        return array
    mask = array.is_null() if array.null_count else None
    if pa.types.is_large_list(target):
        return _list(array, target, mask)
    if pa.types.is_fixed_size_list(target):
        width = target.list_size
        values = array.values.slice(array.offset * width, len(array) * width)
        values = _objects(values, target.value_type)
        return pa.FixedSizeListArray.from_arrays(values, type=target, mask=mask)
    if pa.types.is_map(target):
        return _map(array, target, mask)
    if pa.types.is_struct(target):
        children = [_objects(array.field(i), field.type) for i, field in enumerate(target.fields)]
        return pa.StructArray.from_arrays(children, fields=list(target.fields), mask=mask)
    if pa.types.is_union(target):
        return _union(array, target)
    if pa.types.is_temporal(array.type):
        return array.view(target)
    return array.cast(target)


def _list(array: pa.Array, target: pa.DataType, mask: pa.Array | None) -> pa.Array:
    """Lists, one after the other. Takes rows of plain values: `flatten` supports few types."""
    offsets = array.offsets.to_numpy()
    if is_list_view(array.type):
        starts, lengths = offsets[: len(array)], array.sizes.to_numpy()
    else:
        starts, lengths = offsets[:-1], np.diff(offsets)
    if mask is not None:
        lengths = np.where(mask.to_numpy(zero_copy_only=False), 0, lengths)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    values = _objects(array.values, target.value_type)
    if len(array) and (starts - ends[:-1] == starts[0]).all():
        values = values.slice(starts[0], ends[-1])
    else:
        rows = np.repeat(starts - ends[:-1], lengths) + np.arange(ends[-1])
        values = values.take(pa.array(rows))
    return pa.LargeListArray.from_arrays(pa.array(ends), values, type=target, mask=mask)


def _map(array: pa.Array, target: pa.DataType, mask: pa.Array | None) -> pa.Array:
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    keys = _objects(array.keys.slice(first, last - first), target.key_type)
    values = _objects(array.items.slice(first, last - first), target.item_type)
    offsets = pa.array(array.offsets.to_numpy() - first, pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, values, type=target, mask=mask)


def _union(array: pa.Array, target: pa.DataType) -> pa.Array:
    parts = [target.field(i) for i in range(target.num_fields)]
    children = [_objects(array.field(i), part.type) for i, part in enumerate(parts)]
    names = [part.name for part in parts]
    # The array's own properties ignore the offset of a slice.
    buffers, at = array.buffers(), array.offset
    codes = pa.array(np.frombuffer(buffers[1], np.int8, len(array), at))
    if target.mode == "sparse":
        return pa.UnionArray.from_sparse(codes, children, names, target.type_codes)
    offsets = pa.array(np.frombuffer(buffers[2], np.int32, len(array), 4 * at))
    return pa.UnionArray.from_dense(codes, offsets, children, names, target.type_codes)


def _without_views(array: pa.Array) -> pa.Array:
    """Arrow cannot take rows of views: cast them."""
    if pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    if pa.types.is_binary_view(array.type):
        return array.cast(pa.large_binary())
    return array
