"""A dataset as one job reads it: manifest, columns, and the memory that each block takes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.config import JobSpec
from dataplane.model import Kind, Region
from dataplane.node.projection import Projection
from dataplane.plan.defaults import BlockSizes
from dataplane.plan.manifest import Manifest
from dataplane.plan.null_counts import NEVER, NullCounts
from dataplane.plan.shards import starts_of
from dataplane.redact import redacted
from dataplane.rpc import tasks
from dataplane.scheduler.dataset import DatasetBlocks, Marks
from dataplane.scheduler.joined import BlockPlaces
from dataplane.store.urls import FILE_PREFIX
from dataplane.transforms.annotations import annotated
from dataplane.transforms.codes import coded_columns, with_categories
from dataplane.transforms.columns import ColumnPlan, LeafPart
from dataplane.transforms.leaves import value_type
from dataplane.transforms.lists import LISTS
from dataplane.transforms.restart_indexes import restart_index_bytes
from dataplane.worker.columns import Ints, RowLayout, offset_bytes
from dataplane.worker.death import WorkerPlace
from dataplane.worker.limits import WorkerBytes
from dataplane.worker.row_layout import plan_row_layout
from dataplane.worker.stacking import StackedPlan, plan_stacked

# Blocks that could be used in place, without arena memory, are packed only if those of open windows
# take at most this part of the arena, and if the other columns copied along are at most this many
# times larger.
_ROOM_PARTS = 2
_OTHERS_MAX = 4
# The part of the arena that blocks which stay may fill, together with their restart indexes.
_STAYING_SHARE = 0.9
# Bytes that an Arrow stream adds to its columns: a schema message, headers and padding.
_STREAM_BYTES = 4096
_STREAM_BYTES_A_COLUMN = 512


class Dataset(Struct, frozen=True, eq=False, weakref=True):
    """One manifest, read with one set of options. Jobs with the same options share its blocks.

    `direct`: a zero-copy block is already in canonical form and needs no decoding; if its small
    columns are packed, it is decoded anyway. `blocks` is the scheduler's view of it;
    `largest_block` the one that takes most of the arena, raw and decoded together; `row_bytes` the
    approximate size of one sample in a slab, at least one. `has_bytes`: a column may hold images.
    `kept_bytes` is what all blocks together would take of the arena.
    `categories` are the values of columns that come as codes.

    Shapes:  row_starts: int64[blocks + 1], the samples before each block.
    """

    dataset_id: int
    manifest: Manifest
    columns: StackedPlan
    message: tasks.OpenDataset
    direct: bool
    blocks: DatasetBlocks
    projection: Projection | None
    largest_block: int
    row_starts: Ints
    row_bytes: int
    has_bytes: bool
    kept_bytes: int
    categories: Mapping[str, pa.Array]

    def path(self, block: int) -> str | None:
        """The local file with the block, if the shard is one."""
        is_remote = self.blocks.marks.is_remote.item(block)
        return None if is_remote else self.url(block)[len(FILE_PREFIX) :]

    def raw_block(self, block: int, arena: Region | None) -> tasks.RawBlockRef:
        """Where a worker finds the block's bytes."""
        manifest, shard = self.manifest, self._shard(block)
        shards = manifest.shards
        place = Region(manifest.block_offset.item(block), manifest.block_length.item(block))
        return tasks.RawBlockRef(
            url=shards.urls[shard],
            index=shards.block_in_shard(shard, block),
            rows=manifest.block_rows.item(block),
            place=place,
            preamble_place=shards.preamble(shard),
            shard_bytes=shards.size_bytes.item(shard),
            etag=shards.etags[shard],
            arena=arena,
            path=self.path(block) if arena is None else None,
            pieces=() if self.projection is None else self.projection.pieces(block, place),
        )

    def is_decoded(self, block: int) -> bool:
        """Whether a worker decodes the block; otherwise rows are gathered from its raw bytes."""
        return self.blocks.needs_decode(block)

    def origin(self, block: int) -> tasks.Origin | None:
        """Which samples the block has; needed only if they may be images."""
        if not self.has_bytes:
            return None
        shard = self._shard(block)
        return tasks.Origin(self.manifest.shards.urls[shard], shard, self._first_row(block))

    def place(self, block: int) -> WorkerPlace:
        """The block as errors name it."""
        index = self.manifest.block_in_shard(block)
        return WorkerPlace(self.url(block), index, first_row=self._first_row(block))

    def _first_row(self, block: int) -> int:
        """The index within its shard of the block's first sample."""
        first = self.manifest.shards.block_starts.item(self._shard(block))
        return self.row_starts.item(block) - self.row_starts.item(first)

    def url(self, block: int) -> str:
        """The shard of the block."""
        return self.manifest.shards.urls[self._shard(block)]

    def _shard(self, block: int) -> int:
        return self.manifest.block_shard.item(block)


