"""Answers questions about a job: types of columns, values of codes, weights of a mixture."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pyarrow as pa

from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.node.categories import Categories, stream_of
from dataplane.node.changes import epoch_described, weights_changed
from dataplane.node.dataset import Dataset
from dataplane.node.member import ServedMember
from dataplane.node.opener import OpenedJob
from dataplane.rpc.messages import (
    CategoriesRead,
    ChangeWeights,
    ColumnsDescribed,
    DescribedColumn,
    DescribeEpoch,
    EpochDescribed,
    Question,
    ReadCategories,
    WeightsChanged,
)
from dataplane.transforms.codes import shown_as
from dataplane.transforms.columns import LeafPart, shown
from dataplane.transforms.leaves import Leaf, value_type
from dataplane.transforms.lists import AS_THEY_ARE
from dataplane.transforms.packing import delivered_columns
from dataplane.worker.stacking import StackedPlan

# An answer is one packet, far smaller than the limit.
_TEXT_BYTES_MAX = 64 << 10
_TYPE_LENGTH_MAX = 2000
_COLUMN_BYTES = 64


Told = ColumnsDescribed | CategoriesRead | EpochDescribed | WeightsChanged


async def describe(member: ServedMember, asked: Question) -> Told:
    """Answer a question about the member's job. Of a list, the answer has as many entries as fit,
    from the requested first one on.

    Raises:  ConfigError: a column does not come as codes, or weights are invalid.
    """
    if isinstance(asked, DescribeEpoch):
        return await asyncio.to_thread(epoch_described, member, asked)
    if isinstance(asked, ChangeWeights):
        return await asyncio.to_thread(weights_changed, member, asked)
    if isinstance(asked, ReadCategories):
        return await asyncio.to_thread(_categories, member.dataset, asked)
    if member.described is None:
        member.described = await asyncio.to_thread(described_columns, member.opened)
    columns, found, room = member.described, list[DescribedColumn](), _TEXT_BYTES_MAX
    for column in columns[asked.first :]:
        room -= _COLUMN_BYTES + 4 * (len(column.spec.name) + len(column.stored_type))
        if room < 0 and found:
            break
        found.append(column)
    return ColumnsDescribed(tuple(found), len(columns))


def _categories(dataset: Dataset, asked: ReadCategories) -> CategoriesRead:
    values = dataset.categories.get(asked.column)
    if values is None:
        raise ConfigError(
            f"column {asked.column!r} does not come as codes; the columns that do: "
            f"{shown(dataset.categories) or 'none'}. Name it in codes=[…]",
            field=asked.column,
        )
    leaf = next(leaf for leaf in dataset.columns.leaves.leaves if leaf.name == asked.column)
    count, left = 1, len(values) - asked.first
    part = values.slice(asked.first, 1)
    while count < left and (more := values.slice(asked.first, 2 * count)).nbytes < _TEXT_BYTES_MAX:
        count, part = 2 * count, more
    return CategoriesRead(stream_of(shown_as(part, leaf)), len(values))


def described_columns(job: OpenedJob) -> tuple[DescribedColumn, ...]:
    """All columns of a batch, in order."""
    if job.collated is not None:
        return tuple(map(DescribedColumn, job.collated.specs))
    dataset = job.datasets[0]
    return tuple(_described(dataset.columns, job.spec, dataset.categories))


def _described(
    plan: StackedPlan, spec: JobSpec, categories: Categories
) -> Iterator[DescribedColumn]:
    leaves = {
        column.name: leaf
        for column, leaf, part in zip(
            plan.leaves.specs, plan.leaves.leaves, plan.leaves.parts, strict=True
        )
        if part is not LeafPart.IS_NULL
    }
    stacks = {stack.name: stack.columns for stack in plan.stacks}
    for at, column in enumerate(delivered_columns(plan.specs, spec)):
        length_max = plan.lists.get(at, AS_THEY_ARE).length_max
        if column.name in stacks:
            yield DescribedColumn(column, _types_of(stacks[column.name], leaves))
        elif column.name in leaves:
            kind = leaves[column.name].type
            if column.name in categories:
                count = len(categories[column.name])
                yield DescribedColumn(column, _text(kind), category_count=count)
                continue
            yield DescribedColumn(column, _text(kind), *_unit(kind), length_max)
        else:
            yield DescribedColumn(column)


def _types_of(members: tuple[str, ...], leaves: Mapping[str, Leaf]) -> str:
    """Return the types in a stack, each once; none in a stack of masks."""
    kinds = (_text(leaves[name].type) for name in members if name in leaves)
    return ", ".join(dict.fromkeys(kinds))[:_TYPE_LENGTH_MAX]


def _text(kind: pa.DataType) -> str:
    text = str(kind)
    return text if len(text) <= _TYPE_LENGTH_MAX else f"{text[:_TYPE_LENGTH_MAX]}…"


def _unit(kind: pa.DataType) -> tuple[str, str]:
    """Return the unit, as numpy.datetime64 names it, and the time zone of the times in a column."""
    kind = value_type(kind)
    if pa.types.is_date32(kind):
        return "D", ""
    if pa.types.is_date64(kind):
        return "ms", ""
    if pa.types.is_timestamp(kind):
        return kind.unit, kind.tz or ""
    is_time = pa.types.is_time(kind) or pa.types.is_duration(kind)
    return (kind.unit, "") if is_time else ("", "")
