"""The manifest of a dataset: one chain of sources, which are tried in this order.

1. Given: another node has sent it (node/shared_manifests.py).
2. Saved: the url ends in ".manifest". It is not checked against the store: a changed shard is
   detected when it is read.
3. Finished: the cache folder has a manifest of the same list of shards.
4. Remembered: shards that an earlier run has indexed, before a failure or an interruption or for
   another list, are not indexed again (journal.py).
5. Made: the other shards are indexed, in workers (processes.py), and checked to agree (run.py).

An embedded node opens the dataset of the loader that starts it as soon as it runs
(node/manifests.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Self

import pyarrow as pa
from typing_extensions import Buffer

from dataplane.base import collector, suffixes
from dataplane.base.trace import Trace
from dataplane.base.units import some_of
from dataplane.formats import registry
from dataplane.formats.base import Format, ShardIndex
from dataplane.index.batches import KeepPreamble
from dataplane.index.described import described_shards, is_described
from dataplane.index.files import joined_shards, table_shards
from dataplane.index.journal import (
    IndexJournal,
    dataset_name,
    listing_key,
    shard_keys,
    version_of,
)
from dataplane.index.processes import IndexProcesses
from dataplane.index.run import (
    BeginBatches,
    Connect,
    IndexProgress,
    IndexRun,
    IndexShard,
    Progress,
    StoredShard,
)
from dataplane.index.shared_schema import SharedSchema
from dataplane.index.viewing import with_folder_columns
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError, ShardNotFound
from dataplane.model.joined import files_of, is_joined
from dataplane.model.records import ObjectInfo
from dataplane.model.redact import redacted, unpinned
from dataplane.plan.manifest import Manifest
from dataplane.rpc.messages import DatasetSource
from dataplane.rpc.sharing import NodeWork
from dataplane.store.connect import Stores, connect
from dataplane.store.expand import expand, missing
from dataplane.store.local import SPECIAL, target_of
from dataplane.store.reads import etag_of_size
from dataplane.store.tables import open_table
from dataplane.store.urls import FILE_PREFIX, Url, normalise

__all__ = ["Connect", "IndexProgress", "KeepPreamble", "Progress", "SharedSchema"]

MANIFEST_BYTES_MAX = 8 << 30
# Indexing a shard is mostly waiting for a few round trips.
_INDEXED_AT_ONCE = 64
_ADVICE = "`dataplane index … -o FILE` does this once for all runs; it goes on where it was stopped"
_NAMES_SHOWN = 3
_METADATA = "/metadata."
"""The beginning of the name of a table of the images in its folder (Hugging Face)."""
_trace = Trace("index")


# -- slow work -------------------------------------------------------------------------------------
#
# Report the progress of slow work on a dataset before a job can be opened: in the log, to the
# trainers that wait, and to `dataplane status`.
#
# Invariants:
# 1. Only work in progress is listed: the function that adds work removes it, also when it fails.

_LINES_S = 10.0
_TEXT_MAX = 300
_RATED_S = 1.0
"""The remaining time is not estimated earlier: the first parts of the work say too little."""

_work_trace = Trace("node")
_listed: dict[int, LongWork] = {}
_listing = threading.Lock()


class LongWork:
    """Work on the dataset with these urls, such as "indexing", counted in `units`. The log gets a
    line every ten seconds, and the first one has the `advice`. Use it as a context around the work;
    it also serves as a `Progress`. Thread-safe.
    """

    def __init__(
        self,
        what: str,
        urls: Sequence[str],
        unit: str,
        advice: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.urls = what, frozenset(urls)
        self._dataset, self._unit = redacted(some_of(urls)), unit
        self._advice, self._clock = advice, clock
        self._began = clock()
        self._next = self._began + _LINES_S
        self._first: tuple[float, int] | None = None
        self._done = self._total = 0

    def __enter__(self) -> Self:
        with _listing:
            _listed[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        with _listing:
            _listed.pop(id(self), None)

    def __call__(self, done: IndexProgress) -> None:
        """Note how many shards, or groups of blocks, are done."""
        self.advance(done.shards_done, done.shard_count)

    def advance(self, done: int, total: int) -> None:
        """Note the progress. A smaller `done` than before is ignored."""
        now = self._clock()
        self._done, self._total = max(done, self._done), total
        self._first = self._first or (now, done)
        if now < self._next:
            return
        self._next = now + _LINES_S
        facts: dict[str, object] = {
            "dataset": self._dataset,
            self._unit: f"{done:,} of {total:,}",
            "elapsed_s": round(now - self._began),
        }
        if left_s := self._left_s(now):
            facts["left_s"] = round(left_s)
        if self._advice:
            facts["help"], self._advice = self._advice, ""
        _work_trace.noted(f"still {self.what}", **facts)

    @property
    def now(self) -> NodeWork:
        """Return the progress."""
        left_s, dataset = self._left_s(self._clock()), self._dataset[:_TEXT_MAX]
        return NodeWork(self.what, dataset, self._done, self._total, self._unit, left_s)

    def _left_s(self, now: float) -> float:
        began, before = self._first or (now, 0)
        took_s, done = now - began, self._done - before
        return took_s / done * (self._total - self._done) if done and took_s > _RATED_S else 0.0


def work_on(urls: Collection[str]) -> NodeWork | None:
    """Return the progress of the work on datasets with one of these urls; if there are several, of
    the work that began last.
    """
    with _listing:
        mine = [each for each in _listed.values() if not each.urls.isdisjoint(urls)]
    return mine[-1].now if mine else None


def all_work() -> list[NodeWork]:
    """Return the progress of all slow work of this process."""
    with _listing:
        return [each.now for each in _listed.values()]


# -- sources ---------------------------------------------------------------------------------------


def open_manifest(
    config: NodeConfig,
    stores: Stores,
    source: DatasetSource,
    *,
    given: Manifest | None = None,
    keep: KeepPreamble | None = None,
    progress: Progress | None = None,
    workers: int = _INDEXED_AT_ONCE,
    leaves_out: bool = False,
) -> Manifest:
    """Return the manifest of a dataset from the first source that has it, for a node or a command.
    Shards are indexed in workers with the limits of this configuration; `keep` gets the preambles
    that are read for this.

    Raises:  as `index_dataset`.
    """
    if given is not None:
        return given
    indexers = IndexProcesses.of(config, keep, stores.pauses, is_policed=not config.embedded)
    with indexers as processes, LongWork("indexing", source.urls, "shards", _ADVICE) as work:
        return index_dataset(
            source.urls,
            format_name=source.format,
            cache_dir=config.cache_dir,
            workers=workers,
            progress=progress or work,
            connect=stores.connect,
            index_shard=processes.index,
            begin_batches=processes.begin_batches,
            leaves_out=leaves_out,
        )


def index_dataset(
    urls: Url | Iterable[Url],
    *,
    format_name: str = "",
    cache_dir: str = "",
    workers: int = 8,
    progress: Progress | None = None,
    connect: Connect = connect,
    index_shard: IndexShard | None = None,
    begin_batches: BeginBatches | None = None,
    leaves_out: bool = False,
) -> Manifest:
    """Return the manifest of the shards that `urls` name: saved, from the cache, or newly made. A
    cache folder of "" caches nothing. With `leaves_out`, shards that cannot be indexed are left
    out, and the manifest says so (run.py); it is not cached.

    `progress` is called in the caller's thread, at the start and after each shard. `index_shard` is
    called in threads, for the shards that `begin_batches` leaves out, or for all. By default it
    parses bytes in this process, so use the default only for trusted bytes.

    Raises:  ConfigError: no shards, several formats, no samples, no such format or cache folder.
    SchemaMismatch: two shards differ.  CorruptShard: a shard or a saved manifest is damaged.  The
    StoreError family.  DatasetChangedError.
    """
    given = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    names = [normalise(url) for url in given]
    if any(name.endswith(suffixes.MANIFEST) for name in names):
        return with_folder_columns(Manifest.from_bytes(_saved(names, connect), names[0]))
    table = open_table(names, connect)
    if table is not None:
        names, format_name = [table.name], "parquet"
        _trace.noted("opened a table", table=table.name, files=len(table.files))
    with collector.resting():
        objects = expand(names, connect) if table is None else list(table.files)
        chosen, listed, values = _shards_of(objects, names, format_name, index_shard, connect)
        if listed and is_joined(listed[0].etag):
            index_shard, begin_batches = _index_here, None  # only numbers are parsed
        version = version_of(chosen)
        keys = shard_keys(version, listed)
    run = IndexRun(
        chosen, listed, progress, connect, index_shard or _index_here, begin_batches,
        leaves_out=leaves_out,
    )  # fmt: skip
    if not cache_dir:
        manifest = run.manifest(names, run.indexed(workers, {}, keys, None))
        return with_folder_columns(manifest.with_categories(values), table)
    journal = IndexJournal(cache_dir, dataset_name(version, names))
    try:
        key = listing_key(version, keys)
        finished = journal.manifest(key)
        if finished is not None:
            collector.release(listed, keys)
            return with_folder_columns(finished, table)
        indexes = run.indexed(workers, journal.remembered(), keys, journal)
        manifest = run.manifest(names, indexes).with_categories(values)
        if not run.left_out:
            journal.finish(key, manifest, zip(keys, indexes, strict=True))
    finally:
        journal.close()
    return with_folder_columns(manifest, table)


def _shards_of(
    objects: Sequence[ObjectInfo],
    names: Sequence[str],
    format_name: str,
    index_shard: IndexShard | None,
    connect: Connect,
) -> tuple[Format, list[ObjectInfo], dict[str, pa.Array]]:
    """Return the dataset's format, its shards, and the values of columns that the names of files
    show. Files that are rows are joined into shards.
    """
    table_format, column = files_of(format_name)
    chosen, listed = choose_shards(objects, names, table_format, connect)
    _warn_of_versions(listed)
    if column:
        reader = registry.by_name(format_name)
        shards = table_shards(listed, column, reader, index_shard or _index_here, connect)
        return registry.by_name(suffixes.FILES), shards, {}
    return chosen, *(
        joined_shards(listed, names) if chosen.name == suffixes.FILES else (listed, {})
    )


def _saved(names: Sequence[str], connect: Connect) -> Buffer:
    """Read the file of a saved manifest."""
    if len(names) > 1:
        saved = next(name for name in names if name.endswith(suffixes.MANIFEST))
        raise ConfigError(f"{saved} is a whole dataset: pass only it, or pass the shards")
    store = connect(names[0])
    listed = store.head(names[0])
    if listed.size_bytes > MANIFEST_BYTES_MAX:
        raise ConfigError(f"{names[0]} has {listed.size_bytes} bytes: that is not a manifest")
    return store.read(names[0], 0, listed.size_bytes, listed.etag) if listed.size_bytes else b""


def _index_here(format_: Format, shard: StoredShard) -> ShardIndex:
    return format_.index(shard)


def _warn_of_versions(shards: Sequence[ObjectInfo]) -> None:
    """Log a warning that changes of these shards may go unnoticed."""
    unknown = [shard.url for shard in shards if shard.etag == etag_of_size(shard.size_bytes)]
    if unknown:
        _trace.failed(
            "the store tells neither etag nor time of shards: only their size identifies them, and "
            "a change that keeps the size mixes two versions",
            count=len(unknown),
            such_as=unknown[0],
        )


def choose_shards(
    listed: Sequence[ObjectInfo], names: Sequence[str], format_name: str, connect: Connect
) -> tuple[Format, list[ObjectInfo]]:
    """Return the dataset's format, and the listed objects that are its shards.

    Folders contain other files besides shards (README.md, dataset_info.json). Objects found in a
    folder are left out unless they have a suffix of shards; objects named by their own url stay.
    Empty objects that stand for folders (see `Store.list`) are left out, too. To find these, the
    store is queried only about objects that would otherwise be chosen.

    Raises:  ConfigError: no shards, or several formats.  ShardNotFound: there are only folders.
    Errors of the stores.
    """
    asked = registry.by_name(format_name) if format_name else None
    literal = frozenset(map(unpinned, names))
    given = listed
    while True:
        formats = by_name = [registry.format_of_url(shard.url) for shard in listed]
        if is_described(asked, formats) and (described := described_shards(listed, connect)):
            return described
        if asked is None:
            formats = _without_besides(formats)
        shards = _chosen(listed, formats, literal, asked)
        _check_links(listed, shards)
        _check_file_names(shards)
        _check_twins(shards)
        folders = missing((s for s in shards or listed if not s.size_bytes), connect)
        if not folders:
            break
        listed = [shard for shard in listed if shard.url not in folders]
        if not listed:
            raise ShardNotFound(
                "there is no object, only empty folders: "
                + some_of([s.url for s in given], _NAMES_SHOWN),
                shard=names[0],
            )
    if asked is not None:
        return asked, shards
    left_out = {
        info.url: before.name
        for info, before, after in zip(listed, by_name, formats, strict=True)
        if before is not None and after is None and info.url not in literal
    }
    _tell_of_besides(left_out, shards)
    if not shards:
        urls = [s.url for s in listed]
        why = registry.advice_of(urls[0], urls) or (
            f"known suffixes are {', '.join(registry.shard_suffixes())}; pass the format if your "
            "files have others"
        )
        raise ConfigError(
            f"none of the {len(listed)} objects has a suffix of shards "
            f"({some_of(urls, _NAMES_SHOWN)}); the first one: {why}",
            field="format",
            shard=urls[0],
        )
    known = {f.name for f in formats if f is not None}
    if len(known) == 1 and len(shards) == len(formats) - formats.count(None):
        return registry.by_name(known.pop()), shards
    return registry.dataset_format(s.url for s in shards), shards


def _check_links(listed: Sequence[ObjectInfo], shards: Sequence[ObjectInfo]) -> None:
    """Refuse shards that are symbolic links to missing files, or no files, and warn of others."""
    links = {info.url: target for info in listed if (target := target_of(info))}
    for url in (shard.url for shard in shards if shard.url in links):
        if links[url] == SPECIAL:
            raise ShardNotFound(f"{url} is {SPECIAL}, and no file: remove it", shard=url)
        raise ShardNotFound(
            f"{url} is a symbolic link to {links[url]}, which is not there: restore the file, or "
            "remove the link",
            shard=url,
        )
    for url, target in links.items():
        _trace.failed("no file, or a link that leads nowhere, is left out", url=url, target=target)


def _check_file_names(shards: Sequence[ObjectInfo]) -> None:
    """Refuse shards whose names are not UTF-8: messages and manifests have only such names."""
    for url in (shard.url for shard in shards if not shard.url.isascii()):
        try:
            url.encode()
        except UnicodeEncodeError as error:
            shown = os.fsencode(url.removeprefix(FILE_PREFIX))
            raise ConfigError(
                f"the name of the file {shown!r} is not UTF-8: rename it, move it elsewhere, or "
                "name the other shards by a pattern that leaves it out",
                field="urls",
            ) from error


def _check_twins(shards: Sequence[ObjectInfo]) -> None:
    """Refuse a folder that has MDS shards both plain and compressed, as caches of their library do.

    Raises:  ConfigError.
    """
    plain = {shard.url for shard in shards if shard.url.endswith(".mds")}
    for url in (shard.url for shard in shards if plain):
        stem, _, ending = url.rpartition(".")
        if stem in plain:
            raise ConfigError(
                f"{url} is there without .{ending}, too: pass one kind, as in *.mds",
                field="urls",
                shard=url,
            )


def _without_besides(formats: Sequence[Format | None]) -> list[Format | None]:
    """Leave out files that lie beside shards of another format."""
    names = {known.name for known in formats if known is not None}
    besides = [name for name in suffixes.BESIDES if name in names]
    left_out = besides if names.difference(besides) else besides[1:]
    return [known if known and known.name not in left_out else None for known in formats]


def _tell_of_besides(left_out: Mapping[str, str], shards: Sequence[ObjectInfo]) -> None:
    """Log which files, given with their formats, are left out beside these shards.

    Raises:  ConfigError: the shards are a table of the images beside it, by its name.
    """
    if not left_out or not shards:
        return
    images = [url for url, name in left_out.items() if name == suffixes.FILES]
    tables = [shard.url for shard in shards if images and _METADATA in shard.url]
    if tables:
        raise ConfigError(
            f"{tables[0]} is a table of the images beside it ({some_of(images, _NAMES_SHOWN)}): "
            'pass that file and files="file_name", its column of paths, to read its rows with the '
            'images; or format="files" to read the images alone',
            field="format",
            shard=tables[0],
        )
    image = suffixes.BY_FORMAT[suffixes.FILES]
    is_of_images = images or suffixes.path_of(shards[0].url).endswith(image)
    (_trace.failed if is_of_images else _trace.noted)(
        "files beside shards of another format are left out: to read them, name them or pass "
        "format=",
        count=len(left_out),
        such_as=next(iter(left_out)),
        read=shards[0].url,
    )


def _chosen(
    listed: Sequence[ObjectInfo],
    formats: Sequence[Format | None],
    literal: frozenset[str],
    asked: Format | None,
) -> list[ObjectInfo]:
    """Select the shards among these listed objects."""
    by_suffix = partial(zip, listed, formats, strict=True)
    if asked is None:
        return [s for s, f in by_suffix() if f is not None or unpinned(s.url) in literal]

    def is_chosen(info: ObjectInfo, known: Format | None) -> bool:
        # A suffix may belong to a format that is read only if it is named: .bin to token files.
        fits = known is None and suffixes.path_of(info.url).endswith(asked.suffixes)
        return fits or (known is not None and known.name == asked.name)

    named = [s for s, f in by_suffix() if is_chosen(s, f) or unpinned(s.url) in literal]
    # Many TFRecord shards have no suffix at all (train-00000-of-01024).
    return named or [s for s, f in by_suffix() if f is None] or list(listed)
