"""Reads blocks from the store into the block arena, several at a time.

A raw region has room for the shard's preamble, followed by the needed bytes of the block. Every
block of a shard needs the preamble, so it is read once and kept separately (`preambles.py`). It is
copied into the raw region only if rows are gathered from there, and read into it if there is no
room to keep it; otherwise its room stays empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Self

from dataplane import background
from dataplane.config import NodeConfig
from dataplane.errors import DataplaneError, StoreError
from dataplane.model import Region
from dataplane.node.preambles import BYTES_MIN, KeptPreamble, Preambles, preamble_bytes
from dataplane.rpc import tasks
from dataplane.scheduler.blocks import SMALL_FETCHES
from dataplane.store.base import Store
from dataplane.store.connect import Stores
from dataplane.store.pieces import copy_into, fill
from dataplane.store.unreachable import UNREACHABLE

Report = Callable[[DataplaneError | None], None]
Connect = Callable[[str], Store]
Trouble = Callable[[str], StoreError | None]

_GIVEN_UP_MAX = 256


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The bytes of a block, and the preamble of its shard if that is kept."""

    raw: tasks.RawBlockRef
    kept: KeptPreamble | None
    is_copied: bool


class Fetcher:
    """Fetches at most `count_max` blocks at once; the caller must respect this. `trouble` says why
    the store delays calls for a url, if it does. Preambles are kept in an arena of
    `preamble_bytes`.
    """

    def __init__(
        self,
        count_max: int,
        connect: Connect,
        trouble: Trouble = lambda _url: None,
        preamble_bytes: int = BYTES_MIN,
    ) -> None:
        """Raises:  BudgetTooSmall: the machine refuses the arena."""
        self._preambles = Preambles(preamble_bytes)
        self._connect = connect
        self._trouble = trouble
        self._given_up: OrderedDict[str, StoreError] = OrderedDict()
        self._threads = ThreadPoolExecutor(count_max, thread_name_prefix="dataplane-fetch")
        # Separate from the threads that wait for these reads.
        self._aside = ThreadPoolExecutor(count_max, thread_name_prefix="dataplane-preamble")
        self._lock = threading.Lock()

    @classmethod
    def of(cls, config: NodeConfig, stores: Stores) -> Self:
        """The fetcher of a node.

        Raises:  BudgetTooSmall: the machine refuses the arena.
        """
        return cls(
            SMALL_FETCHES * config.fetch_count,
            stores.connect,
            stores.trouble,
            preamble_bytes(config.block_arena_bytes),
        )

    def fetch(
        self, key: int, raw: tasks.RawBlockRef, into: memoryview, report: Report, *, is_copied: bool
    ) -> None:
        """Fill `into` with the bytes of a block; `report` is called on the event loop when the
        region is no longer written. `is_copied`: put the preamble before them. Otherwise the
        preamble is held for the block with this key, until `let_go`.

        Shapes:  into: uint8[length of the preamble + length of all pieces].
        """
        loop, place = asyncio.get_running_loop(), raw.preamble_place
        kept = self._preambles.hold(key, raw.url, raw.etag, place) if place.length else None
        wanted = _Wanted(raw, kept, is_copied)

        def end(error: DataplaneError | None) -> None:
            if is_copied:
                self.let_go(key)
            report(error)

        def work() -> None:
            error = self._fill(wanted, into)
            into.release()
            try:
                loop.call_soon_threadsafe(end, error)
            except RuntimeError:
                return  # the loop is closed: no caller waits any more

        background.watch("fetch", self._threads.submit(work))

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
        now = self._trouble(url)
        with self._lock:
            return now or self._given_up.get(url)

    def close(self) -> None:
        """Start no more reads; running ones end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._aside.shutdown(wait=False)
        self._preambles.close()

    def _fill(self, wanted: _Wanted, into: memoryview) -> DataplaneError | None:
        error, url = self._filled(wanted, into), wanted.raw.url
        with self._lock:
            self._given_up.pop(url, None)
            if isinstance(error, UNREACHABLE):
                self._given_up[url] = error
                if len(self._given_up) > _GIVEN_UP_MAX:
                    self._given_up.popitem(last=False)
        return error

    def _filled(self, wanted: _Wanted, into: memoryview) -> DataplaneError | None:
        raw, kept = wanted.raw, wanted.kept
        url, length = raw.url, raw.preamble_place.length
        try:
            store = self._connect(url)
            with into[:length] as head, into[length:] as body:
                # Requested in parallel with the block, so that both take one round trip.
                coming = self._preamble(store, wanted, head) if length else None
                try:
                    self._fill_pieces(store, url, raw.etag, raw.pieces or (raw.place,), body)
                finally:
                    if coming is not None:
                        wait((coming,))
                if coming is not None:
                    coming.result()
                if kept is not None and wanted.is_copied:
                    copy_into(head, kept.view)
        except DataplaneError as error:
            return type(error)(
                str(error), **error.nouns
            )  # without the objects that its traceback keeps alive
        except BaseException as error:  # noqa: BLE001 - also a library's panic: somebody waits
            return StoreError(f"{url}: {type(error).__name__}: {error}", shard=url)
        return None

    def _preamble(self, store: Store, wanted: _Wanted, head: memoryview) -> Future[None]:
        """Read once, even if several blocks start together."""
        url, etag, at = wanted.raw.url, wanted.raw.etag, wanted.raw.preamble_place.offset
        if wanted.kept is None:
            return self._aside.submit(fill, store, url, at, etag, head)
        read = partial(fill, store, url, at, etag, wanted.kept.view)
        with self._lock:
            if wanted.kept.reading is None or wanted.kept.has_failed:
                wanted.kept.reading = self._aside.submit(read)
            return wanted.kept.reading

    def _fill_pieces(
        self, store: Store, url: str, etag: str, pieces: Sequence[Region], body: memoryview
    ) -> None:
        """Read all pieces in parallel, so that they take one round trip."""
        reads: list[Callable[[], None]] = []
        with contextlib.ExitStack() as views:
            at = 0
            for piece in pieces:
                view = views.enter_context(body[at : at + piece.length])
                reads.append(partial(fill, store, url, piece.offset, etag, view))
                at += piece.length
            others: list[Future[None]] = []
            try:
                others += (self._aside.submit(read) for read in reads[1:])
                reads[0]()
            finally:
                wait(others)  # nothing is written any more when this returns
            for other in others:
                other.result()
