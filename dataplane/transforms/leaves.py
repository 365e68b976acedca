"""The leaf columns of an Arrow schema: its columns, with structs flattened.

A leaf of a struct has a dotted name ("image.bytes"). Field names may contain dots themselves, so a
leaf also stores its path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace

from dataplane.formats.nulls import children, node_count
from dataplane.model.records import ColumnSpec, Kind, ListPolicy
from dataplane.transforms.plain import is_any_list, object_type


class Leaf(Struct, frozen=True):
    """One leaf column. `top` is the top-level column that contains it, `path` the index of the
    field in each struct on the way down, `structs` the dotted names of these structs.

    A null in one of the field nodes `row_nodes` (see formats.nulls) makes the leaf's own row null.
    The half-open range `inner_nodes` are the field nodes below the leaf: the items of a list.
    """

    name: str
    top: str
    type: pa.DataType
    path: tuple[int, ...]
    structs: tuple[str, ...]
    row_nodes: tuple[int, ...]
    inner_nodes: tuple[int, int]


def leaves_of(schema: pa.Schema) -> Iterator[Leaf]:
    """Yield every leaf, in order."""
    node = 0
    for field in schema:
        name, kind = field.name, field.type
        if kind.id in _NUMBERS:
            node += 1
            yield Leaf(name, name, kind, (), (), (node - 1,), (node, node))
            continue
        yield from _leaves(Leaf(name, name, kind, (), (), (node,), (0, 0)))
        node += node_count([field])


def _leaves(at: Leaf) -> Iterator[Leaf]:
    """Yield the leaves at this place: those of a struct, or the field itself."""
    kind = at.type.storage_type if isinstance(at.type, pa.BaseExtensionType) else at.type
    node = at.row_nodes[-1] + 1
    if not pa.types.is_struct(kind) or not kind.num_fields:
        yield _with_nodes(at)
        return
    for i, field in enumerate(kind.fields):
        yield from _leaves(
            Leaf(
                f"{at.name}.{field.name}",
                at.top,
                field.type,
                (*at.path, i),
                (*at.structs, at.name),
                (*at.row_nodes, node),
                (0, 0),
            )
        )
        node += node_count([field])


def _with_nodes(leaf: Leaf) -> Leaf:
    kind, nodes = leaf.type, leaf.row_nodes
    while isinstance(kind, pa.BaseExtensionType) or pa.types.is_run_end_encoded(kind):
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        else:  # the children are run ends, then values; only values have nulls
            kind, nodes = kind.value_type, (*nodes, nodes[-1] + 2)
    inner = (nodes[-1] + 1, nodes[-1] + 1 + node_count(children(kind)))
    return Leaf(leaf.name, leaf.top, leaf.type, leaf.path, leaf.structs, nodes, inner)


def spec_of(leaf: Leaf, lists: ListPolicy) -> ColumnSpec:
    """Return the form of a leaf's values."""
    number = _NUMBERS.get(leaf.type.id)
    if number is not None:
        return ColumnSpec(leaf.name, Kind.FIXED, number[0])
    fixed = _fixed(leaf.type)
    if fixed is not None:
        return ColumnSpec(leaf.name, Kind.FIXED, *fixed)
    plain = _plain(leaf.type)
    if pa.types.is_string(plain) or pa.types.is_large_string(plain):
        return ColumnSpec(leaf.name, Kind.STRING, "")
    if pa.types.is_binary(plain) or pa.types.is_large_binary(plain):
        return ColumnSpec(leaf.name, Kind.BYTES, "")
    if pa.types.is_fixed_size_binary(plain) and not pa.types.is_decimal(plain):
        return ColumnSpec(leaf.name, Kind.BYTES, "")
    if is_any_list(plain) and numpy_name(_plain(plain.value_type)):
        kind_of = Kind.PADDED if lists is ListPolicy.PADDED else Kind.RAGGED
        return ColumnSpec(leaf.name, kind_of, numpy_name(_plain(plain.value_type)))
    return ColumnSpec(leaf.name, Kind.OBJECT, "")


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type below extensions, dictionaries, run-end encodings and views."""
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return kind


def value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's single values, or of the items of its lists."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return value_type(kind.value_type)
    kind = _plain(kind)
    return (
        value_type(kind.value_type)
        if is_any_list(kind) or pa.types.is_fixed_size_list(kind)
        else kind
    )


def coded_leaf(leaf: Leaf) -> Leaf:
    """Return the leaf of the values that have codes: those of lists, or the column's own."""
    plain = _plain(leaf.type)
    return replace(leaf, type=plain.value_type) if is_any_list(plain) else leaf


