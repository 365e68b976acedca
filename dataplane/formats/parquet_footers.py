"""Parsed Parquet footers, the last few of them.

Every block of a shard needs the footer, and parsing a large one costs more than a small block.

1. A footer is taken for a remembered one only if all of its bytes are the same: a shard that was
   written anew under its name has another.
2. Remembered are the last one, and more of them as long as all together have 16 MiB: parsed they
   take seven times their bytes, of the memory that a worker may have.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import Buffer

MAGIC = b"PAR1"
BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class ParquetFooter:
    """A footer and its row groups that have rows, which are the blocks."""

    metadata: pq.FileMetaData
    groups: tuple[int, ...]


def parsed(content: Buffer) -> ParquetFooter:
    """Raises:  what Arrow has against it."""
    metadata = pq.read_metadata(pa.BufferReader(MAGIC + bytes(content)))
    groups = range(metadata.num_row_groups)
    return ParquetFooter(metadata, tuple(i for i in groups if metadata.row_group(i).num_rows))


class Footers:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, int], tuple[pa.Buffer, ParquetFooter]] = OrderedDict()
        self._bytes = 0

    def of(self, url: str, content: Buffer) -> ParquetFooter:
        """The footer of this shard, parsed now if these are not the bytes that were parsed before.

        Raises:  what Arrow has against it.
        """
        whole = pa.py_buffer(content)
        key = url, whole.size
        with self._lock:
            known = self._known.get(key)
            if known is not None and known[0].equals(whole):
                self._known.move_to_end(key)
                return known[1]
        own = whole.to_pybytes()  # what it lies in may be written over
        footer = parsed(own)
        with self._lock:
            if self._known.pop(key, None) is not None:
                self._bytes -= whole.size
            self._known[key] = pa.py_buffer(own), footer
            self._bytes += whole.size
            while self._bytes > BYTES_MAX and len(self._known) > 1:
                (_, size), _ = self._known.popitem(last=False)
                self._bytes -= size
        return footer
