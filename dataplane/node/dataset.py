"""A dataset in the form that one job reads: manifest, columns, and the memory that each block
takes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
from msgspec import Struct, field, structs
from msgspec.structs import replace

from dataplane.formats import megatron
from dataplane.formats.folders import folder_names
from dataplane.index.viewing import Projection
from dataplane.model.config import JobSpec
from dataplane.model.joined import MARK
from dataplane.model.records import Kind, Region, View
from dataplane.model.redact import redacted
from dataplane.node.job_columns import (
    Columns,
    columns_of,
    row_bytes_of,
)
from dataplane.plan.columns import scaled
from dataplane.plan.defaults import BlockSizes
from dataplane.plan.manifest import Manifest
from dataplane.plan.packed_blocks import given_counts, row_counts
from dataplane.plan.permute import Words
from dataplane.plan.shards import starts_of
from dataplane.plan.views import filters, first_rows, has_shares, shard_words
from dataplane.rpc import tasks
from dataplane.rpc.codec import encode
from dataplane.scheduler.dataset import BlockPlaces, DatasetBlocks, DatasetLookup, Marks
from dataplane.store.urls import FILE_PREFIX
from dataplane.transforms.casts import casts_of
from dataplane.transforms.codes import with_categories
from dataplane.transforms.columns import ColumnPlan, LeafPart
from dataplane.transforms.leaves import canonical_type, value_type
from dataplane.transforms.lists import LISTS
from dataplane.transforms.made_columns import MappedColumns, mapped_in, with_mapped
from dataplane.transforms.packing import packed_columns
from dataplane.transforms.restart_indexes import restart_index_bytes
from dataplane.transforms.row_filter import BlockRows, RowFilter, reads_columns
from dataplane.worker.block_mapping import COUNTED_ROWS, FOUND_COLUMNS
from dataplane.worker.columns import Ints, RowLayout, offset_bytes
from dataplane.worker.death import WorkerBytes, WorkerPlace
from dataplane.worker.stacking import StackedPlan

# Blocks that could be used in place, without arena memory, are packed only if the packed blocks of
# all open windows take at most one part in _ROOM_PARTS of the arena, and if the other columns,
# which are copied along, are at most _OTHERS_MAX times larger than the packed ones.
_ROOM_PARTS = 2
_OTHERS_MAX = 4
# Restart indexes are kept if all blocks and their indexes fill at most this part of the arena.
_STAYING_SHARE = 0.9
# Bytes that an Arrow stream adds to its columns: a schema message, headers and padding.
_STREAM_BYTES = 4096
_STREAM_BYTES_A_COLUMN = 512
# The decoded size of mapped blocks is estimated from the first rows, times _MAPPED_SHARE as rows
# differ. Too large an estimate costs nothing once the block is decoded; after too small a one, the
# block is decoded again. Estimates are limited to one part in _MAPPED_PARTS of the arena, so that
# no block is refused because of its estimate.
_MAPPED_SHARE = 1.5
_MAPPED_PARTS = 4


# -- sizes of stored rows --------------------------------------------------------------------------
#
# The rows that the blocks of a dataset store. A view may have only some of them.


class StoredRows(Struct, frozen=True, eq=False):
    """The rows that each block stores, if a view has only some of them.

    Shapes:  rows, first: int64[K], the number of rows, and the first row's index in its shard.
             words: uint64[K], the shard's part of the keys of rows; None if no view needs keys.
    """

    rows: Ints | None = None
    first: Ints | None = None
    words: Words | None = None
    manifest: Manifest | None = None

    @classmethod
    def of(cls, manifest: Manifest, view: View) -> Self:
        """Return the stored rows of a manifest; empty unless it is the manifest of a view."""
        if manifest.whole is None or manifest.kept is None:
            return cls()
        words = shard_words(manifest.shards.urls) if has_shares(view) else None
        return cls(
            stored_rows(manifest),
            first_rows(manifest.whole)[manifest.kept],
            None if words is None else words[manifest.block_shard],
            manifest,
        )

    def of_filter(self, rows: RowFilter, block: int) -> BlockRows:
        """Return the rows that a block stores, for this filter of the view."""
        assert self.manifest is not None
        shards, shard = self.manifest.shards, self.manifest.block_shard.item(block)
        names = (self.manifest.format, shards.urls[shard], shards.etags[shard])
        known = self.of_block(block)
        return rows.stored(names, known["stored_rows"], known["first_row"], known["shard_word"])

    def of_block(self, block: int) -> dict[str, Any]:
        """Return the rows as fields of a RawBlockRef."""
        if self.rows is None or self.first is None:
            return {}
        word = 0 if self.words is None else self.words.item(block)
        return {
            "stored_rows": self.rows.item(block),
            "first_row": self.first.item(block),
            "shard_word": word,
        }


def stored_rows(manifest: Manifest) -> Ints:
    """Return the rows of each block before the view.

    Shapes:  result: int64[K].
    """
    whole, kept = manifest.whole, manifest.kept
    return manifest.block_rows if whole is None or kept is None else whole.block_rows[kept]


def largest_stored(manifest: Manifest, projection: Projection | None) -> int:
    """Return the size of the largest block, decoded before a view selects rows; 0 if none does."""
    whole, kept = manifest.whole, manifest.kept
    if whole is None or kept is None:
        return 0
    decoded = whole.block_decoded[kept] if projection is None else projection.decoded
    return int(np.max(decoded, initial=0))


# -- datasets --------------------------------------------------------------------------------------


class Dataset(Struct, frozen=True, eq=False, weakref=True):
    """One manifest, read with one set of options. Jobs with the same options share its blocks.

    `blocks` is the scheduler's view of it; `largest_block` the one that takes most of the arena,
    raw and decoded together; `row_bytes` the approximate size of one sample in a slab, at least
    one. `has_bytes`: a column may hold images. `kept_bytes` is what all blocks together would take
    of the arena. `categories` are the values of columns that come as codes; `stored` the rows that
    blocks have before the view. `digest`, of 16 bytes, is equal on all nodes whose blocks have
    equal bytes, as they are read and once decoded.

    Shapes:  row_starts: int64[blocks + 1], the rows before each block.
    """

    dataset_id: int
    manifest: Manifest
    columns: StackedPlan
    message: tasks.OpenDataset
    blocks: DatasetBlocks
    projection: Projection | None
    largest_block: int
    row_starts: Ints
    row_bytes: int
    has_bytes: bool
    kept_bytes: int
    categories: Mapping[str, pa.Array]
    digest: bytes
    stored: StoredRows

    @property
    def column_count(self) -> int:
        """The number of columns of its batches."""
        pack = self.message.view.pack
        return len(self.columns.specs if pack is None else packed_columns(self.columns.specs, pack))

    @property
    def mapped(self) -> MappedColumns | None:
        """The columns that its map makes, if it has one."""
        schema = self.message.schema if self.message.view.map else b""
        return mapped_in(pa.ipc.read_schema(pa.py_buffer(schema))) if schema else None

    def for_epoch(self, epoch: int, dataset_id: int) -> Dataset:
        """Return this dataset with blocks of its own, for which the map draws in this epoch."""
        message = replace(self.message, dataset_id=dataset_id, epoch=epoch)
        marks = self.blocks.marks
        marks = Marks.of(marks.raw, marks.decoded.copy(), marks.is_remote)
        blocks = replace(self.blocks, dataset_id=dataset_id, marks=marks)
        return replace(self, dataset_id=dataset_id, message=message, blocks=blocks)

    def path(self, block: int) -> str | None:
        """Return the local file with the block; None if the shard is not a local file."""
        is_remote = self.blocks.marks.is_remote.item(block)
        return None if is_remote else self.url(block)[len(FILE_PREFIX) :]

    def raw_block(self, block: int, arena: Region | None) -> tasks.RawBlockRef:
        """Return where a worker finds the block's bytes."""
        manifest, shard = self.manifest, self._shard(block)
        shards = manifest.shards
        place = Region(manifest.block_offset.item(block), manifest.block_length.item(block))
        return tasks.RawBlockRef(
            url=shards.urls[shard],
            index=shards.block_in_shard(shard, block),
            rows=given_counts(manifest).item(block),
            place=place,
            preamble_place=shards.preamble(shard),
            shard_bytes=shards.size_bytes.item(shard),
            etag=shards.etags[shard],
            arena=arena,
            path=self.path(block) if arena is None else None,
            pieces=() if self.projection is None else self.projection.pieces(block, place),
            shard=shard,
            made_rows=0 if manifest.given is None else manifest.block_rows.item(block),
            **(self.stored.of_block(block) or {"first_row": self._first_row(block)}),
        )

    def is_decoded(self, block: int) -> bool:
        """Whether a worker decodes the block; otherwise rows are gathered from its raw bytes."""
        return self.blocks.needs_decode(block)

    def origin(self, block: int) -> tasks.Origin | None:
        """Return which samples the block has; needed only if they may be images, are packed, or may
        be replaced.
        """
        view, shard = self.message.view, self._shard(block)
        url, of_view = self.manifest.shards.urls[shard], self.stored.rows is not None
        if view.pack is None:
            if not self.has_bytes and not view.bad_max:
                return None
            return tasks.Origin(url, shard, self._first_row(block), of_view)
        # This manifest leaves out blocks without packs, so `_first_row` would not count their rows.
        # Use the first row that was stored.
        first, packs = self.stored.first, int(self.manifest.block_rows[block])
        assert first is not None
        return tasks.Origin(url, shard, first.item(block), filters(view), packs)

    def place(self, block: int) -> WorkerPlace:
        """Return the block's place for error messages."""
        index = self.manifest.block_in_shard(block)
        first, of_view = self._first_row(block), self.stored.rows is not None
        return WorkerPlace(self.url(block), index, first_row=first, of_view=of_view)

    def _first_row(self, block: int) -> int:
        """Return the index within its shard of the block's first sample."""
        first = self.manifest.shards.block_starts.item(self._shard(block))
        return self.row_starts.item(block) - self.row_starts.item(first)

    def url(self, block: int) -> str:
        """Return the url of the block's shard."""
        return self.manifest.shards.urls[self._shard(block)]

    def _shard(self, block: int) -> int:
        return self.manifest.block_shard.item(block)


