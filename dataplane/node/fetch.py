"""Blocks' bytes from the store into the block arena, several at a time.

A raw region holds the shard's preamble, then the block's own bytes. Preambles (Parquet footers,
Arrow dictionaries) are needed by every block of a shard: the last few are kept.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dataplane.errors import DataplaneError, StoreUnavailable
from dataplane.model import Region
from dataplane.store.base import Store
from dataplane.store.pieces import fill

Report = Callable[[DataplaneError | None], None]
Connect = Callable[[str], Store]

# One holder: the preambles of the shards that are being read.
PREAMBLE_BYTES_MAX = 64 << 20


class Fetcher:
    """At most `fetch_count` blocks on their way at once; the caller keeps to that."""

    def __init__(self, fetch_count: int, connect: Connect) -> None:
        self._connect = connect
        self._threads = ThreadPoolExecutor(fetch_count, thread_name_prefix="dataplane-fetch")
        self._preambles: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._preamble_bytes = 0
        self._lock = threading.Lock()

    def fetch(
        self, url: str, etag: str, preamble: Region, place: Region, into: memoryview, report: Report
    ) -> None:
        """Fill `into` with preamble and block; `report` is called in the event loop.

        Shapes:  into: uint8[preamble.length + place.length].
        """
        loop = asyncio.get_running_loop()

        def work() -> None:
            error = self._fill(url, etag, preamble, place, into)
            into.release()
            try:
                loop.call_soon_threadsafe(report, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more

        self._threads.submit(work)

    def close(self) -> None:
        """Start nothing more; what is under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fill(
        self, url: str, etag: str, preamble: Region, place: Region, into: memoryview
    ) -> DataplaneError | None:
        try:
            store = self._connect(url)
            if preamble.length:
                into[: preamble.length] = self._preamble(store, url, etag, preamble)
            with into[preamble.length :] as body:
                fill(store, url, place.offset, etag, body)
        except DataplaneError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it was, someone waits for an answer
            return StoreUnavailable(f"{url}: {type(error).__name__}: {error}", shard=url)
        return None

    def _preamble(self, store: Store, url: str, etag: str, place: Region) -> bytes:
        key = (url, etag)
        with self._lock:
            found = self._preambles.get(key)
            if found is not None:
                self._preambles.move_to_end(key)
                return found
        read = bytes(store.read(url, place.offset, place.length, etag))
        with self._lock:
            if key not in self._preambles:
                self._preambles[key] = read
                self._preamble_bytes += len(read)
            while self._preamble_bytes > PREAMBLE_BYTES_MAX and len(self._preambles) > 1:
                self._preamble_bytes -= len(self._preambles.popitem(last=False)[1])
        return read
