"""The manifest: a dataset's shards and blocks, with a fingerprint.

1. Two manifests are equal if and only if their fingerprints are: same shards, same content, divided
   into the same blocks. The `urls` that the user passed are not covered.
2. Every block has samples. Blocks are in the order of their shards, and within a shard in the order
   that the format defines.
3. A file is accepted only if its checksum and its fingerprint are correct.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import Buffer

from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.redact import unsigned
from dataplane.plan import texts
from dataplane.plan.columns import (
    ColumnPlaces,
    NullCounts,
    block_column,
    categories_from_bytes,
    categories_to_bytes,
    scaled,
)
from dataplane.plan.order import counted
from dataplane.plan.shards import IndexedShard, Shard, ShardTable, block_table, no_samples, spread
from dataplane.plan.texts import Piece, records

# -- sealed ------------------------------------------------------------------------------------
#
# A file is its content with a checksum, so that a damaged file is refused before it is parsed.

_MARK = b"DP-INDEX"
_CHECKSUM_BYTES = 32


def sealed(body: bytes) -> bytes:
    """Append a checksum and a mark to the body. A reader of the body may ignore both."""
    return body + _checksum(body) + _MARK


def unsealed(content: Buffer, name: str) -> memoryview:
    """Return the body of content that `sealed` returned; errors call the content `name`.

    Raises:  CorruptShard: the content is truncated, damaged, or was not made by `sealed`.
    """
    whole = memoryview(content).cast("B")
    end = len(whole) - _CHECKSUM_BYTES - len(_MARK)
    mark = bytes(whole[-len(_MARK) :])
    if end < 0 or mark != _MARK:
        raise damaged(name, f"{_MARK!r} at its end (was it truncated?)", repr(mark), max(end, 0))
    body = whole[:end]
    if bytes(whole[end : -len(_MARK)]) != _checksum(body):
        raise damaged(name, "the checksum at its end", f"a different one of {end} bytes", end)
    return body


def damaged(name: str, expected: str, found: str, offset: int = 0) -> CorruptShard:
    """Return the error for a manifest that is damaged."""
    return CorruptShard(
        f"{name} is damaged, or is not a manifest: expected {expected}, found {found}."
        " Index the dataset again",
        shard=name,
        offset=offset,
        expected=expected,
        found=found,
    )


def check_version(metadata: Mapping[bytes, bytes], expected: int, name: str) -> None:
    """Check the version of a manifest, which errors call `name`.

    Raises:  ConfigError: the manifest has another version.
    """
    found = metadata[b"dataplane.manifest"].decode()
    if found != str(expected):
        raise ConfigError(
            f"{name} is a manifest of version {found}, and this Dataplane reads version"
            f" {expected}: index the dataset again, or use the release that wrote it",
            field="version",
            expected=expected,
            found=found,
        )


def _checksum(body: Buffer) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()


Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

VERSION = 2
_COLUMNS: tuple[tuple[str, np.dtype[Any]], ...] = (
    ("block_shard", np.dtype(np.int32)),
    ("block_rows", np.dtype(np.int64)),
    ("block_offset", np.dtype(np.int64)),
    ("block_length", np.dtype(np.int64)),
    ("block_decoded", np.dtype(np.int64)),
)
_BLOCK_LISTS = ("rows", "gap", "length", "decoded")
# Columns whose lists are always empty: the places of columns are stored after the table.
_COLUMN_LISTS = ("column_gap", "column_length", "column_decoded")
_FILE_SCHEMA = pa.schema(
    [
        pa.field("url", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("preamble_offset", pa.int64(), nullable=False),
        pa.field("preamble_length", pa.int64(), nullable=False),
        pa.field("zero_copy", pa.bool_(), nullable=False),
        *(pa.field(name, pa.list_(pa.int64()), nullable=False) for name in _BLOCK_LISTS),
        pa.field("empty_blocks", pa.list_(pa.int64()), nullable=False),
        *(pa.field(name, pa.list_(pa.int64()), nullable=False) for name in _COLUMN_LISTS),
    ]
)


# Serialise the number of rows that some views have in each block, for a manifest.

ViewCounts = Mapping[str, NDArray[np.int64]]
"""Counts by the name of the view: int64[K]."""


def counts_to_bytes(counts: ViewCounts) -> bytes:
    """Return one zstd-compressed Arrow stream with a column for each view; empty without views."""
    if not counts:
        return b""
    narrow = {
        name: column.astype(np.min_scalar_type(column.max())) for name, column in counts.items()
    }
    batch, sink = pa.record_batch(narrow), pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def counts_from_bytes(content: bytes, block_count: int) -> ViewCounts:
    """Invert `counts_to_bytes`.

    Raises:  pa.ArrowInvalid: the bytes are something else.  ValueError: they belong to other
    blocks.
    """
    if not content:
        return {}
    with pa.ipc.open_stream(pa.py_buffer(content)) as reader:
        batch = reader.read_next_batch()
    if batch.num_rows != block_count:
        raise ValueError(f"the row counts of views are for {batch.num_rows} blocks")
    return {name: batch.column(name).to_numpy().astype(np.int64) for name in batch.schema.names}


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """The part of a dataset that is left for the first epoch of a stage (stages.py). `manifest`
    describes only this part: its block b is block `manifest.kept[b]` of the dataset. If only some
    samples of block b are left, `samples` has their numbers, from `starts[b]` on; if all are left,
    `starts[b]` is -1. If nothing of the dataset is left, `is_nothing` is true, `manifest` is that
    of the whole dataset, and the epoch reads none of it.

    Shapes:  starts: int64[blocks].   samples: int32[n].
    """

    manifest: Manifest
    starts: Int64
    samples: Int32
    is_nothing: bool = False

    @property
    def kept(self) -> Int64:
        """The numbers of the blocks that have samples left; if nothing is left, of all blocks."""
        kept = None if self.is_nothing else self.manifest.kept
        return np.arange(self.manifest.block_count) if kept is None else kept

    def of(self, block: int) -> Int32 | None:
        """Return the samples that are left of a block of `manifest`; None if all are left."""
        start = int(self.starts[block])
        return None if start < 0 else self.samples[start:][: int(self.manifest.block_rows[block])]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Manifest:
    """The shards of a dataset and their K blocks. The arrays are read-only.

    `schema` is the dataset's Arrow schema, serialised; `fingerprint` is 32 hex digits. `shards` may
    be a sequence of Shard.

    Fields with a default are derived from the content of the shards, so the fingerprint does not
    cover them: `nulls`, None if unknown; `categories`, the sorted values of some columns;
    `pack_counts`, the counts of `packed_blocks.py` by name; and `view_counts`, the rows of each
    block in views, by the views' names. The manifest of a view has the rows of the view, and the
    fingerprint of `whole`, the manifest of the whole dataset, whose blocks `kept` have rows in the
    view. If samples are packs of rows, `block_rows` counts packs, and `documents` rows. If they are
    made by a map that resizes, `given` counts the rows that the map gets. `left` is the part of the
    dataset that the first epoch of a stage reads, None for all of it.

    Shapes:  block_shard: int32[K], ascending.   block_rows: int64[K], samples, > 0.
             block_offset, block_length: int64[K], bytes in the shard.
             block_decoded: int64[K], bytes, an estimate.
    Raises:  ConfigError: the columns do not fit together, or there are no samples.
    """

    urls: tuple[str, ...]
    format: str
    schema: bytes
    shards: ShardTable
    block_shard: Int32
    block_rows: Int64
    block_offset: Int64
    block_length: Int64
    block_decoded: Int64
    column_places: ColumnPlaces | None = None
    nulls: NullCounts | None = None
    categories: Mapping[str, pa.Array] = field(default_factory=dict)
    pack_counts: Mapping[str, pa.Array] = field(default_factory=dict)
    whole: Manifest | None = None
    kept: Int64 | None = None
    documents: Int64 | None = None
    given: Int64 | None = None
    view_counts: ViewCounts = field(default_factory=dict)
    left: Left | None = None
    stored_schema: bytes = b""
    sample_count: int = field(init=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        for name, dtype in _COLUMNS:
            object.__setattr__(self, name, block_column(getattr(self, name), dtype, name))
        if not isinstance(self.shards, ShardTable):
            object.__setattr__(self, "shards", ShardTable.of(self.shards))
        object.__setattr__(self, "sample_count", counted(self.block_rows))
        self._check()
        found = self._fingerprint() if self.whole is None else self.whole.fingerprint
        object.__setattr__(self, "fingerprint", found)

    @classmethod
    def build(
        cls, urls: Iterable[str], format_name: str, schema: bytes, shards: Iterable[IndexedShard]
    ) -> Manifest:
        """Build the manifest of these shards, in this order. Blocks without rows are left out.

        Raises:  ConfigError: no samples at all, or numbers that no block can have.
        """
        kept: list[Shard] = []
        tables: list[Int64] = []
        places: list[Sequence[int]] = []
        nulls: list[Sequence[int]] = []
        for shard in shards:
            nulls.append(shard.nulls)
            table = block_table(shard)
            filled = table[:, 0] != 0
            listed, count = shard.listed, int(filled.sum())
            empty = tuple(np.flatnonzero(~filled).tolist())
            kept.append(
                Shard(
                    listed.url, listed.size_bytes, listed.etag, count, shard.preamble,
                    shard.zero_copy, empty,
                )
            )  # fmt: skip
            tables.append(table[filled])
            places += [block.columns for block in shard.blocks if block.rows]
        if not tables:
            raise ConfigError("the dataset has no shards: check its urls", field="urls")
        counts = [shard.block_count for shard in kept]
        if not any(counts):
            raise no_samples([shard.url for shard in kept])
        block_shard = np.repeat(np.arange(len(kept), dtype=np.int32), counts)
        columns = (np.ascontiguousarray(column) for column in np.concatenate(tables).T)
        names = (name for name, _ in _COLUMNS[1:])
        return cls(
            tuple(urls), format_name, schema, ShardTable.of(kept), block_shard,
            column_places=ColumnPlaces.of(places), nulls=NullCounts.of(nulls),
            **cast("dict[str, Any]", dict(zip(names, columns, strict=True))),
        )  # fmt: skip

    @property
    def block_count(self) -> int:
        return len(self.block_rows)

    def block_in_shard(self, block: int) -> int:
        """Return the block's index within its shard, which a format's RawBlock needs.

        Raises:  ConfigError: there is no such block.
        """
        if not 0 <= block < self.block_count:
            raise ConfigError(
                f"there is no block {block}: they run from 0 to {self.block_count - 1}",
                field="block",
            )
        return self.shards.block_in_shard(int(self.block_shard[block]), block)

    def with_categories(self, values: Mapping[str, pa.Array]) -> Manifest:
        """Return the manifest with the values of these columns added."""
        return replace(self, categories={**self.categories, **values})

    def with_view(self, name: str, counts: Int64) -> Manifest:
        """Return the manifest with the counts of one more view: the number of its rows in each
        block.
        """
        return replace(self, view_counts={**self.view_counts, name: counts})

    def first_shards(self, count: int) -> Manifest:
        """Return the manifest of a whole dataset's first shards."""
        blocks = int(self.shards.block_starts[count])
        columns = {name: getattr(self, name)[:blocks] for name, _ in _COLUMNS}
        return replace(
            self,
            shards=ShardTable.of(map(self.shards.__getitem__, range(count))),
            column_places=None,
            nulls=None,
            categories={},
            pack_counts={},
            view_counts={name: counts[:blocks] for name, counts in self.view_counts.items()},
            **columns,
        )

    def viewed(self, counts: Int64) -> Manifest:
        """Return the manifest of a view with this many rows of each block. Blocks without rows are
        left out, so that order, lanes, shuffle and resuming need not know of views.

        Shapes:  counts: int64[K], at most the rows of each block.
        Raises:  ConfigError: the view has no rows.
        """
        kept = np.flatnonzero(counts)
        stored, rows, decoded = (
            each[kept] for each in (self.block_rows, counts, self.block_decoded)
        )
        return replace(
            self,
            shards=self.shards.keeping(kept),
            block_shard=self.block_shard[kept],
            block_rows=rows,
            block_offset=self.block_offset[kept],
            block_length=self.block_length[kept],
            block_decoded=scaled(decoded, rows, stored),
            column_places=None,
            whole=self,
            kept=kept,
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Manifest)
            and self.fingerprint == other.fingerprint
            and (
                self.whole is other.whole is None
                or np.array_equal(self.block_rows, other.block_rows)
            )
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"<Manifest {self.fingerprint}: {len(self.shards)} {self.format} shards,"
            f" {self.block_count} blocks, {self.sample_count} samples>"
        )

    def to_bytes(self) -> bytes:
        """Serialise to one compressed Arrow stream with one row per shard, followed by the places
        of columns, a checksum, and a mark.
        """
        shards = self.shards
        places = b"" if self.column_places is None else self.column_places.to_bytes()
        ends = self.block_offset + self.block_length
        # Store the gaps between blocks, which are nearly always 0. If a gap overflows, the sum that
        # a reader computes overflows back to the offset.
        gap = self.block_offset.copy()
        same = self.block_shard[1:] == self.block_shard[:-1]
        gap[1:][same] -= ends[:-1][same]
        lists = (self.block_rows, gap, self.block_length, self.block_decoded)
        columns = [
            texts.strings(shards.urls),
            texts.numbers(shards.size_bytes),
            texts.strings(shards.etags),
            texts.numbers(shards.preamble_offset),
            texts.numbers(shards.preamble_length),
            texts.flags(shards.zero_copy),
            *(texts.lists(shards.block_starts, values) for values in lists),
            texts.lists(shards.empty_starts, shards.empty),
            *(texts.lists(shards.block_starts * 0, shards.empty[:0]) for _ in _COLUMN_LISTS),
        ]
        described = _FILE_SCHEMA.with_metadata(
            {
                "dataplane.manifest": str(VERSION),
                "fingerprint": self.fingerprint,
                "format": self.format,
                "schema": self.schema,
                "stored_schema": self.stored_schema,
                "urls": json.dumps(self.urls),
                "column_places": str(len(places)),
                "nulls": b"" if self.nulls is None else self.nulls.to_bytes(),
                "categories": categories_to_bytes(self.categories),
                "pack_counts": categories_to_bytes(self.pack_counts, "zstd"),
                "views": counts_to_bytes(self.view_counts),
            }
        )
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        with pa.ipc.new_stream(sink, described, options=options) as writer:
            writer.write_batch(pa.record_batch(columns, schema=described))
        body: bytes = sink.getvalue().to_pybytes()
        return sealed(body + places)

    @classmethod
    def from_bytes(cls, content: Buffer, name: str = "the manifest") -> Manifest:
        """Parse the manifest that `to_bytes` wrote; errors call it `name`.

        Raises:  CorruptShard: not a manifest, or damaged.  ConfigError: of another version.
        """
        body = unsealed(content, name)
        try:
            options = pa.ipc.IpcReadOptions(use_threads=False)
            # Unlike Arrow's default, the system's allocator returns freed memory to the machine.
            pool = pa.system_memory_pool()
            source = pa.py_buffer(body)
            with pa.ipc.open_stream(source, options=options, memory_pool=pool) as reader:
                metadata = reader.schema.metadata or {}
                check_version(metadata, VERSION, name)
                batch = reader.read_next_batch()
            batch.validate(full=True)
            if not batch.schema.remove_metadata().equals(_FILE_SCHEMA):
                raise ValueError(f"columns {batch.schema.names}")
            manifest = _decoded(batch, metadata, body)
            expected = metadata[b"fingerprint"].decode()
        except ConfigError as error:
            if error.nouns.get("field") == "version":
                raise
            raise damaged(name, "columns that fit together", str(error)) from error
        except (
            pa.ArrowException,
            OSError,
            ValueError,
            KeyError,
            TypeError,
            StopIteration,
        ) as error:
            raise damaged(name, "the columns of a manifest", str(error)) from error
        if manifest.fingerprint != expected:
            raise damaged(name, f"fingerprint {expected}", manifest.fingerprint)
        return manifest

    def _check(self) -> None:
        lengths = {len(getattr(self, name)) for name, _ in _COLUMNS}
        if len(lengths) != 1:
            raise ConfigError(f"block columns have different lengths: {sorted(lengths)}")
        places = self.column_places
        if places is not None and places.block_count != self.block_count:
            raise ConfigError("the places of columns are for a different number of blocks")
        if (self.block_shard[1:] < self.block_shard[:-1]).any():
            raise ConfigError("blocks must be in the order of their shards", field="block_shard")
        if self.block_shard[-1] >= len(self.shards):
            raise ConfigError("a block lies in a shard that does not exist", field="block_shard")
        counts = np.bincount(self.block_shard, minlength=len(self.shards))
        wrong = counts != self.shards.block_counts
        if wrong.any():
            shard = self.shards[int(wrong.argmax())]
            raise ConfigError(
                f"{shard.url} should have {shard.block_count} blocks and has"
                f" {counts[wrong.argmax()]}",
                shard=shard.url,
            )

    def _fingerprint(self) -> str:
        """Hash the canonical encoding: lengths before texts, numbers as little-endian."""
        digest = hashlib.blake2b(digest_size=16, person=b"dp-manifest-1")
        texts = (self.format.encode(), self.schema)
        digest.update(b"".join(struct.pack("<Q", len(text)) + text for text in texts))
        digest.update(struct.pack("<QQ", len(self.shards), self.block_count))
        shards = self.shards
        # Hash urls without their signatures: signing a url again gives another signature.
        urls, etags = shards.urls.changed(unsigned, b"@?").piece(), shards.etags.piece()
        empty = Piece(shards.empty, shards.empty_starts[:-1], shards.empty_starts[1:])
        numbers = (
            urls.stops - urls.starts, shards.etags.lengths, shards.size_bytes, shards.block_counts,
            shards.preamble_offset, shards.preamble_length, shards.zero_copy, shards.empty_counts,
        )  # fmt: skip
        for some in records(numbers, (empty, urls, etags)):
            digest.update(some.data)
        for name, dtype in _COLUMNS:
            digest.update(getattr(self, name).astype(dtype.newbyteorder("<"), copy=False).data)
        return digest.hexdigest()


