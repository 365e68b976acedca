"""Read and write blocks on the node's disk, in threads of a fetcher, each within a deadline.

Invariants:
1. Each order ends exactly once, at its deadline at the latest, whatever the disk does: a thread
   that hangs in the kernel is abandoned.
2. After the end of a read, nothing of it is written into the arena. After the end of a write, the
   arena may change; if the write had not finished, its file is dropped.
3. Reads of stores do not wait for threads that the disk blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from msgspec import Struct, field

from dataplane.arena.memfd import Arena
from dataplane.fetcher.kept_files import KeptFiles
from dataplane.model.errors import NotKept
from dataplane.rpc.fetches import DiskBody, KeptFound, KeptName, ReadEnded, ReadKept, WriteKept

_READERS, _WRITERS = 8, 2
_SLOWEST_BYTES = 16 << 20
"""The bytes a second that a disk has to read or write, after the time allowed for each order."""
_SCAN_S = 3600.0

Tell = Callable[[ReadEnded | KeptFound], None]


class _OverError(Exception):
    """The order has ended at its deadline."""


class _Order(Struct, eq=False):
    """An order that has not ended. The lock is needed to end it and to copy into the arena."""

    body: DiskBody
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False
    is_written: bool = False
    """Whether the file is about to be renamed to its final name. It may have that name already."""

    def check(self) -> None:
        """Check that the order has not ended.

        Raises:  _OverError.
        """
        if self.is_over:
            raise _OverError


class Disk:
    """The node's disk, below this folder. `tell` sends a message to the node. An order may take
    `patience_s`, and a second more for every 16 MiB.
    """

    def __init__(self, folder: str, arena: Arena, tell: Tell, patience_s: float = 5.0) -> None:
        self._files = KeptFiles(folder)
        self._arena, self._tell, self._patience_s = arena, tell, patience_s
        self._readers = ThreadPoolExecutor(_READERS, "dataplane-disk")
        self._writers = ThreadPoolExecutor(_WRITERS, "dataplane-disk-write")
        self._lock = threading.Lock()
        self._orders: set[_Order] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no order is in progress."""
        return not self._orders

    def begin(self, body: DiskBody) -> None:
        """Carry out an order."""
        threads, work, allowed_s = self._writers, self._scan, _SCAN_S
        if isinstance(body, ReadKept):
            threads, work = self._readers, self._read
        elif isinstance(body, WriteKept):
            work = self._write
        if isinstance(body, ReadKept | WriteKept):
            allowed_s = self._patience_s + body.length / _SLOWEST_BYTES
        order = _Order(body, time.monotonic() + allowed_s)
        with self._lock:
            self._orders.add(order)
        threads.submit(self._serve, order, partial(work, order))

    def look(self) -> None:
        """End late orders. Call this now and then while orders are in progress."""
        now = time.monotonic()
        with self._lock:
            late = [order for order in self._orders if now > order.deadline]
        for order in late:
            # A file that is about to get its final name counts as written: the rename may happen
            # any time.
            self._end(order, None if order.is_written else _not_kept("it does not answer in time"))

    def close(self) -> None:
        """Wait for the orders in progress."""
        self._readers.shutdown()
        self._writers.shutdown()

    def _serve(self, order: _Order, work: Callable[[], None]) -> None:
        """Carry out an order; runs in a thread."""
        error: NotKept | None = None
        try:
            order.check()
            work()
        except _OverError:
            return
        except FileNotFoundError as fault:
            is_read = isinstance(order.body, ReadKept)
            error = _not_kept("" if is_read else fault.strerror or str(fault))
        except OSError as fault:
            error = _not_kept(fault.strerror or str(fault))
        except BaseException as fault:  # noqa: BLE001 - the node waits for the end
            error = _not_kept(str(fault) or repr(fault))
        self._end(order, error)

    def _end(self, order: _Order, error: NotKept | None) -> None:
        with order.lock:
            if order.is_over:
                return
            order.is_over = True
        with self._lock:
            self._orders.discard(order)
        is_read = error is None and isinstance(order.body, ReadKept)
        length, cpu_s = order.body.length if is_read else 0, time.process_time()
        self._tell(ReadEnded(order.body.number, error, cpu_s=cpu_s, disk_bytes=length))

    def _read(self, order: _Order) -> None:
        body = order.body
        assert isinstance(body, ReadKept)
        self._arena.prepare(body.into.offset, body.into.length)
        with self._arena.view(body.into.offset, body.into.length) as into:

            def place(part: memoryview, at: int) -> None:
                with order.lock:
                    order.check()
                    into[at : at + len(part)] = part

            self._files.read(KeptName(body.dataset, body.block), into, place)

    def _write(self, order: _Order) -> None:
        body = order.body
        assert isinstance(body, WriteKept)
        self._files.remove(body.instead_of)
        if not body.source.length:
            return

        def commit() -> None:
            with order.lock:
                order.check()
                order.is_written = True

        name = KeptName(body.dataset, body.block)
        with self._arena.view(body.source.offset, body.source.length) as source:
            self._files.write(name, source, body.number, order.check, commit)

    def _scan(self, order: _Order) -> None:
        for found in self._files.scan():
            order.check()
            self._tell(found)


def _not_kept(trouble: str) -> NotKept:
    return NotKept(f"the disk: {trouble}" if trouble else "not on disk", trouble=trouble)
