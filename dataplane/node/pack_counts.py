"""Count how many packs the documents of each block make, once per dataset, by the node's workers.

The node reads the column of tokens like a trainer, from its first block to its last; for each
block, a worker reports the fate of its tokens. Fetching, decoding and budgets are as for any job.

Invariants:
1. Counts are stored in the cache folder, by dataset, view, and the code of its map. A manifest may
   have them, too. Every few seconds, the counts so far are stored as well: a node that was killed
   continues from there.
2. Blocks that were decoded to be counted stay in memory, as far as there is room, for the job that
   caused the counting: no map is called again over them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace

from dataplane.base import background
from dataplane.base.trace import Trace
from dataplane.index.journal import cache_faults, publish, written_at
from dataplane.index.slow import LongWork
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import ConfigError, CorruptShard, DataplaneError
from dataplane.model.records import PackSpec, View
from dataplane.node.dataset import Dataset, dataset_of
from dataplane.node.job_columns import columns_of
from dataplane.node.mapped_reader import MappedReader
from dataplane.node.own_slabs import OwnReads
from dataplane.plan.manifest import Manifest, sealed, unsealed
from dataplane.plan.orders import order_of
from dataplane.plan.packed_blocks import NUMBERS, counts_name, known_counts, packed, packing_in
from dataplane.plan.packs import Int64, Packing
from dataplane.plan.shards import named
from dataplane.rpc.codec import decode
from dataplane.rpc.messages import Layout
from dataplane.transforms.options import only
from dataplane.transforms.packing import PACKING, delivered_columns
from dataplane.worker.limits import WorkerBytes

_FILES_KEPT = 256
_WRITTEN_S, _WATCH_S = 5.0, 1.0
_WHOLE, _PART = ".counts", ".part"
_ADVICE = "`dataplane index … --pack … -o FILE` does this once for all runs"

_trace = Trace("packs")


class PackedManifest(Struct, frozen=True):
    """The manifest of a view; if its samples are packs, `packing` is the fate of tokens, and
    `counts` the number of packs of each block, known by this name.

    Shapes:  counts: int64[K, NUMBERS], the Packing of each block with rows.
    """

    manifest: Manifest
    packing: Packing | None = None
    name: str = ""
    counts: Int64 | None = None
    counted: CountedBlocks | None = None

    def take_counted(self) -> Dataset | None:
        """Return the dataset that was read to count its packs; the caller takes over its blocks, or
        forgets it. None if it was taken, or not read.
        """
        return None if self.counted is None else self.counted.take()


class CountedBlocks:
    """The dataset of a pass that has counted packs, whose blocks may still be in memory."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset: Dataset | None = dataset

    def take(self) -> Dataset | None:
        """Return the dataset; the caller takes over its blocks, or forgets it. None if it was
        taken.
        """
        dataset, self._dataset = self._dataset, None
        return dataset


