"""The loader arguments that choose columns and rows: their names, types and defaults. Each group is
converted to one frozen value, and checked as far as possible without the dataset.

Pure, and without arrays: a trainer imports it.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, TypedDict, TypeVar, Unpack

import numpy as np
from msgspec import structs

from dataplane.base.units import meant, one_of, whole, whole_from
from dataplane.model.errors import ConfigError
from dataplane.model.records import (
    ColumnOptions,
    ListPolicy,
    NullPolicy,
    TruncationSide,
    View,
)
from dataplane.transforms.dtypes import DTYPES, dtype_name
from dataplane.transforms.stacks import Stack, stack_specs

Numbers = Mapping[str, float] | float
"""A number for every column, or numbers for some columns by name."""
Lengths = Mapping[str, int] | int
LENGTH_MAX = (1 << 31) - 1
Number = TypeVar("Number", int, float)
_WHOLE = 1 << 32
_LIMIT_MAX = (1 << 62) - 1
_FIRST: Final = ("train", "training")
_LAST: Final = ("validation", "valid", "val", "dev", "test", "eval", "holdout")
_SPLIT_EXAMPLES = (
    'split=("train", 0.99) is the first 99 % by the hash of each row, split=("validation", 0.01) '
    'the last 1 %, and split=("test", 0.98, 0.99) the part between'
)


class ColumnArguments(TypedDict, total=False):
    """The arguments that say which columns batches have, and in which form."""

    columns: Sequence[str] | Mapping[str, object] | None
    """The columns of a batch, in this order; by default all. The name of a struct means all its
    fields. A dict gives each column a type, as in `dtype`; None keeps the stored type.
    """
    dtype: Mapping[str, object] | None
    """The types of columns with numbers or lists of numbers: `{"tokens": "int64"}`. Decimals, and
    texts that contain a number, can be converted, too. A number that does not fit is an error.
    """
    lists: str
    """With `"padded"`, a list column is one tensor, as wide as the longest list of the batch, and a
    column `name.length` has the lengths. With `"ragged"`, a list column has two tensors: the values
    of all lists, and the offsets at which lists begin.
    """
    pad_value: Numbers | None
    """The number that fills padded lists, 0 by default, or a dict with a number for each column."""
    max_length: Lengths | None
    """The maximum length of lists, or a dict with a length for each column. Longer lists are cut.
    """
    truncation_side: str
    """The side at which longer lists are cut: `"right"` or `"left"`."""
    fill_null: Numbers | None
    """The number that replaces nulls, or a dict with a number for each column. Without a number,
    null floats become NaN, and other nulls (integers, bools, times) are errors.
    """
    nulls: str
    """With `"fill"`, `fill_null` replaces nulls. With `"mask"`, each column that may have nulls
    also gets a column of bools, `name.is_null`.
    """
    codes: Sequence[str] | None
    """Columns whose values become integers. `loader.categories("country")` returns the sorted
    values, and code i is the i-th value. For a new dataset, the node first reads these columns
    once.
    """
    stack: Mapping[str, Stack | Sequence[str]] | None
    """Columns of numbers that are joined into one tensor [B, columns]: `{"x": ["age", "price"]}`.
    If types differ, pass `Stack(["age", "price"], dtype="float32")`.
    """


class RowArguments(TypedDict, total=False):
    """The arguments that choose rows."""

    where: str | None
    """A condition on columns: `"lang == 'en' and score > 0.5"`. The loader reads only rows for
    which the condition is true.
    """
    sample: float | None
    """A share of the rows, selected by a hash of each row: 0.1 is a tenth."""
    split: Sequence[object] | None
    """A part of the rows, selected by a hash of each row: `("train", 0.99)` and `("validation",
    0.01)` never share a row, even if shards are added. `("test", 0.98, 0.99)` is the range of
    hashes from 98 % to 99 %.
    """
    limit: int | None
    """The number of rows to read, from the first row on."""


ROW_ARGUMENTS: Final = tuple(RowArguments.__annotations__)
COLUMN_DEFAULTS: Final[Mapping[str, object]] = {
    **dict.fromkeys(ColumnArguments.__annotations__),
    "lists": ListPolicy.PADDED.value,
    "nulls": NullPolicy.FILL.value,
    "truncation_side": TruncationSide.RIGHT.value,
}


def column_options(**given: Unpack[ColumnArguments]) -> ColumnOptions:
    """Convert these arguments of a DataLoader to options.

    Raises:  ConfigError: an argument is invalid; says what is allowed.
    """
    options: dict[str, Any] = {**COLUMN_DEFAULTS, **given}
    if isinstance(options["columns"], Mapping):
        options |= _with_types(options["columns"], options["dtype"])
    pad_value, max_length = options["pad_value"], options["max_length"]
    fills, everywhere = _by_column("fill_null", options["fill_null"], _number)
    pads, pad_all = _by_column("pad_value", pad_value, _number)
    lengths, length_all = _by_column("max_length", max_length, _length)
    policy = one_of("lists", options["lists"], ListPolicy)
    side = one_of("truncation_side", options["truncation_side"], TruncationSide)
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
        columns=_columns(options["columns"]),
        lists=policy,
        fill_null=fills,
        stack=stack_specs(options["stack"] or {}),
        fill_null_all=everywhere,
        nulls=one_of("nulls", options["nulls"], NullPolicy),
        pad_value=pads,
        pad_value_all=pad_all,
        max_length=lengths,
        max_length_all=length_all or 0,
        truncation_side=side,
        codes=_codes(options["codes"]),
        dtype=_dtypes(options["dtype"]),
    )


def in_order(options: ColumnOptions) -> ColumnOptions:
    """Sort mappings by name, so that equal jobs have equal options. `columns` keep their order."""
    given = structs.asdict(options)
    by_name: dict[str, Any] = {
        name: tuple(sorted(value, key=lambda entry: getattr(entry, "name", entry)))
        for name, value in given.items()
        if isinstance(value, tuple) and name != "columns"
    }
    return structs.replace(options, **by_name)


def naming(options: ColumnOptions, names: Sequence[str]) -> ColumnOptions:
    """Return the options with these columns added, if the options select columns at all."""
    named = set(options.columns)
    if not named:
        return options
    others = [name for name in names if name not in named]
    return structs.replace(options, columns=(*options.columns, *others))


def only(columns: Sequence[str]) -> ColumnOptions:
    """Return options that select these columns, and are otherwise the defaults."""
    return ColumnOptions(columns=tuple(columns))


def to_find_values(columns: Sequence[str]) -> ColumnOptions:
    """Return options that read all values of some columns, and distinguish nulls."""
    return ColumnOptions(columns=tuple(columns), nulls=NullPolicy.MASK, distinct_in_lists=True)


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
    return tuple(map(str, given))  # names may be numpy strings


def _with_types(columns: Mapping[str, object], dtype: object) -> dict[str, object]:
    """Return `columns` and `dtype` for a dict from columns to types; None keeps the stored type."""
    if dtype is not None:
        raise ConfigError(
            f"dtype={dtype!r:.80} with columns={columns!r:.80}: name types in one of the two",
            field="dtype",
        )
    types = {name: value for name, value in columns.items() if value is not None}
    return {"columns": list(columns), "dtype": types or None}


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
            # Guess only if the name ends with a digit: for "int" the guess would be "int8", which
            # is hardly what the user meant.
            near = meant(dtype, DTYPES) if dtype[-1:].isdigit() else ""
            raise ConfigError(
                f"dtype={{{name!r}: {dtype!r:.80}}}{near}: choose one of {', '.join(DTYPES)}",
                field="dtype",
            )
    return tuple(pairs)


def _by_column(
    argument: str, given: object, value_of: Callable[[str, str, object], Number]
) -> tuple[tuple[tuple[str, Number], ...], Number | None]:
    """Return the numbers for single columns, by name, and the number for every other column."""
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
    number = None if isinstance(value, bool | np.bool_) else whole(value)
    if number is None or not 1 <= number <= LENGTH_MAX:
        raise ConfigError(
            f"{said}: pass a number of values for every list column, or a dict of a number for "
            f'each, as in {argument}={{"tokens": 512}}; 1 to {LENGTH_MAX}',
            field=argument,
        )
    return number


def _number(argument: str, said: str, value: object) -> float:
    if not isinstance(value, numbers.Real | np.bool_):
        raise ConfigError(
            f"{said}: pass a number for every column, or a dict of a number for each, as in "
            f'{argument}={{"age": 0}}',
            field=argument,
        )
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if isinstance(value, numbers.Integral) and number != value:
        raise ConfigError(
            f"{said}: a whole number must have an exact double, as all up to 2**53 do",
            field=argument,
        )
    return number


def view_of(**given: Unpack[RowArguments]) -> View:
    """Convert these arguments of a DataLoader to a view.

    Raises:  ConfigError: an argument is invalid; says what is allowed.
    """
    where, split, limit = given.get("where"), given.get("split"), given.get("limit")
    lower, upper = (0, 0) if split is None else _split(split)
    rows = f"limit={limit!r:.80}, the number of rows to read"
    return View(
        where="" if where is None else _canonical(where),
        sample=_sample(given.get("sample")),
        split_from=lower,
        split_to=upper,
        limit=0 if limit is None else whole_from("limit", limit, 1, _LIMIT_MAX, rows),
    )


def _canonical(where: str) -> str:
    # Import this module late, so that a loader starts its node sooner.
    from dataplane.transforms.where import canonical_where

    return canonical_where(where)


def split_of_text(text: str) -> tuple[object, ...]:
    """Convert the text of a command line, such as "train:0.99", to the argument `split`.

    Raises:  ConfigError: it has another form.
    """
    name, *shares = text.split(":")
    with contextlib.suppress(ValueError):
        if shares:
            return (name, *map(float, shares))
    raise ConfigError(
        f"split {text!r}: write NAME:SHARE, as in train:0.99, validation:0.01 or my:0.98:0.99",
        field="split",
    )


def _sample(given: object) -> int:
    if given is None:
        return 0
    share = _share(given)
    units = 0 if share is None else share * _WHOLE // 1
    if not 0 < units <= _WHOLE:
        raise ConfigError(
            f"sample={given!r:.80}: pass the share of all rows to read, such as 0.1; more than 0, "
            "and 1 at most",
            field="sample",
        )
    return int(units)


def _split(given: object) -> tuple[int, int]:
    """Return the range of hashes, in units of 2**-32. A share and its complement meet exactly."""
    wrong = ConfigError(f"split={given!r:.80}: {_SPLIT_EXAMPLES}", field="split")
    match given:
        case str() | bytes():
            raise wrong
        case [str(name), share] if (part := _share(share)) is not None:
            if name.lower() in _FIRST:
                lower, upper = Fraction(0), part
            elif name.lower() in _LAST:
                lower, upper = 1 - part, Fraction(1)
            else:
                known = ", ".join((*_FIRST, *_LAST))
                raise ConfigError(
                    f"split={given!r:.80}: {name!r} does not say which end of the dataset it takes "
                    f"({known} do): pass its range, as in split=({name!r}, 0.98, 0.99)",
                    field="split",
                )
        case [str(), begin, end]:
            ends = (_share(begin), _share(end))
            lower, upper = (Fraction(-1) if bound is None else bound for bound in ends)
        case _:
            raise wrong
    if not 0 <= lower < upper <= 1:
        raise wrong
    first, last = (int(bound * _WHOLE // 1) for bound in (lower, upper))
    if first == last:
        raise ConfigError(f"split={given!r:.80}: a share this small has no rows", field="split")
    return first, last


def _share(given: object) -> Fraction | None:
    """Parse a number exactly as it is written: 0.1 is a tenth."""
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        return None
    try:
        return Fraction(str(given))
    except ValueError:  # not finite
        return None
