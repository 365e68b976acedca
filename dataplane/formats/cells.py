"""Samples that are stored one after the other, each as the sizes of its values and then the values:
the form of the shards of MosaicML and LitData.

Both begin with the number of samples and the offset of each; a shard ends where the last one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataplane.formats.arrays import bytes_column, list_column
from dataplane.formats.base import Block, RawBlock, ShardReader
from dataplane.formats.conform import check_rows
from dataplane.formats.faults import corrupt, describe, foreign_faults
from dataplane.formats.npy import as_rows
from dataplane.formats.source import BLOCK_BYTES, PROBE_BYTES, ByteSource, Inflated, Window
from dataplane.model.errors import SchemaMismatch
from dataplane.model.records import Region

NUMBER_BYTES = 4
_NUMBER = np.dtype("<u4")
_SAMPLED = 64


def source_of(shard: ShardReader, *, compressed: bool) -> ByteSource:
    """Return the (inflated) bytes of a shard, of which only the first are read."""
    if not compressed:
        return Window(shard)
    size = shard.size_bytes
    starts = range(0, size, PROBE_BYTES)
    pieces = (shard.read(at, min(PROBE_BYTES, size - at)) for at in starts)
    return Inflated(shard, pieces)


def offsets_in(url: str, source: ByteSource, size: int | None, name: str) -> NDArray[np.uint32]:
    """Return the offset of each sample, and the end of the last. `size` is the shard's size if it
    is not compressed.

    Shapes:  uint32[samples + 1], strictly ascending.
    Raises:  CorruptShard.
    """
    head = source.view(0, NUMBER_BYTES)
    count = int.from_bytes(head, "little")
    end = NUMBER_BYTES * (count + 2)
    limit = (1 << 32) if size is None else size
    table = source.view(NUMBER_BYTES, end - NUMBER_BYTES) if end <= limit else memoryview(b"")
    offsets = np.frombuffer(table, _NUMBER, len(table) // NUMBER_BYTES)
    is_sound = (
        len(offsets) == count + 1 and offsets[0] >= end and (offsets[1:] > offsets[:-1]).all()
    )
    if not is_sound:
        kind = describe(bytes(source.view(0, 512)))
        raise corrupt(url, 0, "damaged offsets of samples", expected=name, found=kind)
    if size is not None and offsets[-1] != size:
        what = "the shard is truncated, or something follows its samples"
        raise corrupt(url, size, what, expected=f"{offsets[-1]} bytes", found=f"{size} bytes")
    return offsets


def blocks_of(
    offsets: NDArray[np.uint32], decoded: Callable[[int, int], int], whole_bytes: int | None
) -> tuple[Block, ...]:
    """Cut samples into blocks of about 4 MiB; or return one block, if the shard has `whole_bytes`
    compressed ones. `decoded` estimates the size of a block from its rows and its stored bytes.
    """
    count = len(offsets) - 1
    if whole_bytes is not None:
        size = decoded(count, int(offsets[-1] - offsets[0]))
        return (Block(count, Region(0, whole_bytes), size),) if count else ()
    blocks, first = [], 0
    while first < count:
        start = int(offsets[first])
        stop = int(np.searchsorted(offsets, start + BLOCK_BYTES, "right")) - 1
        stop = min(max(stop, first + 1), count)
        length = int(offsets[stop]) - start
        blocks.append(Block(stop - first, Region(start, length), decoded(stop - first, length)))
        first = stop
    return tuple(blocks)


def samples_of(
    offsets: NDArray[np.uint32], block: RawBlock, *, compressed: bool
) -> NDArray[np.uint32]:
    """Return the offsets of a block's samples, and the end of the last; all of the shard's if it is
    compressed.

    Raises:  CorruptShard: the block has other samples.
    """
    if compressed:
        check_rows(block.url, 0, block.rows, len(offsets) - 1)
        return offsets
    place = block.place
    first, stop = np.searchsorted(offsets, (place.offset, place.offset + place.length)).tolist()
    check_rows(block.url, place.offset, block.rows, stop - first)
    places = offsets[first : stop + 1]
    if not (
        len(places) > 1 and places[0] == place.offset and places[-1] - places[0] == place.length
    ):
        raise corrupt(block.url, place.offset, "the block does not begin or end with a sample")
    return places


class Cells(NamedTuple):
    """The places of one column's values in `body`.

    Shapes:  starts, lengths: int64[rows].
    """

    body: memoryview
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def pieces(self) -> list[memoryview]:
        """Return the bytes of each value."""
        ends = self.starts + self.lengths
        return [
            self.body[at:end] for at, end in zip(self.starts.tolist(), ends.tolist(), strict=True)
        ]

    def numbers(self, dtype: np.dtype, count: int, skip: int = 0) -> NDArray[np.generic]:
        """Return this many numbers of each value, behind its first `skip` bytes.

        Shapes:  dtype[rows, count].   Raises:  ValueError: a value is too short.
        """
        width = dtype.itemsize * count
        if (self.lengths < skip + width).any():
            raise ValueError(f"a value has less than {skip + width} bytes")
        codes = np.frombuffer(self.body, np.uint8)
        places = (self.starts + skip)[:, None] + np.arange(width)
        numbers: NDArray[Any] = codes[places].view(dtype).reshape(len(self.starts), count)
        return numbers


def cells_of(
    url: str,
    body: memoryview,
    offsets: NDArray[np.uint32],
    base: int,
    fixed: Sequence[int | None],
) -> list[Cells]:
    """Find the values of these samples. `fixed` has the size of each column, None if the sample
    states it. `body` begins at `base` in the shard.

    Raises:  CorruptShard: names the first sample whose sizes are wrong.
    """
    starts, ends = offsets[:-1].astype(np.int64) - base, offsets[1:].astype(np.int64) - base
    stated = sum(size is None for size in fixed)
    rows, head = Cells(body, starts, ends - starts), NUMBER_BYTES * stated
    bad = rows.lengths < head
    if not bad.any():
        sizes = iter(rows.numbers(_NUMBER, stated).astype(np.int64).T) if stated else iter(())
        at, columns = starts + head, []
        for size in fixed:
            lengths = next(sizes) if size is None else np.full(len(starts), size, np.int64)
            columns.append(Cells(body, at, lengths))
            at = at + lengths
        bad = at != ends
        if not bad.any():
            return columns
    row = int(np.argmax(bad))
    raise corrupt(url, base + int(starts[row]), "a sample's sizes contradict its length")


def fixed_column(cells: Cells, dtype: np.dtype, kind: pa.DataType) -> pa.Array:
    """Make a column of values of equal size: numbers, or arrays of one shape."""
    if not len(cells.starts):
        return pa.array([], kind)
    return as_rows(cells.numbers(dtype, int(cells.lengths[0]) // dtype.itemsize), kind)


def text_column(cells: Cells, kind: pa.DataType) -> pa.Array:
    """Make a column of texts or bytes.   Raises:  Arrow's errors: a text is not UTF-8."""
    column = bytes_column(cells.pieces(), kind)
    if pa.types.is_string(kind):
        column.validate(full=True)
    return column