def numpy_name(kind: pa.DataType) -> str:
    """Return the numpy name of a primitive type, "" for any other type."""
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        # Do not call to_pandas_dtype(): before pyarrow 26, it imports pandas, which takes half a
        # second at every start.
        prefix = "float" if pa.types.is_floating(kind) else "int"
        return f"{'u' if pa.types.is_unsigned_integer(kind) else ''}{prefix}{kind.bit_width}"
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return "int64"
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return f"int{kind.bit_width}"
    return ""


def _fixed(kind: pa.DataType) -> tuple[str, tuple[int, ...]] | None:
    """Return (dtype, shape) of a type whose values all have one size, otherwise None."""
    if isinstance(kind, pa.FixedShapeTensorType):
        order = kind.permutation
        if order is not None and list(order) != sorted(order):
            return None
        dtype = numpy_name(kind.value_type)
        return (dtype, tuple(kind.shape)) if dtype else None
    kind = _plain(kind)
    if pa.types.is_fixed_size_list(kind):
        inner = _fixed(kind.value_type)
        return None if inner is None else (inner[0], (kind.list_size, *inner[1]))
    dtype = numpy_name(kind)
    return (dtype, ()) if dtype else None


def _numeric(dtype: str) -> pa.DataType:
    return pa.uint8() if dtype == "bool" else pa.from_numpy_dtype(dtype)


def canonical_type(kind: pa.DataType) -> pa.DataType:
    """Return the Arrow type of a leaf's values, ignoring encodings and the width of offsets."""
    number = _NUMBERS.get(kind.id)
    if number is not None:
        return number[1]
    fixed = _fixed(kind)
    if fixed is not None:
        dtype, shape = fixed
        width = math.prod(shape)
        return _numeric(dtype) if not shape else pa.list_(_numeric(dtype), width)
    plain = _plain(kind)
    if is_any_list(plain) and numpy_name(_plain(plain.value_type)):
        return pa.large_list(_numeric(numpy_name(_plain(plain.value_type))))
    if pa.types.is_string(plain) or pa.types.is_binary(plain):
        return pa.large_binary()
    if pa.types.is_large_string(plain) or pa.types.is_large_binary(plain):
        return pa.large_binary()
    if pa.types.is_fixed_size_binary(plain) and not pa.types.is_decimal(plain):
        return pa.large_binary()
    return object_type(plain)


def block_type(kind: pa.DataType) -> pa.DataType:
    """Return the Arrow type of a leaf in the block arena: the canonical one, but with 32-bit
    offsets if it is stored with them, so that a fetched block needs no decoding.
    """
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return pa.binary()
    kept = canonical_type(kind)
    short = pa.types.is_list(kind) and pa.types.is_large_list(kept)
    return pa.list_(kept.value_type) if short else kept


def is_number(kind: pa.DataType) -> bool:
    """Return whether a column of this type has one plain number per row."""
    return kind.id in _NUMBERS


def are_numbers(schema: pa.Schema) -> bool:
    """Return whether every column has one plain number per row."""
    return all(kind.id in _NUMBERS for kind in schema.types)


# Types of plain numbers by id, for speed: wide tables have tens of thousands of such columns.
_NUMBERS = {
    kind.id: (numpy_name(kind), _numeric(numpy_name(kind)))
    for kind in (
        *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64()),
        *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64()),
    )
}
