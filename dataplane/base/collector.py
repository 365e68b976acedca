"""Control Python's garbage collector where it would block a process.

The collector visits every object of the process whenever their number has grown by a quarter, and
stops all threads meanwhile: for 100 ms and more with a million listed objects, a dozen times during
the listing.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

_RELEASED_AT_ONCE = 1 << 12
_THRESHOLDS = (10_000, 10, 50)
"""Numbers of new objects, and of collections, after which the next generation is collected. Ten
thousand young objects take a millisecond.
"""


class _Rest:
    """Counts the callers, in any thread, that need the collector off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_on = False

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._was_on = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._was_on:
                gc.enable()


_rest = _Rest()


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """Turn the collector off in all threads while many objects without cycles are created. When the
    last caller leaves, the collector is turned on again.
    """
    _rest.begin()
    try:
        yield
    finally:
        _rest.end()


def release(*lists: list[Any]) -> None:
    """Empty these lists in steps, so that other threads can run in between. Dropping a large list
    frees all of its objects at once, without releasing the interpreter lock.
    """
    for each in lists:
        while each:
            del each[-_RELEASED_AT_ONCE:]


def start() -> None:
    """Turn the collector off until `settle`. A process that imports creates objects that live until
    it ends; visiting them again and again would take a tenth of the time of the imports.
    """
    gc.disable()


def settle() -> None:
    """Exclude all present objects from collection, since they live until the process ends. A node
    has 50,000 objects once its imports are done, and visiting them all blocks its event loop for 35
    ms. Later objects are collected, but less often than usual. The present garbage is not collected
    first: this would take as long, and free only the 600 objects that imports leave.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()
