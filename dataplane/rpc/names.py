"""The abstract socket names under which nodes listen: trainer and node compute the same one."""

from __future__ import annotations

import hashlib

from dataplane.rpc import address

_LOOPBACK = "127.0.0.1"


def served_name(uid: int, service: str) -> str:
    """Return the socket name of this user's node on this host for the coordinator at `service`.
    Upper and lower case, and different names of the loopback address, give the same name.

    Raises:  ConfigError: `service` is not an address.
    """
    parsed = address.parse(service.strip())
    if isinstance(parsed, address.TcpAddress):
        host = parsed.host.lower()
        host = _LOOPBACK if host in {"localhost", "::1"} else host
        return _name(uid, "served", address.TcpAddress(host, parsed.port).target)
    return _name(uid, "served", parsed.target)


def embedded_name(uid: int, version: str, run: str) -> str:
    """Return the socket name of the node that the trainers of one run on this host share."""
    return _name(uid, "embedded", version, run)


def _name(uid: int, *parts: str) -> str:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
    return f"dataplane-{uid}-{parts[0]}-{digest}"
