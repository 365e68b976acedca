"""Convert Arrow arrays to forms without encodings, whose rows can be selected, joined and converted
to Python objects.

Values without a tensor form have one layout for each kind: large lists, large strings, structs,
maps, unions. Dates, times, timestamps and durations, nested or not, are the stored integers, since
Python's types lack nanoseconds and range.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from dataplane.formats.arrays import ANY_LISTS, read_as


def is_any_list(kind: pa.DataType) -> bool:
    """Return whether a type is lists of variable length, in any layout."""
    return kind.id in ANY_LISTS


def list_ends(array: pa.Array) -> pa.Array:
    """Return the offsets of an array's lists within its flattened values; a null list is empty.

    Shapes:  result: int64[len(array) + 1].
    """
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pa.int64())


def object_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that represents values of `kind`, which have no tensor form."""
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
    """Convert an array to `object_type`."""
    return read_as(array, object_type(array.type))
