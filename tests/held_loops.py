"""Fails tests whose nodes held their event loop.

A node tells of it on its log, which an embedded node has in common with its trainer, and so with
the test. What counts is the processor time of the loop's own thread, and more of it than the
watchdog's 20 ms: on a machine whose processors share caches with others it grows by half. Where several nodes of a test have told, or one several times, the longest
hold counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

RAN_MS_MAX = 50.0
MAY_HOLD = "may_hold_loop"
"""Marks tests of what holds a loop."""

_LINE = re.compile(r"event loop held ran_ms=(?P<ran_ms>[0-9.e+]+) .*")


def longest_hold(captured: Iterable[str]) -> str | None:
    """The line of the longest hold that is too long, of all that was written."""
    found = [line for text in captured for line in _LINE.finditer(text)]
    too_long = [line for line in found if float(line["ran_ms"]) > RAN_MS_MAX]
    longest = max(too_long, key=lambda line: float(line["ran_ms"]), default=None)
    return None if longest is None else longest.group()
