"""The messages between a node and its fetchers.

Frozen values, used outside this package instead of protobuf classes. Names and fields equal those
of proto/dataplane/rpc/v1/fetcher.proto, whose comments are the specification; a test compares the
two.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.errors import DataplaneError
from dataplane.model import Region


@dataclass(frozen=True, slots=True)
class StartFetching:
    """How a fetcher reaches stores. The two arenas are sent with it."""

    environment: tuple[bytes, ...]
    budget_s: float
    request_timeout_s: float
    log_level: str = "info"
    log_format: str = "text"
    store: str = ""


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Read bytes of a shard into an arena."""

    number: int
    url: str
    offset: int
    etag: str
    arena_id: int
    into: Region


@dataclass(frozen=True, slots=True)
class CopyPreamble:
    """Copy a preamble into the block arena."""

    number: int
    kept: Region
    into: Region


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A read or a copy has ended: its memory is no longer written."""

    number: int
    error: DataplaneError | None = None
    took_s: float = 0.0
    cpu_s: float = 0.0
    hedged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StorePause:
    """A store has asked to slow down, and the pause lasts this long."""

    store: str
    level: int
    left_s: float


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """An outage of a store, as a fetcher sees it."""

    store: str
    since: float
    error: str
    asked: float
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class ShardTrouble:
    """Why reads of a shard are delayed; no error if they no longer are."""

    url: str
    error: DataplaneError | None = None


ReadBody = ReadRange | CopyPreamble
ToFetcherBody = StartFetching | ReadRange | CopyPreamble | StorePause
FromFetcherBody = ReadEnded | StorePause | StoreSeen | ShardTrouble


@dataclass(frozen=True, slots=True)
class ToFetcher:
    """The envelope of a node's message to a fetcher."""

    body: ToFetcherBody


@dataclass(frozen=True, slots=True)
class FromFetcher:
    """The envelope of a fetcher's message."""

    body: FromFetcherBody
