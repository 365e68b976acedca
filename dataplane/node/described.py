"""What the columns of a job are made of, for people: told when it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pyarrow as pa

from dataplane.config import JobSpec
from dataplane.node.member import Member
from dataplane.node.stacking import StackedPlan
from dataplane.rpc.messages import ColumnsDescribed, DescribeColumns, DescribedColumn
from dataplane.transforms.columns import Part
from dataplane.transforms.images import delivered
from dataplane.transforms.leaves import Leaf, value_type
from dataplane.transforms.lists import AS_THEY_ARE

# An answer is one packet, far below what a packet may have.
_TEXT_BYTES_MAX = 64 << 10
_TYPE_LENGTH_MAX = 2000
_COLUMN_BYTES = 64


async def describe(member: Member, asked: DescribeColumns) -> ColumnsDescribed:
    """As many columns as fit into one answer, from the first that was asked for on."""
    if member.described is None:
        plan = member.delivery.dataset.columns
        member.described = await asyncio.to_thread(described_columns, plan, member.spec)
    columns, found, room = member.described, list[DescribedColumn](), _TEXT_BYTES_MAX
    for column in columns[asked.first :]:
        room -= _COLUMN_BYTES + 4 * (len(column.spec.name) + len(column.stored_type))
        if room < 0 and found:
            break
        found.append(column)
    return ColumnsDescribed(tuple(found), len(columns))


def described_columns(plan: StackedPlan, spec: JobSpec) -> tuple[DescribedColumn, ...]:
    """All columns of batches, in their order."""
    return tuple(_described(plan, spec))


def _described(plan: StackedPlan, spec: JobSpec) -> Iterator[DescribedColumn]:
    leaves = {
        column.name: leaf
        for column, leaf, part in zip(
            plan.leaves.specs, plan.leaves.leaves, plan.leaves.parts, strict=True
        )
        if part is Part.VALUES
    }
    stacks = {stack.name: stack.columns for stack in plan.stacks}
    for at, column in enumerate(delivered(plan.specs, spec.transforms)):
        length_max = plan.lists.get(at, AS_THEY_ARE).length_max
        if column.name in stacks:
            yield DescribedColumn(column, _types_of(stacks[column.name], leaves))
        elif column.name in leaves:
            kind = leaves[column.name].type
            yield DescribedColumn(column, _text(kind), *_unit(kind), length_max)
        else:
            yield DescribedColumn(column)


def _types_of(members: tuple[str, ...], leaves: Mapping[str, Leaf]) -> str:
    """The types in a stack, each once; none in a stack of masks."""
    kinds = (_text(leaves[name].type) for name in members if name in leaves)
    return ", ".join(dict.fromkeys(kinds))[:_TYPE_LENGTH_MAX]


def _text(kind: pa.DataType) -> str:
    text = str(kind)
    return text if len(text) <= _TYPE_LENGTH_MAX else f"{text[:_TYPE_LENGTH_MAX]}…"


def _unit(kind: pa.DataType) -> tuple[str, str]:
    """Unit, as numpy.datetime64 names it, and time zone of the times in a column."""
    kind = value_type(kind)
    if pa.types.is_date32(kind):
        return "D", ""
    if pa.types.is_date64(kind):
        return "ms", ""
    if pa.types.is_timestamp(kind):
        return kind.unit, kind.tz or ""
    is_time = pa.types.is_time(kind) or pa.types.is_duration(kind)
    return (kind.unit, "") if is_time else ("", "")