def lists_column(cells: Cells, skip: int) -> pa.Array:
    """Make a column of lists of bytes: behind `skip` bytes each has its length (uint32), the sizes
    of its values (uint32 each), and these.

    Raises:  ValueError: sizes contradict each other.
    """
    counts = cells.numbers(_NUMBER, 1, skip)[:, 0].astype(np.int64)
    skip += NUMBER_BYTES
    parts: list[memoryview] = []
    places = (cells.starts.tolist(), cells.lengths.tolist(), counts.tolist())
    for start, length, count in zip(*places, strict=True):
        at, end = start + skip + NUMBER_BYTES * count, start + length
        if at > end:
            raise ValueError(f"a list of {count} values does not fit into {length} bytes")
        for size in np.frombuffer(cells.body, _NUMBER, count, start + skip).tolist():
            parts.append(cells.body[at : at + size])
            at += size
        if at != end:
            raise ValueError("the size of a list contradicts those of its values")
    return list_column(counts, np.ones(len(counts), np.bool_), bytes_column(parts, pa.binary()))


def refuse_mixed(values: NDArray[Any], name: str, url: str, what: str) -> None:
    """Refuse arrays that differ.   Raises:  SchemaMismatch."""
    if (values != values[0]).any():
        raise SchemaMismatch(
            f"{url}: column {name!r}: its arrays have several {what}; write them with one, or "
            "leave the column out with columns=[…]",
            shard=url,
            field=name,
        )


