"""Joins some columns of a block, row by row, into one column of fixed-size lists.

Gathering a batch of the joined column then takes one copy per row, like any column of fixed-size
lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.formats.arrays import record_batch
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, ColumnSpec, StackSpec
from dataplane.transforms.canonical import canonical
from dataplane.transforms.casts import converted
from dataplane.transforms.columns import (
    ColumnPlan,
    is_null_name,
    is_plain_schema,
    plan_columns,
)
from dataplane.transforms.leaves import canonical_type
from dataplane.transforms.lists import ListForm, list_forms
from dataplane.transforms.options import naming, only
from dataplane.transforms.stacks import stacked_columns, stacks_of
from dataplane.worker import row_layout
from dataplane.worker.columns import RowLayout


class StackedPlan(Struct, frozen=True):
    """How blocks become batch columns: first the leaves, then the stacks made from them.

    `specs` and `schema` describe the columns of batches, in their order. `lists` are the forms of
    list columns that are changed, by index. `is_plain`: all columns of the dataset are numbers and
    come as stored, so a block without nulls is in canonical form.
    """

    leaves: ColumnPlan
    stacks: tuple[StackSpec, ...]
    specs: tuple[ColumnSpec, ...]
    schema: pa.Schema
    lists: Mapping[int, ListForm]
    is_plain: bool = False


def plan_stacked(schema: pa.Schema, options: ColumnOptions, url: str = "") -> StackedPlan:
    """Implement `plan_columns`; stacked columns need not be listed in columns=.

    Raises:  ConfigError: as `plan_columns`, and for a column that cannot be stacked.
    """
    stacks = stacks_of(options)
    members = [name for stack in stacks for name in stack.columns]
    options = naming(options, members)
    leaves = plan_columns(schema, options, url)
    if not stacks:
        lists, is_plain = list_forms(leaves.specs, options), is_plain_schema(schema, leaves)
        return StackedPlan(leaves, (), leaves.specs, leaves.schema, lists, is_plain)
    names = {spec.name for spec in leaves.specs}
    for name in members:
        if name not in names:
            # If there is no column of this name, this raises an error that lists the existing ones.
            plan_columns(schema, only((name,)))
            raise ConfigError(
                f"column {name!r} has fields, but a stack needs single numbers: list its fields",
                field=name,
            )
    stacks = tuple(one for stack in stacks for one in _with_mask(stack, names))
    specs = stacked_columns(leaves.specs, stacks)
    fields = {field.name: field.type for field in leaves.schema}
    types = [
        pa.list_(_arrow(spec.dtype), spec.shape[0])
        if spec.name in {stack.name for stack in stacks}
        else fields[spec.name]
        for spec in specs
    ]
    made = pa.schema([(spec.name, kind) for spec, kind in zip(specs, types, strict=True)])
    return StackedPlan(leaves, stacks, specs, made, list_forms(specs, options))


def _with_mask(stack: StackSpec, names: Collection[str]) -> Iterator[StackSpec]:
    """Yield a stack, and the stack of its columns' masks if there are any."""
    yield stack
    masks = tuple(map(is_null_name, stack.columns))
    if masks[0] in names:
        yield StackSpec(is_null_name(stack.name), masks)


def canonical_stacked(batch: pa.RecordBatch, plan: StackedPlan, url: str) -> pa.RecordBatch:
    """Implement `canonical`, with the columns of stacks side by side.

    Raises:  CorruptShard: nulls in a column of integers or bools without a fill value.
    """
    leaves = canonical(batch, plan.leaves, url)
    if not plan.stacks:
        return leaves
    arrays = []
    by_name = {stack.name: stack for stack in plan.stacks}
    for spec, field in zip(plan.specs, plan.schema, strict=True):
        stack = by_name.get(spec.name)
        arrays.append(
            leaves.column(spec.name)
            if stack is None
            else _side_by_side(leaves.select(stack.columns), spec, field.type, url)
        )
    return record_batch(arrays, plan.schema)


def _side_by_side(
    members: pa.RecordBatch, spec: ColumnSpec, target: pa.DataType, url: str
) -> pa.Array:
    width, rows = len(members.columns), members.num_rows
    size = np.dtype(spec.dtype).itemsize
    out = np.empty(rows * width * size, np.uint8)
    if rows:
        alike = pa.record_batch(
            [
                converted(column, target.value_type, name, url, stack=spec.name)
                for name, column in zip(members.schema.names, members.columns, strict=True)
            ],
            names=members.schema.names,
        )
        fields = np.array([(at * size, size) for at in range(width)], np.int64)
        rows_of = RowLayout(tuple(range(width)), fields, width * size)
        specs = [ColumnSpec(name, spec.kind, spec.dtype) for name in alike.schema.names]
        row_layout.pack(alike, specs, rows_of, out)
    values = pa.Array.from_buffers(target.value_type, rows * width, [None, pa.py_buffer(out)])
    return pa.FixedSizeListArray.from_arrays(values, type=target)


def _arrow(dtype: str) -> pa.DataType:
    return canonical_type(pa.bool_() if dtype == "bool" else pa.from_numpy_dtype(dtype))
