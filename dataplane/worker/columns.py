"""An opened canonical block: the place in memory of each column's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct

from dataplane.arena.slab_layout import TEXTS, row_bytes
from dataplane.model.errors import RowOutOfBounds
from dataplane.model.records import ColumnSpec, Kind

TABLE_WIDTH = 5
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
RowIndex = npt.NDArray[np.int32]

_OFFSET_BYTES = {
    **{kind.id: 4 for kind in (pa.string(), pa.binary(), pa.list_(pa.null()))},
    **{kind.id: 8 for kind in (pa.large_string(), pa.large_binary(), pa.large_list(pa.null()))},
}


class BufferSpan(Struct, frozen=True):
    """Bytes [offset, offset + length) of an Arrow buffer, which is None if empty."""

    buffer: pa.Buffer | None
    offset: int
    length: int

    @property
    def address(self) -> int:
        """The address of the bytes; 0 if there is no buffer."""
        return 0 if self.buffer is None else self.buffer.address + self.offset

    @property
    def view(self) -> Bytes:
        """The bytes; they keep the buffer alive."""
        if self.buffer is None or not self.length:
            return np.empty(0, np.uint8)
        return np.frombuffer(self.buffer, np.uint8, self.length, self.offset)


NOTHING = BufferSpan(None, 0, 0)


class RowLayout(Struct, frozen=True, eq=False):
    """The columns whose rows lie side by side in packed rows, in this order; see row_layout.py.

    Shapes:  fields: int64[columns, 2], where each column starts in a packed row, and its size.
    """

    columns: tuple[int, ...]
    fields: Ints
    row_bytes: int

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in a packed row."""
        return self.row_bytes - int(self.fields[:, 1].sum())


class BlockColumns(Struct, frozen=True):
    """One opened canonical block. Its memory lives as long as this object.

    `batch` is the block without packed columns. `values[c]` has the rows of a FIXED column, or the
    values that `starts[c]` (int32 or int64[rows + 1], in elements) divides into rows. `valid[c]`
    exists for columns with nulls. With a row_layout, the packed rows are one additional column, the
    last.

    Shapes:  valid[c]: uint8[rows].   table: int64[columns, 5], the addresses of values, starts and
    valid, 0 for missing ones, the number of elements that the starts divide, and the bytes of a
    start.
    """

    batch: pa.RecordBatch
    rows: int
    values: tuple[BufferSpan, ...]
    starts: tuple[BufferSpan, ...]
    valid: dict[int, Bytes]
    table: Ints
    row_layout: RowLayout | None = None


def row_sizes(specs: Sequence[ColumnSpec]) -> list[int]:
    """Return the size of one row of each column; 0 for columns that are not FIXED."""
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    found = []
    for spec in specs:
        if spec.kind is not Kind.FIXED:
            found.append(0)
            continue
        form = (spec.dtype, spec.shape)
        size = known.get(form)
        if size is None:
            size = known[form] = row_bytes(spec)
        found.append(size)
    return found


def open_block(
    batch: pa.RecordBatch,
    specs: Sequence[ColumnSpec],
    row_layout: RowLayout | None = None,
    packed: BufferSpan = NOTHING,
) -> BlockColumns:
    """Open a canonical block, some of whose columns may be in packed rows.

    Raises:  RowOutOfBounds: a buffer ends before its column does.
    """
    values, starts, valid, table = [], [], {}, []
    elsewhere = frozenset(row_layout.columns if row_layout is not None else ())
    for at, spec in enumerate(specs):
        own, cuts, count, mask, start_bytes = NOTHING, NOTHING, 0, 0, 0
        if spec.kind is not Kind.OBJECT and at not in elsewhere:
            array = batch.column(spec.name)
            if spec.kind is Kind.FIXED:
                own = _fixed(array, spec)
            else:
                start_bytes = offset_bytes(array.type)
                own, cuts = _runs(array, spec), _starts(array, start_bytes)
                count = own.length // spec.value_bytes
                if spec.kind in TEXTS and array.null_count:
                    valid[at] = array.is_valid().cast(pa.uint8()).to_numpy()
                    mask = valid[at].ctypes.data
        values.append(own)
        starts.append(cuts)
        table.append((own.address, cuts.address, mask, count, start_bytes))
    if row_layout is not None:
        values.append(packed)
        starts.append(NOTHING)
        table.append((packed.address, 0, 0, 0, 0))
    return BlockColumns(
        batch,
        batch.num_rows,
        tuple(values),
        tuple(starts),
        valid,
        np.array(table, np.int64).reshape(-1, TABLE_WIDTH),
        row_layout,
    )


def _fixed(array: pa.Array, spec: ColumnSpec) -> BufferSpan:
    size = row_bytes(spec)
    values = array.values if spec.shape else array
    offset = values.offset * spec.value_bytes + (array.offset * size if spec.shape else 0)
    return _part(values.buffers()[1], offset, len(array) * size)


def _runs(array: pa.Array, spec: ColumnSpec) -> BufferSpan:
    if spec.kind in TEXTS:
        buffer = array.buffers()[2]
        return _part(buffer, 0, 0 if buffer is None else buffer.size)
    values, size = array.values, spec.value_bytes
    return _part(values.buffers()[1], values.offset * size, len(values) * size)


def offset_bytes(kind: pa.DataType) -> int:
    """Return the bytes of a row's offset; 0 if rows of this type have no offsets."""
    return _OFFSET_BYTES.get(kind.id, 0)


def _starts(array: pa.Array, start_bytes: int) -> BufferSpan:
    if not len(array):
        return NOTHING
    buffer = array.buffers()[1]
    return _part(buffer, array.offset * start_bytes, (len(array) + 1) * start_bytes)


def _part(buffer: pa.Buffer | None, offset: int, length: int) -> BufferSpan:
    if not length:
        return NOTHING
    if buffer is None or offset + length > buffer.size:
        raise RowOutOfBounds(
            f"a column takes {offset + length} bytes, and its buffer is shorter", row=0
        )
    return BufferSpan(buffer, offset, length)


def by_block(row_index: RowIndex) -> Iterator[tuple[int, Ints, Ints]]:
    """Yield (block, its rows, their places in the index), block after block.

    Shapes:  row_index: int32[rows, 2].   places: int64, rising within a block.
    """
    order = np.argsort(row_index[:, 0], kind="stable")
    blocks = row_index[order, 0]
    cuts = np.flatnonzero(np.diff(blocks)) + 1
    for places in np.split(order, cuts) if len(order) else ():
        yield int(row_index[places[0], 0]), row_index[places, 1].astype(np.int64), places
