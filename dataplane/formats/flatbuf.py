"""Read the few fields of Arrow IPC metadata that indexing needs, checking every bound.

pyarrow parses a message only together with its body, and an index must not read bodies.

Source:  https://flatbuffers.dev/internals and Message.fbs, File.fbs of the Arrow format.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

SCHEMA, DICTIONARY, RECORDS = 1, 2, 3
BLOCK_STRUCT = struct.Struct("<qi4xq")
_NUMBER = struct.Struct("<q")
_UNPACK = {form: struct.Struct(form).unpack_from for form in ["<B", "<h", "<H", "<i", "<I", "<q"]}
_PAIR_BYTES = 16
"""An array's length and null count, or a buffer's offset and length."""


class Table(Struct, frozen=True):
    """One flatbuffer table. Every read beyond the buffer raises a ValueError."""

    buffer: memoryview
    at: int

    def _unpack(self, form: str, at: int) -> int:
        if at >= 0:  # a negative offset would count from the end
            try:
                number: int = _UNPACK[form](self.buffer, at)[0]
            except struct.error:
                pass
            else:
                return number
        raise ValueError(f"flatbuffer offset {at} lies outside of {len(self.buffer)} bytes")

    def place(self, field: int) -> int:
        """Return the place of a field, 0 if it is absent."""
        vtable = self.at - self._unpack("<i", self.at)
        if 4 + 2 * field + 2 > self._unpack("<H", vtable):
            return 0
        offset = self._unpack("<H", vtable + 4 + 2 * field)
        return self.at + offset if offset else 0

    def number(self, field: int, form: str) -> int:
        """Return a scalar field, 0 if it is absent."""
        place = self.place(field)
        return self._unpack(form, place) if place else 0

    def table(self, field: int) -> Table | None:
        """Return a field that is a table, None if it is absent."""
        place = self.place(field)
        return Table(self.buffer, place + self._unpack("<I", place)) if place else None

    def structs(self, field: int, form: struct.Struct) -> list[tuple[int, ...]]:
        """Return a vector of structs, empty if it is absent."""
        return list(form.iter_unpack(self.vector(field, form.size)))

    def numbers(self, field: int) -> Sequence[int]:
        """Return a vector of 64-bit numbers, empty if it is absent."""
        numbers = array("q")
        numbers.frombytes(self.vector(field, _NUMBER.size))
        return numbers

    def pairs(self, field: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return a vector of structs of two 64-bit numbers, as one sequence of first numbers and
        one of second numbers, since a wide table has hundreds of thousands of them.
        """
        numbers = array("q")
        numbers.frombytes(self.vector(field, _PAIR_BYTES))
        return numbers[::2], numbers[1::2]

    def vector(self, field: int, size: int) -> memoryview:
        """Return the bytes of a vector of structs of this size, empty if it is absent."""
        place = self.place(field)
        if not place:
            return self.buffer[:0]
        start = place + self._unpack("<I", place)
        count = self._unpack("<I", start)
        end = start + 4 + count * size
        if end > len(self.buffer):
            raise ValueError(f"a vector of {count} does not fit in {len(self.buffer)} bytes")
        return self.buffer[start + 4 : end]


def root(buffer: memoryview) -> Table:
    """Return the root table of a flatbuffer."""
    start = Table(buffer, 0)
    return Table(buffer, start._unpack("<I", 0))  # noqa: SLF001


class Head(Struct, frozen=True):
    """The content of a message's metadata. `nodes` are the array lengths in depth-first order,
    `nulls` their null counts. `starts` and `sizes` are the places of buffers in the body. `views`
    has the number of value buffers of each array of string or binary views.
    """

    kind: int
    body_length: int
    rows: int = 0
    nodes: Sequence[int] = ()
    starts: Sequence[int] = ()
    sizes: Sequence[int] = ()
    compressed: bool = False
    nulls: Sequence[int] = ()
    is_big_endian: bool = False
    views: Sequence[int] = ()


def message_head(metadata: memoryview) -> Head:
    """Parse a message's metadata.

    Raises:  ValueError: not a message, or it points outside of itself.
    """
    message = root(metadata)
    kind = message.number(1, "<B")
    body_length = message.number(3, "<q")
    if body_length < 0:
        raise ValueError(f"a body of {body_length} bytes")
    header = message.table(2)
    if header is None:
        raise ValueError("a message without a header")
    if kind == SCHEMA:
        return Head(kind, body_length, is_big_endian=_is_big_endian(header))
    if kind not in {DICTIONARY, RECORDS}:
        return Head(kind, body_length)
    batch = header.table(1) if kind == DICTIONARY else header
    if batch is None:
        raise ValueError("a dictionary without values")
    rows = batch.number(0, "<q")
    nodes, nulls = batch.pairs(1)
    if rows < 0 or (nodes and nodes[0] != rows):
        raise ValueError(f"a batch of {rows} rows has a first array of another length")
    return Head(
        kind,
        body_length,
        rows,
        nodes,
        *batch.pairs(2),
        batch.table(3) is not None,
        nulls,
        views=batch.numbers(4),
    )


def move_buffers(metadata: memoryview, starts: bytes, sizes: bytes, body_length: int) -> Head:
    """Change the places of a record batch's buffers in its metadata, in place; return the parsed
    metadata.

    Shapes:  starts, sizes: int64[buffers].
    Raises:  ValueError: not a record batch with this number of buffers, or its parts overlap.
    """
    before, message = message_head(metadata), root(metadata)
    batch, length_at = message.table(2), message.place(3)
    pairs = array("q", bytes(len(starts) + len(sizes)))
    pairs[::2], pairs[1::2] = array("q", starts), array("q", sizes)
    if before.kind != RECORDS or batch is None or len(pairs) != 2 * len(before.sizes):
        raise ValueError(f"not a record batch of {len(pairs) // 2} buffers")
    if length_at:
        _NUMBER.pack_into(metadata, length_at, body_length)
    batch.vector(2, _PAIR_BYTES)[:] = pairs.tobytes()
    expected = replace(before, starts=pairs[::2], sizes=pairs[1::2], body_length=body_length)
    after = message_head(metadata)
    if after != expected:
        raise ValueError("the parts of its metadata overlap")
    return after


class FooterBatch(NamedTuple):
    """A record batch as a file's footer describes it: its offset, and the lengths of its parts."""

    offset: int
    metadata_length: int
    body_length: int


def footer_batches(footer: memoryview) -> list[FooterBatch]:
    """Return a file's record batches.

    Raises:  ValueError: not a footer.
    """
    return [FooterBatch(*block) for block in root(footer).structs(3, BLOCK_STRUCT)]


def first_offset(footer: memoryview) -> int | None:
    """Return the place of the first dictionary or record batch of a file; None if it has none.

    Raises:  ValueError: not a footer.
    """
    tables = (root(footer).structs(field, BLOCK_STRUCT) for field in (2, 3))
    return min((offset for table in tables for offset, *_ in table), default=None)


def footer_is_big_endian(footer: memoryview) -> bool:
    """Return whether a file's values are big-endian, according to its footer.

    Raises:  ValueError: not a footer.
    """
    schema = root(footer).table(1)
    if schema is None:
        raise ValueError("a footer without a schema")
    return _is_big_endian(schema)


def _is_big_endian(schema: Table) -> bool:
    return schema.number(0, "<h") != 0
