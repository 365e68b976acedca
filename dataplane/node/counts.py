"""Facts about a whole dataset that the node's workers count once: the distinct values of columns
that come as codes, and the samples that blocks make: packs, or the rows of a map that resizes.

The node reads a column that comes as codes as a trainer would, from its first row to its last, and
keeps the distinct values. Fetching, decoding and budgets are the same as for any job.

Invariants:
1. A column of a dataset is read once at a time, however many trainers wait for it; reading stops
   when the last of them has gone.
2. The values are stored in the cache folder, under the dataset's fingerprint. A manifest may
   contain them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from msgspec import Struct, field, structs
from msgspec.structs import asdict, replace

from dataplane.arena.slab_layout import TEXTS, texts
from dataplane.base import background
from dataplane.base.trace import Trace
from dataplane.base.units import some_of
from dataplane.index.indexing import LongWork
from dataplane.index.journal import SealedFiles, digest
from dataplane.index.viewing import counted_packs, kept_packs, pack_files
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.records import ColumnOptions, ColumnSpec, Kind, PackSpec, View
from dataplane.node.dataset import Dataset, dataset_of
from dataplane.node.job_columns import columns_of, columns_to_find
from dataplane.node.own_reads import Categories, FoundOnce, MappedReader, OwnReads
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane.plan.orders import order_of
from dataplane.plan.packed_blocks import NUMBERS, counts_name, made, packed, packing_in
from dataplane.plan.packs import Int64, Packing
from dataplane.rpc.codec import decode
from dataplane.rpc.messages import Column, Layout, Slab
from dataplane.transforms.codes import coded_columns, distinct_in
from dataplane.transforms.columns import is_null_name
from dataplane.transforms.leaves import canonical_type, coded_leaf
from dataplane.transforms.options import only, to_find_values
from dataplane.transforms.packing import PACKING, delivered_columns
from dataplane.worker.block_mapping import COUNTED_ROWS
from dataplane.worker.death import WorkerBytes

VALUES_MAX = 1 << 20
BYTES_MAX = 16 << 20
_VERSION = 1
_SLAB_BYTES = 1 << 20
_ROWS_MAX = 4096

Check = Callable[[Manifest, JobSpec], Awaitable[None]]

_trace = Trace("categories")


class CategoryReader:
    """Finds the values of columns, for all jobs of a node."""

    def __init__(
        self,
        config: NodeConfig,
        reads: OwnReads,
    ) -> None:
        self._config, self._reads = config, reads
        self._passes = FoundOnce[Categories]("categories", remembered=0)
        self._files = SealedFiles(config.cache_dir, "categories", ".values")

    async def of_job(
        self, manifest: Manifest, spec: JobSpec, check: Check, urls: Sequence[str] = ()
    ) -> Categories:
        """Return the values of the columns that a job wants as codes. Other errors in the
        job's columns are raised before any column is read. `urls` are those that the user passed.
        """
        codes = coded_columns(spec.column_options)
        if not codes:
            return {}
        await check(manifest, spec)
        # Find the values of the whole dataset, so that all of its views have the same codes.
        return await self.read(manifest.whole or manifest, codes, urls)

    async def read(
        self, manifest: Manifest, columns: Sequence[str], urls: Sequence[str] = ()
    ) -> Categories:
        """Return the sorted values of each of these columns, in its canonical type, without nulls.

        Raises:  ConfigError: a column has too many values.  DataplaneError: as for any job that
        reads the dataset.
        """
        known = {name: manifest.categories[name] for name in columns if name in manifest.categories}
        others = [name for name in columns if name not in known]
        categories = {**known, **await asyncio.to_thread(self._remembered, manifest, others)}
        missing = tuple(name for name in columns if name not in categories)
        if not missing:
            return categories
        if not self._config.has_workers:
            raise ConfigError(
                f"columns {', '.join(missing)} are wanted as codes. A node finds their values with "
                "its own workers, and this one has none (worker_count is 0): store them beside the "
                f"dataset with `dataplane index --codes {','.join(missing)}`, or give it workers",
                field="codes",
            )

        async def read() -> Categories:
            with LongWork("finding the values of codes", urls, "rows") as work:
                values = await self._read(manifest, missing, work)
            await asyncio.to_thread(self._remember, manifest, values)
            return values

        return {**categories, **await self._passes.of((manifest.fingerprint, missing), read)}

    async def _read(
        self, manifest: Manifest, columns: tuple[str, ...], work: LongWork
    ) -> Categories:
        options = to_find_values(columns)
        worker_bytes = WorkerBytes.of(self._config)
        spec = JobSpec(manifest.fingerprint, column_options=options)
        dataset = await asyncio.to_thread(
            dataset_of, self._reads.new_dataset_id(), manifest, spec, worker_bytes=worker_bytes
        )
        specs = [spec for spec in dataset.columns.specs if spec.name in set(columns)]
        leaves = dataset.columns.leaves.leaves
        types = {leaf.name: canonical_type(coded_leaf(leaf).type) for leaf in leaves}
        lists = frozenset(leaf.name for leaf in leaves if coded_leaf(leaf) is not leaf)
        values = {column.name: DistinctValues(column.name, types[column.name]) for column in specs}
        facts = {"columns": list(columns), "samples": manifest.sample_count}
        _trace.noted("finding the values of columns", **facts)
        rows = max(1, min(_SLAB_BYTES // dataset.row_bytes, _ROWS_MAX))
        spec = structs.replace(spec, global_batch=rows)
        order = await asyncio.to_thread(Order, dataset.manifest.block_rows, 0, False, 1, 1, 0)
        reading = self._reads.slabs(dataset, spec, order)
        done = 0
        async with contextlib.aclosing(reading) as slabs:
            async for slab, content in slabs:
                await asyncio.to_thread(_add, values, lists, dataset.columns.specs, slab, content)
                done += sum(batch.rows for batch in slab.batches)
                work.advance(done, manifest.sample_count)
        categories = {
            name: await asyncio.to_thread(values_of.in_order) for name, values_of in values.items()
        }
        counts = {name: len(values_of) for name, values_of in categories.items()}
        _trace.noted("found the values of columns", **facts, values=counts)
        return categories

    def _name(self, manifest: Manifest, column: str) -> str:
        return digest(_VERSION, manifest.fingerprint, column)

    def _remembered(self, manifest: Manifest, columns: Sequence[str]) -> dict[str, pa.Array]:
        remembered = {}
        for column in columns:
            body = self._files.read(self._name(manifest, column))
            if body is not None:
                with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
                    remembered[column] = reader.read_next_batch().column(0)
        return remembered

    def _remember(self, manifest: Manifest, categories: Categories) -> None:
        for column, values in categories.items():
            self._files.write(self._name(manifest, column), stream_of(values))


class DistinctValues(Struct, eq=False):
    """Collects the distinct values of one column.

    Raises:  ConfigError: there are more than VALUES_MAX values, or more than BYTES_MAX bytes.
    """

    column: str
    type: pa.DataType
    _found: list[pa.Array] = field(default_factory=list)
    _merged_count: int = 0
    _new_count: int = 0

    def add(self, values: pa.Array) -> None:
        """Add some rows, without nulls."""
        import pyarrow.compute as pc

        some = pc.unique(values)
        self._found.append(some)
        self._new_count += len(some)
        # Merge only when there are more new values than merged ones, to keep the cost linear.
        if self._new_count > max(_ROWS_MAX, self._merged_count):
            self._merge()

    def in_order(self) -> pa.Array:
        """Return all values, sorted."""
        import pyarrow.compute as pc

        merged = self._merge()
        return merged.take(pc.array_sort_indices(merged))

    def _merge(self) -> pa.Array:
        import pyarrow.compute as pc

        merged = pc.unique(pa.concat_arrays([pa.array([], self.type), *self._found]))
        self._found, self._merged_count, self._new_count = [merged], len(merged), 0
        if len(merged) > VALUES_MAX or merged.nbytes > BYTES_MAX:
            raise ConfigError(
                f"codes: column {self.column!r} has too many distinct values: {len(merged)} of "
                f"{merged.nbytes} bytes were found, and {VALUES_MAX} of {BYTES_MAX} bytes are "
                "allowed. Codes are for columns with few distinct values: leave it out of "
                "codes=[…]",
                field="codes",
            )
        return merged


def united(values: Mapping[str, Categories]) -> Categories:
    """Return the values of the columns that come as codes, in all sources of a mixture together.

    Raises:  ConfigError: the sources have a column in different types, or it has too many values.
    """
    first, *others = values
    for name, column in itertools.product(others, values[first]):
        kinds = values[first][column].type, values[name][column].type
        if kinds[0] != kinds[1]:
            words = ["text" if pa.types.is_large_binary(kind) else str(kind) for kind in kinds]
            raise ConfigError(
                f"codes: column {column!r} has {words[0]} in source {first!r} and {words[1]} in "
                f"{name!r}: write it with one type, or leave it out of codes=[…]",
                field="codes",
            )
    distinct = {column: DistinctValues(column, own.type) for column, own in values[first].items()}
    for column, own in itertools.product(distinct, values.values()):
        distinct[column].add(own[column])
    return {column: every.in_order() for column, every in distinct.items()}


def stream_of(values: pa.Array) -> bytes:
    """Convert values to an Arrow stream of one column."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([values], ["values"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _add(
    values: Mapping[str, DistinctValues],
    lists: Collection[str],
    specs: Sequence[ColumnSpec],
    slab: Slab,
    content: bytes,
) -> None:
    """Add the rows of a slab that are not null, and the values of columns of `lists`."""
    places = {spec.name: at for at, spec in enumerate(specs)}
    columns = decode(Layout, slab.layout).columns
    for name, distinct in values.items():
        at = places[name]
        if specs[at].kind in TEXTS:
            for array in _texts(slab, columns[at], content):
                found = map(distinct_in, array.to_pylist()) if name in lists else [array]
                for some in found:
                    if some is not None:
                        distinct.add(some)
            continue
        rows = _numbers(slab, columns[at], specs[at], content)
        mask = places.get(is_null_name(name))
        if mask is not None:
            rows = rows[~_numbers(slab, columns[mask], specs[mask], content).astype(np.bool_)]
        distinct.add(pa.array(rows, distinct.type))


