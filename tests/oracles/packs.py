"""Packs in the columns of a slab, by numpy: what kernel.c must write, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from oracles.rows import NumpyRows

from dataplane.model.errors import RowOutOfBounds
from dataplane.model.records import PackSpec
from dataplane.transforms.packing import LENGTHS
from dataplane.worker import packing
from dataplane.worker.columns import Bytes, Ints, RowIndex
from dataplane.worker.pack_blocks import LABELS_KIND, NO_LABEL, TOKENS_KIND, PackBlock, PackForm

Int32s = npt.NDArray[np.int32]

_NO_DOCUMENT = -1


def write_packs(
    form: PackForm,
    blocks: Sequence[PackBlock],
    index: RowIndex,
    places: Ints,
    columns: Sequence[Bytes],
) -> None:
    """The oracle of the function in worker/packing.py."""
    drawn = packing._drawn(blocks, index)
    pieces = _pieces(drawn, places)
    rows_index = np.stack([pieces.tables, pieces.rows], axis=1).astype(np.int32)
    rows = NumpyRows([block for block, _ in drawn.packs], rows_index)
    placed = _Placed.of(pieces, form.pack)
    for at, (spec, output, out) in enumerate(zip(form.specs, form.outputs, columns, strict=True)):
        kind, _, source, width, *_ = output
        if kind not in (TOKENS_KIND, LABELS_KIND):
            _write_where(spec.name, spec.shape, pieces, placed, out.view(np.int32))
            continue
        starts, lengths = rows.spans(source)
        if (pieces.begins + pieces.lengths > lengths).any():
            raise RowOutOfBounds("a document is shorter than it was", row=0)
        starts = starts + pieces.begins
        put, room = placed.put, placed.room
        if kind == TOKENS_KIND:
            spans, padding = (starts, pieces.lengths), b"" if at else form.padding
            if spec.dtype == form.stored[source].dtype:
                rows.runs(source, width, spans, put * width, room * width, out, padding)
                continue
            values, fill = out.view(spec.dtype), form.pack.pad_value
            _widen(rows, source, form.stored[source].dtype, spans, placed, values, fill)
            continue
        # The token after the last one of a document that is cut is its label, too.
        spans = starts + 1, np.minimum(pieces.lengths, lengths - pieces.begins - 1)
        labels = out.view(np.int64)
        _widen(rows, source, form.stored[source].dtype, spans, placed, labels, NO_LABEL)
        if form.pack.loss_mask:
            mask = form.column(form.pack.loss_mask)
            starts, lengths = rows.spans(mask)
            if (pieces.begins + spans[1] >= np.maximum(lengths, 1)).any():
                raise RowOutOfBounds("a document has fewer values of its loss mask", row=0)
            spans = starts + pieces.begins + 1, spans[1]
            has_loss = np.ones_like(labels)  # also where no piece of these blocks lies
            _widen(rows, mask, form.stored[mask].dtype, spans, placed, has_loss, 1)
            labels[has_loss == 0] = NO_LABEL


def _widen(
    rows: NumpyRows,
    source: int,
    dtype: str,
    spans: tuple[Ints, Ints],
    placed: _Placed,
    out: npt.NDArray[Any],
    padding: int,
) -> None:
    """Write a column of these lists into one with larger values.

    Shapes:  spans: int64[pieces] each, start and length.   out: int[packs * length].
    """
    stored, width = np.empty(len(out), dtype), np.dtype(dtype).itemsize
    put, room = placed.put, placed.room
    rows.runs(source, width, spans, put * width, room * width, stored.view(np.uint8))
    for begin, length, size in zip(put, spans[1], room, strict=True):
        out[begin : begin + length] = stored[begin : begin + length]
        out[begin + length : begin + size] = padding


class _Pieces(Struct, frozen=True, eq=False):
    """Pieces of documents. Those of a pack follow one another.

    Shapes:  all: int64[pieces]; the table and the row of each, its first token and its tokens,
    where it goes: the row of the slab, the place in the pack, and which piece of the pack it is.
    """

    tables: Ints
    rows: Ints
    begins: Ints
    lengths: Ints
    packs: Ints
    places: Ints
    ordinals: Ints


def _pieces(drawn: packing._Drawn, places: Ints) -> _Pieces:
    parts = []
    asked = zip(drawn.tables.tolist(), drawn.numbers.tolist(), places.tolist(), strict=True)
    for table, number, row in asked:
        _, packs = drawn.packs[table]
        start, end = packs.starts[number : number + 2].tolist()
        part = np.empty((7, end - start), np.int64)
        part[0], part[4], part[6] = table, row, np.arange(end - start)
        part[[1, 2, 3, 5]] = packs.pieces[:, start:end]
        parts.append(part)
    return _Pieces(*np.concatenate(parts, axis=1))


class _Placed(Struct, frozen=True, eq=False):
    """Where pieces of documents go.

    Shapes:  put, taken, room: int64[pieces]: where in all packs together each one goes, what it
    takes, and the same with the padding behind the last of a pack.   first, last: int64[packs], of
    the pieces of each pack.   size: the tokens of a pack.
    """

    put: Ints
    taken: Ints
    room: Ints
    first: Ints
    last: Ints
    size: int

    @classmethod
    def of(cls, pieces: _Pieces, pack: PackSpec) -> _Placed:
        """The places of these pieces."""
        first = np.flatnonzero(pieces.ordinals == 0)
        last = np.append(first[1:], len(pieces.rows)) - 1
        taken = -(-pieces.lengths // pack.multiple) * pack.multiple
        is_last = np.zeros(len(taken), np.bool_)
        is_last[last] = True
        # Up to the next one, whose place counts: a document may stand for a longer one.
        taken[~is_last] = np.diff(pieces.places)[~is_last[:-1]]
        room = taken.copy()
        room[last] = pack.length - pieces.places[last]
        put = pieces.packs * pack.length + pieces.places
        return cls(put, taken, room, first, last, pack.length)


def _write_where(
    name: str, shape: tuple[int, ...], pieces: _Pieces, placed: _Placed, out: Int32s
) -> None:
    """One of the columns that say where documents lie in their packs."""
    last, size, taken = placed.last, placed.size, placed.taken
    packs, used = pieces.packs[last], pieces.places[last] + taken[last]
    if name == "max_seqlen":
        out[packs] = np.maximum(np.maximum.reduceat(taken, placed.first), size - used)
    elif name == LENGTHS:
        table = out.reshape(-1, *shape)
        table[packs] = 0
        table[pieces.packs, pieces.ordinals] = pieces.lengths
    elif name == "cu_seqlens":
        table = out.reshape(-1, *shape)
        table[packs] = size
        table[pieces.packs, pieces.ordinals] = pieces.places
        table[packs, pieces.ordinals[last] + 1] = used
    else:
        is_position = name == "position_ids"
        values = np.zeros_like(taken) if is_position else pieces.ordinals
        first = np.concatenate([values, np.full(len(packs), 0 if is_position else _NO_DOCUMENT)])
        put = np.concatenate([placed.put, packs * size + used])
        room = np.concatenate([taken, size - used])
        for begin, count, start in zip(put.tolist(), room.tolist(), first.tolist(), strict=True):
            out[begin : begin + count] = start + np.arange(count) * is_position