def _fixed_bytes(schema: pa.Schema) -> int:
    """Bytes of a row over all columns with rows of fixed size."""
    of_id: dict[int, int] = {}
    size = 0
    for kind in schema.types:
        known = of_id.get(kind.id)
        if known is None:
            known = _row_bytes(kind)
            if not pa.types.is_fixed_size_list(kind):  # its size is not in its id
                of_id[kind.id] = known
        size += known
    return size


def _row_bytes(kind: pa.DataType) -> int:
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _row_bytes(kind.value_type)
    return int(kind.bit_width) // 8 if pa.types.is_primitive(kind) else 0


def _sample_bytes(manifest: Manifest, columns: Columns, projection: Projection | None) -> int:
    size = int(_whole_bytes(manifest, projection).sum())
    mean = size // max(manifest.sample_count, 1)
    fixed = columns.fixed_bytes
    return max(fixed, 1) if columns.is_fixed else max(mean, fixed, 1)


def _projection(manifest: Manifest, columns: StackedPlan) -> Projection | None:
    """The bytes that need not be read, if not all columns are wanted."""
    places = manifest.column_places
    names = pa.ipc.read_schema(pa.py_buffer(manifest.schema)).names
    wanted = set(columns.leaves.top_level)
    if places is None or places.column_count != len(names) or wanted.issuperset(names):
        return None
    is_wanted = [name in wanted for name in names]
    return Projection.of(places, manifest.block_length, manifest.block_decoded, is_wanted)


def _whole_bytes(manifest: Manifest, projection: Projection | None) -> Ints:
    """The size of each block from the index; of only the wanted columns, if the index knows their
    sizes.
    """
    return manifest.block_decoded if projection is None else projection.decoded


def _decoded_bytes(
    manifest: Manifest,
    columns: Columns,
    row_layout: RowLayout | None,
    projection: Projection | None = None,
) -> Ints:
    """Bytes of each block once decoded, as far as the index knows."""
    size = _whole_bytes(manifest, projection)
    if row_layout is not None and columns.is_fixed:
        size = manifest.block_rows * columns.fixed_bytes  # only of requested columns
    else:
        size = size + manifest.block_rows * _wider_bytes(columns.plan.leaves)
    if row_layout is not None:
        size = size + manifest.block_rows * row_layout.padding_bytes
    return size + _stream_bytes(columns.plan)


def _wider_bytes(plan: ColumnPlan) -> int:
    """How much longer a row is in canonical form than as stored: a bool takes a byte, texts of a
    dictionary and views get offsets. Without it, blocks would be decoded twice: the first time
    finds the size.
    """
    size = 0
    for leaf, part, target in zip(plan.leaves, plan.parts, plan.schema.types, strict=True):
        if part is not LeafPart.VALUES:
            size += _row_bytes(target)  # an additional column
        elif offset_bytes(target):
            size += offset_bytes(target) - offset_bytes(leaf.type)
        elif pa.types.is_boolean(value_type(leaf.type)):
            size += _row_bytes(target)
    return size


def _stream_bytes(plan: StackedPlan) -> int:
    return _STREAM_BYTES + _STREAM_BYTES_A_COLUMN * len(plan.specs)


def _marks(
    manifest: Manifest, decoded: Ints, projection: Projection | None, *, direct: bool
) -> Marks:
    shards = manifest.shards
    # For each shard: the bytes fetched with every block, -1 for a local file; whether blocks are
    # decoded.
    is_local = shards.urls.starting_with(FILE_PREFIX.encode())
    preamble = np.where(is_local, -1, shards.preamble_length)
    is_decoded = ~shards.zero_copy if direct else np.ones(len(shards), np.bool_)
    fetched = preamble[manifest.block_shard]
    length = manifest.block_length - (0 if projection is None else projection.skipped)
    raw = np.where(fetched < 0, 0, fetched + length)
    return Marks.of(raw, np.where(is_decoded[manifest.block_shard], decoded, 0), fetched >= 0)


def _places(manifest: Manifest, projection: Projection | None) -> BlockPlaces:
    at = manifest.block_shard, manifest.block_offset, manifest.block_length
    return BlockPlaces(*at) if projection is None else projection.places(*at)


def _schema(manifest: Manifest, spec: JobSpec) -> pa.Schema:
    """The dataset's schema, with the facts that a job needs in addition to types."""
    schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
    return annotated(schema, spec.column_options, manifest.nulls)


class Columns(Struct, frozen=True):
    """The columns of a dataset as a job reads them; `schema` is that of the shards. `is_canonical`:
    zero-copy blocks have them in canonical form. `is_fixed`: all rows have the same size.
    `fixed_bytes` is the size of a row over the columns of fixed size. `row_layout`: the layout of
    packed rows.
    """

    schema: pa.Schema
    plan: StackedPlan
    is_canonical: bool
    is_fixed: bool
    fixed_bytes: int
    row_layout: RowLayout | None


