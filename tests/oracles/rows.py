"""Rows of blocks, and packed rows, by numpy: what the loops of kernel.c must give, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.model.errors import RowOutOfBounds
from dataplane.model.records import ColumnSpec
from dataplane.worker.columns import (
    BlockColumns,
    Bytes,
    Ints,
    RowIndex,
    RowLayout,
    by_block,
    open_block,
)


class NumpyRows:
    """The oracle of Rows in worker/rows.py."""

    def __init__(self, blocks: Sequence[BlockColumns], row_index: RowIndex) -> None:
        self._rows = len(row_index)
        block_rows = np.array([*(block.rows for block in blocks), 0], np.int64)
        outside = (row_index < 0).any(axis=1) | (row_index[:, 0] >= len(blocks))
        outside |= row_index[:, 1] >= block_rows[np.where(outside, -1, row_index[:, 0])]
        _expect_inside(outside, "the index")
        self._parts = [(blocks[block], take, put) for block, take, put in by_block(row_index)]

    def fixed(self, at: int, row_bytes: int, out: Bytes) -> None:
        if not row_bytes:
            return
        one_row = np.dtype((np.void, row_bytes))
        into = out.view(one_row)
        for block, take, put in self._parts:
            count = int(np.searchsorted(put, len(into)))
            into[put[:count]] = block.values[at].view.view(one_row)[take[:count]]

    def packed(self, row_layout: RowLayout, count: int, out: Bytes, begins: Ints) -> None:
        outside = (begins < 0) | (begins > len(out) - count * row_layout.fields[:, 1])
        _expect_inside(outside, "a packed column")
        for block, take, put in self._parts:
            rows = block.values[-1].view.reshape(-1, row_layout.row_bytes)
            some = int(np.searchsorted(put, count))
            for (start, size), begin in zip(
                row_layout.fields.tolist(), begins.tolist(), strict=True
            ):
                into = out[begin : begin + count * size].reshape(-1, size)
                into[put[:some]] = rows[take[:some], start : start + size]

    def spans(self, at: int) -> tuple[Ints, Ints]:
        starts, ends = np.empty(self._rows, np.int64), np.empty(self._rows, np.int64)
        limits = np.empty(self._rows, np.int64)
        for block, take, put in self._parts:
            *_, limit, start_bytes = block.table[at].tolist()
            cuts = block.starts[at].view.view(f"i{start_bytes}")
            starts[put], ends[put] = cuts[take], cuts[take + 1]
            limits[put] = limit
        outside = (starts < 0) | (ends < starts) | (ends > limits)
        _expect_inside(outside, f"column {at}")
        return starts, ends - starts

    def runs(self, at: int, element_bytes: int, spans: tuple[Ints, Ints], put: Ints, room: Ints,
             out: Bytes, padding: bytes = b"") -> None:  # fmt: skip
        element = np.frombuffer(padding or bytes(element_bytes), np.uint8)
        starts, lengths = (each[: len(put)] * element_bytes for each in spans)
        outside = (put < 0) | (lengths > room) | (room > len(out) - put)
        _expect_inside(outside, f"column {at}")
        for block, _, places in self._parts:
            values = block.values[at].view
            for i in places[places < len(put)].tolist():
                end = put[i] + lengths[i]
                out[put[i] : end] = values[starts[i] : starts[i] + lengths[i]]
                rest = out[end : put[i] + room[i]]
                rest[:] = np.resize(element, len(rest))

    def valid(self, at: int, count: int) -> Bytes:
        found = np.ones(self._rows, np.uint8)
        for block, take, put in self._parts:
            if at in block.valid:
                found[put] = block.valid[at][take]
        return found[:count]


def pack(
    batch: pa.RecordBatch, specs: Sequence[ColumnSpec], row_layout: RowLayout, out: Bytes
) -> None:
    """The oracle of the function in worker/row_layout.py."""
    chosen = [specs[at] for at in row_layout.columns]
    columns = open_block(batch.select([spec.name for spec in chosen]), chosen).values
    rows = out.reshape(-1, row_layout.row_bytes)
    for (at, size), column in zip(row_layout.fields.tolist(), columns, strict=True):
        rows[:, at : at + size] = column.view.reshape(-1, size)


def _expect_inside(outside: npt.NDArray[np.bool_], what: str) -> None:
    if outside.any():
        row = int(outside.argmax())
        raise RowOutOfBounds(f"row {row} of a slab is not where {what} says", row=row)
