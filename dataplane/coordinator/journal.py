"""Pending writes to the store: merged by record and committed in groups, from one thread.

Invariants:
1. Records reach the disk in the order of the decisions, whole decisions at a time.
2. When `commit()` returns, everything that was added before it was called is on disk.
3. A failed commit loses nothing: its writes wait for the next one.
4. The number of pending writes is bounded by the number of records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from dataplane.coordinator.records import Key, Record, Write, key_of
from dataplane.coordinator.store import JobStore


class Journal:
    """The store, seen from the event loop. Joins that arrive together share one fsync."""

    def __init__(self, path: str) -> None:
        self._path = path
        # The connection is made, used and closed by this one thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="coordinator-store")
        self._store: JobStore | None = None
        self._waiting: dict[Key, Write] = {}
        self._added = 0
        self._committed = 0
        self._commit: asyncio.Task[None] | None = None

    async def open(self) -> list[Record]:
        """Open the store and read it.

        Raises:  ConfigError: as `JobStore`.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._open)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    def _open(self) -> list[Record]:
        store = JobStore(self._path)
        try:
            records = store.load()
        except BaseException:
            store.close()
            raise
        self._store = store
        return records

    def add(self, writes: Iterable[Write]) -> None:
        """Add a decision's writes to the next commit."""
        for write in writes:
            self._waiting[key_of(write)] = write
            self._added += 1

    async def commit(self) -> None:
        """Return when everything added so far is on disk.

        Raises:  NotWrittenError: the disk is full or failed; the writes wait for the next commit.
        """
        wanted = self._added
        while self._committed < wanted:
            if self._commit is None or self._commit.done():
                self._commit = asyncio.create_task(self._commit_waiting())
                # Callers that wait get the failure; there may be none left.
                self._commit.add_done_callback(lambda done: done.cancelled() or done.exception())
            # A cancelled caller must not cancel the commit that others wait for.
            await asyncio.shield(self._commit)

    async def _commit_waiting(self) -> None:
        writes, self._waiting = self._waiting, {}
        target = self._added
        store = self._store
        assert store is not None, "commit() comes after open()"
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, store.write, tuple(writes.values()))
        except BaseException:
            self._waiting = writes | self._waiting
            raise
        self._committed = target

    async def close(self) -> None:
        """Close the store; may be called twice. Pending writes are dropped."""
        if self._commit is not None and not self._commit.done():
            await asyncio.wait([self._commit])
        if self._store is not None:
            store, self._store = self._store, None
            await asyncio.get_running_loop().run_in_executor(self._thread, store.close)
        self._thread.shutdown(wait=False)
