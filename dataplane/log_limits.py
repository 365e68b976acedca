"""How many lines of a log an event may have in a minute, and which were suppressed.

Invariants:
1. In a minute an event has at most LINES_A_MINUTE lines from one source, and LINES_OF_ALL from all
   of them together. The second half of those is for sources that have had none yet, so that a few
   noisy ones leave room for the first line of others.
2. At most SOURCES_MAX sources are remembered for each event, those that came last.
3. Each line that is suppressed is counted once, and told once when its minute has ended.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict

from msgspec import Struct, field

LINES_A_MINUTE = 30
LINES_OF_ALL = 300
SOURCES_MAX = 1000
_MINUTE_S = 60.0
_TOLD_MAX = 5
_NAME_LENGTH_MAX = 256


class Suppressed(Struct, frozen=True):
    """Lines of an event that were suppressed, at a level of the log, and from whom."""

    event: str
    level: int
    count: int
    by: str


class _Source(Struct):
    """How many lines it had in the minute, and how many were suppressed."""

    written: int = 0
    suppressed: int = 0


class _Minute(Struct):
    """The lines of one event since it began."""

    began: float
    level: int
    written: int = 0
    suppressed: int = 0
    sources: OrderedDict[str, _Source] = field(default_factory=OrderedDict)

    def allows(self, source: str) -> bool:
        """Count a line of this source: whether it is written."""
        source = source[:_NAME_LENGTH_MAX]
        known = self.sources.setdefault(source, _Source())
        self.sources.move_to_end(source)
        if len(self.sources) > SOURCES_MAX:
            self.sources.popitem(last=False)
        most = LINES_OF_ALL // 2 if known.written or known.suppressed else LINES_OF_ALL
        if known.written < LINES_A_MINUTE and self.written < most:
            known.written += 1
            self.written += 1
            return True
        known.suppressed += 1
        self.suppressed += 1
        return False

    def who(self) -> str:
        """The sources of most of these lines, such as "10.0.0.9 (900), others (7)"; "" if none was
        named.
        """
        counts = [(name, one.suppressed) for name, one in self.sources.items() if one.suppressed]
        counts.sort(key=lambda each: -each[1])
        if [name for name, _ in counts] == [""]:
            return ""
        told = [f"{name} ({count})" for name, count in counts[:_TOLD_MAX]]
        left = self.suppressed - sum(count for _, count in counts[:_TOLD_MAX])
        return ", ".join([*told, f"others ({left})"] if left else told)


class LogLimits:
    """The limits of one log. Thread-safe; time is an argument."""

    def __init__(self) -> None:
        self.due_at = math.inf
        """When a minute ends in which lines were suppressed."""
        self._lock = threading.Lock()
        self._minutes: dict[str, _Minute] = {}

    def allows(self, event: str, level: int, source: str, now: float) -> bool:
        """Whether a line is written. Call `ended` first."""
        with self._lock:
            minute = self._minutes.get(event)
            if minute is None or (not minute.suppressed and now >= minute.began + _MINUTE_S):
                minute = self._minutes[event] = _Minute(now, level)
            minute.level = max(minute.level, level)
            is_written = minute.allows(source)
            if not is_written:
                self.due_at = min(self.due_at, minute.began + _MINUTE_S)
            return is_written

    def ended(self, now: float) -> list[Suppressed]:
        """Return the numbers of lines suppressed in past minutes that were not reported yet."""
        if now < self.due_at:
            return []
        with self._lock:
            over = [
                (event, minute)
                for event, minute in self._minutes.items()
                if minute.suppressed and now >= minute.began + _MINUTE_S
            ]
            for event, _ in over:
                del self._minutes[event]
            begun = [one.began for one in self._minutes.values() if one.suppressed]
            self.due_at = min(begun, default=math.inf) + _MINUTE_S
        return [Suppressed(event, one.level, one.suppressed, one.who()) for event, one in over]
