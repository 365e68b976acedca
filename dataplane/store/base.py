"""The interface of an object store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct
from typing_extensions import Buffer

from dataplane.model.records import ObjectInfo

LAST = "\U0010ffff" * 256
"""A text that sorts after all keys, since a key has at most 1024 bytes."""


class NotInOrderError(Exception):
    """A page of a list does not continue the page before."""


class Store(Protocol):
    """One bucket, container or file system. Every url is a full one ("s3://bucket/key").

    Calls block, may come from any thread, and raise only StoreError, its subclasses, and
    DatasetChangedError: other exceptions are converted.

    Stores are synchronous, since that is easier to implement, and blocks are so large that the cost
    of a thread is negligible.
    """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object whose url starts with `prefix`, in url order, without folders. An
        object without bytes may stand for a folder: consoles make empty objects "folder/", and
        obstore lists them as "folder". `head` distinguishes them.

        Raises:  ShardNotFound: no such bucket.  StoreDenied.  StoreUnavailable.
        """

    def head(self, url: str) -> ObjectInfo:
        """Return one object's size and etag.

        Raises:  ShardNotFound.  StoreDenied.  StoreUnavailable.
        """

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        """Return exactly bytes [offset, offset + length) of the object with this etag.

        Raises:  DatasetChangedError: the object has another etag.  TruncatedRead: fewer bytes
        came.  ShardNotFound, StoreDenied, StoreThrottled, StoreUnavailable.
        """

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        """Yield the whole object from its start, in pieces of the store's choice.

        Raises:  as `read`.
        """


@runtime_checkable
class Filling(Protocol):
    """A store that can read directly into given memory. From other stores, bytes are copied."""

    def read_into(self, url: str, offset: int, etag: str, *into: memoryview) -> None:
        """Fill these buffers, one after the other, with the object's bytes from `offset` on, in one
        request. Their content is undefined while this runs, and after an error. Nothing is written
        before `sent` of the thread's race (store/reads.py) was called, which prepares the memory
        while the answer is on its way.

        Shapes:  into: uint8, writable, contiguous.
        Raises:  as `Store.read`.
        """


@runtime_checkable
class Reconnecting(Protocol):
    """A store whose connections may break without notice."""

    def reconnect(self) -> None:
        """Open new connections for new requests; requests in flight continue.

        Raises:  ConfigError: the environment no longer configures access. The old connections are
        kept.
        """


@runtime_checkable
class Restricted(Protocol):
    """A store that opens only some of its urls."""

    def opens(self, url: str) -> bool:
        """Return whether the store opens this url."""


@runtime_checkable
class Writable(Protocol):
    """A store that can write objects."""

    def put(self, url: str, content: Buffer) -> None:
        """Write a whole object, in place of any other. Nobody sees a part of it.

        Raises:  As `Store.head`.
        """


@runtime_checkable
class Pinning(Protocol):
    """A store that keeps versions of its objects, and can name the present one."""

    def pinned(self, url: str) -> str:
        """Return the url or pattern at the present version, which nobody can change; unchanged if
        there are no versions.

        Raises:  As `Store.head`.
        """


class Page(Struct, frozen=True):
    """Objects in url order, and whether more follow. Objects without bytes are separate, in any
    order, since an object listed as "folder" may be in the place of "folder/".
    """

    objects: list[ObjectInfo]
    is_last: bool
    empty: Sequence[ObjectInfo] = ()


@runtime_checkable
class Paged(Protocol):
    """A store that can list objects from any key on."""

    def has_pages(self) -> bool:
        """Return whether the store can list in pages, as far as is known."""

    def page(self, prefix: str, after: str | None) -> Page:
        """List the first objects whose urls start with `prefix`, and come after the url `after`
        (any text that starts with `prefix`), if it is given.

        Raises:  NotInOrderError: the store does not list in url order.  As `Store.list`.
        """
