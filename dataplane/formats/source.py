"""Read the bytes of a shard by offset: forward with read-ahead, decompressed, or as a file for
pyarrow.

Invariants:
1. `view` returns fewer bytes than were requested only at the end of the data.
2. At most one read-ahead or one request is held in memory, whichever is larger.
"""

from __future__ import annotations

import bisect
import io
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Protocol

import pyarrow as pa
from typing_extensions import Buffer

from dataplane.formats.base import RawBlock, ShardReader
from dataplane.formats.faults import corrupt
from dataplane.model.errors import CorruptShard
from dataplane.model.records import Region

# Compressed shards, decompressed piece by piece with bounded memory; errors name the place.
#
# A compressed shard has no random access, so it is one block: it is fetched and decoded whole.
#
# Source:  RFC 1950, RFC 8878, RFC 1952 (a gzip file may hold several members, one after the other).

PROBE_BYTES = 64 << 10
"""The size of a read if only a few bytes are needed."""
PIECE_BYTES = 1 << 20
FEED_BYTES = 256 << 10
# A few kilobytes can decompress to gigabytes. Real text and tensors stay below 100:1. A ratio above
# RATIO_MAX counts as a bomb from RATIO_FLOOR_BYTES on, and no block may exceed INFLATED_BYTES_MAX.
RATIO_MAX = 256
RATIO_FLOOR_BYTES = 256 << 20
INFLATED_BYTES_MAX = 16 << 30

_GZIP = b"\x1f\x8b\x08"
_ZSTD = b"\x28\xb5\x2f\xfd"
# A frame that decompressors skip; pzstd begins with one.
_ZSTD_SKIPPED = tuple(bytes([code]) + b"\x2a\x4d\x18" for code in range(0x50, 0x60))
_ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")


def is_compressed(head: bytes) -> bool:
    """Return whether data that starts like this is gzip, zlib or zstd data."""
    return head.startswith((_GZIP, _ZSTD, *_ZSTD_SKIPPED, *_ZLIB))


def inflate(url: str, pieces: Iterable[Buffer]) -> Iterator[bytes]:
    """Return the decompressed data of a gzip, zlib or zstd shard, in pieces of at most 1 MiB.

    Raises:  CorruptShard: damaged, truncated, followed by garbage, or a decompression bomb.
    """
    pieces = iter(pieces)
    first = bytes(memoryview(next(pieces, b"")))
    engine = _inflate_zstd if first.startswith((_ZSTD, *_ZSTD_SKIPPED)) else _inflate_zlib
    return engine(url, itertools.chain([first], pieces))


def _inflate_zlib(url: str, pieces: Iterable[Buffer]) -> Iterator[bytes]:
    engine = None
    fed = made = members = 0
    for feed in _slices(pieces):
        rest: bytes | memoryview = feed
        while rest or engine is not None:
            if engine is None:
                # Skip zeros after a member, with which devices fill a block. Anything else must be
                # another member.
                rest = bytes(rest).lstrip(b"\0") if members else rest
                if not rest:
                    break
                engine = zlib.decompressobj(wbits=47)
                members += 1
            try:
                out = engine.decompress(rest, PIECE_BYTES)
            except zlib.error as fault:
                raise corrupt(url, fed, f"damaged compressed data ({fault})") from fault
            made += len(out)
            left = len(engine.unused_data if engine.eof else engine.unconsumed_tail)
            _check_bomb(url, fed + len(feed) - left, made)
            if out:
                yield out
            if engine.eof:
                rest, engine = engine.unused_data, None
            elif not engine.unconsumed_tail and len(out) < PIECE_BYTES:
                break
            else:
                rest = engine.unconsumed_tail
        fed += len(feed)
    if engine is not None or fed == 0:
        raise corrupt(
            url,
            fed,
            "the compressed data is truncated; upload the shard again",
            expected="the end of the gzip stream",
            found="the end of the shard",
        )


class _Feed:
    """A file that reads these pieces, for pyarrow; `fed` bytes of them were read."""

    closed = False

    def __init__(self, pieces: Iterable[Buffer]) -> None:
        self._slices = _slices(pieces)
        self._rest = memoryview(b"")
        self.fed = 0

    def read(self, length: int) -> memoryview:
        """Read up to `length` bytes."""
        while not self._rest and (piece := next(self._slices, None)) is not None:
            self._rest = piece
        part, self._rest = self._rest[:length], self._rest[length:]
        self.fed += len(part)
        return part

    def close(self) -> None:
        """Do nothing: the pieces belong to the caller."""

    def readable(self) -> bool:
        """Return True."""
        return True


def _inflate_zstd(url: str, pieces: Iterable[Buffer]) -> Iterator[bytes]:
    feed, made = _Feed(pieces), 0
    with pa.CompressedInputStream(pa.PythonFile(feed, mode="r"), "zstd") as stream:
        while True:
            try:
                piece: bytes = stream.read(PIECE_BYTES)
            except OSError as fault:
                what = f"damaged or truncated compressed data ({str(fault)[:200]})"
                raise corrupt(url, feed.fed, what) from fault
            if not piece:
                return
            made += len(piece)
            _check_bomb(url, feed.fed, made)
            yield piece


