"""Packed blocks: the small columns of a row lie side by side, so that reading a random row costs
one or two cache misses instead of one per column.

In the block arena a packed block is the Arrow stream of its other columns, then its packed rows,
up to the end of its region; both start at multiples of a cache line.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataplane.arena.slab_layout import TEXTS
from dataplane.model.errors import RowOutOfBounds
from dataplane.model.records import ColumnSpec, Kind
from dataplane.worker.columns import (
    NOTHING,
    BlockColumns,
    BufferSpan,
    Bytes,
    Ints,
    RowLayout,
    open_block,
    row_sizes,
)
from dataplane.worker.kernel import kernel
from dataplane.worker.rows import Rows, fields_of

# -- places of columns -----------------------------------------------------------------------------
#
# Find the columns of a batch without a Python object per column: a wide table has tens of
# thousands, and inspecting each would take longer than decoding it.
#
# Source:  https://arrow.apache.org/docs/format/CDataInterface.html


_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_LENGTH, NULLS, OFFSET, VALUES = range(4)


def placed_columns(batch: pa.RecordBatch) -> Ints:
    """Return, for each column, its length, its null count (-1 if not counted), the offset in rows
    of its first value, and the address of its values, 0 if it has no values. The addresses are
    valid as long as the batch lives.

    Shapes:  result: int64[columns, 4].
    """
    places = np.zeros((batch.num_columns, 4), np.int64)
    _, exported = batch.__arrow_c_array__()
    kernel().place_columns(_pointer_in(exported, b"arrow_array"), places.ctypes.data)
    return places


def may_have_nulls(places: Ints) -> bool:
    """Whether a column has nulls, or may have some."""
    return bool(places[:, NULLS].any())


_LINE_BYTES = 64
_SMALL_BYTES = 32
"""Longer values of a column are not packed: a cache miss for each is acceptable."""
_COLUMNS_MIN = 4
"""With fewer columns, faster reading does not pay for packing."""
_PADDING_SHARE = 8
"""Padding is at most 1/_PADDING_SHARE of a row's size. Padded rows cross fewer cache lines."""


def plan_row_layout(specs: Sequence[ColumnSpec]) -> RowLayout | None:
    """Choose the columns that are worth packing; return None if there are too few."""
    every = row_sizes(specs)
    sizes = {at: size for at, size in enumerate(every) if 0 < size <= _SMALL_BYTES}
    if len(sizes) < _COLUMNS_MIN:
        return None
    # Put columns of equal size side by side: the kernel transposes several of them at once.
    columns = sorted(sizes, key=lambda at: -sizes[at])
    widths = np.array([sizes[at] for at in columns], np.int64)
    ends = np.cumsum(widths)
    fields = np.stack([ends - widths, widths], axis=1)
    return RowLayout(tuple(columns), fields, _padded(int(ends[-1])))


