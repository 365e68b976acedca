"""Convert Arrow arrays between types that hold the same values, and build columns from bytes.

Arrow has several layouts for the same values (dictionaries, run ends, views, 32 and 64 bit
offsets), and its kernels support only some of them. An array with 32-bit offsets holds at most
2 GiB of text, or of list items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

OFFSET_MAX = (1 << 31) - 1
TEXTS = frozenset(kind.id for kind in (pa.string(), pa.large_string(), pa.string_view()))
BYTES = frozenset(
    kind.id for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1))
)
ANY_LISTS = frozenset(
    make(pa.null()).id for make in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)
)
LIST_VIEWS = frozenset(make(pa.null()).id for make in (pa.list_view, pa.large_list_view))
"""Arrow type ids of texts, of bytes, of lists of any layout, and of list views, whose values may be
stored in any order.
"""
_NARROW = frozenset(kind.id for kind in (pa.string(), pa.binary()))


def widened(kind: pa.DataType) -> pa.DataType:
    """Return the type that holds the same values, and more than 2 GiB of them."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind if isinstance(kind, pa.FixedShapeTensorType) else widened(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return widened(kind.value_type)
    if kind.id in TEXTS:
        return pa.large_string()
    if kind.id in BYTES:
        return kind if pa.types.is_fixed_size_binary(kind) else pa.large_binary()
    if kind.id in ANY_LISTS:
        return pa.large_list(_widened(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_widened(kind.value_field), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(widened(kind.key_type), widened(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([_widened(field) for field in kind.fields])
    return kind


def _widened(field: pa.Field) -> pa.Field:
    return pa.field(field.name, widened(field.type))


def read_as(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert an array to a type that can hold the same values; times may become integers.

    Raises:  Arrow's errors.
    """
    if array.type.equals(kind):
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    array = decoded(array)
    if array.type.equals(kind):
        return array
    mask = array.is_null() if array.null_count else None
    if pa.types.is_large_list(kind):
        return _read_as_lists(array, kind, mask)
    if pa.types.is_fixed_size_list(kind):
        width = kind.list_size
        values = array.values.slice(array.offset * width, len(array) * width)
        values = read_as(values, kind.value_type)
        return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=mask)
    if pa.types.is_map(kind):
        return _read_as_map(array, kind, mask)
    if pa.types.is_struct(kind):
        return _read_as_struct(array, kind, mask)
    if pa.types.is_union(kind):
        return _read_as_union(array, kind)
    if pa.types.is_temporal(array.type) and pa.types.is_integer(kind):
        return array.view(kind)
    return array.cast(kind)


def first_refused(array: pa.Array, read: Callable[[pa.Array], object]) -> int:
    """Return the first row that `read` refuses with an error of Arrow. There must be such a row."""
    start, stop = 0, len(array)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            read(pa.concat_arrays([array.slice(start, middle - start)]))
        except pa.ArrowException:
            stop = middle
        else:
            start = middle
    return start


def _read_as_struct(array: pa.Array, kind: pa.DataType, mask: pa.Array | None) -> pa.Array:
    """Convert a struct; its fields may be in another order."""
    own, names = ([field.name for field in both.fields] for both in (array.type, kind))
    places = range(len(names)) if own == names else [own.index(name) for name in names]
    fields = list(kind.fields)
    parts = [read_as(array.field(at), field.type) for at, field in zip(places, fields, strict=True)]
    return pa.StructArray.from_arrays(parts, fields=fields, mask=mask)


def _read_as_lists(array: pa.Array, kind: pa.DataType, mask: pa.Array | None) -> pa.Array:
    """Convert lists item by item. Nested arrays are rebuilt from their offsets and values, since
    Arrow's `flatten` supports few types.
    """
    offsets = array.offsets.to_numpy()
    if array.type.id in LIST_VIEWS:
        starts, lengths = offsets[: len(array)], array.sizes.to_numpy()
    else:
        starts, lengths = offsets[:-1], np.diff(offsets)
    if mask is not None:
        lengths = np.where(mask.to_numpy(zero_copy_only=False), 0, lengths)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    values = read_as(array.values, kind.value_type)
    if len(array) and (starts - ends[:-1] == starts[0]).all():
        values = values.slice(starts[0], ends[-1])
    else:
        rows = np.repeat(starts - ends[:-1], lengths) + np.arange(ends[-1])
        values = values.take(pa.array(rows))
    return pa.LargeListArray.from_arrays(pa.array(ends), values, type=kind, mask=mask)


def _read_as_map(array: pa.Array, kind: pa.DataType, mask: pa.Array | None) -> pa.Array:
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    keys = read_as(array.keys.slice(first, last - first), kind.key_type)
    values = read_as(array.items.slice(first, last - first), kind.item_type)
    offsets = pa.array(array.offsets.to_numpy() - first, pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, values, type=kind, mask=mask)


def _read_as_union(array: pa.Array, kind: pa.DataType) -> pa.Array:
    parts = [kind.field(i) for i in range(kind.num_fields)]
    children = [read_as(array.field(i), part.type) for i, part in enumerate(parts)]
    names = [part.name for part in parts]
    # Read the buffers: the array's own properties ignore the offset of a slice.
    buffers, at = array.buffers(), array.offset
    codes = pa.array(np.frombuffer(buffers[1], np.int8, len(array), at))
    if kind.mode == "sparse":
        return pa.UnionArray.from_sparse(codes, children, names, kind.type_codes)
    offsets = pa.array(np.frombuffer(buffers[2], np.int32, len(array), 4 * at))
    return pa.UnionArray.from_dense(codes, offsets, children, names, kind.type_codes)


def decoded(array: pa.Array) -> pa.Array:
    """Remove extension, dictionary and run-end layers; the values stay the same."""
    if isinstance(array, pa.ExtensionArray):
        return decoded(array.storage)
    if pa.types.is_dictionary(array.type):
        return _taken(decoded(array.dictionary), array.indices)
    if pa.types.is_run_end_encoded(array.type):
        # Find the run of each row with numpy: Arrow's own kernel does not support dictionaries.
        ends = array.run_ends.to_numpy()
        places = np.arange(array.offset, array.offset + len(array))
        runs = np.searchsorted(ends, places, side="right")
        return _taken(decoded(array.values), pa.array(runs))
    return array


def take_rows(array: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    """Return these rows of an array of any type.

    Shapes:  rows: int64[n], any order.
    """
    try:
        return array.take(pa.array(rows))
    except pa.ArrowNotImplementedError:  # Arrow cannot take rows of views or of run ends
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        some = [array.slice(run[0], len(run)) for run in runs if len(run)]
        return pa.concat_arrays([array[:0], *some])


def _taken(values: pa.Array, rows: pa.Array) -> pa.Array:
    """Select rows of the values; also of view types, which Arrow's `take` does not support."""
    kind = values.type
    is_view = pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)
    if is_view or (kind.id in _NARROW and _longest(values) * len(rows) > OFFSET_MAX):
        values = values.cast(widened(kind))
    return values.take(rows)


def _longest(texts: pa.Array) -> int:
    import pyarrow.compute as pc

    return int(pc.max(pc.binary_length(texts)).as_py() or 0)


def record_batch(arrays: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """Make a batch of these columns. If a column is too large for its type's 32-bit offsets, it
    gets the type with 64-bit offsets.
    """
    try:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    except pa.ArrowInvalid:
        return pa.RecordBatch.from_arrays(arrays, names=schema.names)


def joined(pieces: Sequence[pa.Array]) -> pa.Array:
    """Concatenate arrays into one, with 64-bit offsets if 32-bit ones cannot hold the sum.

    Raises:  Arrow's errors.
    """
    if len(pieces) == 1:
        return pieces[0]
    try:
        return pa.concat_arrays(pieces)
    except pa.ArrowInvalid:
        wide = widened(pieces[0].type)
        if wide.equals(pieces[0].type):
            raise
        return pa.concat_arrays([read_as(piece, wide) for piece in pieces])


# Make columns of pieces of a block: each value is copied once, without a Python object.

_NARROW_BYTES = 4


def bytes_column(pieces: Sequence[memoryview | bytes | None], kind: pa.DataType) -> pa.Array:
    """Make a column with one binary or string value per row; None is null. Beyond 2 GiB it has
    64-bit offsets.
    """
    lengths = np.fromiter((-1 if p is None else len(p) for p in pieces), np.int64, len(pieces))
    valid = lengths >= 0
    offsets = offsets_of(np.where(valid, lengths, 0))
    kind = widened(kind) if offsets.itemsize > _NARROW_BYTES else kind
    values = pa.py_buffer(b"".join(piece for piece in pieces if piece is not None))
    return pa.Array.from_buffers(
        kind, len(pieces), [_bitmap(valid), pa.py_buffer(offsets), values], _nulls(valid)
    )


def primitive_column(values: np.ndarray, valid: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Make a column with one number per row.

    Shapes:  values: dtype of kind [rows].   valid: bool[rows].
    """
    buffers = [_bitmap(valid), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(kind, len(values), buffers, _nulls(valid))


def list_column(counts: np.ndarray, valid: np.ndarray, values: pa.Array) -> pa.Array:
    """Make a column with one list per row; beyond 2^31 values it has 64-bit offsets.

    Shapes:  counts: int64[rows].   valid: bool[rows].   values: those of all lists, concatenated.
    """
    offsets = offsets_of(counts)
    make = pa.large_list if offsets.itemsize > _NARROW_BYTES else pa.list_
    return pa.Array.from_buffers(
        make(values.type),
        len(counts),
        [_bitmap(valid), pa.py_buffer(offsets)],
        _nulls(valid),
        children=[values],
    )


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return Arrow offsets, as narrow as the total allows.

    Shapes:  lengths: int64[rows].   result: int32[rows + 1], or int64[rows + 1].
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets if offsets[-1] > OFFSET_MAX else offsets.astype(np.int32)


def _bitmap(valid: np.ndarray) -> pa.Buffer | None:
    if valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def _nulls(valid: np.ndarray) -> int:
    return int(len(valid) - np.count_nonzero(valid))
