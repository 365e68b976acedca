"""What Dataplane asks of an object store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from typing_extensions import Buffer

from dataplane.model import ObjectInfo


class Store(Protocol):
    """One bucket, container or file system. Every url is a full one ("s3://bucket/key").

    Calls block, may come from any thread, and raise only the StoreError family and
    DatasetChangedError: foreign exceptions are mapped inside.
    """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose url starts with `prefix`, in url order, folders left out.

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
    """A store that can write what it reads where it is wanted. For others it is copied there."""

    def read_into(self, url: str, offset: int, etag: str, into: memoryview) -> None:
        """Fill `into` with the object's bytes from `offset` on; what is in it after an error, or
        while this runs, means nothing.

        Shapes:  into: uint8, writable, contiguous.
        Raises:  as `Store.read`.
        """


@runtime_checkable
class Reconnecting(Protocol):
    """A store with connections that may be dead without anybody having noticed."""

    def reconnect(self) -> None:
        """Have requests from now on go out over new connections; those under way go on.

        Raises:  ConfigError: the environment no longer says how. The old connections are kept.
        """
