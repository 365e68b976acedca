"""Find JSON numbers that a column cannot hold exactly; refuse them or choose another type.

JSON has one kind of number, and the JSON parser silently turns every integer beyond int64 into a
double. Such integers become uint64 if all integers of a column fit, and are refused otherwise. In a
column of doubles, an integer must have an exact double. A number with a fraction or an exponent
becomes the nearest double, as usual, but never infinity.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.errors import SchemaMismatch

# From here on several integers may have the same double.
LARGE = float(1 << 53)
UINT64_MAX = (1 << 64) - 1
_DIGITS_MAX = 400  # no double has more digits before its point
_SHOWN = 40
# Every literal as large as that matches this.
_MAY_BE_LARGE = re.compile(rb"[0-9]{16}|[eE][+]?[0-9]{2}")

Path = tuple[str, ...]


class JsonLine(Struct, frozen=True):
    """One line with content, its offset in the shard, and its line number in words."""

    text: bytes
    offset: int
    where: str


class _Unfit(Struct, frozen=True):
    """A number too large for a double."""

    text: str


class _Seen(Struct):
    """The integers of one column, and whether it has other numbers."""

    low: int = 0
    high: int = 0
    has_fractions: bool = False


def has_large(array: pa.Array) -> bool:
    """Whether a column, nested or not, has a double so large that it may stand for a lost
    integer.
    """
    if isinstance(array, pa.ChunkedArray):
        return any(has_large(piece) for piece in array.chunks)
    if pa.types.is_list(array.type):
        return has_large(array.values)
    if pa.types.is_struct(array.type):
        return any(has_large(array.field(i)) for i in range(array.type.num_fields))
    if not pa.types.is_float64(array.type):
        return False
    return bool((np.abs(array.to_numpy(zero_copy_only=False)) >= LARGE).any())


def check_exact(url: str, lines: Iterator[JsonLine], types: Mapping[str, pa.DataType]) -> None:
    """Refuse the first integer that has no exact double but would be read as one.

    Raises:  SchemaMismatch: shard, field, offset, line, found.
    """
    for line in lines:
        if _MAY_BE_LARGE.search(line.text):
            _check_line(url, line, types)


def exact_types(
    url: str, lines: Sequence[JsonLine], types: Mapping[str, pa.DataType]
) -> dict[str, pa.DataType]:
    """Choose types that hold every number of these lines: uint64 instead of double if a column has
    only integers, and all of them fit.

    Raises:  SchemaMismatch: shard, field, offset, line, found.
    """
    seen: dict[Path, _Seen] = {}
    for line in lines:
        for path, number in _doubles(_parsed(line.text), types):
            _note(seen.setdefault(path, _Seen()), number)
    found = {name: _retyped(kind, (name,), seen) for name, kind in types.items()}
    check_exact(url, iter(lines), found)
    return found


def _check_line(url: str, line: JsonLine, types: Mapping[str, pa.DataType]) -> None:
    for path, number in _doubles(_parsed(line.text), types):
        if isinstance(number, _Unfit) or (isinstance(number, int) and not _is_double(number)):
            text = number.text if isinstance(number, _Unfit) else str(number)
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
            raise SchemaMismatch(
                f"{url}: byte {line.offset}, {line.where}: the number {shown} of {path[0]!r} fits "
                "neither a 64-bit integer column nor, exactly, a double: write such numbers as "
                "text, in quotes",
                shard=url,
                offset=line.offset,
                line=line.where,
                field=path[0],
                expected="double",
                found=shown,
            )


def _is_double(number: int) -> bool:
    return abs(number) <= LARGE or int(float(number)) == number


def _note(seen: _Seen, number: float | _Unfit) -> None:
    if isinstance(number, int):
        seen.low, seen.high = min(seen.low, number), max(seen.high, number)
    else:
        seen.has_fractions = True


def _retyped(kind: pa.DataType, path: Path, seen: Mapping[Path, _Seen]) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_retyped(kind.value_type, (*path, "[]"), seen))
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, _retyped(f.type, (*path, f.name), seen)) for f in kind.fields])
    column = seen.get(path)
    if column is None or column.has_fractions or not pa.types.is_float64(kind):
        return kind
    return pa.uint64() if column.low >= 0 and column.high <= UINT64_MAX else kind


def _parsed(line: bytes) -> Any:
    return json.loads(line, parse_int=_whole, parse_float=_fraction)


def _whole(text: str) -> int | _Unfit:
    return int(text) if len(text) <= _DIGITS_MAX and _fits(float(text)) else _Unfit(text)


def _fraction(text: str) -> float | _Unfit:
    return float(text) if _fits(float(text)) else _Unfit(text)


def _fits(number: float) -> bool:
    return not math.isinf(number)


def _doubles(
    row: Mapping[str, Any], types: Mapping[str, pa.DataType]
) -> Iterator[tuple[Path, float | _Unfit]]:
    for name, kind in types.items():
        yield from _numbers(row.get(name), kind, (name,))


def _numbers(value: Any, kind: pa.DataType, path: Path) -> Iterator[tuple[Path, float | _Unfit]]:
    if value is None:
        return
    if pa.types.is_list(kind):
        for each in value:
            yield from _numbers(each, kind.value_type, (*path, "[]"))
    elif pa.types.is_struct(kind):
        for field in kind.fields:
            yield from _numbers(value.get(field.name), field.type, (*path, field.name))
    elif pa.types.is_float64(kind):
        yield path, value
