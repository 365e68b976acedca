"""What a store has answered to another process, which asked ahead of this one.

Only whole answers are kept, never errors: who asks again what has failed gets its own error, after
its own retries.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, field
from typing_extensions import Buffer

from dataplane.model import ObjectInfo
from dataplane.store.base import Store

Listed = tuple[str, int, str]
"""Url, size and etag of an object."""


class EarlyAnswers(Struct):
    """What a store answered: objects by prefix and by url, and bytes by url, etag and offset."""

    lists: dict[str, list[Listed]] = field(default_factory=dict)
    heads: dict[str, Listed] = field(default_factory=dict)
    reads: list[tuple[str, str, int, bytes]] = field(default_factory=list)


class AskedAhead:
    """A store that remembers what `inner` answers."""

    def __init__(self, inner: Store, answers: EarlyAnswers) -> None:
        self._inner, self._answers = inner, answers

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As `Store.list`."""
        found = list(self._inner.list(prefix))
        self._answers.lists[prefix] = [_told(one) for one in found]
        return iter(found)

    def head(self, url: str) -> ObjectInfo:
        """As `Store.head`."""
        found = self._inner.head(url)
        self._answers.heads[url] = _told(found)
        return found

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        """As `Store.read`."""
        found = self._inner.read(url, offset, length, etag)
        self._answers.reads.append((url, etag, offset, bytes(found)))
        return found

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        """As `Store.stream`; it is not remembered."""
        return self._inner.stream(url, etag)


class Known:
    """Answers, each of which is given once. Thread-safe."""

    def __init__(self, answers: EarlyAnswers) -> None:
        self._answers = answers
        self._reads = {
            (url, etag, offset, len(content)): content
            for url, etag, offset, content in answers.reads
        }

    def list(self, prefix: str) -> list[Listed] | None:
        """The objects below this prefix; None if they are not known."""
        return self._answers.lists.pop(prefix, None)

    def head(self, url: str) -> Listed | None:
        """The object with this url; None if it is not known."""
        return self._answers.heads.pop(url, None)

    def read(self, url: str, offset: int, length: int, etag: str) -> bytes | None:
        """These bytes of an object; None if they are not known."""
        return self._reads.pop((url, etag, offset, length), None)


class Answered:
    """A store that answers what is known, and asks `inner` for everything else."""

    def __init__(self, inner: Store, known: Known) -> None:
        self._inner, self._known = inner, known

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As `Store.list`."""
        found = self._known.list(prefix)
        return self._inner.list(prefix) if found is None else (ObjectInfo(*one) for one in found)

    def head(self, url: str) -> ObjectInfo:
        """As `Store.head`."""
        found = self._known.head(url)
        return self._inner.head(url) if found is None else ObjectInfo(*found)

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        """As `Store.read`."""
        found = self._known.read(url, offset, length, etag)
        return self._inner.read(url, offset, length, etag) if found is None else found

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        """As `Store.stream`."""
        return self._inner.stream(url, etag)


def _told(info: ObjectInfo) -> Listed:
    return info.url, info.size_bytes, info.etag
