"""Read blocks from the store into the block arena, several at a time.

A raw region has room for the shard's preamble, followed by the needed bytes of the block. Every
block of a shard needs the preamble, so it is read once and kept separately (`stored.py`). It is
copied into the raw region only if rows are gathered from there, and read into the region if there
is no room to keep the preamble; otherwise the preamble's part of the region stays empty.

Blocks that are fetched together are read in one request, each into its own region. If that request
fails or returns too little, each block is read by itself, so that no block fails because of
another.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.base.machine import this_machine
from dataplane.base.trace import Trace
from dataplane.model.config import NodeConfig
from dataplane.model.errors import (
    BudgetTooSmall,
    StoreError,
    StoreUnavailable,
    TruncatedRead,
)
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours.wire import GIVEN_WHOLE, NOT_GIVEN, RUN_BLOCKS_MAX
from dataplane.node.fetchers import Fetchers, Report
from dataplane.node.stored import CacheFolder, KeptPreamble, Preambles, folder_of, preamble_bytes
from dataplane.rpc import fetches, tasks
from dataplane.rpc.membership import NodeReads
from dataplane.scheduler.in_flight import RANGE_BYTES
from dataplane.store.base import Store
from dataplane.store.faults import UNREACHABLE
from dataplane.store.outage import Outages, Pauses
from dataplane.store.urls import base_of, normalise, prefixes_of, scheme_of

# -- blocks to read together ----------------------------------------------------------------------
#
# A block to read, and the rule for blocks that may be read in one request.

RUN_PARTS = 32
"""A request to a neighbour is for one block, or for at most one part in RUN_PARTS of its arena: the
most that it sends to one of its neighbours at a time."""


class BlockRead(Struct, frozen=True):
    """A block to read into a region of the block arena; `report` is called when the region is no
    longer written. The preamble is copied to the start of the region, in the arena `copied_to`; if
    `copied_to` is None, the preamble is held for the block with this key, until `let_go`. The disk
    is tried first, if `is_not_kept` is given to report a miss, then `neighbour`, then the store.

    Shapes:  into: the length of the preamble + the length of all pieces; the length of the decoded
    block, if the neighbour is to send that.
    """

    key: int
    raw: tasks.RawBlockRef
    into: Region
    report: Report
    copied_to: Arena | None
    neighbour: fetches.Neighbour | None = None
    dataset: bytes = b""
    block: int = 0
    is_not_kept: Report | None = None

    def may_follow(self, others: Sequence[BlockRead], arena_bytes: int) -> bool:
        """Whether the block may be read from the same source in one request with these, which
        precede it in the shard. Nodes have arenas of about this size.
        """
        last, own = others[-1], self.neighbour
        if self.is_not_kept is not None or last.is_not_kept is not None:
            return False
        if own is None or last.neighbour is None:
            return own is last.neighbour
        length = sum(block.into.length for block in (*others, self))
        if len(others) == RUN_BLOCKS_MAX or RUN_PARTS * length > arena_bytes:
            return False
        is_run = self.is_whole and last.is_whole and self.block == last.block + 1
        return is_run and own.peer == last.neighbour.peer

    @property
    def is_whole(self) -> bool:
        """Whether its own bytes, without a preamble, form one piece."""
        is_decoded = self.neighbour is not None and self.neighbour.form is BlockForm.DECODED
        return not is_decoded and len(self.raw.pieces) <= 1


# -- the fetcher -----------------------------------------------------------------------------------

Connect = Callable[[str], Store]
Trouble = Callable[[str], StoreError | None]

_GIVEN_UP_MAX = 256
# After these failures of a joint read, each block is read alone: a shorter read may succeed.
_OF_LENGTH = (StoreUnavailable, TruncatedRead, BudgetTooSmall)


class ReadParts:
    """Counts the parts of one read. `report` is called once all have ended, with the first error,
    or with the number of bytes that a neighbour sent. A part never ends while it is being added.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._left = 1
        self._error: fetches.Outcome = None
        self._given = 0

    def one_more(self) -> Report:
        """Add a part, and return the function that reports its end."""
        self._left += 1
        return self._ended

    def are_all(self) -> None:
        """Note that no more parts will be added."""
        self._ended(None)

    def _ended(self, outcome: fetches.Outcome) -> None:
        self._left -= 1
        if isinstance(outcome, fetches.NeighbourGave):
            self._given += outcome.length
        else:
            self._error = self._error or outcome
        if not self._left:
            given = fetches.NeighbourGave(self._given) if self._given else None
            self._report(self._error or given)


