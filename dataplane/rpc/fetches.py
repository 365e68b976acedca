"""The messages between a node and its fetchers.

Frozen values, used outside this package instead of protobuf classes. Names and fields equal those
of proto/dataplane/rpc/v1/fetcher.proto, whose comments are the specification; a test compares the
two.
"""

from __future__ import annotations

from msgspec import Struct

from dataplane.errors import DataplaneError
from dataplane.model import Region


class StartFetching(Struct, frozen=True):
    """How a fetcher reaches stores. The two arenas are sent with it."""

    environment: tuple[bytes, ...]
    budget_s: float
    request_timeout_s: float
    log_level: str = "info"
    log_format: str = "text"
    store: str = ""
    is_policed: bool = False
    allowed_urls: tuple[str, ...] = ()


class ReadTarget(Struct, frozen=True):
    """More bytes of a shard that are read in one request, and where they go."""

    offset: int
    into: Region


class ReadRange(Struct, frozen=True):
    """Read bytes of a shard into an arena."""

    number: int
    url: str
    offset: int
    etag: str
    arena_id: int
    into: Region
    more: tuple[ReadTarget, ...] = ()

    @property
    def targets(self) -> tuple[ReadTarget, ...]:
        """All that is read, in the order of the shard."""
        return (ReadTarget(self.offset, self.into), *self.more)

    @property
    def length(self) -> int:
        """Bytes that are read of the shard, with those between the targets."""
        last = self.more[-1] if self.more else ReadTarget(self.offset, self.into)
        return last.offset + last.into.length - self.offset


class CopyPreamble(Struct, frozen=True):
    """Copy a preamble into the block arena."""

    number: int
    kept: Region
    into: Region

    @property
    def length(self) -> int:
        """Bytes that are copied."""
        return self.into.length


class ReadEnded(Struct, frozen=True):
    """A read or a copy has ended: its memory is no longer written."""

    number: int
    error: DataplaneError | None = None
    took_s: float = 0.0
    cpu_s: float = 0.0
    hedged_bytes: int = 0


class StorePause(Struct, frozen=True):
    """A store has asked to slow down, and the pause lasts this long."""

    store: str
    level: int
    left_s: float


class StoreSeen(Struct, frozen=True):
    """An outage of a store, as a fetcher sees it."""

    store: str
    since: float
    error: str
    asked: float
    until: float = 0.0


class ShardTrouble(Struct, frozen=True):
    """Why reads of a shard are delayed; no error if they no longer are."""

    url: str
    error: DataplaneError | None = None


ReadBody = ReadRange | CopyPreamble
ToFetcherBody = StartFetching | ReadRange | CopyPreamble | StorePause
FromFetcherBody = ReadEnded | StorePause | StoreSeen | ShardTrouble


class ToFetcher(Struct, frozen=True):
    """The envelope of a node's message to a fetcher."""

    body: ToFetcherBody


class FromFetcher(Struct, frozen=True):
    """The envelope of a fetcher's message."""

    body: FromFetcherBody