def _slices(pieces: Iterable[Buffer]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for at in range(0, len(view), FEED_BYTES):
            yield view[at : at + FEED_BYTES]


def _check_bomb(url: str, fed: int, made: int) -> None:
    if made <= RATIO_FLOOR_BYTES:
        return
    if made > INFLATED_BYTES_MAX or made > RATIO_MAX * fed:
        raise CorruptShard(
            f"{url}: {fed} compressed bytes inflate to more than {made} bytes. A compressed shard "
            f"is decoded whole, so at most {INFLATED_BYTES_MAX >> 30} GiB and {RATIO_MAX}:1 are "
            "accepted; write smaller shards, or uncompressed ones",
            shard=url,
            offset=fed,
            expected=f"at most {min(INFLATED_BYTES_MAX, RATIO_MAX * fed)} bytes",
            found=made,
        )


# The target size of a block of records: large enough that one ranged read is worth its latency, and
# small enough that a shuffle window of many open blocks fits into memory.
BLOCK_BYTES = 4 << 20
# Skipping fewer bytes than this is slower than reading them: a request to a store costs as much as
# the transfer of about one MiB.
NEAR_BYTES = 1 << 20
_READS_AT_ONCE = 8


class ByteSource(Protocol):
    """Bytes by offset, read forward: an offset is never before that of an earlier view."""

    @property
    def url(self) -> str: ...

    def view(self, offset: int, length: int) -> memoryview:
        """Return bytes [offset, offset + length); fewer only at the end of the data."""


class Window:
    """A shard read through a buffer: skips large gaps, and reads across small ones."""

    def __init__(self, shard: ShardReader) -> None:
        self._shard = shard
        self._start = 0
        self._held = memoryview(b"")

    @property
    def url(self) -> str:
        return self._shard.url

    def view(self, offset: int, length: int) -> memoryview:
        """Implement `ByteSource.view`; ascending offsets are fast, other orders work."""
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
    """A shard whose ranges `places` are read at once, and whose other ranges are read by `rest`.
    `known` contains the bytes of ranges that were read before, by offset.

    Raises:  StoreError and its subclasses, as the shard does.
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
        """The number of bytes in memory."""
        return len(self._body)

    def view(self, offset: int, length: int) -> memoryview:
        """Implement `ByteSource.view`."""
        at = max(0, offset - self._base)
        return self._body[at : at + max(0, length)]


class Inflated:
    """A compressed shard, inflated while it is read. Offsets count inflated bytes. `pieces` are
    those of the shard, if they are read otherwise than by its stream.
    """

    def __init__(self, shard: ShardReader, pieces: Iterable[Buffer] | None = None) -> None:
        self._url = shard.url
        pieces = shard.stream() if pieces is None else pieces
        self._pieces: Iterator[Buffer] = inflate(shard.url, pieces)
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
    """Return a fetched block as a source; a compressed shard is decompressed whole."""
    if not compressed:
        return Memory(block.url, block.body, block.place.offset)
    inflated = bytearray()
    for piece in inflate(block.url, iter((block.body,))):
        inflated += piece
    return Memory(block.url, memoryview(inflated).toreadonly(), 0)


def holds_compressed(block: RawBlock) -> bool:
    """Return whether a fetched block is a whole shard that starts like compressed data."""
    whole = block.place.offset == 0 and block.place.length == block.shard_bytes
    return whole and is_compressed(bytes(block.body[:4]))


class SpliceFile:
    """A read-only file of `size_bytes` bytes; only some pieces of it are available.

    `read` returns views of the pieces, which pyarrow keeps alive as long as an array needs them. A
    read outside of the pieces is an error; it never returns zeros.
    """

    closed = False

    def __init__(self, size_bytes: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self._size_bytes = size_bytes
        self._pieces = tuple(piece for piece in pieces if len(piece[1]))
        self._at = 0

    def read(self, length: int = -1) -> memoryview:
        """Read up to `length` bytes at the current place."""
        left = max(0, self._size_bytes - self._at)
        length = left if length < 0 else min(length, left)
        view = self._view(self._at, length)
        self._at += len(view)
        return view

    def _view(self, at: int, length: int) -> memoryview:
        if length == 0:
            return memoryview(b"")
        for offset, piece in self._pieces:
            if offset <= at < offset + len(piece):
                view = piece[at - offset : at - offset + length]
                if len(view) == length:
                    return view
                rest = self._view(at + len(view), length - len(view))
                return memoryview(b"".join((view, rest)))
        raise OSError(f"the shard's metadata points to byte {at}, outside of the block")

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to another place; see io.IOBase.seek."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the current place."""
        return self._at

    def close(self) -> None:
        """Do nothing: the pieces belong to the caller."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return False."""
        return False

    def seekable(self) -> bool:
        """Return True."""
        return True


def spliced(size_bytes: int, pieces: Sequence[tuple[int, memoryview]]) -> pa.PythonFile:
    """Return the pieces as a pyarrow file."""
    return pa.PythonFile(SpliceFile(size_bytes, pieces), mode="r")
