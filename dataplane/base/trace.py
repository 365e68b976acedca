"""The log of a process: lines of text for people, or of JSON for log collectors.

A line is an event and its facts: `event name=value …` in text; in JSON an object with `timestamp`,
`level`, `room`, `event` and the facts. No line contains a secret of a url. To keep peers and stores
from filling a disk, the number of lines per event and minute is limited (LogLimits), and long facts
are cut. At the end of a minute, one more line says how many lines were suppressed: long-running
processes call `tell_suppressed` for that; others write it before their next line.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import faulthandler
import json
import logging
import math
import os
import re
import sys
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import TextIO

from msgspec import Struct, field

from dataplane.model.redact import redacted

# -- log limits --------------------------------------------------------------------------------
#
# How many lines per minute an event may have in a log, and how many were suppressed.
#
# Invariants:
# 1. In a minute an event has at most LINES_A_MINUTE lines from one source, and LINES_OF_ALL from
#    all sources together. The second half of these is reserved for sources that have had no line in
#    this minute, so that a few noisy sources do not hide the first line of others.
# 2. At most SOURCES_MAX sources are remembered for each event: the most recent ones.
# 3. Each suppressed line is counted once, and reported once when its minute has ended.

LINES_A_MINUTE = 30
LINES_OF_ALL = 300
SOURCES_MAX = 1000
_MINUTE_S = 60.0
_TOLD_MAX = 5
_NAME_LENGTH_MAX = 256


class Suppressed(Struct, frozen=True):
    """Suppressed lines of one event: their number, log level and sources."""

    event: str
    level: int
    count: int
    by: str


class _Source(Struct):
    """One source's number of lines in the present minute, and how many were suppressed."""

    written: int = 0
    suppressed: int = 0


class _Minute(Struct):
    """The lines of one event since its present minute began."""

    began: float
    level: int
    written: int = 0
    suppressed: int = 0
    sources: OrderedDict[str, _Source] = field(default_factory=OrderedDict)

    def allows(self, source: str) -> bool:
        """Count a line of this source, and return whether it may be written."""
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
        """Name the sources of most suppressed lines, such as "10.0.0.9 (900), others (7)"; "" if no
        line named its source.
        """
        counts = [(name, one.suppressed) for name, one in self.sources.items() if one.suppressed]
        counts.sort(key=lambda each: -each[1])
        if [name for name, _ in counts] == [""]:
            return ""
        told = [f"{name} ({count})" for name, count in counts[:_TOLD_MAX]]
        left = self.suppressed - sum(count for _, count in counts[:_TOLD_MAX])
        return ", ".join([*told, f"others ({left})"] if left else told)


class LogLimits:
    """The line limits of one log. Thread-safe; the time is passed in."""

    def __init__(self) -> None:
        self.due_at = math.inf
        """The earliest end of a minute in which lines were suppressed."""
        self._lock = threading.Lock()
        self._minutes: dict[str, _Minute] = {}

    def allows(self, event: str, level: int, source: str, now: float) -> bool:
        """Return whether a line may be written. Call `ended` first."""
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
        """Return the suppressed lines of past minutes that were not reported yet."""
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


LEVELS = ("debug", "info", "warning", "error")
QUIET = ""
"""The level if nobody has chosen one: "warning", but without warnings about defects of ours that
cost only a little time."""
FORMATS = ("text", "json")
# Control characters, surrogates, line separators, and marks that change the direction of text: a
# terminal would execute them, or cannot show them.
UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
_UNSAFE_IN_TEXT = re.compile(rf"(?![\n\t]){UNSAFE.pattern}")
_FACT_LENGTH_MAX = 2000
_PLAIN = re.compile(r"[^\s\"=]+")
_traces: weakref.WeakSet[Trace] = weakref.WeakSet()
_adding = threading.Lock()
refusals = Counter[str]()
"""The number of refused requests and connections by event, including those that are not logged."""


def printable(text: str, *, of_lines: bool = False) -> str:
    """Return the text with every character that a terminal would act on escaped as in JSON;
    `of_lines` leaves line ends and tabs.
    """
    unsafe = _UNSAFE_IN_TEXT if of_lines else UNSAFE
    return unsafe.sub(lambda found: json.dumps(found[0])[1:-1], text)