def columns_of(manifest: Manifest, spec: JobSpec) -> Columns:
    """Linear in the columns, and a few seconds for 100,000 of them.

    Raises:  ConfigError: a column that is not there.
    """
    schema = _schema(manifest, spec)
    plan = plan_stacked(schema, spec.column_options, manifest.shards.urls[0])
    is_changed = plan.stacks or coded_columns(spec.column_options)
    is_canonical = not is_changed and _is_as_stored(schema, plan.leaves, manifest.nulls)
    is_fixed = all(each.kind is Kind.FIXED for each in plan.specs)
    row_layout, fixed_bytes = plan_row_layout(plan.specs), _fixed_bytes(plan.schema)
    return Columns(schema, plan, is_canonical, is_fixed, fixed_bytes, row_layout)


def _is_as_stored(schema: pa.Schema, plan: ColumnPlan, nulls: NullCounts | None) -> bool:
    """Whether the plan's columns are columns of the dataset in the form in which they lie in it, so
    that nothing of them must be copied.
    """
    if not schema.equals(plan.schema):
        stored = {field.name: _as_bytes(field.type) for field in schema}
        if any(stored.get(field.name) != field.type for field in plan.schema):
            return False
    return _has_no_null_lists(plan, nulls)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """The type to which texts are cast without a copy."""
    if pa.types.is_string(kind):
        return pa.binary()
    return pa.large_binary() if pa.types.is_large_string(kind) else kind


def _has_no_null_lists(plan: ColumnPlan, nulls: NullCounts | None) -> bool:
    """Whether no list and no item of a list is null. Each worker would make its own copy of such
    lists.
    """
    lists = [leaf for spec, leaf in zip(plan.specs, plan.leaves, strict=True) if spec.kind in LISTS]
    if not lists or nulls is None:
        return not lists
    nodes = [node for leaf in lists for node in (*leaf.row_nodes, *range(*leaf.inner_nodes))]
    return bool(np.isin(nulls.counts[nodes], (0, NEVER)).all())


def can_pack(
    manifest: Manifest, spec: JobSpec, arena_bytes: int, known: Columns | None = None
) -> bool:
    """Whether packing a job's blocks pays: its rows are shuffled. If blocks could be used in place,
    packed blocks must also fit until they were used, and little else may be copied.

    Raises:  ConfigError: a column that is not there.
    """
    columns = known or columns_of(manifest, spec)
    row_layout = columns.row_layout if spec.shuffle else None
    if row_layout is None:
        return False
    if not (columns.is_canonical and manifest.shards.zero_copy.any()):
        return True
    sizes = BlockSizes.of(manifest.block_rows, _decoded_bytes(manifest, columns, row_layout))
    if sizes.sample_bytes > (1 + _OTHERS_MAX) * row_layout.row_bytes:
        return False
    needed = sizes.open_window_bytes(spec.window) * spec.lanes
    return needed * _ROOM_PARTS <= arena_bytes


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
    """How a job with this spec reads the manifest, with workers that may take `worker_bytes` and a
    block arena of `arena_bytes`. Codes are of `categories`.

    Raises:  ConfigError: a column that is not there.
    """
    found = known or columns_of(manifest, spec)
    columns, schema = found.plan, found.schema
    row_layout = found.row_layout if packed else None
    direct = found.is_canonical and row_layout is None
    projection = _projection(manifest, columns)
    decoded = _decoded_bytes(manifest, found, row_layout, projection)
    marks = _marks(manifest, decoded, projection, direct=direct)
    kept = np.where(marks.decoded > 0, marks.decoded, marks.raw)
    restart_indexes = restart_index_bytes(
        int(np.where(kept > 0, kept, manifest.block_length).sum())
    )
    largest = int(marks.decoded.max(initial=0))
    message = tasks.OpenDataset(
        dataset_id,
        manifest.format,
        with_categories(schema, categories or {}).serialize().to_pybytes(),
        pack=packed,
        column_options=spec.column_options,
        memory_bytes=0 if worker_bytes is None else worker_bytes.for_blocks_of(largest),
    )
    has_bytes = any(spec.kind is Kind.BYTES for spec in columns.specs)
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
    )
    return Dataset(
        dataset_id, manifest, columns, message, direct, blocks, projection,
        largest_block=int((marks.raw + marks.decoded).argmax()),
        row_starts=starts_of(manifest.block_rows),
        row_bytes=_sample_bytes(manifest, found, projection),
        has_bytes=has_bytes,
        kept_bytes=int(kept.sum()),
        categories=categories or {},
    )  # fmt: skip
