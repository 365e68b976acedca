"""Shards that another object describes: LitData's by an index.json, Megatron's by a .idx."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from dataplane.base.suffixes import BESIDES, path_of
from dataplane.formats import megatron, registry
from dataplane.formats.base import Format
from dataplane.formats.source import read_in_threads
from dataplane.index.run import Connect, StoredShard
from dataplane.model.errors import ConfigError, ShardNotFound
from dataplane.model.joined import Joined
from dataplane.model.records import ObjectInfo, Region
from dataplane.store.urls import folder_of

Chosen = tuple[Format, list[ObjectInfo]]


def is_described(asked: Format | None, formats: Sequence[Format | None]) -> bool:
    """Return whether objects may be such shards: none has a suffix of another format."""
    if asked is None:
        return all(known is None or known.name in BESIDES for known in formats)
    return asked.name == megatron.NAME


def described_shards(listed: Sequence[ObjectInfo], connect: Connect) -> Chosen | None:
    """Return the format of such shards, and these; None if there are none.

    Raises:  ConfigError, ShardNotFound, CorruptShard: what describes them is wrong.
    """
    known = {info.url: info for info in listed}
    shards = [info for info in listed if path_of(info.url).endswith(".bin")]
    if not shards:
        return None
    return _of_litdata(known, shards, connect) or _of_megatron(known, shards, connect)


def _of_litdata(
    listed: Mapping[str, ObjectInfo], shards: Sequence[ObjectInfo], connect: Connect
) -> Chosen | None:
    """Return the format of LitData's chunks, and these in the order of the index.json beside them;
    None if there is none.

    Raises:  ConfigError: two folders differ.   ShardNotFound: a chunk is missing.
    """
    from dataplane.formats import litdata

    by_url = {info.url: info for info in shards}
    names: dict[str, str] = {}
    ordered: list[ObjectInfo] = []
    for folder in dict.fromkeys(map(folder_of, by_url)):
        url = f"{folder}{litdata.INDEX}"
        try:
            info = connect(url).head(url)
        except ShardNotFound:
            return None
        if not 0 < info.size_bytes <= litdata.INDEX_BYTES_MAX:
            return None
        content = connect(url).read(url, 0, info.size_bytes, info.etag)
        known = litdata.described(url, bytes(memoryview(content)))
        if known is None:
            return None
        name, files = known
        names.setdefault(name, url)
        if len(names) > 1:
            raise ConfigError(
                f"{' and '.join(names.values())} describe different samples: read one of the "
                "folders, or each as a source of a mixture",
                shard=url,
            )
        lost = [file for file in files if f"{folder}{file}" not in by_url]
        if lost and url in listed:
            raise ShardNotFound(
                f"{url} names {lost[0]}, which is not there: restore the chunk",
                shard=folder + lost[0],
            )
        ordered += [by_url[f"{folder}{file}"] for file in files if f"{folder}{file}" in by_url]
    return (registry.by_name(next(iter(names))), ordered) if ordered else None


def _of_megatron(
    listed: Mapping[str, ObjectInfo], shards: Sequence[ObjectInfo], connect: Connect
) -> Chosen | None:
    """Return Megatron's format, and the pairs of .bin and .idx, cut into joined shards; None if
    these are no such pairs.

    Raises:  CorruptShard, ShardNotFound: some are none.
    """
    if not _has_pair(listed, shards, connect):
        return None
    joined: list[ObjectInfo] = []
    for tokens in shards:
        url = _table_of(tokens)
        table = listed.get(url) or connect(url).head(url)
        shard, header = _header_of(table, connect)
        count = megatron.documents_in(url, header, table.size_bytes)
        if not count:
            if tokens.size_bytes:
                raise megatron.contradiction(url, tokens.url)
            continue
        firsts = range(0, count, megatron.SHARD_DOCUMENTS)
        places = [Region(megatron.pointer_at(count, first), 8) for first in firsts]
        starts = [int.from_bytes(memoryview(at), "little") for at in read_in_threads(shard, places)]
        for first, start, end in zip(firsts, starts, [*starts[1:], tokens.size_bytes], strict=True):
            if not 0 <= start <= end <= tokens.size_bytes:
                raise megatron.contradiction(url, tokens.url)
            sizes = 4 * min(megatron.SHARD_DOCUMENTS, count - first)
            parts = [
                ObjectInfo(url, megatron.HEADER_BYTES, table.etag),
                ObjectInfo(url, sizes, table.etag),
                ObjectInfo(tokens.url, end - start, tokens.etag),
            ]
            begins = [0, megatron.HEADER_BYTES + 4 * first, start]
            joined.append(Joined(parts, starts=begins).listed(f"{tokens.url}+{first}"))
    if not joined:
        raise ConfigError(
            f"{_table_of(shards[0])} has no documents, nor has another pair: leave them out",
            shard=shards[0].url,
        )
    return registry.by_name(megatron.NAME), joined


def _has_pair(
    listed: Mapping[str, ObjectInfo], shards: Sequence[ObjectInfo], connect: Connect
) -> bool:
    """Return whether a .bin has Megatron's .idx beside it. Those that are not listed are looked for
    beside the first few.
    """
    tables = [listed[url] for url in map(_table_of, shards) if url in listed]
    if tables:
        return any(_header_of(table, connect)[1].startswith(megatron.MAGIC) for table in tables[:8])
    for url in map(_table_of, shards[:8]):
        try:
            table = connect(url).head(url)
        except ShardNotFound:
            continue
        return _header_of(table, connect)[1].startswith(megatron.MAGIC)
    return False


def _header_of(table: ObjectInfo, connect: Connect) -> tuple[StoredShard, bytes]:
    shard = StoredShard(table, connect(table.url), threading.Event())
    return shard, bytes(memoryview(shard.read(0, min(megatron.HEADER_BYTES, table.size_bytes))))


def _table_of(tokens: ObjectInfo) -> str:
    return f"{tokens.url[:-4]}.idx"
