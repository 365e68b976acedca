"""Make shards of files that are rows: a block is a run of files, joined into one shard.

The files are those of a listing, or those that the paths in a table name. Tables are read in the
same workers as all shards; here, only the Arrow columns that come back are used.
"""

from __future__ import annotations

import os
import posixpath
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import accumulate, groupby

import pyarrow as pa

from dataplane.base.trace import Trace
from dataplane.base.units import some_of
from dataplane.formats.base import Format, ShardIndex
from dataplane.formats.nulls import node_count
from dataplane.formats.source import BLOCK_BYTES
from dataplane.index.run import Connect, IndexShard, StoredShard
from dataplane.model.errors import ConfigError, CorruptShard, ShardNotFound
from dataplane.model.joined import IMAGE, LABEL, MISSING, ROWS, Joined, runs, without_query
from dataplane.model.records import ObjectInfo
from dataplane.plan.manifest import Manifest
from dataplane.store.urls import (
    FILE_PREFIX,
    base_of,
    braces,
    folder_of,
    literal_prefix,
    normalise,
)

_FILES_MAX = 256
"""The most files in a block: each takes a request to its store."""
_HEADS_AT_ONCE, _HEADS_MAX = 64, 1000
"""More files than this are found by one listing of the folder that holds all of them."""
_LISTED_MAX = 20
_trace = Trace("index")


def joined_shards(
    listed: Sequence[ObjectInfo], names: Iterable[str]
) -> tuple[list[ObjectInfo], dict[str, pa.Array]]:
    """Return the shards of these files, which the user's names matched, and the values of their
    labels, sorted.
    """
    roots, labels, shards = _roots(names), set[str](), list[ObjectInfo]()
    root_of, known = cache(partial(_root_of, roots)), Counter[str]()
    for root, infos in groupby(listed, lambda info: root_of(folder_of(without_query(info.url)))):
        for run in runs(infos, BLOCK_BYTES, _FILES_MAX):
            joined = Joined(run, root)
            labels.update(joined.labels())
            name = f"{without_query(run[0].url)}+{len(run) - 1}"
            # Files may differ in their queries alone.
            shards.append(joined.listed(f"{name}-{known[name]}" if known[name] else name))
            known[name] += 1
    return shards, {LABEL: pa.array(sorted(labels), pa.large_string())}


def said_of_strays(manifest: Manifest) -> str:
    """Return the advice about images beside folders of classes, which are a class of their own; ""
    if there are none. Lists of files are read only if a label has the name of a root.
    """
    labels = {*manifest.categories.get(LABEL, pa.array([], pa.string())).to_pylist()}
    roots = {root for root in _roots(manifest.urls) if _name_of(root) in labels}
    strays: dict[str, list[str]] = {}
    with_folders = set[str]()
    for shard in manifest.shards if roots and len(labels) > 1 else ():
        joined = Joined.of(shard.url, shard.etag)
        for key in joined.keys() if joined.root in roots else ():
            if "/" in key:
                with_folders.add(joined.root)
            else:
                strays.setdefault(joined.root, []).append(key)
    for root in with_folders.intersection(strays):
        return (
            f"images that lie beside the folders in {root} form a class of their own, with the "
            f"label {_name_of(root)!r}: {some_of(strays[root])}. Move them into "
            f"the folder of their class, or leave them out by the pattern {root}*/**"
        )
    return ""


def _name_of(root: str) -> str:
    return root.rstrip("/").rpartition("/")[2]


def _roots(names: Iterable[str]) -> set[str]:
    """Return the folders to which the names of files may be relative."""
    patterns = [pattern for name in names for pattern in braces(without_query(name))]
    return {
        *(f"{pattern.rstrip('/')}/" for pattern in patterns),
        *(folder_of(literal_prefix(pattern)) for pattern in patterns),
    }


def _root_of(roots: set[str], folder: str) -> str:
    """Return the nearest of these folders that contains `folder`, or else `folder` itself."""
    at = folder
    while at not in roots:
        at = at[: at.rfind("/", 0, -1) + 1]
        if not at:
            return folder
    return at