def _decoded(batch: Any, metadata: dict[bytes, bytes], body: memoryview) -> Manifest:
    if any(column.null_count for column in batch.columns):
        raise ValueError("a value is missing")
    starts = texts.starts_of_lists(batch.column(_BLOCK_LISTS[0]))
    others = (texts.starts_of_lists(batch.column(name)) for name in _BLOCK_LISTS[1:])
    if any(not np.array_equal(list_starts, starts) for list_starts in others):
        raise ValueError("a shard's block columns have different lengths")
    rows, gap, length, decoded = (
        texts.values_of_lists(batch.column(name)) for name in _BLOCK_LISTS
    )
    # Compute `offset` in place, since it is one of the largest columns: where each block ends among
    # all blocks, then where it begins, then where it begins in its shard. Overflows cancel out.
    offset = gap + length
    np.cumsum(offset, out=offset)
    before = np.where(starts[:-1] > 0, offset.take(starts[:-1] - 1, mode="clip"), 0)
    offset -= length
    offset -= spread(before, starts)
    size = int(metadata[b"column_places"])
    shards = ShardTable(
        texts.texts_of(batch.column("url")),
        texts.texts_of(batch.column("etag")),
        texts.numbers_of(batch.column("size_bytes")),
        texts.numbers_of(batch.column("preamble_offset")),
        texts.numbers_of(batch.column("preamble_length")),
        texts.flags_of(batch.column("zero_copy")),
        block_starts=starts,
        empty=texts.values_of_lists(batch.column("empty_blocks")),
        empty_starts=texts.starts_of_lists(batch.column("empty_blocks")),
    )
    return Manifest(
        urls=tuple(json.loads(metadata[b"urls"])),
        format=metadata[b"format"].decode(),
        schema=metadata[b"schema"],
        shards=shards,
        block_shard=spread(np.arange(len(shards), dtype=np.int32), starts),
        block_rows=rows,
        block_offset=offset,
        block_length=length,
        block_decoded=decoded,
        column_places=ColumnPlaces.from_bytes(body[len(body) - size :]) if size else None,
        nulls=NullCounts.from_bytes(metadata[b"nulls"]),
        categories=categories_from_bytes(metadata[b"categories"]),
        pack_counts=categories_from_bytes(metadata[b"pack_counts"]),
        view_counts=counts_from_bytes(metadata[b"views"], len(rows)),
        stored_schema=metadata.get(b"stored_schema", b""),
    )
