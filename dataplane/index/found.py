"""Facts about a dataset that other processes collect before its node opens it. Imports no library,
so that it loads early.
"""

from __future__ import annotations

from msgspec import Struct

from dataplane.model import ObjectInfo

SHARDS_MAX = 32
"""Shards that are read and indexed ahead: there may be a million, and one process does it."""
PLACES_MAX = 1024
"""Places that a scout reads in one round."""
Listed = tuple[str, int, str]
"""Url, size and etag of an object."""
Place = tuple[int, int, int]
"""The number of a listed object, an offset, and a length in bytes."""
Part = tuple[int, int, bytes]
"""The number of a listed object, an offset, and the bytes that are there."""


class Scouted(Struct, frozen=True):
    """The results of a scout: the objects that a dataset's urls name, and the bytes that indexing
    reads first of them; or the content of a saved manifest.
    """

    listed: list[Listed]
    parts: list[Part]
    manifest: bytes = b""


class FoundDataset(Struct, frozen=True):
    """A dataset opened ahead, perhaps in part: its format and its shards. For some shards also
    (shard, index), made by `encode_index`, and (shard, offset, bytes) of the preamble. Or only the
    content of a saved manifest.
    """

    format: str
    listed: list[Listed]
    indexes: list[tuple[int, bytes]]
    preambles: list[tuple[int, int, bytes]]
    manifest: bytes = b""

    @property
    def shards(self) -> list[ObjectInfo]:
        """All shards, in order."""
        return [ObjectInfo(*each) for each in self.listed]