class PackCounter:
    """Counts the packs of datasets, for all jobs of a node."""

    def __init__(
        self,
        config: NodeConfig,
        reads: OwnReads,
        mapped_reader: MappedReader,
    ) -> None:
        self._config, self._reads, self._mapped_reader = config, reads, mapped_reader

    async def packed(
        self, manifest: Manifest, view: View, seed: int, urls: Sequence[str]
    ) -> PackedManifest:
        """Return the manifest of the packs of a view, from that of its rows; the same manifest if
        the view has no packs. `urls` are those that the user passed.

        Raises:  ConfigError: the columns cannot be packed, or make no packs.  DataplaneError: as
        any job that reads them.
        """
        if view.pack is None:
            return PackedManifest(manifest)
        name = await self._name(manifest, view, seed, urls)
        counts = await asyncio.to_thread(counted_before, manifest, name, self._config.cache_dir)
        dataset: Dataset | None = None
        if counts is None:
            with LongWork("counting packs", urls, "blocks", _ADVICE) as work:
                work.advance(0, manifest.block_count)
                asked = (manifest, view, view.pack, seed)
                counts, dataset = await self._counted(*asked, name, work)
        try:
            if not counts[:, 1].any():
                raise _no_packs(manifest, view.pack, packing_in(counts))
            of_blocks = np.ascontiguousarray(counts[:, 1])
            of_packs = await asyncio.to_thread(packed, manifest, of_blocks)
        except BaseException:
            if dataset is not None:
                self._reads.forget(dataset)
            raise
        counted = None if dataset is None else CountedBlocks(dataset)
        return PackedManifest(of_packs, packing_in(counts), name, counts, counted)

    async def _name(self, manifest: Manifest, view: View, seed: int, urls: Sequence[str]) -> str:
        """The name of the counts."""
        if not view.map:
            return counts_name(manifest, view, 0, "")
        spec = JobSpec(manifest.fingerprint, seed, view=view)
        with LongWork(f"calling map={view.map!r} over the first rows", urls, "rows"):
            found = await self._mapped_reader.of_job(manifest, spec)
        assert found is not None
        return counts_name(manifest, view, seed if found.takes_generator else 0, found.code)

    async def _counted(
        self,
        manifest: Manifest,
        view: View,
        pack: PackSpec,
        seed: int,
        name: str,
        work: LongWork,
    ) -> tuple[Int64, Dataset]:
        """Return the Packing of each block, and the dataset that was read.

        Shapes:  result: int64[K, NUMBERS].
        """
        if not self._config.has_workers:
            raise ConfigError(
                "a node counts the packs of a dataset with its own workers, and this one has none"
                " (worker_count is 0): store them beside the dataset with `dataplane index --pack"
                f" {pack.column},length={pack.length} -o …`, or give it workers",
                field="pack",
            )
        spec = JobSpec(
            manifest.fingerprint,
            seed,
            column_options=only(pack.stored),
            view=replace(view, pack=replace(pack, outputs=(PACKING,))),
        )
        mapped = await self._mapped_reader.of_job(manifest, spec)
        dataset = await asyncio.to_thread(
            dataset_of,
            self._reads.new_dataset_id(),
            packed(manifest, np.ones(manifest.block_count, np.int64)),
            spec,
            worker_bytes=WorkerBytes.of(self._config),
            arena_bytes=self._config.block_arena_bytes,
            known=await asyncio.to_thread(columns_of, manifest, spec, mapped),
        )
        delivered_columns(dataset.columns.specs, spec)
        try:
            counts = await self._read(dataset, spec, name, work)
            await asyncio.to_thread(_remember, self._config.cache_dir, name, counts)
        except BaseException:
            self._reads.forget(dataset)
            raise
        told = {"column": pack.column, "rows": manifest.sample_count, "blocks": len(counts)}
        _trace.noted("counted packs", **told, **asdict(packing_in(counts)))
        return counts, dataset

    async def _read(self, dataset: Dataset, spec: JobSpec, name: str, work: LongWork) -> Int64:
        """Shapes:  result: int64[K, NUMBERS], the Packing of each block."""
        blocks, folder = dataset.manifest.block_count, self._config.cache_dir
        counts = np.zeros((blocks, NUMBERS), np.int64)
        before = await asyncio.to_thread(_remembered, folder, name, _PART)
        done = 0
        if before is not None:
            done = min(len(before), blocks)
            counts[:done] = before[:done]
        work.advance(done, blocks)
        if done == blocks:
            return counts
        written = time.monotonic()
        order = await asyncio.to_thread(order_of, spec, dataset.manifest, 0)
        whole = self._reads.slabs(dataset, spec, order, cursor=done, keeps_blocks=True)
        watching = background.start("packs", _watch(dataset, done, work))
        try:
            async with contextlib.aclosing(whole) as slabs:
                async for slab, content in slabs:
                    count = sum(batch.rows for batch in slab.batches)
                    at = decode(Layout, slab.layout).columns[0].values[0]
                    numbers = np.frombuffer(content, np.int64, count * NUMBERS, at)
                    counts[done : done + count] = numbers.reshape(-1, NUMBERS)
                    done += count
                    work.advance(done, blocks)
                    if time.monotonic() > written + _WRITTEN_S:
                        await asyncio.to_thread(_remember, folder, name, counts[:done], _PART)
                        written = time.monotonic()
        except DataplaneError:
            await asyncio.to_thread(_remember, folder, name, counts[:done], _PART)
            raise
        finally:
            watching.cancel()
        return counts


async def _watch(dataset: Dataset, before: int, work: LongWork) -> None:
    """Report how many blocks are decoded: slabs come in order, so they would show less progress."""
    marks, total = dataset.blocks.marks, dataset.manifest.block_count
    while True:
        await asyncio.sleep(_WATCH_S)
        work.advance(before + int(np.count_nonzero(marks.is_exact)), total)


def counted_before(manifest: Manifest, name: str, cache_dir: str) -> Int64 | None:
    """Return the packs of this `counts_name` that the manifest has, or that a node with this cache
    folder has counted; None if there are none.

    Shapes:  result: int64[blocks, NUMBERS].
    """
    known = known_counts(manifest, name)
    if known is None:
        known = _remembered(cache_dir, name)
    return known if known is not None and len(known) == manifest.block_count else None


def _no_packs(manifest: Manifest, pack: PackSpec, found: Packing) -> ConfigError:
    if not found.tokens:
        advice = "name rows that have some"
    elif found.short_documents:
        advice = "choose a longer length, or another value of long="
    else:
        advice = "choose a shorter length, or make blocks larger"
    return ConfigError(
        f"the {manifest.sample_count} rows of {named(manifest.urls)} have {found.tokens} tokens in"
        f" column {pack.column!r}, which fill no pack of {pack.length}: {advice}",
        field="pack",
    )


def _remembered(cache_dir: str, name: str, suffix: str = _WHOLE) -> Int64 | None:
    path = _path(cache_dir, name, suffix)
    try:
        body = unsealed(path.read_bytes(), str(path))
        return np.frombuffer(body, "<i8").reshape(-1, NUMBERS)
    except FileNotFoundError:
        return None
    except (CorruptShard, OSError, ValueError):
        path.unlink(missing_ok=True)
        return None


def _remember(cache_dir: str, name: str, counts: Int64, suffix: str = _WHOLE) -> None:
    """Write the counts, or a part of them, which the complete counts replace."""
    path, part = _path(cache_dir, name, suffix), _path(cache_dir, name, _PART)
    with cache_faults(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        publish(path, sealed(counts.astype("<i8").tobytes()))
        if path != part:
            part.unlink(missing_ok=True)
        paths = sorted(path.parent.glob(f"*{suffix}"), key=written_at)
        for old in paths[:-_FILES_KEPT]:
            old.unlink(missing_ok=True)


def _path(cache_dir: str, name: str, suffix: str) -> Path:
    return Path(cache_dir) / "packs" / f"{name}{suffix}"