def is_all_there(outcome: fetches.Outcome) -> bool:
    """Whether a read with this outcome has read all bytes."""
    return outcome is None or isinstance(outcome, fetches.NeighbourGave)


class Fetcher:
    """Fetches blocks from `origin`. Preambles are kept in `preambles`, whose memory the fetcher
    then owns, like the `folder` of blocks on disk. Call it only from the event loop.
    """

    def __init__(
        self, origin: Fetchers, preambles: Preambles, folder: CacheFolder | None = None
    ) -> None:
        self.origin, self.folder = origin, folder
        self.cache_bytes = 0 if folder is None else folder.cache_bytes
        self.disk_id = "" if folder is None else folder.disk_id
        self._preambles = preambles
        self._given_up: OrderedDict[str, StoreError] = OrderedDict()

    @classmethod
    def of(
        cls,
        config: NodeConfig,
        arena: Arena,
        trace: Trace,
        outages: Outages,
        pauses: Pauses | None = None,
    ) -> Self:
        """Create the fetcher of a node, into this block arena. It shares pauses of stores through
        `pauses`.

        Raises:  BudgetTooSmall: the machine refuses the arena of preambles.
        ConfigError: the folder for blocks on disk cannot be used.
        """
        folder = folder_of(config, trace)
        preambles = Preambles(preamble_bytes(config.block_arena_bytes))
        start = fetches.StartFetching(
            tuple(b"%s=%s" % entry for entry in os.environb.items()),
            config.stall_timeout_s,
            config.fetch_timeout_s,
            config.log_level,
            config.log_format,
            is_policed=not config.embedded,
            allowed_urls=prefixes_of(config.allowed_urls),
            kept_folder="" if folder is None else str(folder.path),
            tls=config.data_tls,
        )
        count_max = max(1, this_machine().cpu_count // 2)
        arenas = (arena, preambles.arena)
        fetchers = Fetchers(count_max, start, arenas, trace, outages, pauses, folder)
        return cls(fetchers, preambles, folder)

    def beginning(self, scan: Callable[[], None]) -> Callable[[str], None]:
        """Return a function to call, from any thread, with a url of each dataset that is opened.
        The first remote url starts the fetchers, so that they are ready when blocks are needed, and
        calls `scan` to list the blocks on disk. An invalid url raises a ConfigError.
        """
        loop, thread, has_begun = asyncio.get_running_loop(), threading.get_ident(), False

        def start(store: str) -> None:
            self.origin.start(store)
            if self.folder is not None:
                scan()

        def begin(url: str) -> None:
            nonlocal has_begun
            store = base_of(normalise(url))
            if has_begun or scheme_of(store) == "file":
                return
            has_begun = True
            if threading.get_ident() == thread:
                start(store)
            else:
                loop.call_soon_threadsafe(start, store)

        return begin

    def fetch(self, blocks: Sequence[BlockRead]) -> None:
        """Read blocks of one shard that lie close together, in the order of their offsets. Each of
        several blocks must be one that `may_follow` those before.
        """
        if len(blocks) > 1 and blocks[0].neighbour is not None:
            self._ask_for_run(blocks, blocks[0].neighbour)
            return
        requests: list[list[_Piece]] = []
        for block in blocks:
            if block.is_not_kept is not None:
                self._read_kept(block, block.is_not_kept)
                continue
            if block.neighbour is not None:
                self._ask(block, block.neighbour)
                continue
            first, *others = self._pieces(block)
            if requests:
                requests[-1].append(first)
            else:
                requests.append([first])
            requests += [[piece] for piece in others]
        for request in requests:
            self._read_together(blocks[0].raw, request)

    def _read_kept(self, block: BlockRead, is_not_kept: Report) -> None:
        """Read a block from the disk; if that fails, from elsewhere, into the same memory."""
        pieces, head = self._pieces(block), block.raw.preamble_place.length
        into = Region(block.into.offset + head, block.into.length - head)

        def end(outcome: fetches.Outcome) -> None:
            if outcome is None:
                for piece in pieces:
                    piece.report(None)
                return
            is_not_kept(outcome)
            self._ask_for(block, pieces)

        self.origin.read(fetches.ReadKept(0, block.dataset, block.block, into), end)

    def _ask(self, block: BlockRead, neighbour: fetches.Neighbour) -> None:
        """Request each piece from a neighbour; fetchers read the rest from the store."""
        if neighbour.form is BlockForm.DECODED:
            parts = ReadParts(block.report)
            self._read(block.raw, 0, tasks.BLOCK_ARENA, block.into, parts, neighbour)
            parts.are_all()
            return
        self._ask_for(block, self._pieces(block))

    def _ask_for(self, block: BlockRead, pieces: Sequence[_Piece]) -> None:
        at = 0
        for piece in pieces:
            source = block.neighbour and replace(block.neighbour, offset=at)
            self._read_alone(block.raw, piece, source)
            at += piece.target.into.length

    def _ask_for_run(self, blocks: Sequence[BlockRead], neighbour: fetches.Neighbour) -> None:
        """Request several whole blocks from a neighbour at once."""
        pieces = [piece for block in blocks for piece in self._pieces(block)]
        self._read_together(blocks[0].raw, pieces, neighbour)

    def _pieces(self, block: BlockRead) -> list[_Piece]:
        """Start to read the preamble. Return the other pieces to read."""
        key, raw, into = block.key, block.raw, block.into
        url, place = raw.url, raw.preamble_place
        kept = self._preambles.hold(key, url, raw.etag, place) if place.length else None
        head = Region(into.offset, place.length)

        def end(outcome: fetches.Outcome) -> None:
            if block.copied_to is not None:
                self.let_go(key)
            self._note(url, outcome)
            block.report(outcome)

        def read(outcome: fetches.Outcome) -> None:
            if is_all_there(outcome) and kept is not None and block.copied_to is not None:
                to = block.copied_to, head.offset
                self._preambles.copy(kept, *to, lambda error: end(error or outcome))
            else:
                end(outcome)

        parts = ReadParts(read)
        if kept is not None:  # read it beside the block, so that both take one round trip
            self._preamble(raw, kept, parts.one_more())
        elif place.length:
            self._read(raw, place.offset, tasks.BLOCK_ARENA, head, parts)
        at, read_pieces = head.offset + head.length, []
        for piece in raw.pieces or (raw.place,):
            target = fetches.ReadTarget(piece.offset, Region(at, piece.length))
            read_pieces.append(_Piece(target, parts.one_more()))
            at += piece.length
        parts.are_all()
        return read_pieces

    def _read_together(
        self,
        raw: tasks.RawBlockRef,
        pieces: Sequence[_Piece],
        neighbour: fetches.Neighbour | None = None,
    ) -> None:
        """Read pieces in one request. The neighbour, if one is named, is tried first."""
        if len(pieces) == 1:
            self._read_alone(raw, pieces[0])
            return

        def end(outcome: fetches.Outcome) -> None:
            for number, piece in enumerate(pieces):
                if isinstance(outcome, _OF_LENGTH):
                    self._read_alone(raw, piece)
                elif isinstance(outcome, fetches.PartlyGiven) and neighbour is not None:
                    if (end := outcome.ends[number]) == NOT_GIVEN:  # refused in a run: try it alone
                        source = replace(neighbour, block=neighbour.block + number)
                        self._read_alone(raw, piece, source)
                    elif end == GIVEN_WHOLE:
                        piece.report(fetches.NeighbourGave(piece.target.into.length))
                    else:
                        piece.report(fetches.HeldDecoded(end))
                elif isinstance(outcome, fetches.NeighbourGave):
                    piece.report(fetches.NeighbourGave(piece.target.into.length))
                else:
                    piece.report(outcome)

        first, *more = [piece.target for piece in pieces]
        place = raw.url, first.offset, raw.etag, tasks.BLOCK_ARENA, first.into
        self.origin.read(fetches.ReadRange(0, *place, tuple(more), neighbour), end)

    def _read_alone(
        self, raw: tasks.RawBlockRef, piece: _Piece, neighbour: fetches.Neighbour | None = None
    ) -> None:
        parts, target = ReadParts(piece.report), piece.target
        self._read(raw, target.offset, tasks.BLOCK_ARENA, target.into, parts, neighbour)
        parts.are_all()

    def for_worker(
        self, key: int, raw: tasks.RawBlockRef
    ) -> tuple[tasks.RawBlockRef, tuple[tuple[int, int], ...]]:
        """Return where a worker finds a fetched block, and which arenas it needs besides the block
        arena.
        """
        return self._preambles.for_worker(key, raw)

    def let_go(self, key: int) -> None:
        """Release the preamble that is held for this block, if there is one."""
        self._preambles.let_go(key)

    def remember_preamble(self, url: str, etag: str, place: Region, content: bytes) -> None:
        """Keep the preamble of this shard, which indexing has read. Thread-safe."""
        self._preambles.remember(url, etag, place, content)

    def trouble(self, url: str) -> StoreError | None:
        """Return why reads of this shard are delayed; None if no reason is known."""
        return self.origin.trouble(url) or self._given_up.get(url)

    def statistics(self) -> NodeReads:
        """Return the reads so far."""
        return self.origin.statistics()

    def tick(self) -> None:
        """Start or stop fetchers as needed; call this about twice a second."""
        self.origin.tick()

    def close(self) -> None:
        """Stop all reads. May be called twice."""
        self.origin.close()
        self._preambles.close()
        if self.folder is not None:
            self.folder.close()

    def _note(self, url: str, error: fetches.Outcome) -> None:
        self._given_up.pop(url, None)
        if isinstance(error, UNREACHABLE):
            self._given_up[url] = error
            if len(self._given_up) > _GIVEN_UP_MAX:
                self._given_up.popitem(last=False)

    def _preamble(self, raw: tasks.RawBlockRef, kept: KeptPreamble, report: Report) -> None:
        """Read a preamble once, even if several blocks start together; not at all if indexing did
        so.
        """
        if kept.reading is None or kept.has_failed:
            kept.reading = asyncio.get_running_loop().create_future()
            parts = ReadParts(partial(_set, kept.reading))
            if not self._preambles.fill(kept):
                at = raw.preamble_place.offset
                self._read(raw, at, tasks.PREAMBLE_ARENA, kept.region, parts)
            parts.are_all()
        kept.reading.add_done_callback(lambda done: report(done.result()))

    def _read(
        self,
        raw: tasks.RawBlockRef,
        offset: int,
        arena_id: int,
        into: Region,
        parts: ReadParts,
        neighbour: fetches.Neighbour | None = None,
    ) -> None:
        """Read bytes of a shard from the neighbour, if one is named, or the store."""
        for part in _ranges(into):
            ahead = part.offset - into.offset
            source = neighbour and replace(neighbour, offset=neighbour.offset + ahead)
            order = fetches.ReadRange(
                0, raw.url, offset + ahead, raw.etag, arena_id, part, neighbour=source
            )
            self.origin.read(order, parts.one_more())


class _Piece(Struct, frozen=True):
    """A part of a block to read."""

    target: fetches.ReadTarget
    report: Report


def _set(reading: asyncio.Future[fetches.Outcome], error: fetches.Outcome) -> None:
    if not reading.cancelled():
        reading.set_result(error)


def _ranges(whole: Region) -> Iterator[Region]:
    """Yield equal parts, none longer than RANGE_BYTES."""
    count = max(1, -(-whole.length // RANGE_BYTES))
    cuts = [whole.length * part // count for part in range(count + 1)]
    for start, stop in itertools.pairwise(cuts):
        yield Region(whole.offset + start, stop - start)
