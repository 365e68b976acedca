"""How many packs the documents of each block make, counted once per dataset by the node's workers.

The node reads the column of tokens as a trainer would, from its first block to its last; a worker
says of each block what becomes of its tokens. Fetching, decoding and budgets are as for any job.

Invariants:
1. What was counted is stored in the cache folder, by dataset, view, and the code of its map. A
   manifest may have it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace

from dataplane.config import JobSpec, NodeConfig
from dataplane.errors import ConfigError, CorruptShard
from dataplane.index.journal import cache_faults, publish, written_at
from dataplane.model import PackSpec, View
from dataplane.node.dataset import dataset_of
from dataplane.node.job_columns import columns_of
from dataplane.node.mapped_reader import MappedReader
from dataplane.node.own_slabs import OwnReads
from dataplane.plan.manifest import Manifest
from dataplane.plan.orders import order_of
from dataplane.plan.packed_blocks import NUMBERS, counts_name, known_counts, packed, packing_in
from dataplane.plan.packs import Int64, Packing
from dataplane.plan.sealed import sealed, unsealed
from dataplane.plan.shard import named
from dataplane.rpc.convert import decode
from dataplane.rpc.messages import Layout
from dataplane.trace import Trace
from dataplane.transforms.options import only
from dataplane.transforms.packing import PACKING, delivered_columns
from dataplane.worker.limits import WorkerBytes

_FILES_KEPT = 256
_TOLD_S = 10.0

_trace = Trace("packs")


class PackedManifest(Struct, frozen=True):
    """The manifest of a view; if its samples are packs, `packing` says what becomes of tokens, and
    `counts` how many packs each block has, which are known by this name.

    Shapes:  counts: int64[K, NUMBERS], the Packing of each block with rows.
    """

    manifest: Manifest
    packing: Packing | None = None
    name: str = ""
    counts: Int64 | None = None


class PackCounter:
    """Counts the packs of datasets, for all jobs of a node."""

    def __init__(
        self,
        config: NodeConfig,
        reads: OwnReads,
        mapped_reader: MappedReader,
    ) -> None:
        self._config, self._reads, self._mapped_reader = config, reads, mapped_reader

    async def packed(self, manifest: Manifest, view: View, seed: int) -> PackedManifest:
        """The manifest of the packs of a view, from that of its rows; the same manifest if the view
        has no packs.

        Raises:  ConfigError: the columns cannot be packed, or make no packs.  DataplaneError: as
        any job that reads them.
        """
        if view.pack is None:
            return PackedManifest(manifest)
        name, counts = await self._counts(manifest, view, view.pack, seed)
        if not counts[:, 1].any():
            raise _no_packs(manifest, view.pack, packing_in(counts))
        of_blocks = np.ascontiguousarray(counts[:, 1])
        of_packs = await asyncio.to_thread(packed, manifest, of_blocks)
        return PackedManifest(of_packs, packing_in(counts), name, counts)

    async def _counts(
        self, manifest: Manifest, view: View, pack: PackSpec, seed: int
    ) -> tuple[str, Int64]:
        """The name of the counts, and the Packing of each block.

        Shapes:  result: int64[K, NUMBERS].
        """
        name = counts_name(manifest, view, 0, "")
        if view.map:
            spec = JobSpec(manifest.fingerprint, seed, view=view)
            found = await self._mapped_reader.of_job(manifest, spec)
            assert found is not None
            name = counts_name(manifest, view, seed if found.takes_generator else 0, found.code)
        counts = await asyncio.to_thread(counted_before, manifest, name, self._config.cache_dir)
        if counts is not None:
            return name, counts
        if not self._config.has_workers:
            raise ConfigError(
                "a node counts the packs of a dataset with its own workers, and this one has none"
                " (worker_count is 0): store them beside the dataset with `dataplane index --pack"
                f" {pack.column},length={pack.length} -o …`, or give it workers",
                field="pack",
            )
        counts = await self._counted(manifest, view, pack, seed)
        await asyncio.to_thread(_remember, self._config.cache_dir, name, counts)
        return name, counts

    async def _counted(self, manifest: Manifest, view: View, pack: PackSpec, seed: int) -> Int64:
        """Shapes:  result: int64[K, 4], the Packing of each block."""
        spec = JobSpec(
            manifest.fingerprint,
            seed,
            column_options=only((pack.column, *pack.carry)),
            view=replace(view, pack=replace(pack, outputs=(PACKING,))),
        )
        blocks = manifest.block_count
        mapped = await self._mapped_reader.of_job(manifest, spec)
        dataset = await asyncio.to_thread(
            dataset_of,
            self._reads.new_dataset_id(),
            packed(manifest, np.ones(blocks, np.int64)),
            spec,
            worker_bytes=WorkerBytes.of(self._config),
            known=await asyncio.to_thread(columns_of, manifest, spec, mapped),
        )
        delivered_columns(dataset.columns.specs, spec)
        told = {"column": pack.column, "rows": manifest.sample_count, "blocks": blocks}
        _trace.noted("counting packs", **told)
        found = np.zeros((blocks, NUMBERS), np.int64)
        done, said = 0, time.monotonic()
        order = await asyncio.to_thread(order_of, spec, dataset.manifest, 0)
        whole = self._reads.slabs(dataset, spec, order)
        async with contextlib.aclosing(whole) as slabs:
            async for slab, content in slabs:
                count = sum(batch.rows for batch in slab.batches)
                at = decode(Layout, slab.layout).columns[0].values[0]
                numbers = np.frombuffer(content, np.int64, count * NUMBERS, at)
                found[done : done + count] = numbers.reshape(-1, NUMBERS)
                done += count
                if time.monotonic() > said + _TOLD_S:
                    said = time.monotonic()
                    _trace.noted("counting packs", **told, done=done)
        _trace.noted("counted packs", **told, **asdict(packing_in(found)))
        return found


def counted_before(manifest: Manifest, name: str, cache_dir: str) -> Int64 | None:
    """The packs of this `counts_name` that the manifest has, or that a node with this cache folder
    has counted; None if neither has.

    Shapes:  result: int64[blocks, NUMBERS].
    """
    known = known_counts(manifest, name)
    return _remembered(cache_dir, name, manifest.block_count) if known is None else known


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


def _remembered(cache_dir: str, name: str, blocks: int) -> Int64 | None:
    path = _path(cache_dir, name)
    try:
        body = unsealed(path.read_bytes(), str(path))
        return np.frombuffer(body, "<i8").reshape(blocks, NUMBERS)
    except FileNotFoundError:
        return None
    except (CorruptShard, OSError, ValueError):
        path.unlink(missing_ok=True)
        return None


def _remember(cache_dir: str, name: str, counts: Int64) -> None:
    folder = _path(cache_dir, name).parent
    with cache_faults(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        publish(_path(cache_dir, name), sealed(counts.astype("<i8").tobytes()))
        paths = sorted(folder.glob("*.counts"), key=written_at)
        for old in paths[:-_FILES_KEPT]:
            old.unlink(missing_ok=True)


def _path(cache_dir: str, name: str) -> Path:
    return Path(cache_dir) / "packs" / f"{name}.counts"
