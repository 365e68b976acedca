"""Which columns of a user's samples every loader can take, and their rows as source shards.

Every loader gets Dataplane's values of a column (see dataplane/transforms/columns.py): dates are
integers, a null among floats is NaN, a null list is empty. A column without such a form,
or with nulls that have none, is left out, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataplane.commands.datasets import read_block, schema_of
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, ColumnSpec, ListPolicy
from dataplane.model.records import Kind as Form
from dataplane.plan.manifest import Manifest
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import ColumnPlan, LeafPart, plan_columns
from dataplane_bench.model import ColumnType, WorkloadColumn
from dataplane_bench.workloads.about import About, shared_names
from dataplane_bench.workloads.recipe import SHARD_COUNT

_SHARD_BYTES = 64 << 20
_GROUP_BYTES = 4 << 20
_COLOURS = ("YCbCr", "RGB", "Gray")
"""Of a JPEG that every decoder turns into RGB; CMYK is not among them."""


@dataclass(frozen=True, slots=True)
class _Usable:
    """A column as the benchmark has it, and what of the shards it is made of."""

    column: WorkloadColumn
    leaf: ColumnPlan

    @property
    def name(self) -> str:
        """What Dataplane calls it."""
        return self.leaf.specs[0].name

    @property
    def field(self) -> pa.Field:
        return pa.field(
            self.column.name,
            _stored_type(self.column),
            nullable=False,
        )


class _Unfit(Exception):
    """A value that not every loader can take; says which kind."""


def write_source(manifest: Manifest, folder: Path) -> About:
    """All samples as source shards in this empty folder.

    Raises:  ConfigError: no column is usable.  CorruptShard and what else reading can raise.
    """
    chosen, notes = _usable(manifest)
    while chosen:
        unfit = _write(manifest, chosen, folder)
        if not unfit:
            return About(
                tuple(one.column for one in chosen),
                tuple(one.name for one in chosen),
                manifest.sample_count,
                tuple(notes),
            )
        # Rare: a column turned out to have nulls only while it was written.
        notes += [_note(leaf, why) for leaf, why in unfit.items()]
        chosen = [one for one in chosen if one.name not in unfit]
        for path in folder.glob("*.parquet"):
            path.unlink()
    raise ConfigError("no column of these samples suits every loader: " + "; ".join(notes))


def _usable(manifest: Manifest) -> tuple[list[_Usable], list[str]]:
    schema = schema_of(manifest)
    plan = plan_columns(schema, ColumnOptions(lists=ListPolicy.RAGGED))
    first = read_block(manifest, 0, schema, plan.top_level)
    found: list[_Usable] = []
    notes: list[str] = []
    names = shared_names([spec.name for spec in plan.specs])
    for index, (spec, name) in enumerate(zip(plan.specs, names, strict=True)):
        leaf = ColumnPlan.of(plan.options, [(plan.leaves[index], LeafPart.VALUES)])
        try:
            column = _column(name, spec, leaf, first)
        except _Unfit as error:
            notes.append(_note(spec.name, str(error)))
        else:
            found.append(_Usable(column, leaf))
    return found, notes


def _note(leaf: str, why: str) -> str:
    return f"column {leaf} is left out: {why}"


def _column(name: str, spec: ColumnSpec, leaf: ColumnPlan, first: pa.RecordBatch) -> WorkloadColumn:
    """Raises:  _Unfit."""
    match spec.kind:
        case Form.FIXED if 0 in spec.shape:
            raise _Unfit("it is empty in every sample")
        case Form.FIXED:
            return WorkloadColumn(name, ColumnType.FIXED, spec.dtype, spec.shape)
        case Form.RAGGED:
            return WorkloadColumn(name, ColumnType.RAGGED, spec.dtype)
        case Form.STRING:
            return WorkloadColumn(name, ColumnType.STRING)
        case Form.BYTES:
            column = WorkloadColumn(name, ColumnType.IMAGE)
            _check(column, canonical(first, leaf, "").column(0).slice(0, 1))
            return column
        case _:
            raise _Unfit(f"it is neither numbers nor text nor JPEGs, but {leaf.schema.types[0]}")


def _write(manifest: Manifest, chosen: Sequence[_Usable], folder: Path) -> dict[str, str]:
    """The source shards; or columns that are not usable after all, by leaf, and why."""
    schema = pa.schema([one.field for one in chosen])
    total = int(manifest.block_decoded.sum())
    shard_count = max(SHARD_COUNT, total // _SHARD_BYTES)
    shard_rows = max(-(-manifest.sample_count // shard_count), 1)
    group_rows = max(_GROUP_BYTES * manifest.sample_count // max(total, 1), 1)
    batches = _batches(manifest, chosen, schema)
    shard, rows = 0, []
    for batch in batches:
        if isinstance(batch, dict):
            return batch
        rows.append(batch)
        while (held := sum(len(one) for one in rows)) >= shard_rows:
            table = pa.Table.from_batches(rows, schema)
            _write_shard(table.slice(0, shard_rows), folder, shard, group_rows)
            rows = table.slice(shard_rows).to_batches() if held > shard_rows else []
            shard += 1
    if rows:
        _write_shard(pa.Table.from_batches(rows, schema), folder, shard, group_rows)
    return {}


def _write_shard(table: pa.Table, folder: Path, shard: int, group_rows: int) -> None:
    pq.write_table(table, folder / f"shard-{shard:05d}.parquet", row_group_size=group_rows)


def _batches(
    manifest: Manifest, chosen: Sequence[_Usable], schema: pa.Schema
) -> Iterator[pa.RecordBatch | dict[str, str]]:
    """Block after block; or a block's unfit columns."""
    whole = schema_of(manifest)
    top_level = tuple(dict.fromkeys(one.leaf.top_level[0] for one in chosen))
    for block in range(manifest.block_count):
        read = read_block(manifest, block, whole, top_level)
        url = manifest.shards[int(manifest.block_shard[block])].url
        arrays, unfit = [], {}
        for one in chosen:
            try:
                arrays.append(_values(one, read, url))
            except _Unfit as error:
                unfit[one.name] = str(error)
        yield unfit or pa.RecordBatch.from_arrays(arrays, schema=schema)


