"""What is known of a dataset before its node has opened it, as processes hand it on. Imports no
library, so that it is there early.
"""

from __future__ import annotations

from msgspec import Struct

from dataplane.model import ObjectInfo

SHARDS_MAX = 32
"""That are read and indexed ahead: there may be a million, and one process does it."""
PLACES_MAX = 1024
"""That a scout reads in one round."""
Listed = tuple[str, int, str]
"""Url, size and etag of an object."""
Place = tuple[int, int, int]
"""The number of a listed object, an offset, and a length in bytes."""
Part = tuple[int, int, bytes]
"""The number of a listed object, an offset, and the bytes that are there."""


class Scouted(Struct, frozen=True):
    """What a scout has found: the objects that the urls of a dataset name, and what indexing reads
    first of them; or the content of a saved manifest.
    """

    listed: list[Listed]
    parts: list[Part]
    manifest: bytes = b""


class FoundDataset(Struct, frozen=True):
    """A dataset as far as it was opened ahead: its format and shards, (shard, index) as
    `encode_index` makes it and (shard, offset, bytes) of the preamble of some of them. Or only the
    content of a saved manifest.
    """

    format: str
    listed: list[Listed]
    indexes: list[tuple[int, bytes]]
    preambles: list[tuple[int, int, bytes]]
    manifest: bytes = b""

    @property
    def shards(self) -> list[ObjectInfo]:
        """All of them, in order."""
        return [ObjectInfo(*each) for each in self.listed]
