"""Types that msgspec reads, known in full before they are read."""

from __future__ import annotations

import os
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")
_complete: set[object] = set()
_completing = threading.RLock()
# A child that is forked meanwhile would have half of a class for good.
os.register_at_fork(
    before=_completing.acquire,
    after_in_parent=_completing.release,
    after_in_child=_completing.release,
)


def complete(cls: type[T]) -> type[T]:
    """The same type, of which msgspec knows all that it needs to read it.

    At the first use of a Struct, msgspec fills what it knows of the class in place and runs Python
    meanwhile. A second thread that reads one with the half that is there dies of SIGSEGV (as of
    msgspec 0.22), so one thread at a time completes types, before anything is read.
    """
    if cls not in _complete:
        with _completing:
            msgspec.msgpack.Decoder(cls)
        _complete.add(cls)
    return cls
