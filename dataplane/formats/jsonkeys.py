"""Find the blocks of JSON lines that may have unknown fields, or unknown kinds of values.

Parsing all lines of a shard takes ten times as long as counting them. This scan is much cheaper: it
examines each colon that follows a quote, and reports a block if one of these ends an unknown key.
Text that looks like a key is reported too, which only costs the parsing of its block. A key counts
as known if any object has it, on any level; decoding refuses it where the level is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dataplane.formats.known_names import WORD_BYTES, KnownNames

_BEFORE, _AFTER = bytes(WORD_BYTES), bytes(2 * WORD_BYTES)
_COLON, _SPACE, _QUOTE, _BACKSLASH, _OPEN, _CLOSE, _NULL = b': "\\[]n'
_ENDS_NAME = ~np.isin(np.arange(256), list(b"\\: ,[{\t"))
"""Bytes that may come before a quote that ends a name. After any other byte, a quote begins a text
or is part of one: names that end with these are not noticed here.
"""
_VALUES, _NULLS, _EMPTY_LISTS = range(3)
"""States of a key so far: it had values; nulls only; lists with nothing but nulls."""


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
        """Whether lines, given in pieces, may have unknown keys, or values where only nulls were
        known.
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
    """Yield the keys of all levels, and the kinds of values seen for each."""
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
            inners = [each for one in inners if isinstance(one, list) for each in one]
        for each in inners if pa.types.is_struct(kind) else ():
            if lost := unknown_field(each, kind.fields, f"{path}{name}."):
                return lost
    return ""
