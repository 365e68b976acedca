"""The distinct values of columns that come as codes, read once per dataset by the node's workers.

The node reads such a column as a trainer would, from its first row to its last, and keeps the
distinct values. Fetching, decoding and budgets are the same as for any job.

Invariants:
1. A column of a dataset is read once at a time, however many trainers wait for it; reading stops
   when the last of them has gone.
2. The values are stored in the cache folder, under the dataset's fingerprint. A manifest may
   contain them too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from msgspec import Struct, field, structs

from dataplane.arena.slab_layout import TEXTS, texts
from dataplane.base.trace import Trace
from dataplane.index.journal import cache_faults, digest, publish, written_at
from dataplane.index.slow import LongWork
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.records import ColumnSpec, Kind
from dataplane.node.dataset import dataset_of
from dataplane.node.found_once import FoundOnce
from dataplane.node.own_slabs import OwnReads
from dataplane.plan.manifest import Manifest, sealed, unsealed
from dataplane.plan.order import Order
from dataplane.rpc.codec import decode
from dataplane.rpc.messages import Column, Layout, Slab
from dataplane.transforms.codes import coded_columns
from dataplane.transforms.columns import is_null_name
from dataplane.transforms.leaves import canonical_type
from dataplane.transforms.options import to_find_values
from dataplane.worker.limits import WorkerBytes

VALUES_MAX = 1 << 20
BYTES_MAX = 16 << 20
_VERSION = 1
_SLAB_BYTES = 1 << 20
_ROWS_MAX = 4096
_FILES_KEPT = 256

Categories = Mapping[str, pa.Array]
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

    async def of_job(
        self, manifest: Manifest, spec: JobSpec, check: Check, urls: Sequence[str] = ()
    ) -> Categories:
        """Return the values of the columns that a job wants as codes. Other errors in its columns
        are raised before any column is read. `urls` are those that the user passed.
        """
        codes = coded_columns(spec.column_options)
        if not codes:
            return {}
        await check(manifest, spec)
        # Those of the whole dataset, so that all views of it have the same codes.
        return await self.read(manifest.whole or manifest, codes, urls)

    async def read(
        self, manifest: Manifest, columns: Sequence[str], urls: Sequence[str] = ()
    ) -> Categories:
        """Return the sorted values of each of these columns, in its canonical type, without nulls.

        Raises:  ConfigError: a column has too many.  DataplaneError: as any job that reads it.
        """
        known = {name: manifest.categories[name] for name in columns if name in manifest.categories}
        others = [name for name in columns if name not in known]
        found = {**known, **await asyncio.to_thread(self._remembered, manifest, others)}
        missing = tuple(name for name in columns if name not in found)
        if not missing:
            return found
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

        return {**found, **await self._passes.of((manifest.fingerprint, missing), read)}

    async def _read(
        self, manifest: Manifest, columns: tuple[str, ...], work: LongWork
    ) -> Categories:
        options = to_find_values(columns)
        worker_bytes = WorkerBytes.of(self._config)
        spec = JobSpec(manifest.fingerprint, column_options=options)
        dataset = await asyncio.to_thread(
            dataset_of, self._reads.new_dataset_id(), manifest, spec, worker_bytes=worker_bytes
        )
        specs = [each for each in dataset.columns.specs if each.name in set(columns)]
        leaves = dataset.columns.leaves.leaves
        types = {leaf.name: canonical_type(leaf.type) for leaf in leaves}
        values = {each.name: DistinctValues(each.name, types[each.name]) for each in specs}
        told = {"columns": list(columns), "samples": manifest.sample_count}
        _trace.noted("finding the values of columns", **told)
        rows = max(1, min(_SLAB_BYTES // dataset.row_bytes, _ROWS_MAX))
        spec = structs.replace(spec, global_batch=rows)
        order = await asyncio.to_thread(Order, dataset.manifest.block_rows, 0, False, 1, 1, 0)
        reading = self._reads.slabs(dataset, spec, order)
        done = 0
        async with contextlib.aclosing(reading) as slabs:
            async for slab, content in slabs:
                await asyncio.to_thread(_add, values, dataset.columns.specs, slab, content)
                done += sum(batch.rows for batch in slab.batches)
                work.advance(done, manifest.sample_count)
        found = {name: await asyncio.to_thread(one.in_order) for name, one in values.items()}
        counts = {name: len(one) for name, one in found.items()}
        _trace.noted("found the values of columns", **told, values=counts)
        return found

    def _path(self, manifest: Manifest, column: str) -> Path:
        name = digest(_VERSION, manifest.fingerprint, column)
        return Path(self._config.cache_dir) / "categories" / f"{name}.values"

    def _remembered(self, manifest: Manifest, columns: Sequence[str]) -> dict[str, pa.Array]:
        found = {}
        for column in columns:
            path = self._path(manifest, column)
            try:
                body = unsealed(path.read_bytes(), str(path))
            except FileNotFoundError:
                continue
            except (CorruptShard, OSError):
                path.unlink(missing_ok=True)
                continue
            with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
                found[column] = reader.read_next_batch().column(0)
        return found

    def _remember(self, manifest: Manifest, found: Categories) -> None:
        folder = Path(self._config.cache_dir) / "categories"
        with cache_faults(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for column, values in found.items():
                publish(self._path(manifest, column), sealed(stream_of(values)))
            paths = sorted(folder.glob("*.values"), key=written_at)
            for path in paths[:-_FILES_KEPT]:
                path.unlink(missing_ok=True)


class DistinctValues(Struct, eq=False):
    """Collects the distinct values of one column.

    Raises:  ConfigError: there are more than VALUES_MAX, or than BYTES_MAX of them.
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
        # So that merging costs no more than reading the rows before it.
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


def stream_of(values: pa.Array) -> bytes:
    """Convert values to an Arrow stream of one column."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([values], ["values"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _add(
    values: Mapping[str, DistinctValues], specs: Sequence[ColumnSpec], slab: Slab, content: bytes
) -> None:
    """Add the rows of a slab that are not null."""
    places = {spec.name: at for at, spec in enumerate(specs)}
    columns = decode(Layout, slab.layout).columns
    for name, distinct in values.items():
        at = places[name]
        if specs[at].kind in TEXTS:
            for array in _texts(slab, columns[at], content):
                distinct.add(array)
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
        found = texts(np.frombuffer(content, np.uint8), column, i, batch.rows)
        buffers = [None, pa.py_buffer(found.offsets), pa.py_buffer(found.values)]
        array = pa.Array.from_buffers(pa.large_binary(), batch.rows, buffers)
        yield array if found.valid.all() else array.filter(pa.array(found.valid.astype(np.bool_)))
