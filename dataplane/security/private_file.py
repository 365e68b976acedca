"""Files with secrets that this program creates; only its user can read them."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from dataplane.errors import ConfigError


def make(path: Path, text: str, what: str, instead: str = "") -> None:
    """Create the file, unless it exists: whole or not at all, even if two processes try at once.
    `what` and `instead` are words for the error.

    Raises:  ConfigError: it cannot be created.
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
    """Check that only this user can read it.

    Raises:  ConfigError: others can, or it cannot be examined.
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
