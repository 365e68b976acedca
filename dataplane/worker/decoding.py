"""Read the blocks of a dataset in a worker: from raw bytes to columns in canonical form."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from msgspec import Struct

from dataplane.arena.memfd import Arena, populate
from dataplane.formats import base, registry
from dataplane.formats.unsupported import supported_names
from dataplane.model.errors import CorruptShard
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.transforms.made_columns import mapped_in
from dataplane.transforms.row_filter import BlockRows, RowFilter, reads_columns
from dataplane.worker import row_layout
from dataplane.worker.block_mapping import FOUND_COLUMNS, BlockMapping
from dataplane.worker.columns import Ints, RowLayout
from dataplane.worker.mapped import MappedShards
from dataplane.worker.pack_blocks import PackForm
from dataplane.worker.placed import may_have_nulls, placed_columns
from dataplane.worker.stacking import StackedPlan, canonical_stacked, plan_stacked


class ReadDataset(Struct):
    """A dataset as one job reads it. `columns` are those that are decoded; `is_whole`: these are
    all columns of its shards. `rows` chooses rows of each block; then `top_level` are the columns
    that are kept, and `mapping` makes others of them. `packs`: the rows of batches are packs of
    these.
    """

    format: base.Format
    schema: pa.Schema
    plan: StackedPlan
    row_layout: RowLayout | None
    columns: tuple[str, ...]
    is_whole: bool
    packs: PackForm | None
    rows: RowFilter | None
    top_level: tuple[str, ...]
    mapping: BlockMapping | None


def read_dataset(body: tasks.OpenDataset, schema: pa.Schema) -> ReadDataset:
    """The dataset of this message, whose schema has arrived in parts."""
    mapped = mapped_in(schema)
    if body.finds_columns:
        plan = plan_stacked(FOUND_COLUMNS, body.column_options)
        top_level = tuple(supported_names(schema))
    elif mapped is not None:
        plan, top_level = plan_stacked(mapped.schema, body.column_options), mapped.reads
    else:
        plan = plan_stacked(schema, body.column_options)
        top_level = plan.leaves.top_level
    columns = reads_columns(body.view, schema, top_level)
    return ReadDataset(
        registry.by_name(body.format),
        schema,
        plan,
        row_layout.plan_row_layout(plan.specs) if body.pack else None,
        columns,
        set(columns).issuperset(schema.names),
        None if body.view.pack is None else PackForm.of(plan.specs, body.view.pack),
        RowFilter.of(body.view, schema),
        top_level,
        BlockMapping(body.view.map, body.seed, mapped) if body.view.map else None,
    )


def canonical_batch(
    dataset: ReadDataset,
    raw: tasks.RawBlockRef,
    arenas: Mapping[int, Arena],
    shards: MappedShards,
) -> tuple[pa.RecordBatch, Ints | None]:
    """A block in canonical form, and the places of its columns if they were determined.

    Raises:  CorruptShard: its bytes are not what the index says.  FunctionError: of the user's map.
    """
    preamble, body, number = _raw_views(raw, arenas, shards, is_whole=dataset.is_whole)
    stored = raw.stored_rows or raw.rows
    block = base.RawBlock(
        raw.url, raw.index, stored, raw.place, raw.shard_bytes, raw.preamble_place,
        preamble, body, raw.pieces if raw.arena is not None else (), number,
    )  # fmt: skip
    batch = dataset.format.decode(block, dataset.schema, dataset.columns)
    _check_rows(raw, batch.num_rows, stored, "its index says")
    if raw.stored_rows:
        batch = _viewed(dataset, batch, raw)
    if dataset.mapping is not None:
        batch = dataset.mapping.applied(batch, raw)
    if dataset.plan.is_plain:
        places = placed_columns(batch)
        if not may_have_nulls(places):
            return batch, places
    return canonical_stacked(batch, dataset.plan, raw.url), None


def _viewed(dataset: ReadDataset, batch: pa.RecordBatch, raw: tasks.RawBlockRef) -> pa.RecordBatch:
    """Return the rows of the view; of the last block within a limit, the first ones."""
    if dataset.rows is not None:
        rows = BlockRows(raw.stored_rows, raw.first_row, raw.shard_word)
        batch = dataset.rows.left(batch, rows)
        if len(dataset.columns) > len(dataset.top_level):
            batch = batch.select(dataset.top_level)
    if dataset.rows is None or dataset.rows.view.limit:
        batch = batch.slice(0, raw.rows)
    _check_rows(raw, batch.num_rows, raw.rows, "and when the rows of its view were counted,")
    return batch


def _check_rows(raw: tasks.RawBlockRef, found: int, expected: int, said: str) -> None:
    if found != expected:
        raise CorruptShard(
            f"{raw.url}: block {raw.index} has {found} rows, {said} {expected}",
            shard=raw.url,
            offset=raw.place.offset,
            expected=expected,
            found=found,
        )


def _raw_views(
    raw: tasks.RawBlockRef, arenas: Mapping[int, Arena], shards: MappedShards, *, is_whole: bool
) -> tuple[memoryview, memoryview, int]:
    """(preamble, body, number of the preamble): from arenas, or from the mapped file. `is_whole`:
    all columns of it are needed.
    """
    if raw.arena is not None:
        whole = arenas[0].view(raw.arena.offset, raw.arena.length).toreadonly()
        cut = raw.preamble_place.length
        length = sum(piece.length for piece in raw.pieces or (raw.place,))
        preamble, kept = whole[:cut], raw.kept_preamble
        if kept is not None:
            arena = arenas[tasks.PREAMBLE_ARENA]
            preamble = arena.view(kept.offset, kept.length).toreadonly()
        return preamble, whole[cut : cut + length], raw.preamble_number
    mapped = shards.of(raw)
    mapping = mapped.mapping
    for piece in raw.pieces or ((raw.place,) if is_whole else ()):
        populate(mapping, piece.offset, piece.length)
    shard = memoryview(mapping)
    return _cut(shard, raw.preamble_place), _cut(shard, raw.place), mapped.number


def _cut(view: memoryview, region: Region) -> memoryview:
    return view[region.offset : region.offset + region.length]
