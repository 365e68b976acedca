"""The log of a process: lines of text for people, or of JSON for log collectors.

A line is an event and its facts: `event name=value …` in text; in JSON an object with `timestamp`,
`level`, `room`, `event` and the facts. No line contains a secret of a url. To keep peers and stores
from filling a disk, at most LINES_A_MINUTE lines are written per event, the next line says how many
were suppressed, and long facts are cut.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping

from dataplane.redact import redacted

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
LINES_A_MINUTE = 30
_FACT_LENGTH_MAX = 2000
_PLAIN = re.compile(r"[^\s\"=]+")


class Trace:
    """The log of one room. Facts are keyword arguments."""

    def __init__(self, room: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = logging.getLogger(f"dataplane.{room}")
        self._limits = _Limits(clock)

    def started(self, event: str, **facts: object) -> None:
        """Something has begun that may take a while. For developers."""
        self._say(logging.DEBUG, event, facts)

    def noted(self, event: str, **facts: object) -> None:
        """Something has ended that operators of the service want to know about."""
        self._say(logging.INFO, event, facts)

    def failed(self, event: str, **facts: object) -> None:
        """It failed, and a user will see an error or a delay."""
        self._say(logging.WARNING, event, facts)

    def broke(self, event: str, *, by: BaseException | None = None, **facts: object) -> None:
        """Dataplane has a bug. Logs the traceback of `by`, or of the exception being handled."""
        self._say(logging.ERROR, event, facts, traceback_of=by or True)

    def _say(
        self,
        level: int,
        event: str,
        facts: Mapping[str, object],
        *,
        traceback_of: BaseException | bool = False,
    ) -> None:
        if not self._log.isEnabledFor(level):
            return
        if level > logging.DEBUG:
            suppressed = self._limits.suppressed(event)
            if suppressed is None:
                return
            if suppressed:
                facts = {**facts, "suppressed": suppressed}
        self._log.log(level, EventLine(event, facts), exc_info=traceback_of)


class EventLine:
    """An event and its facts."""

    def __init__(self, event: str, facts: Mapping[str, object]) -> None:
        self.event = event
        self.facts = facts

    def __str__(self) -> str:
        told = (f"{name}={_shown(value)}" for name, value in self.facts.items())
        return " ".join([self.event, *told])


class _Limits:
    """How many lines of each event were written in its current minute. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._minutes: dict[str, tuple[float, int]] = {}

    def suppressed(self, event: str) -> int | None:
        """How many lines were left out before this one; None if this one is to be left out."""
        now = self._clock()
        with self._lock:
            began, count = self._minutes.get(event, (now, 0))
            left_out = 0
            if now - began >= 60:
                left_out = max(0, count - LINES_A_MINUTE)
                began, count = now, 0
            self._minutes[event] = (began, count + 1)
            return left_out if count < LINES_A_MINUTE else None


def configure(level: str, form: str) -> None:
    """Write the lines of this process to stderr, from this level on and in this form. The lines of
    libraries are written from "warning" on, and all of them at "debug".
    """
    log, ours = logging.getLogger(), logging.getLogger("dataplane")
    for one in [one for one in log.handlers if isinstance(one, _ToStderr)]:
        log.removeHandler(one)
    written = _ToStderr()
    written.setFormatter(_Json() if form == "json" else _Text())
    log.addHandler(written)
    log.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    ours.setLevel(level.upper())


class _ToStderr(logging.Handler):
    """Writes to the current sys.stderr, which tests and progress bars replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            return  # there is no stderr, or its reader is gone


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = f"{_timestamp(record)} {record.levelname} {record.name}: {record.getMessage()}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return redacted(text)


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
        return json.dumps({**about, **facts, **about}, ensure_ascii=False)


def _timestamp(record: logging.LogRecord) -> str:
    """A time in ISO 8601, in UTC."""
    when = dt.datetime.fromtimestamp(record.created, dt.UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: object) -> object:
    """The value if JSON has its type, else its text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _cut(redacted(str(value)))


def _shown(value: object) -> str:
    """A value in a line of text, quoted if it is not a single word."""
    text = f"{value:.6g}" if isinstance(value, float) else _cut(redacted(str(value)))
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _cut(text: str) -> str:
    half = _FACT_LENGTH_MAX // 2
    return text if len(text) <= _FACT_LENGTH_MAX else f"{text[:half]} … {text[-half:]}"
