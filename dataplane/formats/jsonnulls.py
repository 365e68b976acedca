"""Read lists whose values are all null in the first lines, such as `{"tags": [null, null]}`.

Arrow's JSON parser gives such a list fewer values than its offsets say. So the list is read as a
list of bools, and any value other than null is an error.
"""

from __future__ import annotations

import pyarrow as pa


def parser_type(kind: pa.DataType, *, in_list: bool = False) -> pa.DataType:
    """Return the type to request from the parser to get `kind`."""
    if pa.types.is_list(kind):
        return pa.list_(parser_type(kind.value_type, in_list=True))
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, parser_type(f.type, in_list=in_list)) for f in kind.fields])
    return pa.bool_() if in_list and pa.types.is_null(kind) else kind


def from_parser(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert an array of `parser_type(kind)` to `kind`.

    Raises:  ValueError: a value is not null although it must be.
    """
    if array.type.equals(kind):
        return array
    mask = array.is_null() if array.null_count else None
    if pa.types.is_list(kind):
        values = from_parser(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, values, type=kind, mask=mask)
    if pa.types.is_struct(kind):
        children = [from_parser(array.field(i), f.type) for i, f in enumerate(kind.fields)]
        return pa.StructArray.from_arrays(children, fields=list(kind.fields), mask=mask)
    if array.null_count != len(array):
        raise ValueError("Failed to convert: a value in a list that has only nulls before")
    return pa.nulls(len(array))
