"""Fails tests whose nodes held their event loop.

A node logs such a hold, and an embedded node shares its log with its trainer, and so with the test.
The CPU time of the loop's own thread counts. The limit is above the watchdog's 20 ms, since CPU
times grow by half on a machine whose caches are shared with others. If nobody could look where the
loop was, its processor may have been with another virtual machine, which counts as CPU time: then
the limit is higher. If there are several reports, the longest hold counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

RAN_MS_MAX = 50.0
UNKNOWN_MS_MAX = 250.0
MAY_HOLD = "may_hold_loop"
"""Marks tests of what holds a loop."""

_LINE = re.compile(r"a step of this node took long.* ran_ms=(?P<ran_ms>[0-9.e+]+) .*")
_UNKNOWN = "at=unknown"


def longest_hold(captured: Iterable[str]) -> str | None:
    """The log line of the longest hold over the limit."""
    found = [line for text in captured for line in _LINE.finditer(text)]
    too_long = [line for line in found if float(line["ran_ms"]) > _limit(line.group())]
    longest = max(too_long, key=lambda line: float(line["ran_ms"]), default=None)
    return None if longest is None else longest.group()


def _limit(line: str) -> float:
    return UNKNOWN_MS_MAX if _UNKNOWN in line else RAN_MS_MAX
