"""Thrift's compact protocol, as far as a Parquet footer needs it, with every bound checked.

Source:  https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The fields to keep, with the fields to keep of nested structs and lists of structs.
Shape = Mapping[int, "Shape | None"]

_DEPTH_MAX = 48
_TRUE, _FALSE, _BYTE, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = (
    1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13,
)  # fmt: skip
_NOTHING: Shape = {}


def struct(content: bytes, shape: Shape) -> dict[int, Any]:
    """Parse the struct at the start of `content`: field id -> value, of the fields that `shape`
    names.

    Raises:  ValueError: it is not a struct.
    """
    try:
        return _struct(content, 0, shape, 0)[0]
    except IndexError as fault:
        raise ValueError("the message is cut off") from fault


def _struct(content: bytes, at: int, shape: Shape, depth: int) -> tuple[dict[int, Any], int]:
    # Footers have hundreds of thousands of fields: the loop makes few calls.
    if depth > _DEPTH_MAX:
        raise ValueError("structs are nested too deeply")
    found: dict[int, Any] = {}
    field = 0
    value: Any
    while head := content[at]:
        at += 1
        kind = head & 15
        if head > 15:
            field += head >> 4
        else:
            raw, at = _varint(content, at)
            field = (raw >> 1) ^ -(raw & 1)
        if _BYTE < kind <= _I64:
            raw = content[at]
            at += 1
            if raw > 127:
                raw, at = _varint(content, at - 1)
            value = (raw >> 1) ^ -(raw & 1)
        elif kind <= _FALSE:
            value = kind == _TRUE
        else:
            value, at = _value(content, at, kind, shape.get(field) or _NOTHING, depth)
        if field in shape:
            if field in found:
                raise ValueError(f"field {field} of a structure occurs twice")
            if kind <= _FALSE:  # no kept field is a bool; False would read as 0
                raise ValueError(f"field {field} of a structure has another type")
            found[field] = value
    return found, at + 1


def _value(content: bytes, at: int, kind: int, shape: Shape, depth: int) -> tuple[Any, int]:
    if kind == _BINARY:
        length, at = _varint(content, at)
        return _taken(content, at, length)
    if kind == _STRUCT:
        return _struct(content, at, shape, depth + 1)
    if kind in {_LIST, _SET}:
        return _list(content, at, shape, depth)
    if _BYTE < kind <= _I64:
        raw, at = _varint(content, at)
        return (raw >> 1) ^ -(raw & 1), at
    if kind in {_TRUE, _FALSE, _BYTE}:
        return content[at], at + 1
    if kind in {_DOUBLE, _UUID}:
        return None, _taken(content, at, 8 if kind == _DOUBLE else 16)[1]  # never needed
    if kind == _MAP:
        return _map(content, at, depth)
    raise ValueError(f"there is no thrift type {kind}")


def _list(content: bytes, at: int, shape: Shape, depth: int) -> tuple[list[Any], int]:
    head, at = content[at], at + 1
    count = head >> 4
    if count == 15:
        count, at = _varint(content, at)
    _check_count(content, at, count)
    if depth > _DEPTH_MAX:
        raise ValueError("lists are nested too deeply")
    values = []
    for _ in range(count):
        value, at = _value(content, at, head & 15, shape, depth + 1)
        values.append(value)
    return values, at


def _map(content: bytes, at: int, depth: int) -> tuple[None, int]:
    """Skip a map: Parquet has none that an index needs."""
    count, at = _varint(content, at)
    _check_count(content, at, count)
    if depth > _DEPTH_MAX:
        raise ValueError("maps are nested too deeply")
    if count:
        kinds, at = content[at], at + 1
        for kind in (kinds >> 4, kinds & 15) * count:
            _, at = _value(content, at, kind, _NOTHING, depth + 1)
    return None, at


def _check_count(content: bytes, at: int, count: int) -> None:
    """Refuse a count larger than the content, since every value takes at least one byte."""
    if count > len(content) - at:
        raise ValueError(f"a list of {count} values does not fit")


def _taken(content: bytes, at: int, length: int) -> tuple[bytes, int]:
    if length > len(content) - at:
        raise ValueError(f"a value of {length} bytes does not fit")
    return content[at : at + length], at + length


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if value >> 64:
                break
            return value, at
        shift += 7
        if shift > 63:
            break
    raise ValueError("a varint does not end")
