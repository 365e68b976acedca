"""Gzip and zlib shards: inflated piece by piece, bounded, with errors that name the place.

A compressed shard has no random access, so each is one block: it is fetched and decoded whole.

Source:  RFC 1950, RFC 1952 (a gzip file may hold several members, one after the other).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from typing_extensions import Buffer

from dataplane.errors import CorruptShard
from dataplane.formats.faults import corrupt

PIECE_BYTES = 1 << 20
FEED_BYTES = 256 << 10
# A few kilobytes can inflate to gigabytes. Real text and tensors stay below 100:1; a higher ratio
# beyond the floor counts as a bomb, and no block may be larger than the ceiling.
RATIO_MAX = 256
RATIO_FLOOR_BYTES = 256 << 20
INFLATED_BYTES_MAX = 16 << 30

_GZIP = b"\x1f\x8b\x08"
_ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")


def is_compressed(head: bytes) -> bool:
    """Whether data that starts like this is gzip or zlib data."""
    return head.startswith(_GZIP) or head.startswith(_ZLIB)


def inflate(url: str, pieces: Iterable[Buffer]) -> Iterator[bytes]:
    """Yield the inflated data of a gzip or zlib shard, in pieces of at most 1 MiB.

    Raises:  CorruptShard: damaged, truncated, followed by garbage, or a decompression bomb.
    """
    engine = None
    fed = made = members = 0
    for feed in _slices(pieces):
        rest: bytes | memoryview = feed
        while rest or engine is not None:
            if engine is None:
                # Zeros may pad the members to a device's block size; nothing else may follow.
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
