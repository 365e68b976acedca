"""Columns of numbers stacked into one tensor [B, columns]: the user's arguments, and the resulting
columns of a block. Pure, and without arrays: a trainer imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, ColumnSpec, Kind, StackSpec
from dataplane.transforms.dtypes import DTYPES, dtype_name

_EXAMPLE = 'stack={"features": ["age", "price"]}'


class Stack(Struct, frozen=True):
    """Columns that are delivered as one tensor, in this order. `dtype` is a name, or torch's dtype.
    With "", all columns must have the same type.
    """

    columns: Sequence[str]
    dtype: object = ""


def stacks_of(options: ColumnOptions) -> tuple[StackSpec, ...]:
    """Return the stacks of a job."""
    return options.stack


def stack_specs(stacks: Mapping[str, Stack | Sequence[str]]) -> tuple[StackSpec, ...]:
    """Return the stacks that a mapping from new names to columns declares, by name.

    Raises:  ConfigError: `stacks` is not such a mapping, or names a column twice.
    """
    if not isinstance(stacks, Mapping) or not all(isinstance(name, str) for name in stacks):
        raise ConfigError(f"stack={stacks!r:.80}: pass a dict: {_EXAMPLE}", field="stack")
    found = tuple(_spec(name, stacks[name]) for name in sorted(stacks))
    members = [column for spec in found for column in spec.columns]
    for column in members:
        if members.count(column) > 1:
            raise ConfigError(
                f"column {column!r} is stacked twice: list each column once", field="stack"
            )
    return found


def _spec(name: str, given: object) -> StackSpec:
    stack = given if isinstance(given, Stack) else Stack(given)  # type: ignore[arg-type]
    columns = stack.columns
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
        raise ConfigError(
            f"stack {name!r} is {given!r:.80}: pass a list of columns, or Stack([…], dtype=…): "
            f"{_EXAMPLE}",
            field="stack",
        )
    if not all(isinstance(column, str) for column in columns):
        raise ConfigError(f"stack {name!r}: {list(columns)!r:.80} are not names", field="stack")
    dtype = dtype_name(stack.dtype)
    if dtype and dtype not in DTYPES:
        raise ConfigError(
            f"stack {name!r}: dtype is {stack.dtype!r:.80}: choose one of {', '.join(DTYPES)}",
            field="stack",
        )
    return StackSpec(name, tuple(columns), dtype)


def stacked_columns(
    specs: Sequence[ColumnSpec], stacks: Sequence[StackSpec]
) -> tuple[ColumnSpec, ...]:
    """Return the columns of batches: the columns that are not stacked, then the stacks.

    Raises:  ConfigError: a column has more than one number a sample, the columns have several
    types, or the name is taken; says what to do.
    """
    members = {column for stack in stacks for column in stack.columns}
    kept = [spec for spec in specs if spec.name not in members]
    by_name = {spec.name: spec for spec in specs}
    taken = {spec.name for spec in kept}
    for stack in stacks:
        if stack.name in taken:
            raise ConfigError(
                f"stack {stack.name!r} has the name of a column that is not part of it: choose "
                "another",
                field="stack",
            )
    return (*kept, *(_stacked(stack, by_name) for stack in stacks))


def _stacked(stack: StackSpec, by_name: Mapping[str, ColumnSpec]) -> ColumnSpec:
    members = [by_name[name] for name in stack.columns]
    for member in members:
        if member.kind is not Kind.FIXED or member.shape:
            what = f"{member.dtype} of shape {list(member.shape)}" if member.shape else member.kind
            raise ConfigError(
                f"column {member.name!r} ({what}) is not one number per sample, so it cannot be "
                f"part of stack {stack.name!r}: leave it out of the stack",
                field=member.name,
            )
    dtype = stack.dtype or members[0].dtype
    for member in members:
        if not stack.dtype and member.dtype != dtype:
            raise ConfigError(
                f"stack {stack.name!r}: column {members[0].name!r} is {dtype}, but column "
                f"{member.name!r} is {member.dtype}: choose a common type, as in "
                f'Stack([…], dtype="float32")',
                field=member.name,
            )
        # Floats take any number, integers only a type all of whose values they hold.
        if np.dtype(dtype).kind != "f" and not np.can_cast(member.dtype, dtype, "safe"):
            raise ConfigError(
                f"stack {stack.name!r}: column {member.name!r} is {member.dtype}, which {dtype} "
                "cannot hold: choose a wider dtype, or a float",
                field=member.name,
            )
    return ColumnSpec(stack.name, Kind.FIXED, dtype, (len(members),))