def _padded(size: int) -> int:
    """Pad a row's size to the widest alignment that costs little."""
    for step in (_LINE_BYTES, _LINE_BYTES // 2, _LINE_BYTES // 4, _LINE_BYTES // 8):
        padded = -(-size // step) * step
        if (padded - size) * _PADDING_SHARE <= size:
            return padded
    return size


def stored_bytes(batch: pa.RecordBatch, row_layout: RowLayout | None) -> int:
    """Return the bytes that a canonical block takes in the block arena."""
    stream = _others(batch, row_layout)
    mock = pa.MockOutputStream()
    with pa.ipc.new_stream(mock, stream.schema) as writer:
        writer.write_batch(stream)
    size = int(mock.size())
    return size if row_layout is None else _lines(size) + _packed_bytes(batch, row_layout)


def store(
    batch: pa.RecordBatch,
    specs: Sequence[ColumnSpec],
    row_layout: RowLayout | None,
    region: memoryview,
    places: Ints | None = None,
) -> None:
    """Write a canonical block. `places` is the result of `placed_columns`, if it is known.

    Shapes:  region: uint8[stored_bytes], writable; padding is not written.
    Raises:  RowOutOfBounds: a buffer ends before its column does.
    """
    stream = _others(batch, row_layout)
    with (
        pa.FixedSizeBufferWriter(pa.py_buffer(region)) as sink,
        pa.ipc.new_stream(sink, stream.schema) as writer,
    ):
        writer.write_batch(stream)
    if row_layout is not None and batch.num_rows:
        start = len(region) - _packed_bytes(batch, row_layout)
        length = batch.num_rows * row_layout.row_bytes
        pack(batch, specs, row_layout, np.frombuffer(region, np.uint8, length, start), places)


def rows_of_block(
    columns: BlockColumns, specs: Sequence[ColumnSpec], rows: Ints
) -> tuple[pa.RecordBatch, Bytes]:
    """Return some rows of an opened block: the columns that are not packed, and the packed rows.

    Shapes:  rows: int64[n].   result[1]: uint8[n * row_bytes], empty without a row layout.
    Raises:  RowOutOfBounds: the block has no such row, or the row's values are not in its column.
    """
    index = np.stack([np.zeros(len(rows), np.int32), rows.astype(np.int32)], axis=1)
    opened = Rows([columns], index)
    batch, layout = columns.batch, columns.row_layout
    for at, spec in enumerate(specs):
        if spec.kind not in {Kind.FIXED, Kind.OBJECT}:
            opened.spans(at)  # check that the rows' values exist: Arrow does not
    others = batch.slice(0, len(rows))
    if batch.num_columns:
        of_name, chosen = {spec.name: spec for spec in specs}, pa.array(rows)
        taken = [
            _taken(array, of_name[name].kind, chosen)
            for name, array in zip(batch.schema.names, batch.columns, strict=True)
        ]
        metadata = batch.schema.metadata  # lists the rows that were replaced
        others = pa.record_batch(taken, names=batch.schema.names, metadata=metadata)
    if layout is None:
        return others, np.empty(0, np.uint8)
    packed = columns.values[-1].view.reshape(-1, layout.row_bytes)[rows]
    return others, packed.reshape(-1)


def _taken(array: pa.Array, kind: Kind, rows: pa.Array) -> pa.Array:
    """Take rows of a column, with the bytes of nulls: slabs have them, but Arrow leaves
    them out.
    """
    if kind in {Kind.FIXED, Kind.OBJECT} or not array.null_count:
        return array.take(rows)
    buffers, is_text = array.buffers(), kind in TEXTS
    bare = pa.Array.from_buffers(
        array.type,
        len(array),
        [None, *buffers[1 : 3 if is_text else 2]],
        null_count=0,
        offset=array.offset,
        children=None if is_text else [array.values],
    ).take(rows)
    if not is_text:
        return bare
    valid = array.is_valid().take(rows).buffers()[1]
    return pa.Array.from_buffers(bare.type, len(bare), [valid, *bare.buffers()[1:]])


def store_rows(
    others: pa.RecordBatch, packed: Bytes, row_layout: RowLayout | None, region: memoryview
) -> int:
    """Write the result of `rows_of_block` like a stored block. Return the bytes needed; if the
    region has fewer, nothing is written.
    """
    mock = pa.MockOutputStream()
    with pa.ipc.new_stream(mock, others.schema) as writer:
        writer.write_batch(others)
    size = int(mock.size())
    need = size if row_layout is None else _lines(size) + _lines(len(packed))
    if need > len(region):
        return need
    with (
        pa.FixedSizeBufferWriter(pa.py_buffer(region[:need])) as sink,
        pa.ipc.new_stream(sink, others.schema) as writer,
    ):
        writer.write_batch(others)
    if len(packed):
        start = need - _lines(len(packed))
        np.frombuffer(region, np.uint8, len(packed), start)[:] = packed
    return need


def open_stored(
    region: memoryview, specs: Sequence[ColumnSpec], row_layout: RowLayout | None
) -> BlockColumns:
    """Return the places of the columns of a stored block.

    Raises:  RowOutOfBounds: the region is too short for its rows, or a buffer for its column.
    """
    buffer = pa.py_buffer(region)
    with pa.ipc.open_stream(buffer) as reader:
        batch = reader.read_next_batch()
    if row_layout is None:
        return open_block(batch, specs)
    start = buffer.size - _packed_bytes(batch, row_layout)
    if start < 0:
        raise RowOutOfBounds(
            f"{batch.num_rows} packed rows take more than the {buffer.size} bytes of their block",
            row=0,
        )
    length = batch.num_rows * row_layout.row_bytes
    return open_block(
        batch, specs, row_layout, BufferSpan(buffer, start, length) if length else NOTHING
    )


def _others(batch: pa.RecordBatch, row_layout: RowLayout | None) -> pa.RecordBatch:
    """Return the columns that are not packed, with the same number of rows even if no column is
    left.
    """
    if row_layout is None:
        return batch
    packed = frozenset(row_layout.columns)
    return batch.select([at for at in range(batch.num_columns) if at not in packed])


def pack(
    batch: pa.RecordBatch,
    specs: Sequence[ColumnSpec],
    row_layout: RowLayout,
    out: Bytes,
    places: Ints | None = None,
) -> None:
    """Write the packed rows of a canonical block; `places` is as in `store`.

    Shapes:  out: uint8[rows * row_bytes], of one row at least; padding is not written.
    Raises:  RowOutOfBounds: a buffer ends before its column does.
    """
    places = placed_columns(batch) if places is None else places
    fields = fields_of(row_layout, _addresses(batch, specs, row_layout, places))
    kernel().pack_rows(
        fields.ctypes.data, len(fields), batch.num_rows, row_layout.row_bytes, out.ctypes.data
    )


def _addresses(
    batch: pa.RecordBatch, specs: Sequence[ColumnSpec], row_layout: RowLayout, places: Ints
) -> Ints:
    """Return the address at which the values of each packed column start."""
    try:
        batch.validate()
    except pa.ArrowInvalid as fault:
        raise RowOutOfBounds(f"a column is shorter than its block: {fault}", row=0) from fault
    own = places[list(row_layout.columns)]
    found = own[:, VALUES] + own[:, OFFSET] * row_layout.fields[:, 1]
    for i, at in enumerate(row_layout.columns):
        if specs[at].shape:  # a column of lists: find the values in the lists
            part = open_block(batch.select([at]), [specs[at]]).values[0]
            found[i] = part.address
    return found


def _packed_bytes(batch: pa.RecordBatch, row_layout: RowLayout) -> int:
    return _lines(batch.num_rows * row_layout.row_bytes)


def _lines(size: int) -> int:
    return -(-size // _LINE_BYTES) * _LINE_BYTES
