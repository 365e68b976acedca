"""The id of a node, which only that node can use.

A node makes a secret when it starts, and its id ends with a hash of the secret. It sends the secret
with each call that names the id. So a coordinator recognizes the node without stored state, at its
first call, and after a restart of either. A process with another node's token, or with the shared
token, cannot act as that node.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import socket

from msgspec import Struct

SECRET_BYTES = 32
_HASH_BYTES = 10
"""80 bits, which are 16 characters of an id that people read in logs and tables."""
_SALT = b"dataplane node id\0"


class NodeIdentity(Struct, frozen=True):
    """A node's id and its secret. Its repr does not show the secret."""

    node_id: str
    secret: bytes

    def __repr__(self) -> str:
        return f"NodeIdentity({self.node_id!r})"


def own_identity() -> NodeIdentity:
    """Make a new identity for the node of this process."""
    return identity_of(f"{socket.gethostname()}-{os.getpid()}", os.urandom(SECRET_BYTES))


def identity_of(name: str, secret: bytes) -> NodeIdentity:
    """Return the identity for this secret of 32 bytes; its id begins with this name."""
    return NodeIdentity(f"{name}-{_hashed(secret)}", secret)


def is_of(node_id: str, secret: bytes) -> bool:
    """Return whether the id was made from this secret."""
    shown = node_id.rpartition("-")[2].encode()
    return len(secret) == SECRET_BYTES and hmac.compare_digest(shown, _hashed(secret).encode())


def _hashed(secret: bytes) -> str:
    digest = hashlib.sha256(_SALT + secret).digest()[:_HASH_BYTES]
    return base64.b32encode(digest).decode().lower()
