"""Count how many rows of each block of a dataset belong to a view, in workers.

1. Blocks are counted in stretches, each once: stretches counted before a failure, an interruption
   or the addition of shards are not counted again.
2. Only the columns that the view needs are read. A block whose statistics already give its count is
   not read.
3. Remembered counts are used only for the same shard (url, size, etag) and the same blocks of it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from msgspec import Struct, structs

from dataplane.base.trace import Trace
from dataplane.formats import registry
from dataplane.formats.folders import folder_names, known_bounds
from dataplane.formats.index_frames import frame, frames_in
from dataplane.index.journal import RunLogs, SealedFiles, cache_faults, digest, written_at
from dataplane.index.projection import Projection
from dataplane.index.run import Connect, IndexProgress, Progress, StoredShard
from dataplane.model.records import ObjectInfo, Region, View
from dataplane.plan.manifest import Int64, Manifest
from dataplane.plan.permute import Words
from dataplane.plan.views import first_rows, has_shares, rows_only, shard_words, shared_counts
from dataplane.rpc import tasks
from dataplane.store.urls import local_path
from dataplane.transforms.row_filter import BlockRows, RowFilter

COUNT_VERSION = 3
"""Grows when the same view of the same rows may have other counts."""
_STRETCH_BLOCKS = 32
# Counts of shares are cached from this many rows on: hashing these takes a second or two.
_ROWS_CACHED = 1 << 28
# More stretches at once would only wait for one another in the processes, which decode two blocks
# at a time.
_COUNTED_AT_ONCE = 16

KEPT = 4
VIEWS_KEPT = 256

_trace = Trace("node")

CountRows = Callable[[StoredShard, tasks.CountRows, int], Int64]
"""Counts the rows of blocks of a shard. The number is the decoded size of the largest of these
blocks, in bytes."""


class _Stretch(Struct, frozen=True):
    """Consecutive blocks of one shard."""

    shard: int
    first: int
    stop: int


def view_name(view: View) -> str:
    """Return the name under which a view's counts are stored, beside the dataset's manifest: 32 hex
    digits.
    """
    rows = structs.asdict(structs.replace(rows_only(view), limit=0))
    del rows["resizes"], rows["per_epoch"]
    replaces = rows.pop("bad_max") > 0
    return digest(COUNT_VERSION, rows, *(["replaces"] if replaces else []))


def counted(
    manifest: Manifest,
    view: View,
    connect: Connect,
    count_rows: CountRows,
    cache_dir: str = "",
    progress: Progress | None = None,
) -> Int64:
    """Return the number of rows of each block that belong to the view, ignoring its limit: from the
    cache, or counted. A cache folder of "" caches nothing. `count_rows` is called in threads,
    `progress` in this one.

    Shapes:  result: int64[blocks].
    Raises:  ConfigError: the condition does not suit the columns.  As `IndexProcesses.count`.
    """
    run = _Run(manifest, structs.replace(view, limit=0), connect, count_rows, progress)
    if not cache_dir:
        return run.counts(None)
    journal = CountJournal(cache_dir, run.name())
    try:
        found = journal.finished(manifest.fingerprint, manifest.block_count)
        if found is not None:
            return found
        told = {"where": view.where, "blocks": manifest.block_count, "rows": manifest.sample_count}
        _trace.noted("counting the rows of a view", **told)
        began, found = time.monotonic(), run.counts(journal)
        took_s = round(time.monotonic() - began, 3)
        _trace.noted("counted the rows of a view", **told, left=int(found.sum()), took_s=took_s)
        return found
    finally:
        journal.close()


def shares_counted(manifest: Manifest, view: View, cache_dir: str = "") -> Int64:
    """Return the number of rows of each block in the view's shares; cached for very large datasets.

    Shapes:  result: int64[blocks].
    """
    if not cache_dir or manifest.sample_count < _ROWS_CACHED:
        return shared_counts(manifest, view)
    name = digest("shares", view_name(view), *manifest.urls)
    journal = CountJournal(cache_dir, name)
    found = journal.finished(manifest.fingerprint, manifest.block_count)
    if found is None:
        found = shared_counts(manifest, view)
        journal.finish(manifest.fingerprint, found, ())
    return found


class _Run:
    """One counting of one dataset."""

    def __init__(
        self,
        manifest: Manifest,
        view: View,
        connect: Connect,
        count_rows: CountRows,
        progress: Progress | None,
    ) -> None:
        self._manifest, self._view = manifest, view
        self._connect, self._count_rows, self._progress = connect, count_rows, progress
        self._stop = threading.Event()
        self._schema = schema = pa.ipc.read_schema(pa.py_buffer(manifest.schema))
        self._rows = rows = RowFilter.of(view, schema)
        columns = () if rows is None else rows.columns
        self._projection = _projection(manifest, [name in columns for name in schema.names])
        self._first_rows = first_rows(manifest)
        self._words: Words | None = None
        if has_shares(view):
            self._words = shard_words(manifest.shards.urls)
        self._preambles = _Preambles()
        self._done: dict[int, Int64] = {}
        self._bytes_done = 0

    def name(self) -> str:
        """Return the name under which counts are remembered."""
        version = (registry.INDEX_VERSION, self._manifest.format)
        return digest(version, view_name(self._view), *self._manifest.urls)

    def counts(self, journal: CountJournal | None) -> Int64:
        """Return all counts, computed or remembered."""
        stretches = list(self._stretches())
        keys = [self._key(each) for each in stretches]
        remembered = {} if journal is None else journal.remembered()
        for at, key in enumerate(keys):
            known = remembered.get(key)
            if known is not None and len(known) == stretches[at].stop - stretches[at].first:
                self._accept(at, stretches[at], known)
        self._accept_known(stretches)
        self._report(len(stretches))
        todo = [at for at in range(len(stretches)) if at not in self._done]
        self._in_parallel(stretches, todo, keys, journal)
        each = [self._done[at] for at in range(len(stretches))]
        counts = np.concatenate(each)
        if journal is not None:
            journal.finish(self._manifest.fingerprint, counts, zip(keys, each, strict=True))
        return counts

    def _stretches(self) -> Iterator[_Stretch]:
        starts = self._manifest.shards.block_starts.tolist()
        for shard, (first, stop) in enumerate(pairwise(starts)):
            for at in range(first, stop, _STRETCH_BLOCKS):
                yield _Stretch(shard, at, min(at + _STRETCH_BLOCKS, stop))

    def _accept_known(self, stretches: Sequence[_Stretch]) -> None:
        """Count stretches whose shard's folders decide the condition: nobody reads them."""
        rows, schema, manifest = self._rows, self._schema, self._manifest
        if rows is None or rows.condition is None:
            return
        names = rows.condition.fields
        if folder_names(schema).keys().isdisjoint(names):
            return
        for at, stretch in enumerate(stretches):
            url = manifest.shards.urls[stretch.shard]
            bounds = known_bounds(url, schema, names, 1)
            blocks = range(stretch.first, stretch.stop)
            known = [rows.count_known(bounds, self._block_rows(stretch.shard, at)) for at in blocks]
            if None not in known:
                self._accept(at, stretch, np.array(known, np.int64))

    def _block_rows(self, shard: int, block: int) -> BlockRows:
        word = 0 if self._words is None else self._words.item(shard)
        count = self._manifest.block_rows.item(block)
        return BlockRows(count, self._first_rows.item(block), word)

    def _key(self, stretch: _Stretch) -> str:
        shards, first = self._manifest.shards, self._manifest.shards.block_starts
        at = stretch.first - first.item(stretch.shard)
        shard = (shards.urls[stretch.shard], shards.size_bytes.item(stretch.shard))
        word = 0 if self._words is None else self._words.item(stretch.shard)
        return digest(*shard, shards.etags[stretch.shard], at, stretch.stop - stretch.first, word)

    def _in_parallel(
        self,
        stretches: list[_Stretch],
        todo: list[int],
        keys: list[str],
        journal: CountJournal | None,
    ) -> None:
        waiting, running = iter(todo), 0
        ended: queue.SimpleQueue[tuple[int, Future[Int64]]] = queue.SimpleQueue()
        pool = ThreadPoolExecutor(_COUNTED_AT_ONCE, thread_name_prefix="dataplane-count")
        try:
            while True:
                for at in islice(waiting, 2 * _COUNTED_AT_ONCE - running):
                    future = pool.submit(self._counted, stretches[at])
                    future.add_done_callback(partial(_put, ended, at))
                    running += 1
                if not running:
                    return
                at, future = ended.get()
                running -= 1
                found = future.result()
                if journal is not None:
                    journal.remember(keys[at], found)
                self._accept(at, stretches[at], found)
                self._report(len(stretches))
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _counted(self, stretch: _Stretch) -> Int64:
        shard = self._manifest.shards[stretch.shard]
        listed = ObjectInfo(shard.url, shard.size_bytes, shard.etag)
        stored = StoredShard(listed, self._connect(shard.url), self._stop)
        blocks = tuple(self._block(stretch.shard, at) for at in range(stretch.first, stretch.stop))
        order = tasks.CountRows(
            self._manifest.format, shard.url, shard.size_bytes, shard.etag,
            self._manifest.schema, self._view, blocks,
            parts=self._preambles.of(stored, shard.preamble),
        )  # fmt: skip
        manifest, projection = self._manifest, self._projection
        decoded = manifest.block_decoded if projection is None else projection.decoded
        return self._count_rows(stored, order, int(decoded[stretch.first : stretch.stop].max()))

    def _block(self, shard: int, block: int) -> tasks.RawBlockRef:
        manifest, shards = self._manifest, self._manifest.shards
        place = Region(manifest.block_offset.item(block), manifest.block_length.item(block))
        rows = manifest.block_rows.item(block)
        return tasks.RawBlockRef(
            url="",
            index=shards.block_in_shard(shard, block),
            rows=rows,
            place=place,
            preamble_place=shards.preamble(shard),
            shard_bytes=0,
            pieces=() if self._projection is None else self._projection.pieces(block, place),
            stored_rows=rows,
            first_row=self._first_rows.item(block),
            shard_word=0 if self._words is None else self._words.item(shard),
        )

    def _accept(self, at: int, stretch: _Stretch, found: Int64) -> None:
        self._done[at] = found
        length = self._manifest.block_length[stretch.first : stretch.stop]
        self._bytes_done += int(length.sum())

    def _report(self, stretch_count: int) -> None:
        if self._progress is not None:
            total = int(self._manifest.block_length.sum())
            done = len(self._done), self._bytes_done
            self._progress(IndexProgress(stretch_count, *done, total))


