"""Thrift's compact protocol, as far as a Parquet footer needs it, with every bound checked.

pyarrow's own view of row groups ends the process where a footer contradicts itself (a C++ exception
crosses Python), so what an index needs of a footer is read here.

Source:  https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Which fields to keep, and of structs and lists of structs, which of theirs.
Shape = Mapping[int, "Shape | None"]

_DEPTH_MAX = 48
_TRUE, _FALSE, _BYTE, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = (
    1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13,
)  # fmt: skip
_NOTHING: Shape = {}


class Compact:
    """A cursor over one compact-protocol message. A ValueError says that it is not one."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def struct(self, shape: Shape, depth: int = 0) -> dict[int, Any]:
        """The struct at the cursor: field id -> value, of the fields that `shape` names."""
        if depth > _DEPTH_MAX:
            raise ValueError("structs are nested too deeply")
        found: dict[int, Any] = {}
        field = 0
        while True:
            head = self._byte()
            if head == 0:
                return found
            field = field + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            if kind in {_TRUE, _FALSE}:
                value: Any = kind == _TRUE
            else:
                value = self._value(kind, shape.get(field) or _NOTHING, depth)
            if field in shape:
                found[field] = value

    def _value(self, kind: int, shape: Shape, depth: int) -> Any:
        if kind in {_TRUE, _FALSE}:
            return self._byte() == _TRUE
        if kind == _BYTE:
            return self._byte()
        if _BYTE < kind <= _I64:
            return self._integer()
        if kind in {_DOUBLE, _UUID}:
            return self._bytes(8 if kind == _DOUBLE else 16)
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind in {_LIST, _SET}:
            head = self._byte()
            count = self._count(head >> 4 if head >> 4 < 15 else self._varint())
            return [self._value(head & 15, shape, depth + 1) for _ in range(count)]
        if kind == _MAP:
            count = self._count(self._varint())
            kinds = self._byte() if count else 0
            for _ in range(count):
                self._value(kinds >> 4, _NOTHING, depth + 1)
                self._value(kinds & 15, _NOTHING, depth + 1)
            return None
        if kind == _STRUCT:
            return self.struct(shape, depth + 1)
        raise ValueError(f"there is no thrift type {kind}")

    def _count(self, count: int) -> int:
        """Every value takes a byte at least."""
        if count > len(self._content) - self._at:
            raise ValueError(f"a list of {count} values does not fit")
        return count

    def _byte(self) -> int:
        if self._at >= len(self._content):
            raise ValueError("the message is cut off")
        self._at += 1
        return self._content[self._at - 1]

    def _bytes(self, length: int) -> bytes:
        if length > len(self._content) - self._at:
            raise ValueError(f"a value of {length} bytes does not fit")
        self._at += length
        return self._content[self._at - length : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a varint does not end")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
