"""Waiting for a node: the deadline, the pauses, and the log lines.

Every loss before a job is open is retried: a node that dies while it starts or opens the job, a
node that drains, a node that does not exist yet. session.py sends the requests.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time

from dataplane.base.trace import Trace
from dataplane.base.units import show_time
from dataplane.model.errors import PeerLost
from dataplane.rpc.messages import Working

TELL_AFTER_S = 3.0
_LINES_S = 10.0
_PAUSE_S, _PAUSE_S_MAX = 0.1, 1.0
_CLEAR_LINE = "\r\x1b[2K"

_trace = Trace("client")


class Notice:
    """The log lines of one wait: one line after a few seconds, and one line at the end. If the node
    reports progress and `shows_work` is set, the progress is shown instead: on a terminal in a line
    that is overwritten, and elsewhere in a log line every ten seconds.
    """

    def __init__(
        self, what: str, *, shows_work: bool = True, work_of: str = "", **facts: object
    ) -> None:
        self._what, self._facts, self._shows_work = what, facts, shows_work
        self._work_of = f"{work_of}: " if work_of else ""
        self._since = time.monotonic()
        self._is_told = self._is_shown = self._is_working = False
        self._shown_at = self._since + TELL_AFTER_S - _LINES_S

    def due(self, deadline: float) -> float:
        """Return when to call `tell` if it was not called yet, in time.monotonic(); otherwise the
        deadline.
        """
        return deadline if self._is_told else min(deadline, self._since + TELL_AFTER_S)

    def tell(self, error: str = "", until: float | None = None, remedy: str = "") -> None:
        """Log what the process waits for, and perhaps until when and what helps, if a few seconds
        have passed and it was not logged yet.
        """
        if self._is_told or self._is_working or time.monotonic() < self._since + TELL_AFTER_S:
            return
        self._is_told = True
        last = {"error": error} if error else {}
        limit = "" if until is None else f" for at most {until - time.monotonic():.0f} s more"
        what = f"waiting for {self._what}{limit}{remedy and f': {remedy}'}"
        _trace.failed(what, **self._facts, **last)

    def working(self, work: Working) -> None:
        """Show the node's progress."""
        now, self._is_working = time.monotonic(), True
        if not self._shows_work or now < self._since + TELL_AFTER_S:
            return
        line = self._work_of + _words(work)
        if sys.stderr is not None and sys.stderr.isatty():
            self._show(f"dataplane: {line}")
        elif now >= self._shown_at + _LINES_S:
            self._shown_at = now
            _trace.failed(line, **self._facts)

    def _show(self, line: str) -> None:
        self._is_shown = bool(line)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{_CLEAR_LINE}{line}")
            sys.stderr.flush()

    def over(self, error: str = "") -> None:
        """Log the end of the wait, if its beginning was logged."""
        if self._is_shown:
            self._show("")
        if self._is_told:
            waited_s = round(time.monotonic() - self._since, 1)
            last = {"error": error} if error else {}
            what = f"no longer waiting for {self._what}"
            _trace.failed(what, waited_s=waited_s, **self._facts, **last)
        self._is_told, self._since = False, time.monotonic()


def _words(work: Working) -> str:
    """Describe a node's progress: "counting packs: 12 of 40 blocks, 1 min left"."""
    if not work.total:
        return work.what
    left = f", {show_time(work.left_s)} left" if work.left_s else ""
    return f"{work.what}: {work.done:,} of {work.total:,} {work.unit}{left}"


class Patience:
    """The time for retries after losses. Time in which a node works for this process does not
    count.

    `until`, and `last`, the final limit, are in time.monotonic().
    """

    def __init__(self, until: float, last: float) -> None:
        self._until, self.last = until, last
        self._began = time.monotonic()
        self._losses = 0
        self.worked_s = 0.0
        """How long nodes have worked for this process, in seconds."""

    @property
    def until(self) -> float:
        """When to give up, unless a node works for this process until then."""
        return min(self._until, self.last)

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    def extend(self, seconds: float) -> None:
        """Add this time, in which a node has worked for this process."""
        self._until += seconds
        self.worked_s += seconds

    def worked(self, seconds: float) -> None:
        """Add this time, in which a node has reported progress; the final limit moves as well."""
        self.last += seconds

    def pause(self, notice: Notice, error: PeerLost, remedy: str = "") -> bool:
        """Wait a little after a loss, longer after each. Return False if no time is left."""
        self._losses += 1
        notice.tell(str(error), self.until, remedy)
        longest_s = min(_PAUSE_S_MAX, _PAUSE_S * 2 ** min(self._losses, 10))
        left_s = self.until - time.monotonic()
        if left_s <= 0:
            return False
        pause_s = random.uniform(0, longest_s)  # noqa: S311 - jitter is no secret
        threading.Event().wait(min(pause_s, left_s))
        return True