def heritage(heir: Dataset, former: Dataset) -> Ints | None:
    """Return the index in `former` of each block of `heir`; None if the two datasets decode blocks
    differently. Later steps may differ, and `former` may have more blocks.
    """
    if heir.manifest.fingerprint != former.manifest.fingerprint:
        return None
    if _decoded_form(heir.message) != _decoded_form(former.message):
        return None
    mine, its = heir.manifest.kept, former.manifest.kept
    if mine is None or its is None:
        return None
    return np.searchsorted(its, mine)


def _decoded_form(message: tasks.OpenDataset) -> tasks.OpenDataset:
    view = structs.replace(message.view, pack=None)
    return replace(message, dataset_id=0, memory_bytes=0, view=view)


def _digest(manifest: Manifest, message: tasks.OpenDataset) -> bytes:
    options = encode(replace(message, dataset_id=0, memory_bytes=0))
    text = manifest.fingerprint.encode() + options
    return hashlib.blake2b(text, digest_size=16).digest()


def _sample_bytes(manifest: Manifest, columns: Columns, projection: Projection | None) -> int:
    size = int(_whole_bytes(manifest, projection).sum())
    mean = size // max(manifest.sample_count, 1)
    fixed = columns.fixed_bytes
    growth = _list_growth(columns.plan.leaves)
    if columns.mapped is not None:
        return max(int(columns.mapped.row_bytes * growth), fixed, 1)
    mean = int(mean * growth)
    return max(fixed, 1) if columns.is_fixed else max(mean, fixed, 1)


