"""Convert the column arguments of a loader to ColumnOptions, checked as far as possible without the
dataset.

Pure, and without arrays: a trainer links it.
"""

from __future__ import annotations

import enum
import inspect
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from msgspec import structs

from dataplane.errors import ConfigError
from dataplane.model import (
    ColumnOptions,
    ListPolicy,
    NullPolicy,
    TruncationSide,
)
from dataplane.transforms.dtypes import DTYPES, dtype_name
from dataplane.transforms.stacks import Stack, stack_specs
from dataplane.units import meant, whole

Numbers = Mapping[str, float] | float
"""A number for every column, or one for each of some columns."""
Lengths = Mapping[str, int] | int
LENGTH_MAX = (1 << 31) - 1
Number = TypeVar("Number", int, float)
Choice = TypeVar("Choice", bound=enum.StrEnum)


def column_options(
    *,
    columns: Sequence[str] | None = None,
    lists: str = ListPolicy.PADDED.value,
    fill_null: Numbers | None = None,
    stack: Mapping[str, Stack | Sequence[str]] | None = None,
    nulls: str = NullPolicy.FILL.value,
    pad_value: Numbers | None = None,
    max_length: Lengths | None = None,
    truncation_side: str = TruncationSide.RIGHT.value,
    codes: Sequence[str] | None = None,
    dtype: Mapping[str, object] | None = None,
) -> ColumnOptions:
    """Convert these arguments of a DataLoader to options.

    Raises:  ConfigError: one of them is invalid; says what is allowed.
    """
    fills, everywhere = _by_column("fill_null", fill_null, _number)
    pads, pad_all = _by_column("pad_value", pad_value, _number)
    lengths, length_all = _by_column("max_length", max_length, _length)
    policy = _one_of("lists", lists, ListPolicy)
    side = _one_of("truncation_side", truncation_side, TruncationSide)
    if pad_value is not None and policy is ListPolicy.RAGGED:
        raise ConfigError(
            f'pad_value={pad_value!r:.80} with lists="ragged": ragged lists are not padded; leave '
            "one of the two out",
            field="pad_value",
        )
    if side is TruncationSide.LEFT and max_length is None:
        raise ConfigError(
            'truncation_side="left" without max_length: nothing is truncated; pass max_length=, or '
            "leave it out",
            field="truncation_side",
        )
    return ColumnOptions(
        columns=_columns(columns),
        lists=policy,
        fill_null=fills,
        stack=stack_specs(stack or {}),
        fill_null_all=everywhere,
        nulls=_one_of("nulls", nulls, NullPolicy),
        pad_value=pads,
        pad_value_all=pad_all,
        max_length=lengths,
        max_length_all=length_all or 0,
        truncation_side=side,
        codes=_codes(codes),
        dtype=_dtypes(dtype),
    )


ARGUMENTS: Final = tuple(inspect.signature(column_options).parameters)
"""The arguments of a DataLoader that concern columns."""


def in_order(options: ColumnOptions) -> ColumnOptions:
    """Sort mappings by name, so that equal jobs have equal options; `columns` keep their order."""
    given = structs.asdict(options)
    by_name: dict[str, Any] = {
        name: tuple(sorted(value, key=lambda one: getattr(one, "name", one)))
        for name, value in given.items()
        if isinstance(value, tuple) and name != "columns"
    }
    return structs.replace(options, **by_name)


def naming(options: ColumnOptions, names: Sequence[str]) -> ColumnOptions:
    """Return the options with these columns added, if they name columns at all."""
    named = set(options.columns)
    if not named:
        return options
    others = [name for name in names if name not in named]
    return structs.replace(options, columns=(*options.columns, *others))


def only(columns: Sequence[str]) -> ColumnOptions:
    """Return options that read these columns, with defaults otherwise."""
    return ColumnOptions(columns=tuple(columns))


def to_find_values(columns: Sequence[str]) -> ColumnOptions:
    """Return options that read all values of some columns and distinguish nulls."""
    return ColumnOptions(columns=tuple(columns), nulls=NullPolicy.MASK)


def _columns(given: Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, set | frozenset) or not _are_names(given):
        raise ConfigError(
            f"columns={given!r:.80}: pass a list of names; their order is that of the batch",
            field="columns",
        )
    if not len(given):
        raise ConfigError(
            "columns=[] selects nothing: list some columns, or leave it out", field="columns"
        )
    return tuple(map(str, given))  # numpy's, too


def _are_names(given: object) -> bool:
    if isinstance(given, str | bytes) or not isinstance(given, Collection):
        return False
    return all(isinstance(name, str) for name in given)


def _codes(given: Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    if not _are_names(given):
        raise ConfigError(
            f"codes={given!r:.80}: pass a list of the columns that come as integer codes, as in "
            'codes=["country"]',
            field="codes",
        )
    return tuple(sorted(set(map(str, given))))


def _dtypes(given: Mapping[str, object] | None) -> tuple[tuple[str, str], ...]:
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not _are_names(list(given)):
        raise ConfigError(
            f"dtype={given!r:.80}: pass a dict of a type for each column to convert, as in "
            'dtype={"tokens": "int64"}',
            field="dtype",
        )
    pairs = sorted((str(name), dtype_name(value)) for name, value in given.items())
    for name, dtype in pairs:
        if dtype not in DTYPES:
            # "int" is near to "int8", which is hardly what it means.
            near = meant(dtype, DTYPES) if dtype[-1:].isdigit() else ""
            raise ConfigError(
                f"dtype={{{name!r}: {dtype!r:.80}}}{near}: choose one of {', '.join(DTYPES)}",
                field="dtype",
            )
    return tuple(pairs)


def _one_of(argument: str, given: object, choices: type[Choice]) -> Choice:
    for choice in choices:
        if given == choice.value:
            return choice
    names = ", ".join(choice.value for choice in choices)
    raise ConfigError(f"{argument}={given!r:.80}: choose one of {names}", field=argument)


def _by_column(
    argument: str, given: object, value_of: Callable[[str, str, object], Number]
) -> tuple[tuple[tuple[str, Number], ...], Number | None]:
    """Return the numbers for single columns, by name, and the one for every column."""
    if given is None:
        return (), None
    if not isinstance(given, Mapping):
        return (), value_of(argument, f"{argument}={given!r:.80}", given)
    pairs = []
    for name, value in given.items():
        said = f"{argument}={{{name!r}: {value!r:.80}}}"
        if not isinstance(name, str):
            raise ConfigError(f"{said}: {name!r} is not the name of a column", field=argument)
        pairs.append((name, value_of(argument, said, value)))
    return tuple(sorted(pairs)), None


def _length(argument: str, said: str, value: object) -> int:
    found = None if isinstance(value, bool | np.bool_) else whole(value)
    if found is None or not 1 <= found <= LENGTH_MAX:
        raise ConfigError(
            f"{said}: pass a number of values for every list column, or a dict of a number for "
            f'each, as in {argument}={{"tokens": 512}}; 1 to {LENGTH_MAX}',
            field=argument,
        )
    return found


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