def _values(one: _Usable, read: pa.RecordBatch, url: str) -> pa.Array:
    """Raises:  _Unfit."""
    try:
        values = canonical(read, one.leaf, url).column(0)
    except ConfigError as error:
        raise _Unfit("it has nulls, which tensors of whole numbers have not") from error
    _check(one.column, values)
    return values.cast(_stored_type(one.column))


def _check(column: WorkloadColumn, values: pa.Array) -> None:
    """Raises:  _Unfit."""
    if values.null_count:
        raise _Unfit("it has nulls")
    if column.kind is not ColumnType.IMAGE:
        return
    import simplejpeg  # type: ignore[import-untyped]

    for value in values:
        encoded = memoryview(value.as_buffer()).cast("B")
        if encoded[:2].tobytes() != b"\xff\xd8":
            raise _Unfit("it is bytes, but not of JPEGs")
        try:
            colour = simplejpeg.decode_jpeg_header(encoded)[2]
        except ValueError as error:
            raise _Unfit(f"one of its JPEGs is broken: {error}") from error
        if colour not in _COLOURS:
            raise _Unfit(f"not every decoder turns a {colour} JPEG into RGB")


def _stored_type(column: WorkloadColumn) -> pa.DataType:
    match column.kind:
        case ColumnType.STRING:
            return pa.string()
        case ColumnType.IMAGE:
            return pa.binary()
    number = pa.bool_() if column.dtype == "bool" else pa.from_numpy_dtype(column.dtype)
    if column.kind is ColumnType.RAGGED:
        return pa.list_(number)
    return pa.list_(number, int(np.prod(column.shape))) if column.shape else number