def _projection(manifest: Manifest, columns: Sequence[str]) -> Projection | None:
    """Return which bytes can be skipped if only these columns are wanted; None if all are read."""
    whole = manifest.whole or manifest
    places, names = whole.column_places, pa.ipc.read_schema(pa.py_buffer(manifest.schema)).names
    wanted = set(columns)
    names = names[: None if places is None else places.column_count]  # folders have no bytes
    if places is None or places.column_count != len(names) or wanted.issuperset(names):
        return None
    is_wanted = [name in wanted for name in names]
    found = Projection.of(places, whole.block_length, whole.block_decoded, is_wanted)
    return found if manifest.kept is None else found.of_blocks(manifest.kept)


def _whole_bytes(manifest: Manifest, projection: Projection | None) -> Ints:
    """Return the size of each block according to the index, counting only the wanted columns if the
    index knows their sizes.
    """
    if projection is None or manifest.whole is None:
        return manifest.block_decoded if projection is None else projection.decoded
    return scaled(projection.decoded, given_counts(manifest), stored_rows(manifest))


def _decoded_bytes(
    manifest: Manifest,
    columns: Columns,
    row_layout: RowLayout | None,
    projection: Projection | None = None,
) -> Ints:
    """Return the bytes of each block once decoded, as far as the index knows."""
    size, rows = _whole_bytes(manifest, projection), row_counts(manifest)
    growth = _list_growth(columns.plan.leaves)
    if columns.finds is not None:
        size = rows * offset_bytes(columns.finds.types[0])
    elif columns.mapped is not None:
        size = (rows * columns.mapped.row_bytes * _MAPPED_SHARE * growth).astype(np.int64)
    elif row_layout is not None and columns.is_fixed:
        size = rows * columns.fixed_bytes  # the requested columns alone
    else:
        wider = _wider_bytes(columns.plan.leaves) + _folder_bytes(columns)
        size = (size * growth).astype(np.int64) + rows * wider
    if row_layout is not None:
        size = size + rows * row_layout.padding_bytes
    return size + _stream_bytes(columns.plan)


