"""Read the blocks of a dataset in a worker: from raw bytes to columns in canonical form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.arena.memfd import Arena
from dataplane.formats import base, folders, registry
from dataplane.formats.unsupported import supported_names
from dataplane.model.errors import CorruptShard, FunctionError
from dataplane.model.records import ImageSpec
from dataplane.rpc import tasks
from dataplane.transforms.made_columns import MappedColumns, mapped_in
from dataplane.transforms.row_filter import BlockRows, RowFilter, filtered, reads_columns
from dataplane.worker import row_layout, salvaging
from dataplane.worker.block_mapping import (
    COUNTED_ROWS,
    FOUND_COLUMNS,
    BlockMapping,
    counted_rows,
)
from dataplane.worker.columns import Ints, RowLayout
from dataplane.worker.mapped import MappedShards
from dataplane.worker.pack_blocks import PackForm
from dataplane.worker.row_layout import may_have_nulls, placed_columns
from dataplane.worker.salvaging import Bad
from dataplane.worker.stacking import StackedPlan, canonical_stacked, plan_stacked


class ReadDataset(Struct):
    """A dataset as one job reads it. `columns` are decoded; `is_whole`: they are all columns of its
    shards. `rows` chooses rows of each block; after that, only the `top_level` columns are kept,
    and `mapping` makes other columns of them. `packs`: the rows of a batch are packs of the blocks'
    rows. `replaces`: rows that cannot be read are replaced by others, drawn with the `seed`; and
    so are blocks of which no row's `images` can be decoded.
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
    replaces: bool
    seed: int
    images: tuple[ImageSpec, ...]

    @property
    def makes_samples(self) -> bool:
        """Whether samples are made of several rows, or a row makes several."""
        return self.packs is not None or (self.mapping is not None and self.mapping.resizes)


def read_dataset(body: tasks.OpenDataset, schema: pa.Schema) -> ReadDataset:
    """Return the dataset that this message describes; `schema` is its whole schema."""
    mapped = mapped_in(schema)
    if body.finds_columns:
        plan = plan_stacked(FOUND_COLUMNS, body.column_options)
        top_level = tuple(supported_names(schema))
    elif mapped is not None:
        made = COUNTED_ROWS if body.counts_rows else mapped.schema
        plan, top_level = plan_stacked(made, body.column_options), mapped.reads
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
        _mapping(body, mapped),
        body.view.bad_max > 0,
        body.seed,
        body.images,
    )


def _mapping(body: tasks.OpenDataset, mapped: MappedColumns | None) -> BlockMapping | None:
    view = body.view
    if not view.map:
        return None
    return BlockMapping(
        view.map, body.seed, mapped, view.resizes, counts=body.counts_rows, epoch=body.epoch
    )


def canonical_batch(
    dataset: ReadDataset,
    raw: tasks.RawBlockRef,
    arenas: Mapping[int, Arena],
    shards: MappedShards,
) -> tuple[pa.RecordBatch, Ints | None]:
    """Decode a block into canonical form; return the places of its columns, too, if they were
    determined.

    Raises:  CorruptShard: the bytes do not match the index.  FunctionError: the user's map fails.
    """
    preamble, body, number = _raw_views(raw, arenas, shards, is_whole=dataset.is_whole)
    block = base.RawBlock(
        raw.url, raw.index, raw.stored_rows or raw.rows, raw.place, raw.shard_bytes,
        raw.preamble_place, preamble, body, raw.pieces if raw.arena is not None else (), number,
    )  # fmt: skip
    if dataset.replaces:
        batch, numbers, bad = _salvaged(dataset, raw, block)
        if dataset.mapping is not None:
            dataset.mapping.check(batch, raw)
        batch, places = _canonical(dataset, batch, raw.url)
        marks = salvaging.replaced(raw, numbers, bad, dataset.seed) if bad else []
        return salvaging.marked(batch, marks), places
    try:
        batch = folders.decoded(dataset.format, block, dataset.schema, dataset.columns)
    except CorruptShard as fault:
        if dataset.rows is None:
            raise
        batch, _, bad = _salvaged(dataset, raw, block)
        for why in bad.values():
            raise CorruptShard(f"{raw.url}: {why}", **fault.nouns) from fault
        if dataset.mapping is not None:
            dataset.mapping.check(batch, raw)
        return _canonical(dataset, batch, raw.url)  # only rows outside of the view are damaged
    _check_rows(raw, batch.num_rows, block.rows, "its index says")
    if raw.stored_rows:
        batch = _viewed(dataset, batch, raw)
    if dataset.mapping is not None:
        batch = dataset.mapping.applied(batch, raw)
        dataset.mapping.check(batch, raw)
    return _canonical(dataset, batch, raw.url)


def other_batch(
    dataset: ReadDataset, raw: tasks.RawBlockRef, bad: tasks.BadBlock
) -> tuple[pa.RecordBatch, Ints | None]:
    """Replace a block that cannot be decoded: return rows of another one, in canonical form.

    Raises:  CorruptShard, FunctionError: the other block cannot be decoded either.
    """
    other = bad.other
    block = base.RawBlock(
        other.url, other.index, other.stored_rows or other.rows, other.place, other.shard_bytes,
        other.preamble_place, memoryview(bad.preamble), memoryview(bad.content),
    )  # fmt: skip
    batch, numbers, _ = _salvaged(dataset, other, block)
    mapping, count = dataset.mapping, raw.made_rows or raw.rows
    if mapping is not None and mapping.counts:
        batch = counted_rows(count)  # the block counts as many rows as the map would get
    rows = [row % batch.num_rows for row in range(count)]
    batch, places = _canonical(dataset, salvaging.taken(batch, rows), other.url)
    stand_ins = [numbers[row % len(numbers)] for row in range(raw.rows)]
    marks = salvaging.all_replaced(raw, other, stand_ins, bad.reason)
    return salvaging.marked(batch, marks), places


