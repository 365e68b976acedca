"""Samples that are stored one after the other, each as the sizes of its values and then the values:
the form of the shards of MosaicML and LitData.

Both begin with the number of samples and the offset of each; a shard ends where the last one does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import Buffer

from dataplane.formats.arrays import bytes_column, list_column
from dataplane.formats.base import Block, RawBlock, ShardReader
from dataplane.formats.conform import batch_of, check_rows, check_shard
from dataplane.formats.faults import corrupt, describe, foreign_faults
from dataplane.formats.joint_types import marked_arrays
from dataplane.formats.npy import as_rows
from dataplane.formats.source import (
    BLOCK_BYTES,
    PROBE_BYTES,
    ByteSource,
    Inflated,
    Memory,
    Window,
    holds_compressed,
)
from dataplane.formats.unsupported import marked
from dataplane.model.errors import SchemaMismatch
from dataplane.model.records import Region

NUMBER_BYTES = 4
_NUMBER = np.dtype("<u4")
AXES_MAX = 64
# Lists without values need no bytes, so that a short shard could state any number of them.
_EMPTY_LISTS_MAX = 1 << 16


def source_of(shard: ShardReader, *, compressed: bool) -> ByteSource:
    """Return a shard's bytes, inflated as they are read: often only the first are needed."""
    return Inflated(shard, _pieces(shard)) if compressed else Window(shard)


def _pieces(shard: ShardReader) -> Iterator[Buffer]:
    at, length = 0, PROBE_BYTES
    while at < shard.size_bytes:
        yield shard.read(at, min(length, shard.size_bytes - at))
        at, length = at + length, min(2 * length, BLOCK_BYTES)


