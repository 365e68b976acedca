"""The columns of a dataset in the form that a job reads them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.formats.folders import folder_names
from dataplane.formats.unsupported import is_missing, refuse_differing, supported_names
from dataplane.model.config import JobSpec
from dataplane.model.records import ColumnOptions, Kind
from dataplane.plan.columns import NEVER, NullCounts
from dataplane.plan.manifest import Manifest
from dataplane.transforms.annotations import annotated, marks_nulls
from dataplane.transforms.columns import ColumnPlan, changes_values
from dataplane.transforms.lists import LISTS
from dataplane.transforms.made_columns import MappedColumns
from dataplane.transforms.nulls import Fills
from dataplane.transforms.row_filter import reads_columns
from dataplane.worker.block_mapping import COUNTED_ROWS, FOUND_COLUMNS
from dataplane.worker.columns import RowLayout
from dataplane.worker.row_layout import plan_row_layout
from dataplane.worker.stacking import StackedPlan, plan_stacked


class Columns(Struct, frozen=True):
    """The columns of a dataset in the form that a job reads them; `schema` is that of the shards.
    `is_canonical`: zero-copy blocks have them in canonical form. `is_fixed`: all rows have the same
    size. `fixed_bytes` is the size of a row over the columns of fixed size. `row_layout`: the
    layout of packed rows. `mapped` are the columns that a map makes, and `top_level` those of the
    shards that workers decode. `finds` is the schema of blocks that tell which columns the map
    makes, or how many rows; None if they have the columns themselves.
    """

    schema: pa.Schema
    plan: StackedPlan
    top_level: tuple[str, ...]
    is_canonical: bool
    is_fixed: bool
    fixed_bytes: int
    row_layout: RowLayout | None
    mapped: MappedColumns | None = None
    finds: pa.Schema | None = None


def columns_of(manifest: Manifest, spec: JobSpec, mapped: MappedColumns | None = None) -> Columns:
    """Plan the columns, in time linear in their number: a few seconds for 100,000 columns. With a
    map, the options are about the columns that the map makes.

    Raises:  ConfigError: a requested column does not exist.  SchemaMismatch: shards differ in one.
    """
    schema = _schema(manifest, spec)
    seen = schema if mapped is None else mapped.schema
    plan = plan_stacked(seen, spec.column_options, manifest.shards.urls[0])
    is_changed = changes_values(spec.column_options) or mapped is not None
    is_canonical = not is_changed and _is_as_stored(schema, plan.leaves, manifest.nulls)
    is_fixed = all(spec.kind is Kind.FIXED for spec in plan.specs)
    row_layout, fixed_bytes = plan_row_layout(plan.specs), _fixed_bytes(plan.schema)
    top_level = plan.leaves.top_level if mapped is None else mapped.reads
    read = reads_columns(spec.view, schema, top_level)
    filled = () if mapped is not None else filled_columns(schema, plan.leaves)
    is_canonical = is_canonical and not filled and folder_names(schema).keys().isdisjoint(read)
    refused = [name for name in read if name not in filled]
    refuse_differing(schema, refused, manifest.shards.urls.__getitem__)
    return Columns(schema, plan, top_level, is_canonical, is_fixed, fixed_bytes, row_layout, mapped)


def filled_columns(schema: pa.Schema, plan: ColumnPlan) -> frozenset[str]:
    """Return the columns that some shards lack and that the job reads as nulls there, since its
    options say what becomes of nulls in all leaves of the column.
    """
    fills, is_marked = Fills.of(plan.options), marks_nulls(plan.options)
    top_level = frozenset(plan.top_level)
    missing = {field.name for field in schema if field.name in top_level and is_missing(field)}
    for spec, leaf in zip(plan.specs, plan.leaves, strict=True) if missing else ():
        if not (is_marked or fills.is_given(spec)):
            missing.discard(leaf.top)
    return frozenset(missing)


def columns_to_find(manifest: Manifest, mapped: MappedColumns | None = None) -> Columns:
    """Return the columns of the job that determines which columns a map makes; if they are known
    (`mapped`), how many rows of them.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
    finds = FOUND_COLUMNS if mapped is None else COUNTED_ROWS
    return Columns(
        schema,
        plan_stacked(finds, ColumnOptions()),
        tuple(supported_names(schema)) if mapped is None else mapped.reads,
        is_canonical=False,
        is_fixed=False,
        fixed_bytes=0,
        row_layout=None,
        mapped=mapped,
        finds=finds,
    )


def _is_as_stored(schema: pa.Schema, plan: ColumnPlan, nulls: NullCounts | None) -> bool:
    """Whether the plan's columns are stored in the form in which they are read, so that none must
    be copied.
    """
    if not schema.equals(plan.schema):
        stored = {field.name: _as_bytes(field.type) for field in schema}
        if any(stored.get(field.name) != field.type for field in plan.schema):
            return False
    return _has_no_null_lists(plan, nulls)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """Return the type to which texts are cast without a copy."""
    if pa.types.is_string(kind):
        return pa.binary()
    return pa.large_binary() if pa.types.is_large_string(kind) else kind


def _has_no_null_lists(plan: ColumnPlan, nulls: NullCounts | None) -> bool:
    """Whether no list and no item of a list is null. Each worker would make its own copy of
    lists with nulls.
    """
    lists = [leaf for spec, leaf in zip(plan.specs, plan.leaves, strict=True) if spec.kind in LISTS]
    if not lists or nulls is None:
        return not lists
    nodes = [node for leaf in lists for node in (*leaf.row_nodes, *range(*leaf.inner_nodes))]
    return bool(np.isin(nulls.counts[nodes], (0, NEVER)).all())


def _schema(manifest: Manifest, spec: JobSpec) -> pa.Schema:
    """Return the dataset's schema, with the facts that a job needs in addition to types."""
    schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
    return annotated(schema, spec.column_options, manifest.nulls)


def _fixed_bytes(schema: pa.Schema) -> int:
    """Return the bytes of a row over all columns with rows of fixed size."""
    of_id: dict[int, int] = {}
    size = 0
    for kind in schema.types:
        known = of_id.get(kind.id)
        if known is None:
            known = row_bytes_of(kind)
            if not pa.types.is_fixed_size_list(kind):  # the id does not determine the size
                of_id[kind.id] = known
        size += known
    return size


def row_bytes_of(kind: pa.DataType) -> int:
    """Return the bytes of a row of a column, 0 if rows differ in size."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * row_bytes_of(kind.value_type)
    return int(kind.bit_width) // 8 if pa.types.is_primitive(kind) else 0
