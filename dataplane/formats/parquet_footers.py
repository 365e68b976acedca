"""A cache of the last few parsed Parquet footers.

Every block of a shard needs the footer, and parsing a large one costs more than a small block.

1. A footer equals a cached one if both have the same number, or the same bytes. A shard that was
   rewritten under its name has another footer.
2. The cache holds the last footer, and more while together they have at most BYTES_MAX bytes.
   A parsed footer takes seven times its size from a worker's memory.
3. A footer of more than SMALL_BYTES replaces another only if that one was not used for the last
   STALE_USES. If there is no room for it, each block parses only its own row group: this cost does
   not depend on the number of row groups and shards. The cache holds the places of the row groups
   in the last CUTS_MAX such footers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct
from typing_extensions import Buffer

from dataplane.formats.base import RawBlock
from dataplane.formats.parquet_facts import FooterCuts, cut_footer

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
        own = content.to_pybytes()  # its memory may be overwritten
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
