"""Slabs that the node reads for itself, as a trainer would: fetching, decoding and budgets are
the same as for any job. From the first slab, the node learns which columns users' functions make.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping
from typing import Generic, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Struct, structs

from dataplane.arena.memfd import Arena
from dataplane.arena.slab_layout import texts
from dataplane.arena.slots import plan_slots
from dataplane.base import background
from dataplane.base.trace import Trace
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.records import ColumnSpec, End, Stream
from dataplane.model.typed import complete
from dataplane.node.dataset import Dataset, dataset_of
from dataplane.node.delivery import DeliveryArena, slab_sizes
from dataplane.node.engine import Engine
from dataplane.node.job_columns import columns_of, columns_to_find
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order, SampleOrder
from dataplane.plan.packed_blocks import row_counts
from dataplane.rpc.codec import decode
from dataplane.rpc.messages import EndOfStream, FromNodeBody, Layout, Slab, Working
from dataplane.scheduler.walk import Walk
from dataplane.transforms.codes import coded_columns
from dataplane.transforms.made_columns import CollatedColumns, MappedColumns
from dataplane.transforms.packing import delivered_columns
from dataplane.worker.death import WorkerBytes

_SLAB_BYTES = 1 << 20
_SLOTS, _KEPT_BATCHES = 8, 4


Categories = Mapping[str, pa.Array]
"""The values of columns that come as codes, by name."""


class OwnReads:
    """The node's own reads."""

    def __init__(self, engine: Engine, new_dataset_id: Callable[[], int]) -> None:
        self._engine, self.new_dataset_id = engine, new_dataset_id

    async def slabs(
        self,
        dataset: Dataset,
        spec: JobSpec,
        order: SampleOrder,
        *,
        cursor: int = 0,
        keeps_blocks: bool = False,
    ) -> AsyncGenerator[tuple[Slab, bytes], None]:
        """Yield each slab of a job with this spec, in this order from the cursor on, and a copy of
        its bytes. The dataset is forgotten at the end, unless `keeps_blocks`: then the blocks read
        first stay in memory, as far as there is room, until the caller forgets the dataset.

        Raises:  DataplaneError: as for any job that reads the dataset.
        """
        engine = self._engine
        sizes = slab_sizes(dataset, spec, 1, _SLAB_BYTES)
        if keeps_blocks:  # small slabs: a block may take long, and results are wanted soon
            sizes.batches_max = min(sizes.batches_max, _KEPT_BATCHES)
            sizes.batches = min(sizes.batches, _KEPT_BATCHES)
        layout = plan_slots(_SLOTS * sizes.slot_bytes, sizes.slot_bytes)
        arena = Arena.create("dataplane-own", layout.arena_bytes)
        sources = spec.mixture is not None and bool(spec.mixture.source_column)
        delivery = DeliveryArena(
            next(engine.numbers), arena, layout, (dataset,), names_sources=sources
        )
        engine.open_delivery(delivery)
        holder = delivery.delivery_id
        inbox: asyncio.Queue[FromNodeBody] = asyncio.Queue()
        walk = Walk(spec, order, Stream(0, cursor, 0, 1), sizes)
        stream = engine.open_stream(delivery, walk, lambda _, body: inbox.put_nowait(body), holder)
        if keeps_blocks:
            engine.expect_next(stream, order)
        try:
            while True:
                engine.request(stream, 1)
                body = await inbox.get()  # the engine answers within its stall timeout
                while isinstance(body, Working):
                    body = await inbox.get()
                if isinstance(body, DataplaneError):
                    raise body
                if isinstance(body, EndOfStream):
                    return
                assert isinstance(body, Slab)
                content = bytes(arena.view(body.region.offset, body.region.length))
                engine.release(delivery, [body.slab_id])
                yield body, content
        finally:
            engine.close_stream(stream)
            engine.release_all(delivery, holder)
            engine.close_delivery(delivery)
            if not keeps_blocks:
                engine.forget_dataset(dataset)

    def forget(self, dataset: Dataset) -> None:
        """Forget the blocks that were kept."""
        self._engine.forget_dataset(dataset)

    async def first_slab(
        self, dataset: Dataset, spec: JobSpec, order: SampleOrder
    ) -> tuple[Slab, bytes]:
        """Return the first slab, and a copy of its bytes; then close the stream.

        Raises:  DataplaneError: as for any job that reads the dataset, or the dataset has no rows.
        """
        async with contextlib.aclosing(self.slabs(dataset, spec, order)) as slabs:
            async for slab in slabs:
                return slab
        raise DataplaneError("the first block has no rows")


# -- values that are found once --------------------------------------------------------------------
#
# Values that a node determines by reading, or by running a user's function, once for all callers.
#
# Invariants:
# 1. A value is computed by one task at a time, however many callers wait for it. The value may be
#    remembered; a failure is not, so that the next caller tries again.
# 2. The computation continues only as long as a caller waits for it, since a function may hang.


