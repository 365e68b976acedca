"""Every call that a coordinator answers, and the roles that may make it. A call that is not in this
table is refused, so that a new call cannot be forgotten.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec import Struct


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
