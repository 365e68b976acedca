"""Prepare types before msgspec reads them."""

from __future__ import annotations

import os
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")
_complete: set[object] = set()
_completing = threading.RLock()
# A child that is forked meanwhile would have half of a description for good.
os.register_at_fork(
    before=_completing.acquire,
    after_in_parent=_completing.release,
    after_in_child=_completing.release,
)


def complete(cls: type[T]) -> type[T]:
    """Return this type, once msgspec has prepared itself to read it.

    At the first use of a Struct, msgspec describes the class to itself, field by field, and runs
    Python meanwhile. A second thread that reads such a Struct with half of the description crashes
    (SIGSEGV, as of msgspec 0.22). So one thread at a time prepares types, before they are read.
    """
    if cls not in _complete:
        with _completing:
            msgspec.msgpack.Decoder(cls)
        _complete.add(cls)
    return cls
