"""Find the columns of an Arrow record batch from its metadata alone.

A batch lists its buffers one after the other, without names; the schema says how many belong to
each column. The number of buffers of a union depends on the metadata version, and some types are
unknown: shards with such columns are read whole.

Source:  https://arrow.apache.org/docs/format/Columnar.html#recordbatch-message
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Self

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.formats.arrow_messages import Message
from dataplane.formats.arrow_size import column_sizes
from dataplane.formats.flatbuf import Head
from dataplane.formats.nulls import children, node_count

Int64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Smaller blocks have nothing that is worth a request to leave out (see node/projection.py), and a
# dataset may have millions of them.
PLACED_BYTES_MIN = 512 << 10
# Text of one column is assumed to compress at most this much; the size of the whole batch, which
# assumes less, remains the limit.
COLUMN_RATIO = 32
_SHARES_MAX = 1 << 62
_VIEWS = frozenset({pa.string_view().id, pa.binary_view().id})
_NESTED = {
    pa.struct([]).id: 1,
    pa.list_(pa.null(), 1).id: 1,
    pa.list_(pa.null()).id: 2,
    pa.large_list(pa.null()).id: 2,
    pa.map_(pa.string(), pa.null()).id: 2,
    pa.list_view(pa.null()).id: 3,
    pa.large_list_view(pa.null()).id: 3,
    pa.run_end_encoded(pa.int32(), pa.null()).id: 0,
}
_FLAT = {
    pa.null().id: 0,
    **dict.fromkeys((pa.string().id, pa.large_string().id, pa.binary().id), 3),
    **dict.fromkeys((pa.large_binary().id,), 3),
    **dict.fromkeys(_VIEWS, 2),
    pa.dictionary(pa.int8(), pa.null()).id: 2,
    pa.bool_().id: 2,
    pa.month_day_nano_interval().id: 2,
}
"""How many buffers an array has by itself, by type."""


class BufferCounts(Struct, frozen=True, eq=False):
    """The number of buffers of each of F columns. Buffers of views vary, so each batch states them.

    Shapes:  own: int64[F].   views: int64[F], arrays of views.   has_dictionary: bool[F].
    """

    own: Int64
    views: Int64
    has_dictionary: Bools

    @classmethod
    def of(cls, schema: pa.Schema) -> Self | None:
        """Count the buffers by schema; None if a column has a type whose buffers are not known."""
        known: dict[int, tuple[int, int, bool]] = {}
        found = []
        for kind in schema.types:
            counts = known.get(kind.id)
            if counts is None:
                counts = _counted(kind)
                if counts is None:
                    return None
                if not (pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType)):
                    known[kind.id] = counts
            found.append(counts)
        table = np.array(found, np.int64).reshape(-1, 3)
        return cls(table[:, 0].copy(), table[:, 1].copy(), table[:, 2] > 0)

    def starts(self, head: Head) -> Int64 | None:
        """Return the first buffer of each column, and the end of the last column's; None if the
        batch has another number of buffers.

        Shapes:  result: int64[F + 1].
        """
        told, total = np.asarray(head.views, np.int64), len(head.sizes)
        if len(told) != self.views.sum() or (told < 0).any() or (told > total).any():
            return None
        ends, before = np.cumsum(self.views), np.concatenate(([0], np.cumsum(told)))
        counts = self.own + before[ends] - before[ends - self.views]
        starts = np.concatenate(([0], np.cumsum(counts)))
        return starts if starts[-1] == total else None


def _counted(kind: pa.DataType) -> tuple[int, int, bool] | None:
    """Return a type's number of buffers and of view arrays, and whether it has a dictionary."""
    if isinstance(kind, pa.BaseExtensionType):
        return _counted(kind.storage_type)
    if kind.id not in _NESTED:
        own = _FLAT.get(kind.id)
        if own is None and _has_fixed_width(kind):
            own = 2
        is_view, is_dictionary = kind.id in _VIEWS, pa.types.is_dictionary(kind)
        return None if own is None else (own, int(is_view), is_dictionary)
    own, views, has_dictionary = _NESTED[kind.id], 0, False
    for child in children(kind):
        below = _counted(child.type)
        if below is None:
            return None
        own, views, has_dictionary = (
            own + below[0], views + below[1], has_dictionary or below[2],
        )  # fmt: skip
    return own, views, has_dictionary


def _has_fixed_width(kind: pa.DataType) -> bool:
    is_number = pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
    return bool(is_number or pa.types.is_fixed_size_binary(kind))


def column_places(
    schema: pa.Schema, batches: Sequence[Message], shared: int
) -> list[Sequence[int]] | None:
    """Return, for each batch, the `Block.columns` of a block that is this batch alone. None if a
    batch does not give its places, or if leaving out columns would save little. `shared` is the
    decoded size of the dictionaries.
    """
    large = max((batch.end - batch.offset for batch in batches), default=0)
    if large < PLACED_BYTES_MIN or len(schema) < 2:
        return None
    counts, nodes = BufferCounts.of(schema), node_count(schema)
    if counts is None or any(len(batch.head.nodes) != nodes for batch in batches):
        return None
    found: list[Sequence[int]] = []
    for batch in batches:
        placed = _placed(schema, counts, batch, shared)
        if placed is None:
            return None
        found.append(array("q", placed.tobytes()))
    return found


def _placed(schema: pa.Schema, counts: BufferCounts, message: Message, shared: int) -> Int64 | None:
    head = message.head
    starts = counts.starts(head)
    if starts is None or not are_within(head):
        return None
    begin, size = np.asarray(head.starts, np.int64), np.asarray(head.sizes, np.int64)
    column, is_used = np.repeat(np.arange(len(starts) - 1), np.diff(starts)), size > 0
    first, last = np.full(len(schema), head.body_length), np.zeros(len(schema), np.int64)
    np.minimum.at(first, column[is_used], begin[is_used])
    np.maximum.at(last, column[is_used], (begin + size)[is_used])
    # A column without bytes lies where the one before it ends.
    first = np.where(last == 0, np.maximum.accumulate(last), first)
    length = np.maximum(last - first, 0)
    share = length
    if head.compressed:
        share = _decoded_shares(schema, head, length)
    if shared:
        share = share + np.where(counts.has_dictionary, min(shared, _SHARES_MAX), 0)
    share = np.clip(share, 0, _SHARES_MAX // len(schema))
    return np.stack((message.metadata_length + first, length, share), axis=1).reshape(-1)


def are_within(head: Head) -> bool:
    """Whether all buffers of a batch lie in its body."""
    begin, size = np.asarray(head.starts, np.int64), np.asarray(head.sizes, np.int64)
    is_outside = (begin < 0) | (size < 0) | (size > head.body_length)
    is_outside |= begin > head.body_length - size
    return not is_outside.any()


def _decoded_shares(schema: pa.Schema, head: Head, length: Int64) -> Int64:
    sizes = column_sizes(schema, head.nodes)
    fixed = np.array([min(size, _SHARES_MAX // 2) for size, _ in sizes], np.int64)
    is_variable = np.array([variable for _, variable in sizes], np.bool_)
    return fixed + np.where(is_variable, COLUMN_RATIO * length, 0)
