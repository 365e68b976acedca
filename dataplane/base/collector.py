"""Controls Python's garbage collector where it would block a process.

It visits every object of the process whenever their number has grown by a quarter, and all threads
wait meanwhile: 100 ms and more for a million listed objects, a dozen times during the listing.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

_RELEASED_AT_ONCE = 1 << 12
_THRESHOLDS = (10_000, 10, 50)
"""New objects before the young are looked at, which takes a millisecond; and so on."""


class _Rest:
    """How many callers, in any thread, need the collector off."""

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
    """Turn the collector off in all threads, while many objects are made that refer to no others.
    It is turned on again when the last caller leaves.
    """
    _rest.begin()
    try:
        yield
    finally:
        _rest.end()


def release(*lists: list[Any]) -> None:
    """Empty these lists, in steps between which other threads run: a list that is dropped frees all
    that only it had at once.
    """
    for each in lists:
        while each:
            del each[-_RELEASED_AT_ONCE:]


def start() -> None:
    """Turn the collector off until `settle`: a process that imports makes objects that live until
    it ends, and would look at them again and again, for a tenth of the time of the imports.
    """
    gc.disable()


def settle() -> None:
    """Exclude all present objects from collection, since they live until the process ends. A node
    has 50,000 objects once it has imported what it needs, and to look at all of them holds its
    event loop for 35 ms. Those that come later are looked at, but not as often. Nor are the present
    ones looked at once more: imports leave 600 objects of garbage.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()
