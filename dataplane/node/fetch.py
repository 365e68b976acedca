"""Blocks' bytes from the store into the block arena, several at a time.

A raw region holds the shard's preamble, then the block's own bytes, as far as they are needed.
Preambles (Parquet footers, Arrow dictionaries) are needed by every block of a shard: the last few
are kept.
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

from dataplane import background
from dataplane.errors import DataplaneError, StoreError
from dataplane.model import Region
from dataplane.store.base import Store
from dataplane.store.pieces import fill
from dataplane.store.unreachable import UNREACHABLE

Report = Callable[[DataplaneError | None], None]
Connect = Callable[[str], Store]
Trouble = Callable[[str], StoreError | None]

# One holder: the preambles of the shards that are being read.
PREAMBLE_BYTES_MAX = 64 << 20
_GIVEN_UP_MAX = 256


@dataclass(frozen=True, slots=True)
class _Preamble:
    length: int
    content: Future[bytes]

    @property
    def has_failed(self) -> bool:
        return self.content.done() and self.content.exception() is not None


class Fetcher:
    """At most `count_max` blocks on their way at once; the caller keeps to that. `trouble` says why
    the store lets calls for a url wait, if it does.
    """

    def __init__(
        self, count_max: int, connect: Connect, trouble: Trouble = lambda _url: None
    ) -> None:
        self._connect = connect
        self._trouble = trouble
        self._given_up: OrderedDict[str, StoreError] = OrderedDict()
        self._threads = ThreadPoolExecutor(count_max, thread_name_prefix="dataplane-fetch")
        # Others than those that wait for what these read.
        self._aside = ThreadPoolExecutor(count_max, thread_name_prefix="dataplane-preamble")
        self._preambles: OrderedDict[tuple[str, str], _Preamble] = OrderedDict()
        self._preamble_bytes = 0
        self._lock = threading.Lock()

    def fetch(
        self,
        url: str,
        etag: str,
        preamble: Region,
        pieces: Sequence[Region],
        into: memoryview,
        report: Report,
    ) -> None:
        """Fill `into` with preamble and block, of which these pieces are read; `report` is called
        in the event loop.

        Shapes:  into: uint8[preamble.length + length of all pieces].
        """
        loop = asyncio.get_running_loop()

        def work() -> None:
            error = self._fill(url, etag, preamble, pieces, into)
            into.release()
            try:
                loop.call_soon_threadsafe(report, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more

        background.watch("fetch", self._threads.submit(work))

    def trouble(self, url: str) -> StoreError | None:
        """Why bytes of this shard do not come; None if nothing is wrong as far as is known."""
        now = self._trouble(url)
        with self._lock:
            return now or self._given_up.get(url)

    def close(self) -> None:
        """Start nothing more; what is under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._aside.shutdown(wait=False)

    def _fill(
        self, url: str, etag: str, preamble: Region, pieces: Sequence[Region], into: memoryview
    ) -> DataplaneError | None:
        error = self._filled(url, etag, preamble, pieces, into)
        with self._lock:
            self._given_up.pop(url, None)
            if isinstance(error, UNREACHABLE):
                self._given_up[url] = error
                if len(self._given_up) > _GIVEN_UP_MAX:
                    self._given_up.popitem(last=False)
        return error

    def _filled(
        self, url: str, etag: str, preamble: Region, pieces: Sequence[Region], into: memoryview
    ) -> DataplaneError | None:
        try:
            store = self._connect(url)
            # Asked for beside the block, so that both take one round trip.
            coming = self._preamble(store, url, etag, preamble) if preamble.length else None
            with into[preamble.length :] as body:
                self._fill_pieces(store, url, etag, pieces, body)
            if coming is not None:
                into[: preamble.length] = coming.content.result()
        except DataplaneError as error:
            return type(error)(str(error), **error.nouns)  # without what its traceback holds
        except BaseException as error:  # noqa: BLE001 - also a library's panic: somebody waits
            return StoreError(f"{url}: {type(error).__name__}: {error}", shard=url)
        return None

    def _fill_pieces(
        self, store: Store, url: str, etag: str, pieces: Sequence[Region], body: memoryview
    ) -> None:
        """All at once, so that they take one round trip."""
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

    def _preamble(self, store: Store, url: str, etag: str, place: Region) -> _Preamble:
        """What all blocks of a shard need is read once, also by those that start together."""
        key = (url, etag)
        with self._lock:
            found = self._preambles.pop(key, None)
            if found is not None and found.has_failed:
                self._preamble_bytes -= place.length
                found = None
            if found is None:
                self._preamble_bytes += place.length
                coming = self._aside.submit(_read, store, url, etag, place)
                found = _Preamble(place.length, coming)
            self._preambles[key] = found
            while self._preamble_bytes > PREAMBLE_BYTES_MAX and len(self._preambles) > 1:
                _, oldest = self._preambles.popitem(last=False)
                self._preamble_bytes -= oldest.length
            return found


def _read(store: Store, url: str, etag: str, place: Region) -> bytes:
    return bytes(store.read(url, place.offset, place.length, etag))