def table_shards(
    tables: Sequence[ObjectInfo],
    column: str,
    reader: Format,
    index_shard: IndexShard,
    connect: Connect,
) -> list[ObjectInfo]:
    """Return the shards of the files whose paths are in this column of these tables. `reader` is
    the format that reads a whole table as if it indexed it.

    Raises:  ConfigError: a path is missing, or is no path.  ShardNotFound: none of a table's files
    is there.  Errors of `index_shard` and of the stores.
    """
    shards: list[ObjectInfo] = []
    for table in tables:
        stored = StoredShard(table, connect(table.url), threading.Event())
        rows = _rows(table.url, index_shard(reader, stored))
        urls = [_url(table.url, row, path) for row, path in enumerate(rows[column].to_pylist())]
        members = _members(table.url, urls, connect)
        if column == IMAGE:
            rows = rows.drop_columns([IMAGE])
        counts = [len(run) for run in runs(members, BLOCK_BYTES, _FILES_MAX)]
        for end, count in zip(accumulate(counts), counts, strict=True):
            first = end - count
            own = rows.slice(first, count)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, own.schema) as writer:
                writer.write_batch(own)
            joined = Joined(members[first:end], rows=sink.getvalue().to_pybytes())
            shards.append(joined.listed(f"{table.url}+{first}"))
    return shards


def _rows(url: str, index: ShardIndex) -> pa.RecordBatch:
    """Return the rows of a table, which a worker has put into the metadata of its schema.

    Raises:  CorruptShard: the worker's answer is damaged.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer((index.schema.metadata or {})[ROWS])) as reader:
            rows = reader.read_next_batch()
            rows.validate(full=True)
    except (pa.ArrowException, LookupError, StopIteration) as error:
        raise CorruptShard(f"{url}: its rows cannot be read: {error}", shard=url) from error
    return rows


def _url(table: str, row: int, path: object) -> str:
    """Return the url of a path in a table: paths are relative to the folder of the table."""
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{table}: row {row} has {path!r} for the path of its file", shard=table)
    if "://" in path or (path.startswith("/") and table.startswith(FILE_PREFIX)):
        return normalise(path)
    base = base_of(table)
    return base + posixpath.normpath(posixpath.join(folder_of(table)[len(base) :], path))


def _members(table: str, urls: Sequence[str], connect: Connect) -> list[ObjectInfo]:
    """Return the files with these urls, in this order."""
    wanted = dict.fromkeys(urls)
    known: dict[str, ObjectInfo] = {}
    remote = sorted(url for url in wanted if not url.startswith(FILE_PREFIX))
    if len(remote) > _HEADS_MAX:
        for base, of_store in groupby(remote, base_of):
            first, *_, last = [*of_store] * 2
            folder = folder_of(os.path.commonprefix([first, last]))  # noqa: RUF071 - of characters
            below = connect(base).list(folder)
            known.update((info.url, info) for info in below if info.url in wanted)
    rest = [url for url in wanted if url not in known]

    def head(url: str) -> ObjectInfo:
        try:
            return connect(url).head(url)
        except ShardNotFound:
            return ObjectInfo(url, 0, MISSING)

    with ThreadPoolExecutor(_HEADS_AT_ONCE, "dataplane-head") as pool:
        known.update(zip(rest, (pool.map if remote else map)(head, rest), strict=True))
    members = [known[url] for url in urls]
    missing = {row: one.url for row, one in enumerate(members) if one.etag == MISSING}
    if len(missing) == len(members):
        raise ShardNotFound(
            f"{table}: none of the {len(members)} files that it names is there, as {urls[0]}: "
            "paths are relative to the folder of the table",
            shard=table,
        )
    if missing:
        row, url = next(iter(missing.items()))
        _trace.failed("a table names files that are not there", table=table, count=len(missing),
                      such_as=url, row=row)  # fmt: skip
    return members


def check_files(manifest: Manifest, schema: pa.Schema) -> None:
    """Refuse a table of paths if files that it names are not there.

    Raises:  ShardNotFound: names the first of them.
    """
    if manifest.nulls is None:
        return
    node = node_count(list(schema)[: schema.names.index(IMAGE)])
    first = int(manifest.nulls.shards[node])
    if first < 0:
        return
    listed, count = list[str](), int(manifest.nulls.counts[node])
    for at in range(first, len(manifest.shards)):
        shard = manifest.shards[at]
        missing = Joined.of(shard.url, shard.etag).missing()
        table, _, start = shard.url.rpartition("+")
        listed += [f"row {int(start) + row}: {url}" for row, url in missing.items()]
        if len(listed) >= min(count, _LISTED_MAX):
            break
    shown = "; ".join(listed[:_LISTED_MAX])
    more = "" if count <= len(listed[:_LISTED_MAX]) else "; …"
    raise ShardNotFound(
        f"{table} names {count} files that are not there: {shown}{more}. Restore them, take these "
        'rows out of the table, or leave them out with where=; or pass on_bad="replace"',
        shard=table,
    )
