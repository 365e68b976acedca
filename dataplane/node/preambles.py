"""The preambles of shards that are being read: the bytes that every block of a shard needs besides
its own (a Parquet footer, Arrow dictionaries).

They lie in a separate arena that workers map, so that they need not be copied for each block. A
block refers to its preamble by number and place.

Invariants:
1. A preamble that is held for a block stays in place. The others are dropped when room is needed,
   the longest unheld first.
2. A number is never reused, so that a worker cannot take a new preamble for an old one.
3. If too many are held and there is no room, the preamble is not held here, and is read into the
   block's own region.
4. Bytes that indexing has read are not read again, as long as they are remembered: preambles of the
   shards that were indexed last, equal ones once.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from asyncio import Future
from collections import OrderedDict
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from dataplane.arena.allocator import Allocator
from dataplane.arena.memfd import Arena
from dataplane.model.errors import BudgetTooSmall, DataplaneError
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.rpc.fetches import Outcome

BYTES_MIN = 64 << 20
_SHARE = 16
REMEMBERED_MAX = 4096
"""Preambles of so many shards, of at most 64 KiB each."""
_REMEMBERED_BYTES_MAX = 64 << 10
_COPIED_BYTES_MAX = 256 << 10
"""The event loop copies a preamble of at most this many bytes itself."""

_ShardKey = tuple[str, str, int]


def preamble_bytes(block_arena_bytes: int) -> int:
    """The size of the preamble arena for a block arena of this size."""
    return max(BYTES_MIN, block_arena_bytes // _SHARE)


class KeptPreamble(Struct, eq=False):
    """One preamble: its place in the arena, its number, and for how many blocks it is held.
    `reading` gets the end of its read.
    """

    shard: _ShardKey
    number: int
    region: Region
    holders: int = 0
    reading: Future[Outcome] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the read of the preamble failed."""
        reading = self.reading
        return reading is not None and reading.done() and reading.result() is not None


class _Remembered:
    """Bytes of preambles, by shard, until they are in the arena. Thread-safe."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._contents: OrderedDict[_ShardKey, bytes] = OrderedDict()
        self._last = b""

    def add(self, shard: _ShardKey, content: bytes) -> None:
        with self._changing:
            if content == self._last:  # most shards of a dataset have the same
                content = self._last
            self._last = self._contents[shard] = content
            if len(self._contents) > REMEMBERED_MAX:
                self._contents.popitem(last=False)

    def take(self, shard: _ShardKey) -> bytes | None:
        with self._changing:
            return self._contents.pop(shard, None)


class Preambles:
    """An arena of `size_bytes`. Call it only from the event loop, except `remember`."""

    def __init__(self, size_bytes: int) -> None:
        """Allocate the arena.

        Raises:  BudgetTooSmall: the machine refuses the arena.
        """
        self.arena = Arena.create("dataplane-preambles", size_bytes)
        self._allocator = Allocator(size_bytes)
        self._kept: dict[_ShardKey, KeptPreamble] = {}
        self._idle: OrderedDict[_ShardKey, KeptPreamble] = OrderedDict()
        """The preambles that are not held; the one released last is at the end."""
        self._held: dict[int, KeptPreamble] = {}
        self._numbers = itertools.count(1)
        self._remembered = _Remembered()

    def remember(self, url: str, etag: str, place: Region, content: bytes) -> None:
        """Keep the preamble of this shard, which was read and will be needed. Thread-safe."""
        if len(content) <= _REMEMBERED_BYTES_MAX:
            self._remembered.add((url, etag, place.offset), content)

    def fill(self, kept: KeptPreamble) -> bool:
        """Write the preamble from remembered bytes; return False if it must be read."""
        content = self._remembered.take(kept.shard)
        if content is None or len(content) != kept.region.length:
            return False
        self.arena.view(kept.region.offset, kept.region.length)[:] = content
        return True

    def hold(self, key: int, url: str, etag: str, place: Region) -> KeptPreamble | None:
        """Hold the preamble of this shard for the block with this key; None if there is no room."""
        shard = (url, etag, place.offset)
        kept = self._kept.get(shard)
        if kept is None:
            region = self._room(place.length)
            if region is None:
                return None
            kept = self._kept[shard] = KeptPreamble(shard, next(self._numbers), region)
        self._idle.pop(shard, None)
        kept.holders += 1
        self._held[key] = kept
        return kept

    def let_go(self, key: int) -> None:
        """Release the preamble that is held for this block, if there is one."""
        kept = self._held.pop(key, None)
        if kept is None:
            return
        kept.holders -= 1
        if not kept.holders:
            self._idle[kept.shard] = kept
            if kept.has_failed:
                self._drop(kept)

    def for_worker(
        self, key: int, raw: tasks.RawBlockRef
    ) -> tuple[tasks.RawBlockRef, tuple[tuple[int, int], ...]]:
        """Return where a worker finds the block, and the arenas that it needs for that:
        (id, fd).
        """
        kept = self._held.get(key)
        if kept is None:
            return raw, ()
        told = replace(raw, kept_preamble=kept.region, preamble_number=kept.number)
        return told, ((tasks.PREAMBLE_ARENA, self.arena.fd),)

    def copy(
        self,
        kept: KeptPreamble,
        arena: Arena,
        offset: int,
        report: Callable[[DataplaneError | None], None],
    ) -> None:
        """Copy a preamble to this place; `report` is called with the error: at once, or later for a
        long preamble, for which the event loop does not wait.
        """
        region = kept.region

        def copied() -> DataplaneError | None:
            try:
                arena.write(offset, self.arena.view(region.offset, region.length))
            except DataplaneError as error:
                return error
            return None

        if region.length <= _COPIED_BYTES_MAX:
            report(copied())
            return
        copying = asyncio.get_running_loop().run_in_executor(None, copied)
        copying.add_done_callback(lambda done: report(done.result()))

    def close(self) -> None:
        """Release the memory. May be called twice."""
        self.arena.close()

    def _room(self, length: int) -> Region | None:
        at = self._allocator.allocate(length)
        while at is None and self._idle:
            self._drop(next(iter(self._idle.values())))
            at = self._allocator.allocate(length)
        if at is None:
            return None
        try:
            self.arena.reserve(at, length)
        except BudgetTooSmall:
            self._allocator.free(at)
            return None
        return Region(at, length)

    def _drop(self, kept: KeptPreamble) -> None:
        del self._kept[kept.shard], self._idle[kept.shard]
        self._allocator.free(kept.region.offset)