def offsets_in(
    url: str, source: ByteSource, size: int | None, name: str, least: int = 1
) -> NDArray[np.uint32]:
    """Return the offset of each sample, and the end of the last. `size` is the shard's size if it
    is not compressed. `least` is the number of bytes of the shortest sample, at most 1.

    Shapes:  uint32[samples + 1], ascending.
    Raises:  CorruptShard.
    """
    head = source.view(0, NUMBER_BYTES)
    count = int.from_bytes(head, "little")
    end = NUMBER_BYTES * (count + 2)
    limit = (1 << 32) if size is None else size
    table = source.view(NUMBER_BYTES, end - NUMBER_BYTES) if end <= limit else memoryview(b"")
    offsets = np.frombuffer(table, _NUMBER, len(table) // NUMBER_BYTES)
    is_sound = len(offsets) == count + 1 and offsets[0] >= end and is_ascending(offsets, least)
    if not is_sound:
        kind = describe(bytes(source.view(0, 512)))
        raise corrupt(url, 0, "damaged offsets of samples", expected=name, found=kind)
    if size is not None and offsets[-1] != size:
        what = "the shard is truncated, or something follows its samples"
        raise corrupt(url, size, what, expected=f"{offsets[-1]} bytes", found=f"{size} bytes")
    return offsets


def is_ascending(offsets: NDArray[np.uint32], least: int) -> bool:
    """Return whether samples have at least this many bytes, which is 0 or 1."""
    return bool((offsets[1:] >= offsets[:-1] if least == 0 else offsets[1:] > offsets[:-1]).all())


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
        stop = max(stop, first + 1)
        stop = int(np.searchsorted(offsets, offsets[stop], "right")) - 1  # empty ones end a block
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
    bounds = (place.offset, place.offset + place.length)
    first, stop = (np.searchsorted(offsets, bounds, "right") - 1).tolist()
    first = 0 if place.offset == int(offsets[0]) else first
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
        width, rows = dtype.itemsize * count, len(self.starts)
        if (self.lengths < skip + width).any():
            raise ValueError(f"a value has less than {skip + width} bytes")
        if not width or not rows:
            return np.zeros((rows, count), dtype)
        codes = np.frombuffer(self.body, np.uint8)
        values = np.lib.stride_tricks.sliding_window_view(codes, width)[self.starts + skip]
        numbers: NDArray[Any] = np.ascontiguousarray(values).view(dtype).reshape(rows, count)
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

    def kind(self, first: NDArray[np.int64], dtype: np.dtype) -> pa.DataType:
        """Return the type of a column whose first array has this shape and dtype: arrays of several
        axes are of fixed size if all of these have the same shape, too.

        Raises:  SchemaMismatch: these have other axes, or another dtype.
        """
        for values, what in (
            (np.array([first.size, self.shapes.shape[1]]), "numbers of axes"),
            (np.array([dtype.str, self.dtype.str]), "types"),
        ):
            refuse_mixed(values, self.name, self.url, what)
        kind, shape = pa.from_numpy_dtype(dtype), first.tolist()
        is_fixed = len(shape) > 1 and (self.shapes == first).all() and 0 not in shape
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
        lists = np.cumprod(shapes[:, :-1].astype(np.float64), axis=1).sum()
        if lists > len(cells.body) + _EMPTY_LISTS_MAX:
            raise ValueError(f"arrays without values state {lists:.0f} lists")
        for axis in range(shapes.shape[1] - 1, -1, -1):
            # Each list of this axis is repeated by the product of the axes above it.
            lengths = np.repeat(shapes[:, axis], shapes[:, :axis].prod(axis=1))
            column = list_column(lengths, np.ones(len(lengths), np.bool_), column)
        return column


def runs_in(
    source: ByteSource, offsets: NDArray[np.uint32], fixed: Sequence[int | None]
) -> Iterator[list[Cells]]:
    """Read the values of all samples of a shard, in runs of about 4 MiB; see `cells_of`."""
    for block in blocks_of(offsets, lambda _, length: length, None):
        start, length = block.place.offset, block.place.length
        body = source.view(start, length)
        if len(body) < length:
            raise corrupt(source.url, start + len(body), "the shard ends within a sample")
        first = int(np.searchsorted(offsets, start, "right")) - 1
        places = offsets[first : first + block.rows + 1]
        yield cells_of(source.url, body, places, start, fixed)


def array_kinds(
    runs: Iterator[list[Cells]], columns: Mapping[int, Callable[[Cells], Arrays]]
) -> dict[int, pa.DataType]:
    """Return the types of these columns of arrays, by their numbers: of fixed size if every sample
    has the same shape of several axes, else nested lists. Samples are read until that is known.

    Raises:  SchemaMismatch: arrays differ in axes or types.  ValueError, LookupError: damaged.
    """
    firsts: dict[int, Any] = {}
    kinds: dict[int, pa.DataType] = {}
    for cells in runs:
        for at, make in columns.items():
            if at in kinds and not pa.types.is_fixed_size_list(kinds[at]):
                continue
            arrays = make(cells[at])
            kinds[at] = arrays.kind(*firsts.setdefault(at, (arrays.shapes[0], arrays.dtype)))
        if not any(map(pa.types.is_fixed_size_list, kinds.values())):
            break
    return kinds


def samples_apart(block: RawBlock, name: str, least: int = 1) -> list[int] | None:
    """Return where the samples of a block begin in its bytes, and its end; None if they are
    compressed, or some are empty.
    """
    if holds_compressed(block):
        return None
    offsets = offsets_in(block.url, Memory(block.url, block.preamble, 0), None, name, least)
    places = samples_of(offsets, block, compressed=False)
    if not is_ascending(places, 1):
        return None
    starts: list[int] = (places.astype(np.int64) - int(places[0])).tolist()
    return starts


class Stored(Protocol):
    """A column of a shard; `type` unless that is seen in samples, and why it cannot be read."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> pa.DataType: ...

    @property
    def refused(self) -> str: ...

    def array(self, cells: Cells, kind: pa.DataType, url: str) -> pa.Array:
        """Return the column's values; `kind` is its type in the dataset."""


def schema_of(
    stored: Sequence[Stored], varying: Collection[int], kinds: Mapping[int, pa.DataType]
) -> pa.Schema:
    """Return the schema of a shard; the types of its `varying` columns, by number, are in `kinds`,
    unless it has no samples.
    """
    types = [
        (column.name, kinds.get(at, pa.null()) if at in varying else column.type)
        for at, column in enumerate(stored)
    ]
    refused = {column.name: column.refused for column in stored if column.refused}
    schema = marked(pa.schema(types), refused)
    return marked_arrays(schema, [stored[at].name for at in varying])


def decoded_batch(
    stored: Sequence[Stored],
    cells: Sequence[Cells],
    block: RawBlock,
    schema: pa.Schema,
    columns: Sequence[str],
) -> pa.RecordBatch:
    """Return the values of a block's columns.

    Raises:  CorruptShard: a value is damaged.   SchemaMismatch: the shard has other columns.
    """
    arrays = {}
    for column, own in zip(stored, cells, strict=True):
        name = column.name
        if name in columns and name in schema.names:
            with foreign_faults(block.url, block.place.offset, f"column {name!r} is damaged"):
                arrays[name] = column.array(own, schema.field(name).type, block.url)
    kinds = [(c.name, arrays[c.name].type if c.name in arrays else pa.null()) for c in stored]
    check_shard(pa.schema(kinds), schema, columns, block.url)
    return batch_of(arrays, schema, columns, block)