def _folder_bytes(columns: Columns) -> int:
    """Return the bytes of a row in the columns that folders have."""
    sizes = folder_names(columns.schema)
    return sum(size for name, size in sizes.items() if name in columns.top_level)


def _list_growth(plan: ColumnPlan) -> float:
    """Return how many times larger blocks become if lists are converted; 1 for blocks with texts,
    bytes or objects, which are assumed to take most of the block.
    """
    casts, growth = casts_of(plan.options), 1.0
    if not casts or any(not spec.dtype for spec in plan.specs):
        return growth
    columns = zip(plan.specs, plan.leaves, plan.parts, plan.schema.types, strict=True)
    for spec, leaf, part, target in columns:
        if spec.kind in LISTS and spec.name in casts and part is LeafPart.VALUES:
            stored = canonical_type(leaf.type).value_type
            growth = max(growth, target.value_type.bit_width / stored.bit_width)
    return growth


def _wider_bytes(plan: ColumnPlan) -> int:
    """Return how much longer a row is in canonical form than as stored: a bool takes a byte, texts
    of a dictionary and views get offsets, converted numbers may be wider. Without this estimate,
    blocks would be decoded twice, the first time only to find the size.
    """
    size, casts = 0, casts_of(plan.options)
    for leaf, part, target in zip(plan.leaves, plan.parts, plan.schema.types, strict=True):
        if part is not LeafPart.VALUES:
            size += row_bytes_of(target)  # an additional column
        elif offset_bytes(target):
            size += offset_bytes(target) - offset_bytes(leaf.type)
        elif pa.types.is_boolean(value_type(leaf.type)):
            size += row_bytes_of(target)
        elif leaf.name in casts:
            size += max(0, row_bytes_of(target) - row_bytes_of(canonical_type(leaf.type)))
    return size


def _stream_bytes(plan: StackedPlan) -> int:
    return _STREAM_BYTES + _STREAM_BYTES_A_COLUMN * len(plan.specs)


def _marks(
    manifest: Manifest, decoded: Ints, projection: Projection | None, *, direct: bool
) -> Marks:
    shards = manifest.shards
    # `preamble` has, for each shard, the bytes that are fetched with every block, -1 for a local
    # file that can be mapped; `is_decoded`, whether the shard's blocks are decoded: not if these
    # are zero-copy and `direct`, in canonical form with no small columns to be packed.
    is_local = shards.urls.starting_with(FILE_PREFIX.encode())
    if manifest.format != megatron.NAME:  # whose blocks lie in the last part of a joined shard
        is_local &= ~shards.etags.starting_with(MARK.encode())
    preamble = np.where(is_local, -1, shards.preamble_length)
    is_decoded = ~shards.zero_copy if direct else np.ones(len(shards), np.bool_)
    fetched = preamble[manifest.block_shard]
    length = manifest.block_length - (0 if projection is None else projection.skipped)
    raw = np.where(fetched < 0, 0, fetched + length)
    return Marks.of(raw, np.where(is_decoded[manifest.block_shard], decoded, 0), fetched >= 0)