_REMEMBERED = 64
T = TypeVar("T")


class _Sought(Struct, Generic[T], eq=False):
    """A value that is being computed, and how many callers wait for it."""

    result: asyncio.Future[T]
    task: asyncio.Task[None] | None = None
    waiting: int = 0


class FoundOnce(Generic[T]):
    """Values by key; the tasks that compute them have this `name`. The last `remembered` values
    are kept.
    """

    def __init__(self, name: str, remembered: int = _REMEMBERED) -> None:
        self._name, self._remembered = name, remembered
        self._found: OrderedDict[Hashable, T] = OrderedDict()
        self._sought: dict[Hashable, _Sought[T]] = {}

    async def of(self, key: Hashable, find: Callable[[], Awaitable[T]]) -> T:
        """Return the value of this key, which `find` computes if it is not known.

        Raises:  as `find`.
        """
        if key in self._found:
            return self._found[key]
        sought = self._sought.get(key)
        if sought is None:
            sought = self._sought[key] = _Sought(asyncio.get_running_loop().create_future())
            sought.task = background.start(self._name, self._find(key, sought, find))
        sought.waiting += 1
        try:
            return await asyncio.shield(sought.result)
        finally:
            sought.waiting -= 1
            if not sought.waiting and not sought.result.done() and sought.task is not None:
                self._forget(key, sought)  # now, so that the next caller starts again
                sought.task.cancel()

    async def _find(
        self, key: Hashable, sought: _Sought[T], find: Callable[[], Awaitable[T]]
    ) -> None:
        try:
            value = await find()
            self._found[key] = value
            while len(self._found) > self._remembered:
                self._found.popitem(last=False)
            sought.result.set_result(value)
        except Exception as error:  # noqa: BLE001 - raised where callers wait
            sought.result.set_exception(error)
            sought.result.exception()  # mark it as retrieved, in case no caller waits any more
        finally:
            self._forget(key, sought)
            sought.result.cancel()

    def _forget(self, key: Hashable, sought: _Sought[T]) -> None:
        if self._sought.get(key) is sought:
            del self._sought[key]


# -- columns that a map function makes -------------------------------------------------------------
#
# Find the columns that a job's map makes, by having a worker call it with the first rows of the
# dataset.
#
# The node itself never imports a user's code.
#
# Invariants:
# 1. A map of a dataset is tried by one task at a time (see `FoundOnce`, invariant 1). The last
#    results are remembered as long as this node lives, like the workers that imported the maps.
# 2. A served node has workers import only functions that its operator lists.


_trace = Trace("security")


class MappedReader:
    """Tries map functions for one node."""

    def __init__(
        self,
        config: NodeConfig,
        reads: OwnReads,
    ) -> None:
        self._config, self._reads = config, reads
        self._found = FoundOnce[MappedColumns]("map")

    async def of_job(self, manifest: Manifest, spec: JobSpec) -> MappedColumns | None:
        """Return the columns that the job's map makes; None without a map.

        Raises:  ConfigError: this node does not run the job's functions, or cannot import them.
        FunctionError: the map fails.  DataplaneError: as for any job that reads the dataset.
        """
        view = spec.view
        if not view.map:
            return None
        check_allowed(self._config, "map", view.map)
        self._check(spec)
        key = (
            manifest.fingerprint,
            structs.replace(view, collate="", pack=None),
            manifest.urls,
        )
        return await self._found.of(key, lambda: self._read(manifest, spec))

    def _check(self, spec: JobSpec) -> None:
        check_has_workers(self._config, "map", spec.view.map)
        if coded_columns(spec.column_options):
            raise ConfigError(
                "codes= and map= cannot be combined: codes stand for the values of a whole "
                "dataset, which a map may change. Let the map return the codes, or leave one of "
                "them out",
                field="codes",
            )

    async def _read(self, manifest: Manifest, spec: JobSpec) -> MappedColumns:
        view = structs.replace(spec.view, collate="", pack=None)
        own = JobSpec(manifest.fingerprint, seed=spec.seed, view=view)
        dataset = await asyncio.to_thread(
            dataset_of,
            self._reads.new_dataset_id(),
            manifest,
            own,
            worker_bytes=WorkerBytes.of(self._config),
            known=columns_to_find(manifest),
        )
        # An order of one row: the first of the first block.
        order = Order(np.ones(1, np.int64), 0, False, 1, 1, 0)
        slab, content = await self._reads.first_slab(dataset, own, order)
        column = decode(Layout, slab.layout).columns[0]
        decoded = texts(np.frombuffer(content, np.uint8), column, 0, 1)
        return MappedColumns.from_bytes(decoded.values.tobytes())


