"""Bytes of a shard by offset, read forward, with read-ahead: the input of record formats' parsers.

Invariants:
1. `view` returns fewer bytes than asked for only at the end of the data.
2. The bytes held never exceed the larger of one read-ahead and one request.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Protocol

from typing_extensions import Buffer

from dataplane.formats.base import RawBlock, ShardReader
from dataplane.formats.first_reads import PROBE_BYTES
from dataplane.formats.gzipped import inflate, is_compressed
from dataplane.model import Region

# A block of records aims at this size: large enough for one ranged read to be worth its latency,
# small enough that a shuffle window of many open blocks fits in memory.
BLOCK_BYTES = 4 << 20
# Skipping less than this is slower than reading it: a request to a store costs as much as about
# one MiB of transfer.
NEAR_BYTES = 1 << 20
_READS_AT_ONCE = 8


class ByteSource(Protocol):
    """Bytes by offset, read forward: an offset never lies before that of an earlier view."""

    @property
    def url(self) -> str: ...

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes [offset, offset + length), fewer only at the end of the data."""


class Window:
    """A shard behind one read-ahead buffer: skips large gaps, reads small ones."""

    def __init__(self, shard: ShardReader) -> None:
        self._shard = shard
        self._start = 0
        self._held = memoryview(b"")

    @property
    def url(self) -> str:
        return self._shard.url

    def view(self, offset: int, length: int) -> memoryview:
        """Implement `ByteSource.view`; any order of offsets works, rising ones are fast."""
        length = max(0, min(length, self._shard.size_bytes - offset))
        end = self._start + len(self._held)
        if length and not self._start <= offset <= offset + length <= end:
            near = end > 0 and self._start <= offset <= end + NEAR_BYTES
            span = max(length, BLOCK_BYTES if near else PROBE_BYTES)
            span = min(span, self._shard.size_bytes - offset)
            self._held = memoryview(self._shard.read(offset, span)).cast("B")
            self._start = offset
        at = offset - self._start
        return self._held[at : at + length] if length else memoryview(b"")


class Parts:
    """A shard, several ranges of which can be read at a time. `known` maps the offsets of ranges
    that were read before to their bytes.

    Raises:  the StoreError family, as the shard does.
    """

    def __init__(
        self,
        shard: ShardReader,
        rest: Window,
        places: Sequence[tuple[int, int]],
        known: Mapping[int, memoryview],
    ) -> None:
        self._size, self._rest = shard.size_bytes, rest
        within = sorted((at, min(length, self._size - at)) for at, length in places)
        within = [(at, length) for at, length in within if length > 0]
        read = shard.read_all([Region(*place) for place in within])
        held = [(at, memoryview(new).cast("B")) for (at, _), new in zip(within, read, strict=True)]
        held = sorted([*held, *known.items()], key=itemgetter(0))
        self._starts = [at for at, _ in held]
        self._held = [content for _, content in held]

    @property
    def url(self) -> str:
        return self._rest.url

    def view(self, offset: int, length: int) -> memoryview:
        """Implement `ByteSource.view`."""
        length = max(0, min(length, self._size - offset))
        part = bisect.bisect_right(self._starts, offset) - 1
        if part >= 0:
            at = offset - self._starts[part]
            if at + length <= len(self._held[part]):
                return self._held[part][at : at + length]
        return self._rest.view(offset, length)


def read_in_threads(shard: ShardReader, places: Sequence[Region]) -> list[Buffer]:
    """Implement `ShardReader.read_all` for readers that can read only one range at a time."""
    with ThreadPoolExecutor(min(_READS_AT_ONCE, max(len(places), 1))) as pool:
        return list(pool.map(lambda place: shard.read(place.offset, place.length), places))


class Memory:
    """A block in memory; `base` is the offset of its first byte in the shard."""

    def __init__(self, url: str, body: memoryview, base: int) -> None:
        self._url = url
        self._body = body
        self._base = base

    @property
    def url(self) -> str:
        return self._url

    @property
    def base(self) -> int:
        """The offset of the first byte."""
        return self._base

    @property
    def length(self) -> int:
        """How many bytes there are."""
        return len(self._body)

    def view(self, offset: int, length: int) -> memoryview:
        """Implement `ByteSource.view`."""
        at = max(0, offset - self._base)
        return self._body[at : at + max(0, length)]


class Inflated:
    """A compressed shard, inflated while it is read. Offsets count inflated bytes."""

    def __init__(self, shard: ShardReader) -> None:
        self._url = shard.url
        self._pieces: Iterator[Buffer] = inflate(shard.url, shard.stream())
        self._start = 0
        self._held = bytearray()

    @property
    def url(self) -> str:
        return self._url

    def view(self, offset: int, length: int) -> memoryview:
        """Implement `ByteSource.view`; drop the bytes before `offset`."""
        self._forget(offset)
        while self._start + len(self._held) < offset + length:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._held += piece
            self._forget(offset)
        at = offset - self._start
        return memoryview(bytes(self._held[at : at + length]))

    def _forget(self, offset: int) -> None:
        gone = min(offset - self._start, len(self._held))
        if gone > 0:
            del self._held[:gone]
            self._start += gone


def block_source(block: RawBlock, *, compressed: bool) -> Memory:
    """Return a fetched block as a source; a compressed shard is one block and is inflated whole."""
    if not compressed:
        return Memory(block.url, block.body, block.place.offset)
    inflated = bytearray()
    for piece in inflate(block.url, iter((block.body,))):
        inflated += piece
    return Memory(block.url, memoryview(inflated).toreadonly(), 0)


def holds_compressed(block: RawBlock) -> bool:
    """Whether a fetched block is a whole shard that starts like gzip or zlib data."""
    whole = block.place.offset == 0 and block.place.length == block.shard_bytes
    return whole and is_compressed(bytes(block.body[:4]))
