"""The interface of an object store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct
from typing_extensions import Buffer

from dataplane.model import ObjectInfo

LAST = "\U0010ffff" * 256
"""After all keys, which have 1024 bytes at most."""


class NotInOrderError(Exception):
    """A page of a list is not what follows the one before."""


class Store(Protocol):
    """One bucket, container or file system. Every url is a full one ("s3://bucket/key").

    Calls block, may come from any thread, and raise only the StoreError family and
    DatasetChangedError: other exceptions are converted inside.
    """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose url starts with `prefix`, in url order, folders left out. But an
        object without bytes may be none: consoles make empty objects "folder/", and obstore lists
        them as "folder". `head` tells.

        Raises:  ShardNotFound: no such bucket.  StoreDenied.  StoreUnavailable.
        """

    def head(self, url: str) -> ObjectInfo:
        """One object's size and etag.

        Raises:  ShardNotFound.  StoreDenied.  StoreUnavailable.
        """

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        """Exactly bytes [offset, offset + length) of the object that has this etag.

        Raises:  DatasetChangedError: the object has another etag.  TruncatedRead: fewer bytes
        came.  ShardNotFound, StoreDenied, StoreThrottled, StoreUnavailable.
        """

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        """The whole object from its start, in pieces of the store's choice.

        Raises:  as `read`.
        """


@runtime_checkable
class Filling(Protocol):
    """A store that can read directly into given memory. For other stores, bytes are copied
    there.
    """

    def read_into(self, url: str, offset: int, etag: str, *into: memoryview) -> None:
        """Fill these, one after the other, with the object's bytes from `offset` on, in one
        request; their content is undefined after an error, and while this runs. Nothing is written
        before `sent` of the thread's race (store/race.py), which makes the memory ready while the
        answer is on its way.

        Shapes:  into: uint8, writable, contiguous.
        Raises:  as `Store.read`.
        """


@runtime_checkable
class Reconnecting(Protocol):
    """A store whose connections may be dead without notice."""

    def reconnect(self) -> None:
        """Use new connections for new requests; requests in flight continue.

        Raises:  ConfigError: the environment no longer configures access. The old connections are
        kept.
        """


@runtime_checkable
class Restricted(Protocol):
    """A store that opens only some of its urls."""

    def opens(self, url: str) -> bool:
        """Whether it opens this url."""


@runtime_checkable
class Pinning(Protocol):
    """A store that keeps versions of its objects, and can name the one that it has now."""

    def pinned(self, url: str) -> str:
        """The url or pattern at the version that the store has now, which nobody can change; what
        has no versions is unchanged.

        Raises:  As `Store.head`.
        """


class Page(Struct, frozen=True):
    """Objects in url order, and whether no more follow. Those without bytes are apart, and in any
    order: what is listed as "folder" may have come where "folder/" belongs.
    """

    objects: list[ObjectInfo]
    is_last: bool
    empty: Sequence[ObjectInfo] = ()


@runtime_checkable
class Paged(Protocol):
    """A store that can list from any key on."""

    def has_pages(self) -> bool:
        """Whether it can do so, as far as is known."""

    def page(self, prefix: str, after: str | None) -> Page:
        """The first objects whose urls start with `prefix`, and come after the url `after` (any
        text that starts with `prefix`), if there is one.

        Raises:  NotInOrderError: the store does not list in url order.  As `Store.list`.
        """
