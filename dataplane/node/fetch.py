"""Reads blocks from the store into the block arena, several at a time.

A raw region has room for the shard's preamble, followed by the needed bytes of the block. Every
block of a shard needs the preamble, so it is read once and kept separately (`preambles.py`). It is
copied into the raw region only if rows are gathered from there, and read into it if there is no
room to keep it; otherwise its room stays empty.

Blocks that are fetched together are read in one request, each into its own region. If that does not
end, or gives too little, each is read by itself, so that no block fails because of another.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, Self

from msgspec import Struct

from dataplane.arena.memfd import Arena
from dataplane.config import NodeConfig
from dataplane.errors import (
    BudgetTooSmall,
    DataplaneError,
    StoreError,
    StoreUnavailable,
    TruncatedRead,
)
from dataplane.machine import numa_nodes
from dataplane.model import Region
from dataplane.node.fetchers import Fetchers
from dataplane.node.policy import allowed_urls
from dataplane.node.preambles import KeptPreamble, Preambles, preamble_bytes
from dataplane.rpc import fetches, tasks
from dataplane.rpc.membership import NodeReads
from dataplane.scheduler.in_flight import RANGE_BYTES
from dataplane.store.base import Store
from dataplane.store.gate import Pause
from dataplane.store.outage import Outages
from dataplane.store.unreachable import UNREACHABLE
from dataplane.store.urls import base_of, normalise, scheme_of
from dataplane.trace import Trace

Report = Callable[[DataplaneError | None], None]
Connect = Callable[[str], Store]
Trouble = Callable[[str], StoreError | None]

_GIVEN_UP_MAX = 256
# Failures that a shorter read may not have.
_OF_LENGTH = (StoreUnavailable, TruncatedRead, BudgetTooSmall)


class BlockRead(Struct, frozen=True):
    """A block to be read into a region of the block arena; `report` is called when that is no
    longer written. `is_copied`: put the preamble before it. Otherwise the preamble is held for the
    block with this key, until `let_go`.

    Shapes:  into: the length of the preamble + the length of all pieces.
    """

    key: int
    raw: tasks.RawBlockRef
    into: Region
    report: Report
    is_copied: bool


class RangeSource(Protocol):
    """Where ranges are read from when no cache has them. `Fetchers` is one."""

    def start(self, store: str = "") -> None:
        """Get ready: reads will follow, of this store if one is named."""

    def read(self, order: fetches.ReadBody, report: Report) -> None:
        """Carry out an order; `report` is called later, when its memory is no longer written."""

    def trouble(self, url: str) -> StoreError | None:
        """Why reads of this shard are delayed; None if no reason is known."""

    def pause(self, pause: Pause) -> None:
        """A store has asked somebody else on this host to slow down."""

    def look(self) -> None:
        """Time has passed."""

    def statistics(self) -> NodeReads:
        """What was read so far."""

    def close(self) -> None:
        """Stop all reads. Nothing is written any more when this returns."""


class Fetcher:
    """Fetches blocks from `origin`. Preambles are kept in `preambles`, whose memory the fetcher
    then owns. Call it only from the event loop.
    """

    def __init__(self, origin: RangeSource, preambles: Preambles) -> None:
        self._origin = origin
        self._preambles = preambles
        self._given_up: OrderedDict[str, StoreError] = OrderedDict()

    @classmethod
    def of(
        cls,
        config: NodeConfig,
        arena: Arena,
        trace: Trace,
        outages: Outages,
        slow_down: Callable[[Pause], None] = lambda _: None,
    ) -> Self:
        """The fetcher of a node, into this block arena. `slow_down` is called if a store asks for a
        pause.

        Raises:  BudgetTooSmall: the machine refuses the arena of preambles.
        """
        preambles = Preambles(preamble_bytes(config.block_arena_bytes))
        start = fetches.StartFetching(
            tuple(b"%s=%s" % entry for entry in os.environb.items()),
            config.stall_timeout_s,
            config.fetch_timeout_s,
            config.log_level,
            config.log_format,
            is_policed=not config.embedded,
            allowed_urls=allowed_urls(config),
        )
        count_max = max(1, len(os.sched_getaffinity(0)) // 2)
        arenas = (arena, preambles.arena)
        fetchers = Fetchers(
            count_max, start, arenas, trace, outages, slow_down, numa_nodes=numa_nodes()
        )
        return cls(fetchers, preambles)

    def ahead(self, connect: Connect) -> Connect:
        """The same, but the first call for a remote shard, from any thread, starts what reads its
        blocks: so that is ready when the shards are listed.
        """
        loop, is_started = asyncio.get_running_loop(), False

        def connected(url: str) -> Store:
            nonlocal is_started
            if not is_started and scheme_of(normalise(url)) != "file":
                is_started = True
                loop.call_soon_threadsafe(self._origin.start, base_of(normalise(url)))
            return connect(url)

        return connected

    def fetch(self, blocks: Sequence[BlockRead]) -> None:
        """Read blocks of one shard, each of which lies close behind the one before."""
        requests: list[list[_Piece]] = []
        for block in blocks:
            first, *others = self._pieces(block)
            if requests:
                requests[-1].append(first)
            else:
                requests.append([first])
            requests += [[each] for each in others]
        for request in requests:
            self._read_together(blocks[0].raw, request)

    def _pieces(self, block: BlockRead) -> list[_Piece]:
        """Start to read its preamble. Returns what else is to be read."""
        key, raw, into = block.key, block.raw, block.into
        url, place = raw.url, raw.preamble_place
        kept = self._preambles.hold(key, url, raw.etag, place) if place.length else None
        head = Region(into.offset, place.length)

        def end(error: DataplaneError | None) -> None:
            if block.is_copied:
                self.let_go(key)
            self._note(url, error)
            block.report(error)

        def read(error: DataplaneError | None) -> None:
            if error is None and kept is not None and block.is_copied:
                self._origin.read(fetches.CopyPreamble(0, kept.region, head), end)
            else:
                end(error)

        parts = _Parts(read)
        if kept is not None:  # at the same time as the block, so that both take one round trip
            self._preamble(raw, kept, parts.one_more())
        elif place.length:
            self._read(raw, place.offset, tasks.BLOCK_ARENA, head, parts)
        at, found = head.offset + head.length, []
        for piece in raw.pieces or (raw.place,):
            target = fetches.ReadTarget(piece.offset, Region(at, piece.length))
            found.append(_Piece(target, parts.one_more()))
            at += piece.length
        parts.are_all()
        return found

    def _read_together(self, raw: tasks.RawBlockRef, pieces: Sequence[_Piece]) -> None:
        """Read them in one request."""
        if len(pieces) == 1:
            self._read_alone(raw, pieces[0])
            return

        def end(error: DataplaneError | None) -> None:
            for piece in pieces:
                if isinstance(error, _OF_LENGTH):
                    self._read_alone(raw, piece)
                else:
                    piece.report(error)

        first, *more = [piece.target for piece in pieces]
        order = fetches.ReadRange(
            0, raw.url, first.offset, raw.etag, tasks.BLOCK_ARENA, first.into, tuple(more)
        )
        self._origin.read(order, end)

    def _read_alone(self, raw: tasks.RawBlockRef, piece: _Piece) -> None:
        parts = _Parts(piece.report)
        self._read(raw, piece.target.offset, tasks.BLOCK_ARENA, piece.target.into, parts)
        parts.are_all()

    def for_worker(
        self, key: int, raw: tasks.RawBlockRef
    ) -> tuple[tasks.RawBlockRef, tuple[tuple[int, int], ...]]:
        """Where a worker finds a fetched block, and which arenas it needs besides the block
        arena.
        """
        return self._preambles.for_worker(key, raw)

    def let_go(self, key: int) -> None:
        """Release the preamble that is held for this block, if there is one."""
        self._preambles.let_go(key)

    def trouble(self, url: str) -> StoreError | None:
        """Why reads of this shard are delayed; None if no reason is known."""
        return self._origin.trouble(url) or self._given_up.get(url)

    def pause(self, pause: Pause) -> None:
        """A store has asked the node's own calls to slow down. Thread-safe."""
        self._origin.pause(pause)

    def statistics(self) -> NodeReads:
        """What was read so far."""
        return self._origin.statistics()

    def look(self) -> None:
        """Call it about twice a second."""
        self._origin.look()

    def close(self) -> None:
        """Stop all reads. May be called twice."""
        self._origin.close()
        self._preambles.close()

    def _note(self, url: str, error: DataplaneError | None) -> None:
        self._given_up.pop(url, None)
        if isinstance(error, UNREACHABLE):
            self._given_up[url] = error
            if len(self._given_up) > _GIVEN_UP_MAX:
                self._given_up.popitem(last=False)

    def _preamble(self, raw: tasks.RawBlockRef, kept: KeptPreamble, report: Report) -> None:
        """Read once, even if several blocks start together."""
        if kept.reading is None or kept.has_failed:
            kept.reading = asyncio.get_running_loop().create_future()
            parts = _Parts(partial(_set, kept.reading))
            at = raw.preamble_place.offset
            self._read(raw, at, tasks.PREAMBLE_ARENA, kept.region, parts)
            parts.are_all()
        kept.reading.add_done_callback(lambda done: report(done.result()))

    def _read(
        self, raw: tasks.RawBlockRef, offset: int, arena_id: int, into: Region, parts: _Parts
    ) -> None:
        """Read bytes of a shard from the nearest place that has them: blocks in memory never get
        here (scheduler/blocks.py). A cache on disk and the memory of neighbours belong here and in
        `_read_together`, before the origin.
        """
        for part in _ranges(into):
            at = offset + part.offset - into.offset
            order = fetches.ReadRange(0, raw.url, at, raw.etag, arena_id, part)
            self._origin.read(order, parts.one_more())


class _Piece(Struct, frozen=True):
    """A part of a block that is read."""

    target: fetches.ReadTarget
    report: Report


class _Parts:
    """Counts the parts of one read; `report` is called once all have ended, with the first error.
    Parts are reported later than they are added.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._left = 1
        self._error: DataplaneError | None = None

    def one_more(self) -> Report:
        """Reports the end of one more part."""
        self._left += 1
        return self._ended

    def are_all(self) -> None:
        """No part will be added."""
        self._ended(None)

    def _ended(self, error: DataplaneError | None) -> None:
        self._left -= 1
        self._error = self._error or error
        if not self._left:
            self._report(self._error)


def _set(reading: asyncio.Future[DataplaneError | None], error: DataplaneError | None) -> None:
    if not reading.cancelled():
        reading.set_result(error)


def _ranges(whole: Region) -> Iterator[Region]:
    """Equal parts, none longer than RANGE_BYTES."""
    count = max(1, -(-whole.length // RANGE_BYTES))
    cuts = [whole.length * part // count for part in range(count + 1)]
    for start, stop in itertools.pairwise(cuts):
        yield Region(whole.offset + start, stop - start)