def _numbers(slab: Slab, column: Column, spec: ColumnSpec, content: bytes) -> np.ndarray:
    """Return a FIXED column of one number a row."""
    assert spec.kind is Kind.FIXED
    dtype = "uint8" if spec.dtype == "bool" else spec.dtype
    count = sum(batch.rows for batch in slab.batches)
    return np.frombuffer(content, dtype, count, column.values[0])


def _texts(slab: Slab, column: Column, content: bytes) -> Iterator[pa.Array]:
    """Yield a column of text or bytes, batch after batch, without nulls."""
    for i, batch in enumerate(slab.batches):
        if not batch.rows:
            continue
        decoded = texts(np.frombuffer(content, np.uint8), column, i, batch.rows)
        buffers = [None, pa.py_buffer(decoded.offsets), pa.py_buffer(decoded.values)]
        array = pa.Array.from_buffers(pa.large_binary(), batch.rows, buffers)
        yield (
            array if decoded.valid.all() else array.filter(pa.array(decoded.valid.astype(np.bool_)))
        )


# -- packs of blocks -------------------------------------------------------------------------------
#
# Count how many packs the documents of each block make, once per dataset, by the node's workers.
#
# The node reads the column of tokens like a trainer, from its first block to its last; for each
# block, a worker reports the use of its tokens. Fetching, decoding and budgets are as for any job.
#
# Invariants:
# 1. Counts are stored in the cache folder, by dataset, view, and the code of its map. A manifest
#    may have them, too. Every few seconds, the counts so far are stored as well: a node that was
#    killed continues from there.
# 2. Blocks that were decoded to be counted stay in memory, as far as there is room, for the job
#    that caused the counting: no map is called again over them.