def _salvaged(
    dataset: ReadDataset, raw: tasks.RawBlockRef, block: base.RawBlock
) -> tuple[pa.RecordBatch, Sequence[int], Bad]:
    """Return a block in which other rows replace those that cannot be read, the number of each row
    among the block's stored rows, and which rows are bad.

    Raises:  CorruptShard, FunctionError: the whole block is bad.
    """
    batch, bad = salvaging.decoded(dataset.format, block, dataset.schema, dataset.columns)
    _check_rows(raw, batch.num_rows, block.rows, "its index says")
    numbers: Sequence[int] = range(block.rows)
    if raw.stored_rows:
        batch, numbers, bad = _viewed_apart(dataset, batch, raw, block, bad)
    batch, bad = _mapped_apart(dataset, batch, raw, numbers, bad)
    return batch, numbers, bad


def _canonical(
    dataset: ReadDataset, batch: pa.RecordBatch, url: str
) -> tuple[pa.RecordBatch, Ints | None]:
    if dataset.plan.is_plain:
        places = placed_columns(batch)
        if not may_have_nulls(places):
            return batch, places
    return canonical_stacked(batch, dataset.plan, url), None


def _viewed(dataset: ReadDataset, batch: pa.RecordBatch, raw: tasks.RawBlockRef) -> pa.RecordBatch:
    """Return the rows of the view. The last block within a limit is cut to its first rows."""
    if dataset.rows is not None:
        batch = dataset.rows.left(batch, _rows_of(dataset.rows, dataset, raw))
    return _within_view(dataset, batch, raw)


def _within_view(
    dataset: ReadDataset, batch: pa.RecordBatch, raw: tasks.RawBlockRef
) -> pa.RecordBatch:
    if dataset.rows is not None and len(dataset.columns) > len(dataset.top_level):
        batch = batch.select(dataset.top_level)
    if dataset.rows is None or dataset.rows.view.limit:
        batch = batch.slice(0, raw.rows)
    _check_rows(raw, batch.num_rows, raw.rows, "and when the rows of its view were counted,")
    return batch


def _rows_of(rows: RowFilter, dataset: ReadDataset, raw: tasks.RawBlockRef) -> BlockRows:
    shard = (dataset.format.name, raw.url, raw.etag)
    return rows.stored(shard, raw.stored_rows, raw.first_row, raw.shard_word)


def _viewed_apart(
    dataset: ReadDataset,
    batch: pa.RecordBatch,
    raw: tasks.RawBlockRef,
    block: base.RawBlock,
    bad: Bad,
) -> tuple[pa.RecordBatch, Sequence[int], Bad]:
    """Return the rows of the view, their numbers in the block, and which rows are bad."""
    kept: Sequence[int] = range(raw.stored_rows)
    rows = dataset.rows
    if rows is not None:
        some, unread = batch, Bad()
        if bad:  # other columns than those of the condition may be the damaged ones
            format_, schema = dataset.format, dataset.schema
            some, unread = salvaging.decoded(format_, block, schema, rows.columns)
        mask, failed = salvaging.viewed(some, unread, rows, _rows_of(rows, dataset, raw), raw.url)
        bad = failed | bad
        batch, kept = filtered(batch, mask), np.flatnonzero(mask).tolist()
    batch = _within_view(dataset, batch, raw)
    kept = kept[: raw.rows]
    return batch, kept, {at: bad[row] for at, row in enumerate(kept) if row in bad}


def _mapped_apart(
    dataset: ReadDataset,
    batch: pa.RecordBatch,
    raw: tasks.RawBlockRef,
    numbers: Sequence[int],
    bad: Bad,
) -> tuple[pa.RecordBatch, Bad]:
    """Replace the bad rows of a block by others, and apply the map. Return the result, and all bad
    rows, including those at which the map fails.
    """
    mapping = dataset.mapping

    def clean(bad: Bad) -> pa.RecordBatch:
        rows = salvaging.stand_ins(raw, numbers, bad, dataset.seed)
        return salvaging.taken(batch, rows) if bad else batch

    if mapping is None:
        return clean(bad), bad
    given = clean(bad)
    try:
        return mapping.applied(given, raw), bad
    except FunctionError as fault:
        if fault.nouns.get("block") is None:  # the function cannot be imported: no row is bad
            raise
        bad = bad | salvaging.unmapped(lambda part: mapping.applied(part, raw), given, fault)
    return mapping.applied(clean(bad), raw), bad


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
    """Return (preamble, body, number of the preamble), from arenas or from the mapped file.
    `is_whole`: all columns of the file are needed.
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
    for piece in raw.pieces or ((raw.place,) if is_whole else ()):
        mapped.load(piece.offset, piece.length)
    return mapped.view(raw.preamble_place), mapped.view(raw.place), mapped.number
