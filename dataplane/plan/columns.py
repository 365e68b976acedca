"""The columns of a manifest: their null counts, the values of coded columns, and the place of each
column within each block, if the shards' indexes state it.

1. Only a job that leaves out columns needs the places, so they stay compressed in memory: they take
   at most as much as in the manifest's file, and no time to load.
2. Places are encoded and decoded in parts of a bounded number of columns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray
from typing_extensions import Buffer

from dataplane.model.errors import ConfigError

Int64 = NDArray[np.int64]

PLACES_MAX = 1 << 25
"""The most column places of a manifest. If there are more, no places are stored, and blocks are
read whole."""
PART_COLUMNS = 1 << 16
_HEADER = struct.Struct("<QQ")
_LENGTH_BYTES = 4
_NARROW, _WIDE = np.dtype("<u4"), np.dtype("<i8")
_NUMBERS = 3


class PlacesPart(Struct, frozen=True, eq=False):
    """The places of columns in k consecutive blocks, from block `first` on. If a block's places
    are unknown, all of its columns have (0, 0).

    Shapes:  offset, length: int64[k, F], bytes in the block.
             decoded: int64[k, F], bytes, an estimate.
    """

    first: int
    offset: Int64
    length: Int64
    decoded: Int64

    def check(self, block_length: Int64) -> None:
        """Check that the columns lie within these blocks.

        Raises:  ConfigError: columns do not lie in these blocks.

        Shapes:  block_length: int64[k].
        """
        lowest = min(each.min(initial=0) for each in (self.offset, self.length, self.decoded))
        if lowest < 0 or (self.offset > block_length[:, None] - self.length).any():
            raise ConfigError("the manifest is damaged: a column lies outside of its block")


class ColumnPlaces(Struct, frozen=True, eq=False):
    """The places of the F top-level columns of a dataset's schema, in schema order, in K blocks.
    Each part consists of a byte that says which numbers are narrow, followed by all gaps, lengths
    and decoded sizes, compressed. A gap is the distance to the previous column, mostly 0.
    """

    block_count: int
    column_count: int
    encoded: tuple[Buffer, ...]

    @classmethod
    def of(cls, blocks: Sequence[Sequence[int]]) -> Self | None:
        """Encode the places that formats report for each block (formats.base.Block.columns); None
        if they report none.

        Raises:  ConfigError: the blocks have different numbers of columns, or invalid numbers.
        """
        width = max(map(len, blocks), default=0)
        if not width or len(blocks) * width // _NUMBERS > PLACES_MAX:
            return None
        if any(len(columns) not in {0, width} for columns in blocks):
            raise ConfigError("blocks of one dataset have different numbers of columns")
        count, encoded = width // _NUMBERS, []
        for first, stop in _parts(len(blocks), count):
            table = np.zeros((stop - first, width), np.int64)
            for row, columns in zip(table, blocks[first:stop], strict=True):
                if columns:
                    row[:] = columns
            offset, length, decoded = (table[:, at::_NUMBERS] for at in range(_NUMBERS))
            gap = offset.copy()
            gap[:, 1:] -= offset[:, :-1] + length[:, :-1]
            encoded.append(_encoded(gap, length, decoded))
        return cls(len(blocks), count, tuple(encoded))

    def parts(self) -> Iterator[PlacesPart]:
        """Yield the places of all blocks, part by part.

        Raises:  ConfigError: the places are damaged.
        """
        codec = pa.Codec("zstd")
        for (first, stop), part in zip(
            _parts(self.block_count, self.column_count), self.encoded, strict=True
        ):
            shape = (stop - first, self.column_count)
            view = memoryview(part)
            dtypes = [_NARROW if view[0] & 1 << at else _WIDE for at in range(_NUMBERS)]
            sizes = [dtype.itemsize * shape[0] * shape[1] for dtype in dtypes]
            try:
                plain = codec.decompress(view[1:], decompressed_size=sum(sizes))
            except (pa.ArrowException, OSError) as error:
                raise ConfigError("the places of columns are damaged") from error
            at, found = 0, []
            for dtype, size in zip(dtypes, sizes, strict=True):
                piece = np.frombuffer(plain, dtype, size // dtype.itemsize, at)
                found.append(piece.reshape(shape).astype(np.int64))
                at += size
            gap, length, decoded = found
            # A gap that overflowed when it was encoded overflows back in this sum.
            yield PlacesPart(first, np.cumsum(gap + length, axis=1) - length, length, decoded)

    def to_bytes(self) -> bytes:
        """Return the bytes that `from_bytes` reads."""
        head = _HEADER.pack(self.block_count, self.column_count)
        sizes = (memoryview(part).nbytes.to_bytes(_LENGTH_BYTES, "little") for part in self.encoded)
        parts = (piece for pair in zip(sizes, self.encoded, strict=True) for piece in pair)
        return b"".join((head, *parts))

    @classmethod
    def from_bytes(cls, content: Buffer) -> Self:
        """Invert `to_bytes`.

        Raises:  ValueError: the content is invalid.
        """
        whole = memoryview(bytes(content))
        if len(whole) < _HEADER.size:
            raise ValueError("the places of columns are cut off")
        blocks, columns = _HEADER.unpack_from(whole)
        if not 0 < blocks * columns <= PLACES_MAX:
            raise ValueError(f"places of {columns} columns in {blocks} blocks")
        at, encoded = _HEADER.size, []
        for _ in _parts(blocks, columns):
            size = int.from_bytes(whole[at : at + _LENGTH_BYTES], "little")
            at += _LENGTH_BYTES
            encoded.append(whole[at : at + size])
            at += size
            if size < 1 or at > len(whole):
                raise ValueError("the places of columns are cut off")
        return cls(blocks, columns, tuple(encoded))


def _parts(block_count: int, column_count: int) -> list[tuple[int, int]]:
    """Return the first block of each part, and the block after its last one."""
    step = max(1, PART_COLUMNS // max(column_count, 1))
    return [(at, min(at + step, block_count)) for at in range(0, block_count, step)]


def _encoded(gap: Int64, length: Int64, decoded: Int64) -> bytes:
    narrow, pieces = 0, []
    for at, values in enumerate((gap, length, decoded)):
        is_narrow = values.min(initial=0) >= 0 and values.max(initial=0) < 1 << 32
        narrow |= is_narrow << at
        pieces.append(values.astype(_NARROW if is_narrow else _WIDE).tobytes())
    codec = pa.Codec("zstd", compression_level=1)
    compressed: bytes = codec.compress(b"".join(pieces), asbytes=True)
    return bytes([narrow]) + compressed


# -- null counts -------------------------------------------------------------------------------
#
# The null counts of a dataset, one number for each field node of its schema.

NEVER = -2
"""The schemas of all shards rule out nulls."""
UNKNOWN = -1
"""No null was found, but not everything was examined."""


class NullCounts(Struct, frozen=True, eq=False):
    """Null counts of the N field nodes of a schema, in depth-first order as in Arrow IPC. The
    arrays are read-only.

    Shapes:  counts: int64[N]: the minimum number of nulls, or UNKNOWN, or NEVER. shards: int64[N]:
             the first shard with nulls, -1 where none is known.
    """

    counts: Int64
    shards: Int64

    @classmethod
    def of(cls, by_shard: Iterable[Sequence[int]]) -> Self | None:
        """Merge the counts of each shard, in order; None if no shard has counts. A shard without
        counts may have nulls anywhere.
        """
        counts, shards = np.empty(0, np.int64), np.empty(0, np.int64)
        silent = False
        for shard, found in enumerate(by_shard):
            silent = silent or not found
            told = np.array(found, np.int64)
            if not len(told):
                continue
            if not len(counts):
                counts, shards = np.full(len(told), NEVER), np.full(len(told), -1)
            shards = np.where((shards < 0) & (told > 0), shard, shards)
            counts = merged(counts, told)
        if silent:
            counts = merged(counts, np.full(len(counts), UNKNOWN))
        return cls(_fixed(counts), _fixed(shards)) if len(counts) else None

    def without(self, nodes: Sequence[int]) -> Self:
        """Return the counts, changed to say that no null is known in these field nodes."""
        counts, shards = self.counts.copy(), self.shards.copy()
        counts[list(nodes)] = np.minimum(counts[list(nodes)], 0)
        shards[list(nodes)] = -1
        return type(self)(_fixed(counts), _fixed(shards))

    def followed_by(self, counts: Sequence[int], shards: Sequence[int]) -> Self:
        """Return the counts, followed by those of further field nodes."""
        pairs = ((self.counts, counts), (self.shards, shards))
        return type(self)(*(_fixed(np.concatenate([own, more])) for own, more in pairs))

    def to_bytes(self) -> bytes:
        """Serialise the counts for a manifest."""
        return np.concatenate([self.counts, self.shards]).astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self | None:
        """Invert `to_bytes`; None for empty bytes.

        Raises:  ValueError: the content is invalid.
        """
        numbers = np.frombuffer(content, "<i8")
        if len(numbers) % 2:
            raise ValueError(f"null counts of {len(numbers)} numbers")
        counts, shards = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
        return cls(_fixed(counts), _fixed(shards)) if len(counts) else None


def merged(one: Int64, other: Int64) -> Int64:
    """Combine the counts of two parts of a dataset, or of two nullable nodes. The result is the sum
    of known nulls; without any, UNKNOWN if one count is unknown, NEVER if both are NEVER, or 0.
    """
    some = np.maximum(one, 0) + np.maximum(other, 0)
    unknown = (one == UNKNOWN) | (other == UNKNOWN)
    none = np.where(unknown, UNKNOWN, np.maximum(one, other))
    return np.where(some > 0, some, none)


def _fixed(values: NDArray[np.int64]) -> Int64:
    found = np.array(values, np.int64)
    found.flags.writeable = False
    return found


# -- block columns -----------------------------------------------------------------------------
#
# Numbers of the blocks of a manifest, as columns.


def scaled(decoded: Int64, rows: Int64, stored: Int64) -> Int64:
    """Estimate the size of `rows` rows of each block, whose `stored` rows take `decoded` bytes.

    Shapes:  decoded: int64[K], bytes.   rows, stored: int64[K].   result: int64[K], bytes.
    """
    return np.ceil(decoded * (rows / stored)).astype(np.int64)


def block_column(values: NDArray[Any], dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """Convert `values` to a read-only column of a manifest's blocks, with type `dtype`.

    Raises:  ConfigError: `values` is not a flat array of whole numbers, or `dtype` cannot hold
               them; names the column.
    """
    values = np.asarray(values)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ConfigError(f"{name} must be one array of whole numbers", field=name)
    if len(values) and (values.min() < 0 or values.max() > np.iinfo(dtype).max):
        raise ConfigError(f"{name} has a number that is negative or too large", field=name)
    column = np.ascontiguousarray(values, dtype).view()
    column.flags.writeable = False
    return column


# -- categories --------------------------------------------------------------------------------
#
# Serialise the values of columns that are delivered as codes, for a schema or a manifest.


def categories_to_bytes(
    categories: Mapping[str, pa.Array], compression: str | None = None
) -> bytes:
    """Serialise to one Arrow stream with one row, a list for each column; empty without columns."""
    if not categories:
        return b""
    rows = {
        name: pa.LargeListArray.from_arrays([0, len(values)], values)
        for name, values in categories.items()
    }
    batch, sink = pa.record_batch(rows), pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def categories_from_bytes(content: bytes) -> dict[str, pa.Array]:
    """Return the values that `categories_to_bytes` serialised, by column.

    Raises:  pa.ArrowInvalid: the bytes are something else.
    """
    if not content:
        return {}
    with pa.ipc.open_stream(pa.py_buffer(content)) as reader:
        batch = reader.read_next_batch()
    return {name: batch.column(name)[0].values for name in batch.schema.names}
