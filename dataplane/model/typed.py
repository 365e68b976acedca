"""Prepare types before msgspec decodes them."""

from __future__ import annotations

import os
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")
_complete: set[object] = set()
_completing = threading.RLock()
# Hold the lock during a fork: a child that was forked while a type is prepared would keep a
# half-finished description for good.
os.register_at_fork(
    before=_completing.acquire,
    after_in_parent=_completing.release,
    after_in_child=_completing.release,
)


def complete(cls: type[T]) -> type[T]:
    """Return this type, once msgspec is ready to decode it.

    When a Struct is first used, msgspec describes the class to itself, field by field, and runs
    Python meanwhile. A second thread that decodes such a Struct with a half-finished description
    crashes (SIGSEGV, as of msgspec 0.22). So types are prepared by one thread at a time, before
    they are decoded.
    """
    if cls not in _complete:
        with _completing:
            msgspec.msgpack.Decoder(cls)
        _complete.add(cls)
    return cls
