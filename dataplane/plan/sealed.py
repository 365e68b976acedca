"""Bytes with a checksum: a damaged file is refused before it is parsed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from typing_extensions import Buffer

from dataplane.errors import ConfigError, CorruptShard

_MARK = b"DP-INDEX"
_CHECKSUM_BYTES = 32


def sealed(body: bytes) -> bytes:
    """The body, its checksum, and a mark: a reader of only the body may ignore both."""
    return body + _checksum(body) + _MARK


def unsealed(content: Buffer, name: str) -> memoryview:
    """Return the body that `sealed` was given; errors call the content `name`.

    Raises:  CorruptShard: truncated, damaged, or not such a file.
    """
    whole = memoryview(content).cast("B")
    end = len(whole) - _CHECKSUM_BYTES - len(_MARK)
    mark = bytes(whole[-len(_MARK) :])
    if end < 0 or mark != _MARK:
        raise damaged(name, f"{_MARK!r} at its end (was it cut short?)", repr(mark), max(end, 0))
    body = whole[:end]
    if bytes(whole[end : -len(_MARK)]) != _checksum(body):
        raise damaged(name, "the checksum at its end", f"another one over {end} bytes", end)
    return body


def damaged(name: str, expected: str, found: str, offset: int = 0) -> CorruptShard:
    """The error for a manifest that is not intact."""
    return CorruptShard(
        f"{name} is not an intact manifest: expected {expected}, found {found}."
        " Index the dataset again",
        shard=name,
        offset=offset,
        expected=expected,
        found=found,
    )


def check_version(metadata: Mapping[bytes, bytes], expected: int, name: str) -> None:
    """Check the version of a manifest that errors call `name`.

    Raises:  ConfigError: it has another version.
    """
    found = metadata[b"dataplane.manifest"].decode()
    if found != str(expected):
        raise ConfigError(
            f"{name} is a manifest of version {found}, and this is Dataplane with version"
            f" {expected}: index the dataset again, or use the release that wrote it",
            field="version",
            expected=expected,
            found=found,
        )


def _checksum(body: Buffer) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
