"""Shards that are indexed from bytes read earlier, by this process or another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from typing_extensions import Buffer

from dataplane.model.records import Region


class NotReadError(Exception):
    """These bytes of a shard have not been read; without `places`, the whole shard is needed."""

    def __init__(self, *places: Region) -> None:
        super().__init__(*places)
        self.places = places


class PartsOfShard(Struct, eq=False):
    """A shard, and the parts of it that were read, as (offset, bytes)."""

    url: str
    size_bytes: int
    parts: list[tuple[int, bytes]]

    def read(self, offset: int, length: int) -> Buffer:
        """Implement `ShardReader.read`.   Raises:  NotReadError."""
        found = self._held(offset, length)
        if found is None:
            raise NotReadError(Region(offset, length))
        return found

    def read_all(self, places: Sequence[Region]) -> list[Buffer]:
        """Implement `ShardReader.read_all`.   Raises:  NotReadError: names all missing parts."""
        found = [self._held(place.offset, place.length) for place in places]
        held = [each for each in found if each is not None]
        if len(held) < len(places):
            gaps = zip(places, found, strict=True)
            raise NotReadError(*(place for place, each in gaps if each is None))
        return held

    def stream(self) -> Iterator[Buffer]:
        """Always fail: only parts are here.   Raises:  NotReadError."""
        raise NotReadError

    def _held(self, offset: int, length: int) -> Buffer | None:
        for begin, content in self.parts:
            at = offset - begin
            if at >= 0 and at + length <= len(content):
                return memoryview(content)[at : at + length]
        return None