def check_has_workers(config: NodeConfig, argument: str, name: str) -> None:
    """Check that the node can call a function.

    Raises:  ConfigError: this node has no workers to call the function of this name.
    """
    if not config.has_workers:
        raise ConfigError(
            f"{argument}={name!r} is called by the workers of each node that trainers use, and "
            "this one has none (worker_count is 0): give it workers",
            field=argument,
        )


def check_allowed(config: NodeConfig, argument: str, name: str) -> None:
    """Check that the node may call a function.

    Raises:  ConfigError: this node does not run the function of this name; the log says so.
    """
    # An embedded node runs any function: the trainer that started it could call it itself.
    if config.embedded or config.allows_function(name):
        return
    module = name.partition(":")[0]
    _trace.refused("function refused", by=module, argument=argument, function=name)
    allowed = config.allowed_functions.split()
    listed = f"only those that it lists: {', '.join(allowed)}" if allowed else "no functions"
    raise ConfigError(
        f"{argument}={name!r}: this node runs {listed}. Its operator allows more with "
        "allowed_functions, a list of modules and functions such as "
        f'"{module}:" (dataplane serve --allowed-functions, or the setting '
        "allowed_functions)",
        field=argument,
    )


# -- columns that a collate function makes ---------------------------------------------------------
#
# Find the columns that a job's collate function makes, by having a worker call it with the first
# batch.
#
# The node itself never imports a user's code.
#
# Invariants:
# 1. A job's function is tried by one task at a time (see `FoundOnce`, invariant 1), with as many of
#    the dataset's first rows as a rank's batch has, in the dataset's order.
# 2. A served node has workers import only functions that its operator lists.


class FirstSource(Struct, frozen=True):
    """The dataset whose first rows are tried: that of the job, or of its first source. `spec` is
    the spec of a job over this dataset alone.
    """

    manifest: Manifest
    spec: JobSpec
    mapped: MappedColumns | None
    categories: Categories


class CollatedReader:
    """Tries collate functions for one node."""

    def __init__(
        self,
        config: NodeConfig,
        reads: OwnReads,
    ) -> None:
        self._config, self._reads = config, reads
        self._found = FoundOnce[CollatedColumns]("collate")

    async def of_job(
        self, spec: JobSpec, dp_size: int, first: FirstSource
    ) -> CollatedColumns | None:
        """Return the columns that the job's collate function makes; None if there is no function.

        Raises:  ConfigError: this node does not run the job's functions, or cannot import them.
        FunctionError: the function fails.  DataplaneError: as for any job that reads the dataset.
        """
        name = spec.view.collate
        if not name:
            return None
        check_allowed(self._config, "collate", name)
        check_has_workers(self._config, "collate", name)
        rows = min(-(-spec.global_batch // dp_size), first.manifest.sample_count)
        own = structs.replace(
            first.spec,
            shuffle=False,
            lanes=1,
            window=1,
            ramp=0,
            global_batch=rows,
            end=End.RAGGED,
            view=structs.replace(first.spec.view, collate=name),
            mixture=spec.mixture,
        )
        key = own, first.manifest.urls
        return await self._found.of(key, lambda: self._read(own, rows, first))

    async def _read(self, spec: JobSpec, rows: int, first: FirstSource) -> CollatedColumns:
        dataset = await asyncio.to_thread(
            dataset_of,
            self._reads.new_dataset_id(),
            first.manifest,
            first.spec,
            worker_bytes=WorkerBytes.of(self._config),
            arena_bytes=self._config.block_arena_bytes,
            known=await asyncio.to_thread(columns_of, first.manifest, first.spec, first.mapped),
            categories=first.categories,
        )
        _check_columns(delivered_columns(dataset.columns.specs, spec))
        order = Order(_first_rows(first.manifest, rows), 0, False, 1, 1, 0)
        slab, content = await self._reads.first_slab(dataset, spec, order)
        column = decode(Layout, slab.layout).columns[0]
        begin, length = column.values[0], column.width[0]
        return msgspec.json.decode(content[begin : begin + length], type=complete(CollatedColumns))


def _first_rows(manifest: Manifest, rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return how many of a dataset's first `rows` rows lie in each of its first blocks.

    Shapes:  result: int64[blocks].
    """
    counts = row_counts(manifest).astype(np.int64)
    ends = np.cumsum(counts)
    counts = counts[: int(ends.searchsorted(rows)) + 1]
    counts[-1] -= max(int(ends[len(counts) - 1]) - rows, 0)
    return counts


def _check_columns(specs: tuple[ColumnSpec, ...]) -> None:
    """Check that tensors can be made of these columns.

    Raises:  ConfigError: numpy has no type for a column.
    """
    for spec in specs:
        if spec.dtype == "bfloat16":
            raise ConfigError(
                f"column {spec.name!r} comes as bfloat16, which numpy does not have, and collate= "
                'takes numpy arrays: choose float32, for images with ToDtype("float32")',
                field="collate",
            )
