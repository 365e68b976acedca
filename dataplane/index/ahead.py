"""Index the first shards of a dataset while the node that will open it is still importing. The
bytes come from a scout (node/scout.py), or from local files.

Invariants:
1. The results equal the node's own: the same listing, and indexes made by the same code from the
   same bytes. Shards that fail here are left out; the node indexes them, and reports its own
   errors.
2. Memory is limited, as in every indexing process. If a shard crashes this process, the node gets
   no results and suffers no other harm.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dataplane.errors import DataplaneError
from dataplane.formats.base import Format, ShardIndex
from dataplane.index.found import PLACES_MAX, SHARDS_MAX, FoundDataset, Part, Place, Scouted
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
from dataplane.index.unindexed import Unindexed
from dataplane.model import ObjectInfo
from dataplane.store.base import Store
from dataplane.store.expand import expand
from dataplane.store.local import LocalStore
from dataplane.store.urls import normalise

ReadMore = Callable[[list[Place]], list[Part]]
"""Reads more of what the scout has listed; what cannot be read is left out."""


def found_ahead(
    urls: Sequence[str],
    format_name: str,
    scouted: Scouted | None,
    cache_dir: str = "",
    read_more: ReadMore | None = None,
) -> FoundDataset:
    """Collect what can be known of a dataset now. Without a scout, its urls are local. Nothing is
    indexed if the cache folder has the manifest.

    Raises:  DataplaneError: nothing can be known; the node reports why.
    """
    if scouted is not None and scouted.manifest:
        return FoundDataset("", [], [], [], scouted.manifest)
    names = [normalise(url) for url in urls]
    connect = _local if scouted is None else _no_store
    if scouted is None:
        listed = expand(names, connect)
    else:
        listed = [ObjectInfo(*each) for each in scouted.listed]
    chosen, shards = choose_shards(listed, names, format_name, connect)
    told = [(each.url, each.size_bytes, each.etag) for each in shards]
    found = FoundDataset(chosen.name, told, [], [])
    if _is_known(chosen, names, shards, cache_dir) or not hasattr(chosen, "first_reads"):
        return found  # or indexing reads all of them
    first = shards[:SHARDS_MAX]
    if scouted is None:
        for at, shard in enumerate(first):
            with contextlib.suppress(DataplaneError):
                index = chosen.index(StoredShard(shard, LocalStore(), threading.Event()))
                found.indexes.append((at, encode_index(index)))
    else:
        _index(chosen, first, scouted, read_more, found)
    return found


def _local(_: str) -> Store:
    return LocalStore()


def _no_store(url: str) -> Store:
    raise DataplaneError(f"{url}: the node asks whether there is an object or a folder")


def _index(
    chosen: Format,
    shards: Sequence[ObjectInfo],
    scouted: Scouted,
    read_more: ReadMore | None,
    found: FoundDataset,
) -> None:
    number_of = {shard.url: number for number, shard in enumerate(shards)}
    unindexed = Unindexed(chosen, partial(_take, found, number_of))
    for at, (url, size_bytes, _) in enumerate(scouted.listed):
        if url in number_of:
            unindexed.append(at, PartsOfShard(url, size_bytes, []))
    parts = scouted.parts
    while True:
        for part in parts:
            unindexed.add(*part)
        missing = [(at, place.offset, place.length) for at, place in unindexed.index()]
        if not missing or read_more is None or len(missing) > PLACES_MAX:
            return
        parts = read_more(missing)


def _take(
    found: FoundDataset,
    number_of: Mapping[str, int],
    _: int,
    index: ShardIndex,
    reader: PartsOfShard,
) -> None:
    number, place = number_of[reader.url], index.preamble
    found.indexes.append((number, encode_index(index)))
    if place.length:
        with contextlib.suppress(NotReadError):
            content = bytes(memoryview(reader.read(place.offset, place.length)))
            found.preambles.append((number, place.offset, content))


def _is_known(
    chosen: Format, names: Sequence[str], shards: Sequence[ObjectInfo], cache_dir: str
) -> bool:
    if not cache_dir:
        return False
    version = version_of(chosen)
    key = listing_key(version, shard_keys(version, shards))
    return IndexJournal.has_manifest(cache_dir, dataset_name(version, names), key)
