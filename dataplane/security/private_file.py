"""Files with secrets: those that this program creates, which only its user can read, and those that
are read again when they change.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from dataplane.base.trace import Trace
from dataplane.model.errors import ConfigError


def make(path: Path, text: str, what: str, instead: str = "") -> None:
    """Create the file, unless it exists: whole or not at all, even if two processes try at once.
    `what` and `instead` are words for the error.

    Raises:  ConfigError: the file cannot be created.
    """
    if os.path.lexists(path):
        return
    written = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.link(written, path)
        except FileExistsError:
            return
        finally:
            written.unlink()
    except OSError as error:
        advice = f"Choose another --state-dir, {instead}".rstrip(", ")
        raise ConfigError(
            f"{what} {path} cannot be created: {error.strerror}. {advice}", path=str(path)
        ) from error


def check(path: Path) -> None:
    """Check that only this user can read the file.

    Raises:  ConfigError: other users can read the file, or it cannot be examined.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", file=str(path)) from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{path} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}: "
            f"only its owner, and the user that runs this process, may be able to read it. "
            f"Remove it, so that the coordinator creates another, or `chmod 600 {path}`",
            path=str(path),
        )


# -- watched -----------------------------------------------------------------------------------
#
# Files that are read again when they change.

T = TypeVar("T")

LOOK_S = 1.0
_trace = Trace("security")

_Seen = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[T]):
    """The value that `read` makes of these files. The files are checked by a stat at most once a
    second; while the value is empty, at every call.

    While a file is being replaced, it may be missing, incomplete, or not fit the other files. Then
    the last value stays in use, a line is logged, and the next check tries again. May be used from
    any thread.
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

    def refresh(self) -> tuple[str, str]:
        """Check the files now. Return the name of their contents, and the result: "unchanged",
        "read again", or why the contents that were read last stay in use.
        """
        with self._lock:
            self._looked = self._clock()
            return self._what, self._look()

    def _look(self) -> str:
        seen = self._seen_now()
        if seen == self._seen:
            return "unchanged"
        try:
            found = self._read()
        except ConfigError as error:
            _trace.failed(f"{self._what} cannot be read; what was read last stays", error=error)
            return "cannot be read; what was read last stays"
        if self._seen_now() != seen:
            return "being replaced; checked again in a second"
        self._seen = seen
        if found == self._found:
            return "unchanged"
        self._found = found
        self._version += 1
        _trace.noted(f"{self._what} read again", files=" ".join(filter(None, self._paths)))
        return "read again"

    def _seen_now(self) -> _Seen:
        return tuple(_seen(path) for path in self._paths)


def content(path: str, bytes_max: int) -> bytes:
    """Return the whole file.

    Raises:  ConfigError: the file cannot be read, or is larger than `bytes_max`.
    """
    try:
        with Path(path).open("rb") as file:
            found = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. There is no fallback: correct the setting, "
            "or the file",
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
