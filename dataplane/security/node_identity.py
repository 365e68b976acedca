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
import secrets
import socket
from pathlib import Path

from msgspec import Struct

from dataplane.model.errors import ConfigError
from dataplane.security import private_file
from dataplane.security.private_file import content

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


# -- keys of connections between nodes -------------------------------------------------------------
#
# The keys by which the nodes of a job recognize each other when they exchange blocks.
#
# A key is derived from a secret of the coordinator, the job and its generation. So no key is
# stored, and nodes of an older generation, or of another job, do not have it. The secret is in a
# file of the state directory, which the first coordinator there creates. The file is read once, at
# the start: to replace the secret, remove the file and restart the coordinator.


OWN_NAME = "neighbours.key"
_SECRET_BYTES = 32
_FILE_BYTES = 2 * _SECRET_BYTES + 1
_KEY, _KEY_SALT = b"dataplane key", b"dataplane salt"


class NeighbourKeys:
    """Derives the keys. Its repr does not show the secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "NeighbourKeys()"

    def key(self, job_id: str, generation: int, only_under: tuple[str, ...] = ()) -> bytes:
        """Return 32 bytes for the nodes of one generation of a job, which lend blocks under these
        urls; () for all.
        """
        urls = (url.encode() for url in only_under)
        return self._made(_KEY, job_id.encode(), generation.to_bytes(8, "little"), *urls)

    @property
    def salt(self) -> bytes:
        """Return 32 bytes that differ for every secret, and reveal nothing about it."""
        return self._made(_KEY_SALT)

    def _made(self, *parts: bytes) -> bytes:
        # Put the length before each part, so that different lists of parts never give the same
        # bytes.
        message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self._secret, message, hashlib.sha256)


def keys_in(path: Path) -> NeighbourKeys:
    """Return the keys of the secret in this file, which is created if it does not exist.

    Raises:  ConfigError: the file cannot be created or read, others can read it, or it is not a
    secret.
    """
    private_file.make(path, f"{secrets.token_hex(_SECRET_BYTES)}\n", "the secret")
    private_file.check(path)
    found = content(str(path), _FILE_BYTES)
    try:
        secret = bytes.fromhex(found.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != _SECRET_BYTES:
        raise ConfigError(
            f"{path} is not a secret of {2 * _SECRET_BYTES} hex digits: remove it, and the "
            "coordinator creates another when it starts",
            path=str(path),
        )
    return NeighbourKeys(secret)


def own_keys() -> NeighbourKeys:
    """Return keys that end with this process."""
    return NeighbourKeys(secrets.token_bytes(_SECRET_BYTES))
