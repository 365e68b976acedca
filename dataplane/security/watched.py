"""Files that are read again when they change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from dataplane.errors import ConfigError
from dataplane.trace import Trace

T = TypeVar("T")

LOOK_S = 1.0
_trace = Trace("security")

_Seen = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[T]):
    """The value that `read` makes of these files. They are checked with a stat each, once a second
    at most; at every call as long as `read` has failed.

    While a file is replaced, it may be missing, half written, or not fit the others. Then the last
    value stays in use, the log says so, and the next check tries again. May be used from any
    thread.
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[str],
        read: Callable[[], T],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files.

        Raises:  ConfigError: as `read`.
        """
        self._what, self._paths, self._read, self._clock = what, paths, read, clock
        self._lock = threading.Lock()
        self._looked = clock()
        self._seen = self._seen_now()
        self._found = read()
        self._version = 0

    def current(self) -> tuple[T, int]:
        """Return the value, and a number that grows when the value changes."""
        with self._lock:
            now = self._clock()
            if not self._found or now - self._looked >= LOOK_S:
                self._looked = now
                self._look()
            return self._found, self._version

    def _look(self) -> None:
        seen = self._seen_now()
        if seen == self._seen:
            return
        try:
            found = self._read()
        except ConfigError as error:
            _trace.failed(f"{self._what} cannot be read; what was read last stays", error=error)
            return
        if self._seen_now() != seen:
            return  # replaced meanwhile: look again in a second
        self._seen = seen
        if found != self._found:
            self._found = found
            self._version += 1
            _trace.noted(f"{self._what} read again", files=" ".join(filter(None, self._paths)))

    def _seen_now(self) -> _Seen:
        return tuple(_seen(path) for path in self._paths)


def content(path: str, bytes_max: int) -> bytes:
    """The whole file.

    Raises:  ConfigError: it cannot be read, or is larger.
    """
    try:
        with Path(path).open("rb") as file:
            found = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Nothing else is used in its place: correct "
            "the setting, or the file",
            file=path,
        ) from error
    if len(found) > bytes_max:
        raise ConfigError(
            f"{path} has more than {bytes_max} bytes: is it the right file?", file=path
        )
    return found


def _seen(path: str) -> tuple[int, int, int] | None:
    try:
        status = Path(path).stat() if path else None
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)
