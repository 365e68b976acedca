"""Indexes the first shards of a dataset while the node that is to open it still imports: with what
a scout has read (node/scout.py), or from local files.

Invariants:
1. What is found is what the node would find: the same listing, and indexes made by the same code of
   the same bytes. What fails here is left out, and the node does it, with its own errors.
2. As in every indexing process, memory is limited, and what a shard does to this process harms
   nobody: then nothing is found.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from dataplane.errors import DataplaneError
from dataplane.formats.base import Format, ShardIndex, ShardReader
from dataplane.index.found import SHARDS_MAX, FoundDataset, Scouted
from dataplane.index.indexing import choose_shards
from dataplane.index.journal import (
    IndexJournal,
    dataset_name,
    encode_index,
    listing_key,
    shard_keys,
    version_of,
)
from dataplane.index.parts import NotReadError, PartsOfShard
from dataplane.index.run import StoredShard
from dataplane.model import ObjectInfo
from dataplane.store.expand import expand
from dataplane.store.local import LocalStore
from dataplane.store.urls import normalise


def found_ahead(
    urls: Sequence[str], format_name: str, scouted: Scouted | None, cache_dir: str = ""
) -> FoundDataset:
    """What can be known of a dataset by now. Without a scout, its urls are local. Nothing is
    indexed if the cache folder has its manifest.

    Raises:  DataplaneError: nothing can; the node says why.
    """
    if scouted is not None and scouted.manifest:
        return FoundDataset("", [], [], [], scouted.manifest)
    names = [normalise(url) for url in urls]
    if scouted is None:
        listed = expand(names, lambda _: LocalStore())
    else:
        listed = [ObjectInfo(*each) for each in scouted.listed]
    chosen, shards = choose_shards(listed, names, format_name)
    told = [(each.url, each.size_bytes, each.etag) for each in shards]
    found = FoundDataset(chosen.name, told, [], [])
    if _is_known(chosen, names, shards, cache_dir):
        return found
    for at, reader in enumerate(_readers(chosen, shards, scouted)):
        with contextlib.suppress(DataplaneError, NotReadError):
            index = chosen.index(reader)
            found.indexes.append((at, encode_index(index)))
            found.preambles.extend(_preamble(at, index, reader))
    return found


def _is_known(
    chosen: Format, names: Sequence[str], shards: Sequence[ObjectInfo], cache_dir: str
) -> bool:
    if not cache_dir:
        return False
    version = version_of(chosen)
    key = listing_key(version, shard_keys(version, shards))
    return IndexJournal.has_manifest(cache_dir, dataset_name(version, names), key)


def _readers(
    chosen: Format, shards: Sequence[ObjectInfo], scouted: Scouted | None
) -> Iterator[ShardReader]:
    """The first shards, if indexing them needs no more than their first reads."""
    if not hasattr(chosen, "first_reads"):
        return
    if scouted is None:
        for shard in shards[:SHARDS_MAX]:
            yield StoredShard(shard, LocalStore(), threading.Event())
        return
    parts: dict[str, list[tuple[int, bytes]]] = {}
    for at, offset, content in scouted.parts:
        parts.setdefault(scouted.listed[at][0], []).append((offset, content))
    for shard in shards[:SHARDS_MAX]:
        yield PartsOfShard(shard.url, shard.size_bytes, parts.get(shard.url, []))


def _preamble(at: int, index: ShardIndex, reader: ShardReader) -> Iterator[tuple[int, int, bytes]]:
    place = index.preamble
    if place.length and isinstance(reader, PartsOfShard):
        with contextlib.suppress(NotReadError):
            yield at, place.offset, bytes(reader.read(place.offset, place.length))
