"""The interface of a shard format: index a shard, and decode a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa
from msgspec import Struct
from typing_extensions import Buffer

from dataplane.model.records import Region


class ShardReader(Protocol):
    """One shard, opened for indexing."""

    @property
    def url(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    def read(self, offset: int, length: int) -> Buffer:
        """Read exactly this range, or raise a StoreError."""

    def read_all(self, places: Sequence[Region]) -> list[Buffer]:
        """Read several short ranges concurrently; otherwise the same as `read`."""

    def stream(self) -> Iterator[Buffer]:
        """Yield the whole shard from its start, piece by piece."""


class Block(Struct, frozen=True):
    """The unit that is fetched and decoded. `place` is its byte range in the shard. `decoded_bytes`
    is an estimate of its size as Arrow, and should be too large rather than too small.

    `columns` is empty unless decode() works without the bytes of columns that were not requested.
    It then holds three numbers for each top-level column, in the order of the shard's schema:
    offset in the block, length, and share of `decoded_bytes`. Either all blocks of a shard have
    `columns`, or none.
    """

    rows: int
    place: Region
    decoded_bytes: int
    columns: Sequence[int] = ()


class ShardIndex(Struct, frozen=True):
    """The result of indexing one shard.

    `preamble` is the byte range that every block of the shard needs besides its own (a Parquet
    footer, Arrow dictionaries); its length is 0 if there is none. `zero_copy` means that decode()
    copies nothing, so that a fetched block need not be decoded into other memory.

    `nulls` has, for each field node of the schema in depth-first order (see formats.nulls), the
    null count, UNKNOWN, or NEVER; it is empty if the format does not know. A format that examines
    only a sample of the shard gives the counts in the sample, and UNKNOWN instead of 0.
    """

    schema: pa.Schema
    blocks: tuple[Block, ...]
    preamble: Region
    zero_copy: bool
    nulls: Sequence[int] = ()


class ColumnBounds(Struct, frozen=True):
    """The bounds that a shard states for a column in one of its blocks. All values that are neither
    null nor NaN are between `lowest` and `highest`; if the bounds are exact, both occur as values.
    None means unknown.
    """

    rows: int
    null_count: int | None = None
    lowest: Any = None
    highest: Any = None
    is_exact: bool = False
    may_be_nan: bool = False


class RawBlock(Struct, frozen=True):
    """The bytes of one block, as fetched. `index` is its number in the shard. `preamble` and `body`
    are read-only views that live as long as the decoded batch. If only parts of the block were
    read, `body` is these parts, concatenated, and `pieces` are their places in the shard. Blocks in
    this process with the same `preamble_number`, other than 0, have the same preamble. A block of
    which only some rows are decoded begins with `first_row`.
    """

    url: str
    index: int
    rows: int
    place: Region
    shard_bytes: int
    preamble_place: Region
    preamble: memoryview
    body: memoryview
    pieces: tuple[Region, ...] = ()
    preamble_number: int = 0
    first_row: int = 0


class Format(Protocol):
    """One shard format. Instances hold no state and are shared by threads and processes."""

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of file names, lower case, longest first: (".tar.gz", ".tgz", ".tar")."""

    def index(self, shard: ShardReader) -> ShardIndex:
        """Find blocks and schema in one pass, without holding the shard in memory.

        Raises:  CorruptShard: shard, offset, expected, found.
        """

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Return the block's rows with exactly the top-level `columns` of `schema`, in that order.

        `schema` is the dataset's. Buffers that come unchecked from outside are validated with
        `validate(full=True)`.

        Raises:  CorruptShard: shard, offset, expected, found.  SchemaMismatch: this shard lacks a
                 column, or has it with another type.
        """
