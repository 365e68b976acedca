"""The real stores, counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from typing_extensions import Buffer

from dataplane.model.records import ObjectInfo
from dataplane.store.base import Store
from dataplane.store.connect import Stores, connect


class Counted(Stores):
    """The real stores, with a list of the urls that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_urls: list[str] = []
        self._counting = threading.Lock()

    def connect(self, url: str) -> Store:
        return _CountedStore(connect(url), self)

    def note(self, url: str) -> None:
        with self._counting:
            self.read_urls.append(url)

    @property
    def names(self) -> set[str]:
        return {url.rpartition("/")[2] for url in self.read_urls}


class _CountedStore:
    def __init__(self, inner: Store, counted: Counted) -> None:
        self._inner = inner
        self._counted = counted

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix)

    def head(self, url: str) -> ObjectInfo:
        return self._inner.head(url)

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        self._counted.note(url)
        return self._inner.read(url, offset, length, etag)

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        self._counted.note(url)
        return self._inner.stream(url, etag)