def _places(manifest: Manifest, projection: Projection | None) -> BlockPlaces:
    at = manifest.block_shard, manifest.block_offset, manifest.block_length
    return BlockPlaces(*at) if projection is None else projection.places(*at)


def can_pack(
    manifest: Manifest, spec: JobSpec, arena_bytes: int, known: Columns | None = None
) -> bool:
    """Whether packing a job's blocks pays: its rows must be shuffled. If blocks could be used in
    place, packed blocks must also fit into the arena until they are used, and few other columns may
    be copied along.

    Raises:  ConfigError: a requested column does not exist.
    """
    columns = known or columns_of(manifest, spec)
    row_layout = columns.row_layout if spec.shuffle else None
    if row_layout is None:
        return False
    can_stay = columns.is_canonical and not filters(spec.view)
    if not (can_stay and manifest.shards.zero_copy.any()):
        return True
    sizes = BlockSizes.of(manifest.block_rows, _decoded_bytes(manifest, columns, row_layout))
    if sizes.sample_bytes > (1 + _OTHERS_MAX) * row_layout.row_bytes:
        return False
    needed = sizes.open_window_bytes(spec.window) * spec.lanes
    return needed * _ROOM_PARTS <= arena_bytes


def _message(
    dataset_id: int,
    manifest: Manifest,
    found: Columns,
    spec: JobSpec,
    schema: pa.Schema,
    memory_bytes: int,
    *,
    packed: bool,
) -> tasks.OpenDataset:
    """Describe the dataset for workers. The description is about blocks, so the options of batches
    do not matter.
    """
    is_random = found.mapped is not None and found.mapped.takes_generator
    return tasks.OpenDataset(
        dataset_id,
        manifest.format,
        with_mapped(schema, found.mapped).serialize().to_pybytes(),
        pack=packed,
        column_options=spec.column_options,
        memory_bytes=memory_bytes,
        view=structs.replace(spec.view, collate=""),
        finds_columns=found.finds is FOUND_COLUMNS,
        counts_rows=found.finds is COUNTED_ROWS,
        seed=spec.seed if is_random or spec.view.bad_max else 0,
        images=spec.transforms if spec.view.bad_max and found.finds is None else (),
    )


