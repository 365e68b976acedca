"""Parquet footers: the numbers that an index needs, read in C, and a cache of parsed footers.

Every block of a shard needs the footer, and parsing a large one costs more than a small block.

1. A footer equals a cached one if both have the same number, or the same bytes. A shard that was
   rewritten under its name has another footer.
2. The cache holds the last footer, and others as long as all together have at most BYTES_MAX bytes.
   A parsed footer takes seven times its size of a worker's memory.
3. A footer of more than SMALL_BYTES replaces another one only if that was not used for the last
   STALE_USES lookups. If a footer does not get into the cache, each block parses only its own row
   group, at a cost that does not depend on the number of row groups and shards. The cache holds the
   places of the row groups in the last CUTS_MAX such footers.

Source:  https://github.com/apache/parquet-format (FileMetaData in parquet.thrift)
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct
from numpy.typing import NDArray
from typing_extensions import Buffer

from dataplane.base import compiled
from dataplane.formats.base import RawBlock

# The parts of a footer that an index needs, as tables of numbers: the functions of parquet_facts.c.
#
# pyarrow's own view of row groups crashes the process if a footer contradicts itself (a C++
# exception crosses Python), and creates a Python object for each column.

SOURCE = Path(__file__).with_name("parquet_facts.c")
LIBRARY = Path(__file__).with_name("libparquet_facts.so")

Int64 = NDArray[np.int64]

# Columns of FooterFacts.elements; an absent type is -1, any other absent number 0.
TYPE, LENGTH, REPETITION, CHILDREN = range(4)
# Columns of FooterFacts.groups.
ROWS, COLUMN_COUNT = range(2)
# Columns of FooterFacts.columns; an absent null count is -1, any other absent number 0.
(
    FLAGS, VALUES, DECODED_BYTES, BYTES, FIRST_PAGE, DICTIONARY, LONGEST_BOUND, NULLS, LEVELS,
) = range(9)  # fmt: skip
# Bits of FLAGS: the column is in another file, has metadata, is encrypted; the numbers that are
# present.
OTHER_FILE, METADATA, ENCRYPTED = 1, 2, 4
PRESENT = {VALUES: 8, DECODED_BYTES: 16, BYTES: 32, FIRST_PAGE: 64}
FIELDS = {VALUES: 5, DECODED_BYTES: 6, BYTES: 7, FIRST_PAGE: 9, DICTIONARY: 11}
"""The numeric fields of ColumnMetaData, by their field ids in parquet.thrift."""

_WIDTHS = (4, 2, 9)
# The errors of the C code, by number; {} is the number of a field or of a type.
_FAULTS = (
    "",
    "the message is cut off",
    "structures are nested too deeply",
    "field {} of a structure occurs twice",
    "field {} of a structure has another type",
    "a value or a list does not fit",
    "a varint does not end",
    "there is no thrift type {}",
    "field {} of a structure is missing",
    "the footer has changed while it was read",
)
_POINTER = ctypes.c_void_p
_SIGNATURES: dict[str, compiled.Signature] = {
    # content, length, tables, counts -> fault
    "read_parquet_facts": (ctypes.c_int64, (_POINTER, ctypes.c_int64, _POINTER, _POINTER)),
    # content, length, groups, counts -> fault
    "cut_parquet_footer": (ctypes.c_int64, (_POINTER, ctypes.c_int64, _POINTER, _POINTER)),
}
_CUT_GROUPS = 512
_NO_ROOM = _FAULTS.index("the footer has changed while it was read")
_ONE_STRUCT = b"\x1c"
"""The Thrift header of a list of one structure."""


class FooterFacts(Struct, frozen=True, eq=False):
    """The numbers that a footer states, not verified.

    Shapes:  elements: int64[e, 4], the schema's, each group before its children.
    groups: int64[g, 2].   columns: int64[c, 9], row group after row group.
    levels: int64[l]: for each column in turn, as many numbers as its LEVELS says: how many of its
    entries have each definition level.
    """

    rows: int
    is_encrypted: bool
    elements: Int64
    groups: Int64
    columns: Int64
    levels: Int64


class FooterCuts(Struct, frozen=True, eq=False):
    """The places of the row groups in a footer, so that one can be parsed without the others.

    Shapes:  starts: int64[g + 1], where each begins, and the end of the last; `list_at` is where
    their list begins.   filled: int64[b], the groups that have rows, which are the blocks.
    """

    list_at: int
    starts: Int64
    filled: Int64

    def footer_of(self, content: memoryview, block: int) -> bytes:
        """Return the footer of a file with only this row group. `content` is the FileMetaData.

        Raises:  IndexError: there is no such block.
        """
        group = self.filled[block]
        begin, end = self.starts[group], self.starts[group + 1]
        parts = content[: self.list_at], _ONE_STRUCT, content[begin:end], content[self.starts[-1] :]
        return b"".join(parts)


def cut_footer(content: memoryview) -> FooterCuts:
    """Find the row groups in this FileMetaData, without parsing them.

    Raises:  ValueError: the content is not a FileMetaData.
    """
    given, room = np.frombuffer(content, np.uint8), _CUT_GROUPS
    while True:
        counts, groups = np.array((room, 0, 0, 0), np.int64), np.empty((room, 2), np.int64)
        fault = facts_library().cut_parquet_footer(
            given.ctypes.data, len(given), groups.ctypes.data, counts.ctypes.data
        )
        if fault != _NO_ROOM:
            break
        room *= 8
    if fault:
        raise ValueError(_FAULTS[fault].format(counts[3]))
    count, list_at, end, _ = counts.tolist()
    rows, starts = groups[:count].T
    return FooterCuts(list_at, np.append(starts, end), np.flatnonzero(rows))


@functools.cache
def facts_library() -> ctypes.CDLL:
    """Return the library, which is loaded once."""
    return compiled.load(LIBRARY, SOURCE, "parquet_facts_source_crc", _SIGNATURES)


def read_footer(content: bytes | memoryview) -> FooterFacts:
    """Parse the FileMetaData at the beginning of `content`. The resulting tables take at most 72
    bytes for each byte of the FileMetaData.

    Raises:  ValueError: the content is not a FileMetaData.
    """
    counts = np.zeros(7, np.int64)
    given = np.frombuffer(content, np.uint8)
    tables: list[Int64] = []
    for is_counted in (False, True):
        if is_counted:
            shapes = zip(counts[:4].tolist(), (*_WIDTHS, 1), strict=True)
            tables = [np.empty(shape, np.int64) for shape in shapes]
        places = np.array([table.ctypes.data for table in tables], np.uintp)
        fault = facts_library().read_parquet_facts(
            given.ctypes.data,
            len(given),
            places.ctypes.data if is_counted else None,
            counts.ctypes.data,
        )
        if fault:
            raise ValueError(_FAULTS[fault].format(counts[6]))
    elements, groups, columns, levels = tables
    return FooterFacts(
        int(counts[4]), bool(counts[5]), elements, groups, columns, levels.reshape(-1)
    )


MAGIC = b"PAR1"
BYTES_MAX = 16 << 20
SMALL_BYTES = 64 << 10
STALE_USES = 4096
CUTS_MAX = 4096
_TAIL_BYTES = 8

_Key = tuple[str, int]


class ParquetFooter(Struct, frozen=True):
    """A footer and its row groups that have rows, which are the blocks."""

    metadata: pq.FileMetaData
    groups: tuple[int, ...]


class _Known(Struct):
    content: pa.Buffer
    footer: ParquetFooter
    number: int
    used_at: int


def parsed(content: Buffer) -> ParquetFooter:
    """Parse a footer.   Raises:  Arrow's errors."""
    metadata = pq.read_metadata(pa.BufferReader(MAGIC + bytes(content)))
    groups = range(metadata.num_row_groups)
    return ParquetFooter(metadata, tuple(i for i in groups if metadata.row_group(i).num_rows))


