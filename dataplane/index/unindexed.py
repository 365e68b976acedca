"""Index shards from bytes that somebody else reads, and report which further bytes are needed.

Invariants:
1. A shard requests more bytes only a few times, never the same bytes twice, and a limited number of
   them. A shard that cannot be indexed within these limits is left out.
2. No errors are reported here. The node later indexes a shard that is left out alone, and reports
   what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct
from typing_extensions import Buffer

from dataplane.formats.base import Format, ShardIndex
from dataplane.formats.faults import is_out_of_memory
from dataplane.model.errors import DataplaneError
from dataplane.model.records import Region

BYTES_MAX = 16 << 20
"""Bytes that are requested at once. Shards that need more are left out."""
_ROUNDS_MAX = 4
"""How often more of a shard is asked for: a large footer, then what the footer names."""
_SHARD_BYTES_MAX = 1 << 20


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


Take = Callable[[int, ShardIndex, PartsOfShard], None]
"""Gets the number of a shard, its index, and its bytes. It may raise NotReadError, too."""


class _Shard(Struct, eq=False):
    """The parts of a shard that were read, and those that were requested."""

    reader: PartsOfShard
    asked: set[Region]


class Unindexed:
    """Shards of one format without an index, by number; `take` gets each index."""

    def __init__(self, format_: Format, take: Take) -> None:
        self.unread_count = 0
        """How many were left out since they ask again for what nobody could read."""
        self._format, self._take = format_, take
        self._waiting: dict[int, _Shard] = {}
        self._rounds = 0

    def append(self, number: int, reader: PartsOfShard) -> None:
        """Add a shard, whose `first_reads` were requested already."""
        first = set(first_reads(self._format, reader.size_bytes))
        self._waiting[number] = _Shard(reader, first)

    def add(self, number: int, offset: int, content: bytes) -> None:
        """Add bytes of a shard that were read."""
        shard = self._waiting.get(number)
        if shard is not None:
            shard.reader.parts.append((offset, content))

    def index(self) -> list[tuple[int, Region]]:
        """Index the shards whose bytes are here. Return what the others need: pairs of a shard's
        number and a place in it.

        Raises:  MemoryError.
        """
        self._rounds += 1
        missing: list[tuple[int, Region]] = []
        left_bytes = BYTES_MAX
        for number, shard in [*self._waiting.items()]:
            places = self._try(number, shard)
            size_bytes = sum(place.length for place in places)
            is_asked_for = places and size_bytes <= min(left_bytes, _SHARD_BYTES_MAX)
            if is_asked_for and self._rounds <= _ROUNDS_MAX:
                left_bytes -= size_bytes
                shard.asked.update(places)
                missing.extend((number, place) for place in places)
            else:
                del self._waiting[number]
        return missing

    def _try(self, number: int, shard: _Shard) -> tuple[Region, ...]:
        """Index a shard. Return what must be read first; nothing if it has an index, or
        never will.
        """
        try:
            self._take(number, self._format.index(shard.reader), shard.reader)
        except NotReadError as error:
            if shard.asked.intersection(error.places):
                self.unread_count += 1
                return ()
            return error.places
        except DataplaneError:
            return ()
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError from error
        return ()


def first_reads(format_: Format, size_bytes: int) -> tuple[Region, ...]:
    """Return the ranges of a shard of this size that are read before it is parsed."""
    named = getattr(format_, "first_reads", None)
    places: tuple[Region, ...] = () if named is None else named(size_bytes)
    return tuple(place for place in places if place.length)
