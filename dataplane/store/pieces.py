"""Stream a whole object as a run of ranged reads; every store streams this way.

A request for a whole object lasts as long as its consumer is slow: it trips the timeouts of clients
and proxies, and when it breaks there is nothing to resume. Pieces avoid this, and each is pinned to
the object's etag.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from typing_extensions import Buffer

from dataplane.errors import DatasetChangedError, StoreError
from dataplane.model import ObjectInfo
from dataplane.store.base import Filling, Store
from dataplane.store.race import current_race

PIECE_BYTES = 8 << 20
NO_ETAG = "modified-"
"""Prefix of the etags that we make from time and size, for servers without etags."""
_WEAK = "W/"
_OF_NOTHING = hashlib.blake2b(b"", digest_size=8).hexdigest()


def etag_of_size(size_bytes: int) -> str:
    """Return the etag of an object about which the store knows only its size. Another object of the
    same size has the same etag.
    """
    return f"{_OF_NOTHING}-{size_bytes:x}"


def in_pieces(store: Store, url: str, etag: str) -> Iterator[Buffer]:
    """Yield the object from its start. Every piece but the last has PIECE_BYTES.

    Raises:  DatasetChangedError.  Errors of the store's `read` and `head`.
    """
    found = store.head(url)
    check_etag(found, etag)
    for offset in range(0, found.size_bytes, PIECE_BYTES):
        yield store.read(url, offset, min(PIECE_BYTES, found.size_bytes - offset), etag)


def check_etag(found: ObjectInfo, etag: str) -> None:
    """Refuse an object that is not the pinned one.

    Raises:  DatasetChangedError: shard, expected, found.
    """
    if found.etag != etag:
        raise DatasetChangedError(
            f"{found.url} changed since it was indexed: its etag was {etag} and is now "
            f"{found.etag}. Index the dataset again, or restore the object",
            shard=found.url,
            expected=etag,
            found=found.etag,
        )


def unmet(store: Store, url: str, etag: str) -> StoreError | DatasetChangedError:
    """Return the error for a read that was refused because the object has another etag (412); the
    error names the present one. Some servers and proxies refuse although it is the same.
    """
    try:
        check_etag(store.head(url), etag)
    except (StoreError, DatasetChangedError) as better:
        return better
    return StoreError(
        f"{url}: a read of the object with the etag {etag} is refused (HTTP 412), though it has "
        "this etag: the server, or a proxy before it, does not know If-Match. Use one that does",
        shard=url,
    )


def is_strong(etag: str) -> bool:
    """Whether a server accepts this etag in a condition (If-Match). A weak etag never matches
    there, even if the object is unchanged.

    Source: RFC 9110, 13.1.1.
    """
    return not etag.startswith((NO_ETAG, _WEAK))


def copy_into(body: Buffer, *into: memoryview) -> None:
    """Copy a body into these buffers, one after the other, without holding the
    interpreter's lock.
    """
    import numpy as np  # a late import: a process that only asks a store needs no arrays

    source, at = np.frombuffer(memoryview(body), np.uint8), 0
    for each in into:
        np.copyto(np.frombuffer(each, np.uint8), source[at : at + len(each)])
        at += len(each)


def fill(store: Store, url: str, offset: int, etag: str, *into: memoryview) -> None:
    """Fill these buffers, one after the other, with bytes of an object, using the fastest way of
    the store.

    Raises:  as `Store.read`.
    """
    if isinstance(store, Filling):
        store.read_into(url, offset, etag, *into)
    else:
        body = store.read(url, offset, sum(map(len, into)), etag)
        race = current_race()
        race.sent()
        race.claim()
        copy_into(body, *into)
