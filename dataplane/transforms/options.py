"""What a user says about columns -> ColumnOptions: checked as far as it can be without the dataset.

Pure, and without arrays: a trainer links it.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from dataplane.errors import ConfigError
from dataplane.model import ColumnOptions, ColumnValue, ListPolicy, NullPolicy
from dataplane.transforms.stacks import Stack, stack_specs

FillNull = Mapping[str, float] | float
Choice = TypeVar("Choice", bound=enum.StrEnum)


def column_options(
    *,
    columns: Sequence[str] | None = None,
    lists: str = ListPolicy.PADDED.value,
    fill_null: FillNull | None = None,
    stack: Mapping[str, Stack | Sequence[str]] | None = None,
    nulls: str = NullPolicy.FILL.value,
) -> ColumnOptions:
    """The options that these arguments of a DataLoader mean.

    Raises:  ConfigError: one of them means nothing; says what would do.
    """
    fills, everywhere = _values("fill_null", fill_null)
    return ColumnOptions(
        columns=_columns(columns),
        lists=_one_of("lists", lists, ListPolicy),
        fill_null=fills,
        stack=stack_specs(stack or {}),
        fill_null_all=everywhere,
        nulls=_one_of("nulls", nulls, NullPolicy),
    )


def _columns(given: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ConfigError(f"columns={given!r}: pass a list of names", field="columns")
    if given is not None and not len(given):
        raise ConfigError("columns=[] leaves nothing: name some, or leave it out", field="columns")
    return tuple(given or ())


def _one_of(argument: str, given: object, choices: type[Choice]) -> Choice:
    for choice in choices:
        if given == choice.value:
            return choice
    names = ", ".join(choice.value for choice in choices)
    raise ConfigError(f"{argument}={given!r:.80}: choose one of {names}", field=argument)


def _values(argument: str, given: object) -> tuple[tuple[ColumnValue, ...], float | None]:
    """The numbers for single columns, by name, and the one for every column."""
    if given is None:
        return (), None
    if not isinstance(given, Mapping):
        return (), _number(argument, f"{argument}={given!r:.80}", given)
    pairs = []
    for name, value in given.items():
        said = f"{argument}={{{name!r}: {value!r:.80}}}"
        if not isinstance(name, str):
            raise ConfigError(f"{said}: {name!r} is not the name of a column", field=argument)
        pairs.append((name, _number(argument, said, value)))
    return tuple(sorted(pairs)), None


def _number(argument: str, said: str, value: object) -> float:
    if not isinstance(value, numbers.Real | np.bool_):
        raise ConfigError(
            f"{said}: pass a number for every column, or a dict of a number for each, as in "
            f'{argument}={{"age": 0}}',
            field=argument,
        )
    try:
        found = float(value)
    except OverflowError:
        found = float("inf")
    if isinstance(value, numbers.Integral) and found != value:
        raise ConfigError(
            f"{said}: whole numbers must be ones that a double holds exactly, as all up to 2**53 "
            "are",
            field=argument,
        )
    return found
