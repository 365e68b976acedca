"""The abstract socket names under which nodes listen: trainer and node compute the same one."""

from __future__ import annotations

import hashlib

from dataplane.rpc import address


def served_name(uid: int, service: str) -> str:
    """The node of this host and user that serves for the coordinator at `service`.

    Raises:  ConfigError: `service` is no address.
    """
    return _name(uid, "served", address.parse(service.strip().lower()).target)


def embedded_name(uid: int, version: str, run: str) -> str:
    """The node that the trainers of one run on this host start and share."""
    return _name(uid, "embedded", version, run)


def _name(uid: int, *parts: str) -> str:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
    return f"dataplane-{uid}-{parts[0]}-{digest}"
