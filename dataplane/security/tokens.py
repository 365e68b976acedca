"""The token that processes of a service present to each other over TCP: its sources and its file.

The first of these that is set is used: the variable DATAPLANE_TOKEN, the setting `token_file`, and
the file `token` in the state directory, which the first coordinator there creates. A source that is
set but cannot be used is an error, never a reason to try the next one.

A file may have several lines: a server accepts each of them, and a client sends the first. So a
token can be replaced without an interruption: everywhere add the new one below the old one, then
everywhere swap them, then everywhere remove the old one.
"""

from __future__ import annotations

import enum
import hmac
import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from msgspec import Struct

from dataplane.model.errors import ConfigError
from dataplane.security import private_file
from dataplane.security.private_file import Watched, content

# -- calls -----------------------------------------------------------------------------------------
#
# Every call that a coordinator answers, and the roles that may make it. A call that is not in this
# table is refused, so that a new call cannot be forgotten.


class Role(enum.Enum):
    """The roles that a caller may have."""

    NODE = "node"
    TRAINER = "trainer"
    ADMIN = "admin"


NODE_ONLY = frozenset({Role.NODE})
READERS = frozenset({Role.TRAINER, Role.ADMIN})
ADMIN_ONLY = frozenset({Role.ADMIN})
EVERYONE = frozenset(Role)
ANYBODY: frozenset[Role] = frozenset()
"""No token is required."""

_COORDINATOR, _HEALTH = "/dataplane.rpc.v1.Coordinator", "/grpc.health.v1.Health"

CALLS: Mapping[str, frozenset[Role]] = {
    f"{_COORDINATOR}/RegisterNode": NODE_ONLY,
    f"{_COORDINATOR}/Join": NODE_ONLY,
    f"{_COORDINATOR}/Heartbeat": NODE_ONLY,
    f"{_COORDINATOR}/Leave": NODE_ONLY,
    f"{_COORDINATOR}/ShareManifest": NODE_ONLY,
    f"{_COORDINATOR}/Status": READERS,
    f"{_COORDINATOR}/Ledger": READERS,
    f"{_COORDINATOR}/Change": ADMIN_ONLY,
    # Kubernetes' probes cannot send a token, and learn only whether the service is ready.
    f"{_HEALTH}/Check": ANYBODY,
    f"{_HEALTH}/Watch": EVERYONE,
}


class WrongTokenError(Exception):
    """The reason why a token was refused, in words that do not contain the token."""


class Caller(Struct, frozen=True):
    """The caller of a call, according to its token: its roles, its only job ("" for all), the
    prefixes of its datasets (None for all), and its name (None for the shared token).
    """

    roles: frozenset[Role]
    job: str = ""
    datasets: tuple[str, ...] | None = None
    subject: str | None = None


HOLDER_OF_SHARED = Caller(EVERYONE)
"""A caller with the shared token, who may make every call."""


VARIABLE = "DATAPLANE_TOKEN"
OWN_NAME = "token"
_INSTEAD = f"or give a token with {VARIABLE} or --token-file"
_LENGTH_MIN, _LENGTH_MAX = 16, 4096
_TOKENS_MAX = 8
_FILE_BYTES_MAX = _TOKENS_MAX * (_LENGTH_MAX + 2)


class TokenSource:
    """Tokens from one source, which messages call `told`. A file is read again when it changes."""

    def __init__(
        self,
        told: str,
        tokens: tuple[str, ...] | Watched[tuple[str, ...]],
        *,
        is_own: bool = False,
    ) -> None:
        """Create the source. `is_own` means that only this user can read it, so that only processes
        of this user have the token.
        """
        self.told = told
        self.is_own = is_own
        self._tokens = tokens

    def __repr__(self) -> str:
        return f"TokenSource({self.told})"

    def accepts(self, shown: str) -> bool:
        """Return whether this is one of the tokens, in constant time."""
        given = shown.encode()
        found = False
        for token in self.current()[0]:
            found |= hmac.compare_digest(given, token.encode())
        return found

    def first(self) -> str:
        """Return the token to present to others; "" if there is none yet."""
        return next(iter(self.current()[0]), "")

    def current(self) -> tuple[tuple[str, ...], int]:
        """Return all tokens, and a number that grows when they change."""
        return self._tokens.current() if isinstance(self._tokens, Watched) else (self._tokens, 0)

    @property
    def watched(self) -> Watched[tuple[str, ...]] | None:
        """The file of the tokens; None if they are in a variable."""
        return self._tokens if isinstance(self._tokens, Watched) else None


def find(
    environ: Mapping[str, str],
    token_file: str,
    state_dir: str,
    *,
    makes: bool,
    clock: Callable[[], float] = time.monotonic,
) -> TokenSource:
    """Return the token source of this process. With `makes`, the state directory's own token is
    created if it is needed and does not exist. Otherwise, the source has no token until a
    coordinator, which may start later, creates it.

    Raises:  ConfigError: the source cannot be read, or has no usable token.
    """
    if VARIABLE in environ:
        told = f"${VARIABLE}"
        return TokenSource(told, _parsed(environ[VARIABLE], told))
    if token_file:
        given = Watched("token file", (token_file,), partial(_read, token_file), clock)
        return TokenSource(token_file, given)
    path = Path(state_dir, OWN_NAME)
    if makes:
        private_file.make(path, f"{secrets.token_urlsafe(32)}\n", "the token", _INSTEAD)
    own = Watched("token file", (str(path),), partial(_read_own, path), clock)
    return TokenSource(str(path), own, is_own=True)


def _read_own(path: Path) -> tuple[str, ...]:
    if not os.path.lexists(path):
        return ()
    private_file.check(path)
    return _read(str(path))


def _read(path: str) -> tuple[str, ...]:
    return _parsed(content(path, _FILE_BYTES_MAX).decode("ascii", "replace"), path)


def _parsed(text: str, where: str) -> tuple[str, ...]:
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not tokens or len(tokens) > _TOKENS_MAX or len(text) > _FILE_BYTES_MAX:
        raise ConfigError(
            f"{where} has {len(tokens)} tokens: write one, or up to {_TOKENS_MAX} while they are "
            f"replaced, one a line"
        )
    for token in tokens:
        if not _LENGTH_MIN <= len(token) <= _LENGTH_MAX or not all("!" <= c <= "~" for c in token):
            raise ConfigError(
                f"{where} has a line that cannot be a token: a token has {_LENGTH_MIN} to "
                f"{_LENGTH_MAX} printable ASCII characters without spaces. To make one: "
                f"python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
    return tokens