class Arrays(NamedTuple):
    """Values that are arrays of one type, whose shapes may differ; numbers follow `skip` bytes.

    Shapes:  shapes: int64[rows, axes].   skip: the same for all rows, or int64[rows].
    """

    cells: Cells
    shapes: NDArray[np.int64]
    dtype: np.dtype
    skip: int | NDArray[np.int64]
    name: str
    url: str

    @property
    def kind(self) -> pa.DataType:
        """The type of a column that begins with these: arrays of several axes are of fixed size if
        all have the same.
        """
        kind, shape = pa.from_numpy_dtype(self.dtype), self.shapes[0].tolist()
        is_fixed = len(shape) > 1 and (self.shapes == self.shapes[0]).all() and 0 not in shape
        for size in reversed(shape):
            kind = pa.list_(kind, size) if is_fixed else pa.list_(kind)
        return kind

    def column(self, expected: pa.DataType) -> pa.Array:
        """Return the column, in the form of the `expected` type.

        Raises:  SchemaMismatch: shapes differ that must not.  ValueError: sizes contradict shapes.
        """
        # As doubles, since sizes in damaged shards may overflow.
        sizes = self.shapes.astype(np.float64).prod(axis=1) * self.dtype.itemsize
        cells, shapes = self.cells, self.shapes
        if (shapes < 0).any() or (sizes + self.skip != cells.lengths).any():
            raise ValueError("the size of an array contradicts its shape")
        inner = Cells(cells.body, cells.starts + self.skip, cells.lengths - self.skip)
        values = np.frombuffer(b"".join(inner.pieces()), self.dtype)
        column = as_rows(values, pa.from_numpy_dtype(self.dtype))
        if pa.types.is_fixed_size_list(expected):
            kinds = [expected]
            while pa.types.is_fixed_size_list(kinds[-1]):
                kinds.append(kinds[-1].value_type)
            fixed = [kind.list_size for kind in kinds[:-1]]
            refuse_mixed(np.array([fixed, *shapes.tolist()]), self.name, self.url, "shapes")
            for size in reversed(fixed):
                column = pa.FixedSizeListArray.from_arrays(column, size)
            return column
        for axis in range(shapes.shape[1] - 1, -1, -1):
            # Each list of this axis is repeated by the product of the axes above it.
            lengths = np.repeat(shapes[:, axis], shapes[:, :axis].prod(axis=1))
            column = list_column(lengths, np.ones(len(lengths), np.bool_), column)
        return column


def sampled(offsets: NDArray[np.uint32]) -> int:
    """Return how many of the first samples of a shard show the types of its arrays."""
    count = int(np.searchsorted(offsets, int(offsets[0]) + BLOCK_BYTES, "right")) - 1
    return max(1, min(_SAMPLED, count, len(offsets) - 1))


def apart(places: NDArray[np.uint32]) -> list[int]:
    """Return where samples begin in their block, and its end."""
    starts: list[int] = (places.astype(np.int64) - int(places[0])).tolist()
    return starts


def checked_column(url: str, offset: int, name: str, make: Callable[[], pa.Array]) -> pa.Array:
    """Make a column; report damaged values.   Raises:  CorruptShard."""
    with foreign_faults(url, offset, f"column {name!r} is damaged"):
        return make()
