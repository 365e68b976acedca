"""Shards that are indexed from bytes that were read before, by this process or another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from typing_extensions import Buffer

from dataplane.model import Region


class NotReadError(Exception):
    """Nobody has read these bytes of a shard; there are no `places` if it is all of it."""

    def __init__(self, *places: Region) -> None:
        super().__init__(*places)
        self.places = places


class PartsOfShard(Struct, eq=False):
    """A shard, and the parts of it that were read: the offset and the bytes of each."""

    url: str
    size_bytes: int
    parts: list[tuple[int, bytes]]

    def read(self, offset: int, length: int) -> Buffer:
        """As `ShardReader.read`.   Raises:  NotReadError."""
        found = self._held(offset, length)
        if found is None:
            raise NotReadError(Region(offset, length))
        return found

    def read_all(self, places: Sequence[Region]) -> list[Buffer]:
        """As `ShardReader.read_all`.   Raises:  NotReadError: names all that is missing."""
        found = [self._held(place.offset, place.length) for place in places]
        held = [each for each in found if each is not None]
        if len(held) < len(places):
            gaps = zip(places, found, strict=True)
            raise NotReadError(*(place for place, each in gaps if each is None))
        return held

    def stream(self) -> Iterator[Buffer]:
        """Not possible.   Raises:  NotReadError."""
        raise NotReadError

    def _held(self, offset: int, length: int) -> Buffer | None:
        for begin, content in self.parts:
            at = offset - begin
            if at >= 0 and at + length <= len(content):
                return memoryview(content)[at : at + length]
        return None
