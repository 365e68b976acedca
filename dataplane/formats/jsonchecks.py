"""Check lines of JSON for numbers that a column cannot hold exactly, and for unknown fields."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.formats.known_names import WORD_BYTES, KnownNames
from dataplane.model.errors import SchemaMismatch

# Find JSON numbers that a column cannot hold exactly; refuse them or choose another type.
#
# JSON has one kind of number, and the JSON parser silently turns every integer beyond int64 into a
# double. Such integers become uint64 if all integers of the column fit; otherwise they are refused.
# In a column of doubles, every integer must have an exact double. A number with a fraction or an
# exponent becomes the nearest double, as usual, but never infinity.

# From this number on, several integers have the same double.
LARGE = float(1 << 53)
UINT64_MAX = (1 << 64) - 1
_DIGITS_MAX = 400  # no double has more digits before its point
_SHOWN = 40
# Matches every literal whose value may be LARGE or more.
_MAY_BE_LARGE = re.compile(rb"[0-9]{16}|[eE][+]?[0-9]{2}")

Path = tuple[str, ...]


class JsonLine(Struct, frozen=True):
    """One line with content, its offset in the shard, and its line number in words."""

    text: bytes
    offset: int
    where: str


class _Unfit(Struct, frozen=True):
    """A number that is too large for a double."""

    text: str


class _Seen(Struct):
    """The integers of one column, and whether the column has other numbers."""

    low: int = 0
    high: int = 0
    has_fractions: bool = False


def has_large(array: pa.Array) -> bool:
    """Return whether a column, nested or not, has a double so large that the integer it was parsed
    from may not be exact.
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
    """Choose types that hold every number of these lines exactly: uint64 instead of double if a
    column has only integers, and all of them fit.
    """
    seen: dict[Path, _Seen] = {}
    for line in lines:
        for path, number in _doubles(_parsed(line.text), types):
            _note(seen.setdefault(path, _Seen()), number)
    chosen = {name: _retyped(kind, (name,), seen) for name, kind in types.items()}
    check_exact(url, iter(lines), chosen)
    return chosen


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
        for element in value:
            yield from _numbers(element, kind.value_type, (*path, "[]"))
    elif pa.types.is_struct(kind):
        for field in kind.fields:
            yield from _numbers(value.get(field.name), field.type, (*path, field.name))
    elif pa.types.is_float64(kind):
        yield path, value


# Find the blocks of JSON lines that may have unknown fields, or unknown kinds of values.
#
# Parsing all lines of a shard takes ten times as long as counting them. This scan is much cheaper:
# it examines each colon that follows a quote, and reports a block if one of them ends an unknown
# key. Text that looks like a key is also reported, which only costs the parsing of its block. A key
# counts as known if any object has it, at any level; decoding refuses it at a wrong level.

_BEFORE, _AFTER = bytes(WORD_BYTES), bytes(2 * WORD_BYTES)
_COLON, _SPACE, _QUOTE, _BACKSLASH, _OPEN, _CLOSE, _NULL = b': "\\[]n'
_ENDS_NAME = ~np.isin(np.arange(256), list(b"\\: ,[{\t"))
"""For each byte, whether the quote after it may end a name. After a false byte, a quote begins a
text or is part of a text, so the scan misses names that end with such a byte.
"""
_VALUES, _NULLS, _EMPTY_LISTS = range(3)
"""For each key, whether values, only nulls, or only lists of nulls were seen so far."""


class KnownKeys:
    """The keys of some types, on all levels."""

    def __init__(self, types: Mapping[str, pa.DataType]) -> None:
        states: dict[str, int] = {}
        for name, state in _keys(types.items()):
            states[name] = state if states.get(name, state) == state else _VALUES
        written = {
            f'"{json.dumps(name, ensure_ascii=is_ascii)[1:-1]}'.encode(): state
            for name, state in states.items()
            for is_ascii in (True, False)
        }
        self._states = np.array([*written.values()], np.int64)
        self._has_all_values = not self._states.any()
        self._names = KnownNames(list(written))

    def may_be_more(self, pieces: Sequence[memoryview]) -> bool:
        """Return whether lines, given in pieces, may have unknown keys, or values for keys that had
        only nulls before.
        """
        codes = np.frombuffer(b"".join([_BEFORE, *pieces, _AFTER]), np.uint8)
        colons = np.flatnonzero(codes == _COLON)
        ends = colons - 1
        ends = ends - (codes[ends] == _SPACE)
        before = codes[ends - 1]
        is_key = _ENDS_NAME[before] | ((before == _BACKSLASH) & (codes[ends - 2] == _BACKSLASH))
        is_key &= codes[ends] == _QUOTE
        names = self._names.match(codes, ends[is_key])
        if (names < 0).any():
            return True
        if self._has_all_values:
            return False
        state = self._states[names]
        at = colons[is_key] + 1
        at = at + (codes[at] == _SPACE)
        value, after = codes[at], codes[at + 1]
        is_empty = (value == _OPEN) & (after == _CLOSE)
        is_more = (value != _NULL) & ((state == _NULLS) | (state == _EMPTY_LISTS) & ~is_empty)
        return bool(is_more.any())


def _keys(fields: Iterable[tuple[str, pa.DataType]]) -> Iterator[tuple[str, int]]:
    """Yield the keys of all levels, each with `_VALUES`, `_NULLS` or `_EMPTY_LISTS`."""
    for name, kind in fields:
        value = kind
        while pa.types.is_list(value):
            value = value.value_type
        if not pa.types.is_null(value):
            yield name, _VALUES
        else:
            yield name, _NULLS if value is kind else _EMPTY_LISTS
        if pa.types.is_struct(value):
            yield from _keys((field.name, field.type) for field in value.fields)


def unknown_field(value: Any, fields: Iterable[pa.Field], path: str = "") -> str:
    """Return the path of the first key, nested or not, that has no field; "" if all have one."""
    kinds = {field.name: field.type for field in fields}
    for name, inner in value.items() if isinstance(value, dict) else ():
        if name not in kinds:
            return f"{path}{name}"
        kind, inners = kinds[name], [inner]
        while pa.types.is_list(kind):
            kind = kind.value_type
            inners = [
                element for values in inners if isinstance(values, list) for element in values
            ]
        for element in inners if pa.types.is_struct(kind) else ():
            if lost := unknown_field(element, kind.fields, f"{path}{name}."):
                return lost
    return ""