class _Preambles:
    """The preambles of the last few shards in a store. Each is read once for all stretches of its
    shard. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: OrderedDict[str, Future[bytes]] = OrderedDict()

    def of(self, shard: StoredShard, place: Region) -> tuple[tasks.ShardPart, ...]:
        """Read the preamble of this shard; return nothing if the process reads the shard itself."""
        if not place.length or local_path(shard.url) is not None:
            return ()
        with self._lock:
            known = self._read.get(shard.url)
            future = self._read[shard.url] = known or Future()
            if len(self._read) > _COUNTED_AT_ONCE:
                self._read.popitem(last=False)
        if known is None:
            try:
                future.set_result(bytes(memoryview(shard.read(place.offset, place.length))))
            except BaseException as error:
                future.set_exception(error)
                raise
        return (tasks.ShardPart(place.offset, future.result()),)


def _projection(manifest: Manifest, is_wanted: list[bool]) -> Projection | None:
    """Return the bytes that need not be read; None if the places of columns are unknown, or all
    columns are wanted.
    """
    places = manifest.column_places
    is_wanted = is_wanted[: None if places is None else places.column_count]
    if places is None or places.column_count != len(is_wanted) or all(is_wanted):
        return None
    return Projection.of(places, manifest.block_length, manifest.block_decoded, is_wanted)


def _put(
    ended: queue.SimpleQueue[tuple[int, Future[Int64]]], at: int, future: Future[Int64]
) -> None:
    ended.put((at, future))


class CountJournal:
    """The counts of one dataset and view that runs have cached, under the folder name `name`. Each
    process appends to its own log, as in journal.py. A finished run leaves one log, and the counts
    of the last few manifests. Of all datasets and views together, the last few hundred stay.
    """

    def __init__(self, cache_dir: str, name: str) -> None:
        self._views = Path(cache_dir, "counts")
        self._logs = RunLogs(self._views / name)
        self._finished = SealedFiles(cache_dir, f"counts/{name}", ".counts", KEPT)
        self.close = self._logs.close

    def finished(self, fingerprint: str, block_count: int) -> Int64 | None:
        """Return a manifest's counts, if an earlier run has finished them and they are intact.

        Shapes:  result: int64[blocks].
        """
        body = self._finished.read(fingerprint)
        if body is None or len(body) != 8 * block_count:
            return None
        return np.frombuffer(body, "<i8").astype(np.int64)

    def remembered(self) -> dict[str, Int64]:
        """Return the counts of stretches of blocks that earlier runs wrote, by key."""
        counts: dict[str, Int64] = {}
        for content in self._logs.former():
            for facts, body in frames_in(content):
                counts[facts["blocks"]] = np.frombuffer(body, "<i8").astype(np.int64)
        return counts

    def remember(self, key: str, counts: Int64) -> None:
        """Append the counts of a stretch to this process's log."""
        self._logs.append(_stretch(key, counts))

    def finish(
        self, fingerprint: str, counts: Int64, stretches: Iterable[tuple[str, Int64]]
    ) -> None:
        """Publish the counts of a manifest and one log of its stretches; remove other logs."""
        content = b"".join(_stretch(*stretch) for stretch in stretches)
        self._logs.replace(f"stretches-{fingerprint}", content)
        self._finished.write(fingerprint, counts.astype("<i8").tobytes())
        with cache_faults(self._views):
            views = sorted(self._views.iterdir(), key=written_at, reverse=True)
            for folder in views[VIEWS_KEPT:]:
                import shutil

                shutil.rmtree(folder, ignore_errors=True)


def _stretch(key: str, counts: Int64) -> bytes:
    return frame({"blocks": key}, counts.astype("<i8").tobytes())