_WRITTEN_S, _WATCH_S = 5.0, 1.0
_WHOLE, _PART = ".counts", ".part"
_ADVICE = "`dataplane index … --pack … -o FILE` does this once for all runs"

_pack_trace = Trace("packs")


class PackedManifest(Struct, frozen=True):
    """The manifest of a view. If its samples are packs, `packing` is the use of all tokens,
    `counts` that of each block's tokens, stored under `name`, and `counted` has the blocks that
    were read.

    Shapes:  counts: int64[K, NUMBERS], the Packing of each block with rows.
    """

    manifest: Manifest
    packing: Packing | None = None
    name: str = ""
    counts: Int64 | None = None
    counted: CountedBlocks | None = None

    def take_counted(self) -> Dataset | None:
        """Return the dataset that was read to count its packs; the caller takes over its blocks, or
        forgets it. None if it was taken before, or if no dataset was read.
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
        """Return the manifest of the samples that the rows of a view make, from that of its rows;
        the same manifest if these are its samples. `urls` are those that the user passed.

        Raises:  ConfigError: the columns cannot be packed, or make no samples.  DataplaneError: as
        for any job that reads the columns.
        """
        if not view.is_counted:
            return PackedManifest(manifest)
        name = await self._name(manifest, view, seed, urls)
        counts = await asyncio.to_thread(counted_packs, manifest, name, self._config.cache_dir)
        dataset: Dataset | None = None
        if counts is None:
            doing = ("counting packs", _ADVICE) if view.pack else ("counting the rows of map=", "")
            with LongWork(doing[0], urls, "blocks", doing[1]) as work:
                work.advance(0, manifest.block_count)
                counts, dataset = await self._counted(manifest, view, seed, name, work)
        try:
            if not counts[:, 1].any():
                raise _no_samples(manifest, view, packing_in(counts))
            of_blocks = np.ascontiguousarray(counts[:, 1])
            of_packs = await asyncio.to_thread(made, manifest, view, of_blocks)
        except BaseException:
            if dataset is not None:
                self._reads.forget(dataset)
            raise
        counted = None if dataset is None else CountedBlocks(dataset)
        packing = None if view.pack is None else packing_in(counts)
        return PackedManifest(of_packs, packing, name, counts, counted)

    async def _name(self, manifest: Manifest, view: View, seed: int, urls: Sequence[str]) -> str:
        """Return the name under which the counts are stored."""
        if not view.map:
            return counts_name(manifest, view, seed, "")
        spec = JobSpec(manifest.fingerprint, seed, view=view)
        with LongWork(f"calling map={view.map!r} over the first rows", urls, "rows"):
            mapped = await self._mapped_reader.of_job(manifest, spec)
        assert mapped is not None
        is_seeded = mapped.takes_generator or view.bad_max
        return counts_name(manifest, view, seed if is_seeded else 0, mapped.code)

    async def _counted(
        self,
        manifest: Manifest,
        view: View,
        seed: int,
        name: str,
        work: LongWork,
    ) -> tuple[Int64, Dataset]:
        """Return the Packing of each block, and the dataset that was read.

        Shapes:  result: int64[K, NUMBERS].
        """
        # Rows that a map makes are counted as packs of one token.
        pack = view.pack or PackSpec(COUNTED_ROWS.names[0], 1)
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
        if view.pack is None:
            spec = replace(spec, column_options=ColumnOptions())
            columns = await asyncio.to_thread(columns_to_find, manifest, mapped)
        else:
            columns = await asyncio.to_thread(columns_of, manifest, spec, mapped)
        dataset = await asyncio.to_thread(
            dataset_of,
            self._reads.new_dataset_id(),
            packed(manifest, np.ones(manifest.block_count, np.int64)),
            spec,
            worker_bytes=WorkerBytes.of(self._config),
            arena_bytes=self._config.block_arena_bytes,
            known=columns,
        )
        delivered_columns(dataset.columns.specs, spec)
        try:
            counts = await self._read(dataset, spec, name, work)
            await asyncio.to_thread(_remember, self._config.cache_dir, name, counts)
        except BaseException:
            self._reads.forget(dataset)
            raise
        facts = {"column": pack.column, "rows": manifest.sample_count, "blocks": len(counts)}
        _pack_trace.noted("counted packs", **facts, **asdict(packing_in(counts)))
        return counts, dataset

    async def _read(self, dataset: Dataset, spec: JobSpec, name: str, work: LongWork) -> Int64:
        """Return the Packing of each block, continuing from counts that were stored before.

        Shapes:  result: int64[K, NUMBERS].
        """
        blocks, folder = dataset.manifest.block_count, self._config.cache_dir
        counts = np.zeros((blocks, NUMBERS), np.int64)
        before = await asyncio.to_thread(kept_packs, folder, name, _PART)
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


def _no_samples(manifest: Manifest, view: View, packing: Packing) -> ConfigError:
    pack = view.pack
    if pack is None:
        return ConfigError(
            f"map={view.map!r} makes no rows of the {manifest.sample_count} rows of "
            f"{some_of(manifest.urls)}: let it return some",
            field="map",
        )
    if not packing.tokens:
        advice = "name rows that have some"
    elif packing.short_documents:
        advice = "choose a longer length, or another value of long="
    else:
        advice = "choose a shorter length, or make blocks larger"
    return ConfigError(
        f"the {manifest.sample_count} rows of {some_of(manifest.urls)} have {packing.tokens} "
        f"tokens in column {pack.column!r}, which fill no pack of {pack.length}: {advice}",
        field="pack",
    )


def _remember(cache_dir: str, name: str, counts: Int64, suffix: str = _WHOLE) -> None:
    """Write the counts, or a part of them, which the complete counts replace."""
    pack_files(cache_dir, suffix).write(name, counts.astype("<i8").tobytes())
    if suffix == _WHOLE:
        pack_files(cache_dir, _PART).remove(name)
