"""The interface of a shard format: index a shard, decode a block, give the schema."""

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
        """Read exactly this range, or raise an error of the StoreError family."""

    def read_all(self, places: Sequence[Region]) -> list[Buffer]:
        """Read several short ranges at the same time; otherwise the same as `read`."""

    def stream(self) -> Iterator[Buffer]:
        """The whole shard from its start, piece by piece."""


class Block(Struct, frozen=True):
    """The unit of fetch and decode. `place` is its byte range in the shard; `decoded_bytes`
    estimates its Arrow size, and should be too large rather than too small.

    `columns` is empty unless decode() works without the bytes of unrequested columns. It then holds
    three numbers for each top-level column, in the order of the shard's schema: offset in the
    block, length, and share of `decoded_bytes`. All blocks of a shard have it, or none.
    """

    rows: int
    place: Region
    decoded_bytes: int
    columns: Sequence[int] = ()


class ShardIndex(Struct, frozen=True):
    """The result of indexing one shard. `preamble` is the byte range that every block of the shard
    needs besides its own (a Parquet footer, Arrow dictionaries); length 0 if there is none.
    `zero_copy`: decode() copies nothing, so a raw block serves as a decoded one.

    `nulls`: for each field node of the schema in depth-first order (see formats.nulls), the null
    count, UNKNOWN, or NEVER; empty if the format does not know. A format that examines only a
    sample of the shard gives the counts in the sample, and UNKNOWN instead of 0.
    """

    schema: pa.Schema
    blocks: tuple[Block, ...]
    preamble: Region
    zero_copy: bool
    nulls: Sequence[int] = ()


class ColumnBounds(Struct, frozen=True):
    """The bounds that a shard states for a column in one of its blocks. Values that are neither
    null nor NaN lie from `lowest` to `highest`; if the bounds are exact, both occur as values.
    None: unknown.
    """

    rows: int
    null_count: int | None = None
    lowest: Any = None
    highest: Any = None
    is_exact: bool = False
    may_be_nan: bool = False


class RawBlock(Struct, frozen=True):
    """The bytes of one block, as fetched. `index` counts the blocks of the shard; `preamble` and
    `body` are read-only views that live as long as the decoded batch does. If only parts of the
    block were read, `pieces` lists the parts of the shard that lie in `body`, one after the other.
    Blocks of this process with the same `preamble_number`, other than 0, have the same preamble.
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


class Format(Protocol):
    """One shard format. Instances hold no state and are shared by threads and processes."""

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """File name endings, lower case, longest first: (".tar.gz", ".tgz", ".tar")."""

    def index(self, shard: ShardReader) -> ShardIndex:
        """Find blocks and schema in one pass, without holding the shard in memory.

        Raises:  CorruptShard: shard, offset, expected, found.
        """

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """The block's rows with exactly the top-level `columns` of `schema`, in that order.

        `schema` is the dataset's; a column that this shard lacks, or has with another type, is a
        SchemaMismatch. Buffers are validated (`validate(full=True)`) when they came from outside
        unchecked.

        Raises:  CorruptShard: shard, offset, expected, found.
        """