def dataset_of(
    dataset_id: int,
    manifest: Manifest,
    spec: JobSpec,
    *,
    packed: bool = False,
    worker_bytes: WorkerBytes | None = None,
    arena_bytes: int = 0,
    known: Columns | None = None,
    categories: Mapping[str, pa.Array] | None = None,
) -> Dataset:
    """Plan how a job with this spec reads the manifest, with workers that may take `worker_bytes`
    and a block arena of `arena_bytes`. Codes refer to `categories`.

    Raises:  ConfigError: a requested column does not exist.
    """
    found = known or columns_of(manifest, spec)
    columns = found.plan
    row_layout = found.row_layout if packed else None
    direct = found.is_canonical and row_layout is None and not filters(spec.view)
    direct = direct and not spec.view.bad_max  # only decoding finds the bad rows
    projection = _projection(manifest, reads_columns(spec.view, found.schema, found.top_level))
    decoded = _decoded_bytes(manifest, found, row_layout, projection)
    is_guessed = found.mapped is not None or _list_growth(columns.leaves) > 1
    if is_guessed and arena_bytes:
        decoded = np.minimum(decoded, arena_bytes // _MAPPED_PARTS)
    marks = _marks(manifest, decoded, projection, direct=direct)
    kept = np.where(marks.decoded > 0, marks.decoded, marks.raw)
    restart_indexes = restart_index_bytes(
        int(np.where(kept > 0, kept, manifest.block_length).sum())
    )
    largest = max(int(marks.decoded.max(initial=0)), largest_stored(manifest, projection))
    if found.mapped is not None:
        largest += int(_whole_bytes(manifest, projection).max(initial=0))
    memory_bytes = 0 if worker_bytes is None else worker_bytes.for_blocks_of(largest)
    schema = with_categories(found.schema, categories or {})
    message = _message(dataset_id, manifest, found, spec, schema, memory_bytes, packed=packed)
    has_bytes, digest = any(s.kind is Kind.BYTES for s in columns.specs), _digest(manifest, message)
    blocks = DatasetBlocks(
        dataset_id,
        redacted(manifest.urls[0]),
        marks,
        manifest.block_length,
        manifest.block_rows,
        url=lambda block: manifest.shards.urls[manifest.block_shard.item(block)],
        keeps_restart_indexes=has_bytes
        and int(kept.sum()) + restart_indexes <= arena_bytes * _STAYING_SHARE,
        stream_bytes=_stream_bytes(columns),
        places=_places(manifest, projection),
        digest=digest,
    )
    return Dataset(
        dataset_id, manifest, columns, message, blocks, projection,
        largest_block=int((marks.raw + marks.decoded).argmax()),
        row_starts=starts_of(row_counts(manifest)),
        row_bytes=_sample_bytes(manifest, found, projection),
        has_bytes=has_bytes,
        kept_bytes=int(kept.sum()),
        categories=categories or {}, digest=digest, stored=StoredRows.of(manifest, spec.view),
    )  # fmt: skip


# -- datasets of epochs ----------------------------------------------------------------------------
#
# Datasets whose maps draw anew in each epoch: each epoch has blocks of its own.
#
# Invariants:
# 1. A block that a map made for one epoch is used in no other: it belongs to a dataset of that
#    epoch.
# 2. The streams of one epoch share its dataset, which is forgotten when the last of them closes.


_FIRST_ID = 1 << 40  # beyond the numbers of all other datasets


class _OfEpoch(Struct, eq=False):
    dataset: Dataset
    streams: set[int] = field(default_factory=set)


class EpochDatasets:
    """The datasets of epochs that streams read. `known` has all datasets by number; `forget` drops
    the blocks of one.
    """

    def __init__(self, known: dict[int, Dataset], forget: Callable[[Dataset], None]) -> None:
        self._known, self._forget = known, forget
        self._read: dict[tuple[int, int], _OfEpoch] = {}
        self._left: list[Dataset] = []
        """Datasets without streams that workers may still use."""
        self._numbers = itertools.count(_FIRST_ID)

    def of_stream(
        self, stream_id: int, epoch: int, datasets: Sequence[Dataset]
    ) -> DatasetLookup | None:
        """Return what a new stream of an epoch reads instead of these datasets; None if no map
        draws in each epoch.
        """
        if not any(dataset.message.view.per_epoch for dataset in datasets):
            return None
        self._drop_unused()
        return DatasetLookup(
            *(self._of_epoch(dataset, epoch, stream_id).blocks for dataset in datasets)
        )

    def _of_epoch(self, dataset: Dataset, epoch: int, stream_id: int) -> Dataset:
        if not dataset.message.view.per_epoch:
            return dataset
        key = dataset.dataset_id, epoch
        own = self._read.get(key)
        if own is None:
            own = self._read[key] = _OfEpoch(dataset.for_epoch(epoch, next(self._numbers)))
            self._known[own.dataset.dataset_id] = own.dataset
        own.streams.add(stream_id)
        return own.dataset

    def is_read(self, stream_id: int) -> bool:
        """Whether the stream reads blocks that its next epoch does not have."""
        return any(stream_id in own.streams for own in self._read.values())

    def close(self, stream_id: int) -> None:
        """Forget the datasets that only this stream has read."""
        for key, own in list(self._read.items()):
            own.streams.discard(stream_id)
            if not own.streams:
                del self._read[key]
                self._left.append(own.dataset)
                self._forget(own.dataset)
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Drop the datasets without streams whose blocks are no longer in use."""
        for dataset in [dataset for dataset in self._left if not dataset.blocks.marks.keys.any()]:
            self._left.remove(dataset)
            del self._known[dataset.dataset_id]
