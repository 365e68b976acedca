"""Hide the secrets in a process's environment from processes that do not need them.

Workers parse untrusted bytes and call users' functions. Therefore workers, and the processes that
fork them, have no token of the service, no keys of stores, and no other variable whose name
suggests a secret. Fetchers, which read stores, get the node's variables over their socket.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path

_OF_STORES = ("AWS_", "AZURE_", "GOOGLE_", "FSSPEC_")
_WORDS = re.compile(
    r"(?:^|_)(?:(?:API|ACCESS|PRIVATE|SECRET)?KEYS?|TOKEN|SECRETS?|PASS|PASSWORDS?|PASSWD|AUTH|"
    r"CREDENTIALS?|SAS|CONNECTION_STRING)(?:_|$)",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/@\s]*:[^/@\s]+@")  # in urls of proxies and databases, for example
_FILLING = ord("*")
_ENV_START, _ENV_END = 50 - 3, 51 - 3
"""The second of the fields after the name in /proc/self/stat: fields 50 and 51 in proc(5)."""


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return these variables without those that name a secret, or configure access to stores."""
    return {name: value for name, value in environ.items() if not _is_secret(name, value)}


def forget_secrets() -> None:
    """Remove the secrets from the environment of this process and its children, and from the copy
    that the kernel shows in /proc.
    """
    for name in [name for name, value in os.environ.items() if _is_secret(name, value)]:
        del os.environ[name]
    _overwrite_initial()


def hide_secrets() -> None:
    """Keep the secrets in the environment of this process, but remove them from the copy that the
    kernel shows to other processes in /proc. Call this before any thread reads variables.
    """
    for name, value in list(os.environ.items()):
        if _is_secret(name, value):
            os.environ[name] = value  # so that the C library stores the value in other memory
    _overwrite_initial()


def _is_secret(name: str, value: str) -> bool:
    is_named = name.upper().startswith(_OF_STORES) or _WORDS.search(name) is not None
    return is_named or _LOGIN.search(value) is not None


def _overwrite_initial() -> None:
    """Overwrite the secrets among the variables with which the kernel started this program. That
    memory is what /proc/self/environ shows, whatever the process changes later. Zeros cannot be
    used, since some readers of /proc take an empty variable for the end of all variables.
    """
    fields = Path("/proc/self/stat").read_text("latin-1").rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    if not 0 < start < end:  # the kernel does not report the place
        return
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        name, _, value = os.fsdecode(entry).partition("=")
        if _is_secret(name, value):
            ctypes.memset(at, _FILLING, len(entry))
        at += len(entry) + 1