class Footers:
    """The cache. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[_Key, _Known] = OrderedDict()
        self._cuts: OrderedDict[int, FooterCuts] = OrderedDict()
        self._bytes = 0
        self._uses = 0

    def group_of(self, block: RawBlock) -> tuple[pq.FileMetaData, int]:
        """Return a footer that has the block's row group, and the index of this row group in it.

        Raises:  ValueError and Arrow's errors; IndexError: there is no such block.
        """
        whole, number = pa.py_buffer(block.preamble), block.preamble_number
        with self._lock:
            footer = self._remembered((block.url, whole.size), whole, number)
            is_cut = footer is None and whole.size > SMALL_BYTES and not self._has_room(whole.size)
        if is_cut:
            content = block.preamble[:-_TAIL_BYTES]
            own = self._cuts_of(content, number).footer_of(content, block.index)
            return parsed(b"".join((own, len(own).to_bytes(4, "little"), MAGIC))).metadata, 0
        footer = footer or self._parsed_now(block.url, whole, number)
        return footer.metadata, footer.groups[block.index]

    def of(self, url: str, content: Buffer, number: int = 0) -> ParquetFooter:
        """Return the footer of this shard, parsed if it is not cached.

        Raises:  Arrow's errors.
        """
        whole = pa.py_buffer(content)
        with self._lock:
            footer = self._remembered((url, whole.size), whole, number)
        return footer or self._parsed_now(url, whole, number)

    def _remembered(self, key: _Key, content: pa.Buffer, number: int) -> ParquetFooter | None:
        self._uses += 1
        known = self._known.get(key)
        if known is None or not (known.number == number != 0 or known.content.equals(content)):
            return None
        known.number, known.used_at = number, self._uses
        self._known.move_to_end(key)
        return known.footer

    def _has_room(self, size: int) -> bool:
        while self._bytes and self._bytes + size > BYTES_MAX:
            key, oldest = next(iter(self._known.items()))
            if self._uses - oldest.used_at <= STALE_USES:
                return False
            self._forget(key)
        return True

    def _forget(self, key: _Key) -> None:
        if self._known.pop(key, None) is not None:
            self._bytes -= key[1]

    def _parsed_now(self, url: str, content: pa.Buffer, number: int) -> ParquetFooter:
        own = content.to_pybytes()  # a copy, since the original memory may be overwritten
        footer, key = parsed(own), (url, content.size)
        with self._lock:
            self._forget(key)
            self._known[key] = _Known(pa.py_buffer(own), footer, number, self._uses)
            self._bytes += content.size
            while self._bytes > BYTES_MAX and len(self._known) > 1:
                self._forget(next(iter(self._known)))
        return footer

    def _cuts_of(self, content: memoryview, number: int) -> FooterCuts:
        with self._lock:
            known = self._cuts.get(number)
            if known is not None:
                self._cuts.move_to_end(number)
                return known
        cuts = cut_footer(content)
        with self._lock:
            if number:
                self._cuts[number] = cuts
            if len(self._cuts) > CUTS_MAX:
                self._cuts.popitem(last=False)
        return cuts