class Trace:
    """The log of one room. Facts are keyword arguments."""

    def __init__(self, room: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = logging.getLogger(f"dataplane.{room}")
        self._clock, self._limits = clock, LogLimits()
        with _adding:
            _traces.add(self)

    def started(self, event: str, **facts: object) -> None:
        """Log that something has begun that may take a while. For developers."""
        self._say(logging.DEBUG, event, facts)

    def noted(self, event: str, **facts: object) -> None:
        """Log that something has ended that operators of the service want to know about."""
        self._say(logging.INFO, event, facts)

    def failed(self, event: str, **facts: object) -> None:
        """Log a failure that a user will notice as an error or a delay."""
        self._say(logging.WARNING, event, facts)

    def refused(self, event: str, *, by: str, **facts: object) -> None:
        """Log that a request or connection was refused, for operators who look for attacks. Lines
        are limited for each source `by`, so that no source hides behind the lines of others.
        """
        with _adding:
            refusals[event] += 1
        self._say(logging.WARNING, event, facts, by=by)

    def broke(self, event: str, *, by: BaseException | None = None, **facts: object) -> None:
        """Log a bug in Dataplane, with the traceback of `by` or of the exception being handled."""
        self._say(logging.ERROR, event, facts, traceback_of=by or True)

    def ended(self, event: str, **facts: object) -> None:
        """Log the mistake of a user that ends this process."""
        self._say(logging.ERROR, event, facts)

    def _say(
        self,
        level: int,
        event: str,
        facts: Mapping[str, object],
        *,
        by: str = "",
        traceback_of: BaseException | bool = False,
    ) -> None:
        if not self._log.isEnabledFor(level):
            return
        if level > logging.DEBUG:
            self.tell_suppressed()
            if not self._limits.allows(event, level, by, self._clock()):
                return
        self._log.log(level, EventLine(event, facts), exc_info=traceback_of)

    def tell_suppressed(self, *, is_last: bool = False) -> None:
        """Write how many lines were suppressed in past minutes; with `is_last`, also in the present
        one, since the process is ending.
        """
        for one in self._limits.ended(math.inf if is_last else self._clock()):
            facts = {"of": one.event, "suppressed": one.count} | ({"by": one.by} if one.by else {})
            self._log.log(one.level, EventLine("lines suppressed", facts))

    @property
    def due_at(self) -> float:
        """When the next report of suppressed lines is due."""
        return self._limits.due_at


def tell_suppressed(*, is_last: bool = False) -> float:
    """Report the suppressed lines of all rooms; `is_last` if the process is ending. Return when to
    call this again, in the time of `time.monotonic`; infinite if nothing was suppressed.
    """
    with _adding:
        traces = list(_traces)
    for trace in traces:
        trace.tell_suppressed(is_last=is_last)
    return min((trace.due_at for trace in traces), default=math.inf)


class EventLine:
    """An event and its facts, formatted as text only when the line is written."""

    def __init__(self, event: str, facts: Mapping[str, object]) -> None:
        self.event = event
        self.facts = facts

    def __str__(self) -> str:
        told = (f"{name}={_shown(value)}" for name, value in self.facts.items())
        return " ".join([self.event, *told])


def configure(level: str, form: str) -> None:
    """Write this process's lines to stderr from this level on, in this form. Lines of libraries are
    written from level "warning" on, or at level "debug" all of them.
    """
    logging.captureWarnings(capture=form == "json")
    log, ours = logging.getLogger(), logging.getLogger("dataplane")
    for one in [one for one in log.handlers if isinstance(one, _ToStderr)]:
        log.removeHandler(one)
    written = _ToStderr()
    written.setFormatter(_Json() if form == "json" else _Text())
    atexit.unregister(_tell_at_exit)  # an earlier call may have registered it
    atexit.register(_tell_at_exit)
    log.addHandler(written)
    log.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    ours.setLevel((level or "warning").upper())


def _tell_at_exit() -> None:
    tell_suppressed(is_last=True)


class _ToStderr(logging.Handler):
    """Writes to the current sys.stderr, which tests and progress bars replace. If
    `wrap_stray_lines` has redirected descriptor 2, writes to the original stderr instead.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stderr = sys.stderr if _wrapped is None else _wrapped
            stderr.write(self.format(record) + "\n")
            stderr.flush()
        except (OSError, ValueError, AttributeError):
            return  # stderr is missing, or its reader is gone


_LAST_WORDS_S = 1.0
_wrapped: TextIO | None = None


def wrap_stray_lines() -> None:
    """Turn everything else that is written to this process's stderr into lines of the log, in the
    form of the log: for example, lines of gRPC and of child processes. May be called twice.
    """
    global _wrapped  # noqa: PLW0603 - a process has one stderr
    if _wrapped is not None:
        return
    own, other = os.pipe()
    _wrapped = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace")
    os.dup2(other, 2)
    os.close(other)
    thread = threading.Thread(target=_wrap, args=(own, _wrapped), name="stderr", daemon=True)
    thread.start()
    faulthandler.enable(_wrapped)  # a process that crashes runs no thread
    atexit.register(_unwrap, _wrapped, thread)


def _unwrap(stderr: TextIO, thread: threading.Thread) -> None:
    """Write what is left in the pipe; it ends here, unless a child process holds its other end."""
    os.dup2(stderr.fileno(), 2)
    thread.join(_LAST_WORDS_S)


def _wrap(own: int, stderr: TextIO) -> None:
    log = logging.getLogger("dataplane.stderr")
    with os.fdopen(own, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith('{"timestamp": '):
                log.warning("%s", line.rstrip())
                continue
            # A child process that logs in the same form has already formatted this line.
            with contextlib.suppress(OSError, ValueError):
                stderr.write(line)
                stderr.flush()


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = f"{_timestamp(record)} {record.levelname} {record.name}: {record.getMessage()}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return printable(redacted(text), of_lines=True)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = record.msg
        line = said if isinstance(said, EventLine) else EventLine(record.getMessage(), {})
        facts = {name: _plain(value) for name, value in line.facts.items()}
        if record.exc_info:
            facts["traceback"] = redacted(self.formatException(record.exc_info))
        about = {
            "timestamp": _timestamp(record),
            "level": record.levelname.lower(),
            "room": record.name.removeprefix("dataplane."),
            "event": redacted(line.event),
        }
        return printable(json.dumps({**about, **facts, **about}, ensure_ascii=False))


def _timestamp(record: logging.LogRecord) -> str:
    """Return the time of a record in ISO 8601, in UTC."""
    when = dt.datetime.fromtimestamp(record.created, dt.UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: object) -> object:
    """Return the value if JSON can represent it, otherwise its text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return _cut(redacted(str(value)))


def _shown(value: object) -> str:
    """Return a value as it appears in a line of text, quoted if it is not a single word."""
    text = f"{value:.6g}" if isinstance(value, float) else _cut(redacted(str(value)))
    is_plain = _PLAIN.fullmatch(text) and not UNSAFE.search(text)
    return text if is_plain else printable(json.dumps(text, ensure_ascii=False))


def _cut(text: str) -> str:
    half = _FACT_LENGTH_MAX // 2
    return text if len(text) <= _FACT_LENGTH_MAX else f"{text[:half]} … {text[-half:]}"
