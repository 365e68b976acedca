"""Convert columns of numbers to another type than the stored one, such as tokens of uint16 to
int64.

A number stays the same, or becomes the nearest float. A value that the type cannot hold is refused:
no value wraps around, and no finite number becomes infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

import numpy as np
import pyarrow as pa
from msgspec import structs

from dataplane.base.units import meant
from dataplane.formats.arrays import TEXTS, first_refused, widened
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, ColumnSpec, Kind
from dataplane.transforms.leaves import Leaf, numpy_name

_NAMES_SHOWN = 100


def casts_of(options: ColumnOptions) -> Mapping[str, str]:
    """Return the columns that a job converts, with their new types."""
    return dict(options.dtype)


def check_casts(options: ColumnOptions, chosen: Sequence[Leaf], every: Sequence[Leaf]) -> None:
    """Refuse types for columns that are not in the batches.

    Raises:  ConfigError: names the column.
    """
    if not options.dtype:
        return
    names = {leaf.name for leaf in chosen}
    for name, _ in options.dtype:
        if name not in names:
            known = ", ".join(sorted(names)[:_NAMES_SHOWN])
            where = f"is not a column; the batches have: {known}{meant(name, names)}"
            if any(leaf.name == name for leaf in every):
                where = "columns=[…] leaves out: name it there too"
            raise ConfigError(f"dtype names {name!r}, which {where}", field="dtype")


def cast_columns(
    specs: Sequence[ColumnSpec],
    types: Sequence[pa.DataType],
    stored: Sequence[pa.DataType],
    options: ColumnOptions,
) -> tuple[Sequence[ColumnSpec], Sequence[pa.DataType]]:
    """Return the columns, and their types in the block arena, after their numbers are converted.
    `stored` are the types of their values in shards.

    Raises:  ConfigError: a column has no numbers, or fractions that integers cannot hold.
    """
    casts = casts_of(options)
    if not casts:
        return specs, types
    cast_specs, cast_types = [*specs], [*types]
    for at, (spec, kind, own) in enumerate(zip(specs, types, stored, strict=True)):
        dtype = casts.get(spec.name)
        if dtype is None:
            continue
        number = pa.from_numpy_dtype(dtype)
        if is_written(own):
            cast_specs[at] = ColumnSpec(spec.name, Kind.FIXED, dtype)
            cast_types[at] = number
            continue
        _check(spec, dtype)
        cast_specs[at] = structs.replace(spec, dtype=dtype)
        cast_types[at] = _retyped(kind, number)
    return cast_specs, cast_types


def is_written(kind: pa.DataType) -> bool:
    """Return whether values of a stored type are numbers in decimal digits: decimals and texts."""
    plain = widened(kind)
    return bool(pa.types.is_decimal(plain) or plain.id in TEXTS)


_DIGITS = r"^[+-]?[0-9]+$"
_DECIMAL = (  # as Python's float() reads texts
    r"^[+-]?(([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?|(?i:nan|inf|infinity))$"
)


def read_written(array: pa.Array, target: pa.DataType, column: str, url: str) -> pa.Array:
    """Convert decimals and texts to numbers; nulls stay null. A float is the nearest one.

    Raises:  ConfigError: a value is not a number of this type; names column, value, row and shard.
    """
    import pyarrow.compute as pc

    def read(some: pa.Array) -> pa.Array:
        if pa.types.is_integer(target) and pa.types.is_decimal(some.type):
            return some.cast(target)
        digits = some.cast(pa.large_string())
        is_number = pc.match_substring_regex(
            digits, _DIGITS if pa.types.is_integer(target) else _DECIMAL
        )
        if pc.any(pc.invert(is_number)).as_py():
            raise pa.ArrowInvalid("no number")
        number = pa.float64() if pa.types.is_float16(target) else target
        made = pc.utf8_ltrim(digits, "+").cast(number)
        if pa.types.is_float16(target):
            made = _off_midpoints(made, digits)
        if pa.types.is_floating(target):
            infinite = digits.filter(pc.is_inf(made))
            if pc.any(pc.match_substring_regex(infinite, "[0-9]")).as_py():
                raise pa.ArrowInvalid("too large")
        return made

    try:
        return converted(read(array), target, column, url)
    except pa.ArrowException:
        row = first_refused(array, read)
    value = array[row].as_py()
    shown = repr(value) if isinstance(value, str) else str(value)  # spaces count in a text
    raise ConfigError(
        f"{url}: row {row} of its block has {shown:.100} in column {column!r}, "
        f"which {numpy_name(target)} cannot hold: choose another dtype, or leave the column as it "
        "is",
        shard=url,
        field=column,
    )


def _off_midpoints(made: pa.Array, digits: pa.Array) -> pa.Array:
    """Move doubles that lie midway between two values of float16 to the side on which the written
    numbers lie, so that rounding the doubles gives the float16 nearest to each number.
    """
    doubles = made.to_numpy(zero_copy_only=False).copy()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        below = np.nextafter(doubles, -np.inf).astype(np.float16).astype(np.float64)
        above = np.nextafter(doubles, np.inf).astype(np.float16).astype(np.float64)
        # The value after the largest float16 would be 65536.
        below, above = (np.clip(side, -65536.0, 65536.0) for side in (below, above))
        is_midway = (below < above) & (doubles - below == above - doubles)
    for at in np.flatnonzero(is_midway).tolist():
        written, double = Decimal(digits[at].as_py()), Decimal(doubles[at].item())
        if written != double:
            doubles[at] = np.nextafter(doubles[at], np.inf if written > double else -np.inf)
    return pa.array(doubles, pa.float64(), mask=made.is_null().to_numpy(zero_copy_only=False))


def _check(spec: ColumnSpec, dtype: str) -> None:
    said = f"dtype: column {spec.name!r} has"
    if not spec.dtype:
        raise ConfigError(
            f"{said} {spec.kind} values: only numbers, lists of numbers, decimals and digits can "
            f"become {dtype}",
            field="dtype",
        )
    if np.dtype(spec.dtype).kind == "f" and np.dtype(dtype).kind != "f":
        raise ConfigError(
            f"{said} {spec.dtype} values, whose fractions {dtype} cannot hold: choose a float",
            field="dtype",
        )


def _retyped(kind: pa.DataType, number: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(number, kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(number)
    return pa.list_(number) if pa.types.is_list(kind) else number


def converted(
    array: pa.Array, target: pa.DataType, column: str, url: str, *, width: int = 1, stack: str = ""
) -> pa.Array:
    """Convert the numbers of a column to another type; nulls stay null. A row has `width` numbers;
    0 if that varies. `stack` names the stack that the column belongs to, for errors.

    Raises:  ConfigError: the type cannot hold a number; names column, number and shard.
    """
    if array.type == target:
        return array
    null = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    stored = (array if null is None else array.fill_null(0)).to_numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        values = stored.astype(numpy_name(target))
    if not np.can_cast(stored.dtype, values.dtype):
        is_float = values.dtype.kind == "f"
        lost = np.isinf(values) & np.isfinite(stored) if is_float else values != stored
        if lost.any():
            at = int(lost.argmax())
            row = f"row {at // width}" if width else "a list"
            raise ConfigError(
                f"{url}: {f'stack {stack!r}: ' if stack else ''}{row} of its block has "
                f"{stored[at]} in column {column!r}, which {values.dtype} cannot hold: choose a "
                "wider dtype",
                shard=url,
                field=column,
            )
    return pa.array(values, target, mask=null)
