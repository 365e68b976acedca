"""Find the columns that a job's collate function makes, by having a worker call it with the first
batch.

The node itself never imports a user's code.

Invariants:
1. A function is tried once at a time for a job (found_once.py, 1), with as many of the dataset's
   first rows as a rank's batch has, in the dataset's order.
2. A served node has workers import only functions that its operator lists.
"""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
from msgspec import Struct, structs

from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnSpec, End
from dataplane.model.typed import complete
from dataplane.node.categories import Categories
from dataplane.node.dataset import dataset_of
from dataplane.node.found_once import FoundOnce
from dataplane.node.job_columns import columns_of
from dataplane.node.mapped_reader import check_allowed, check_has_workers
from dataplane.node.own_slabs import OwnReads
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane.plan.packed_blocks import row_counts
from dataplane.rpc.codec import decode
from dataplane.rpc.messages import Layout
from dataplane.transforms.made_columns import CollatedColumns, MappedColumns
from dataplane.transforms.packing import delivered_columns
from dataplane.worker.limits import WorkerBytes


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
        """The columns that the job's collate function makes; None without one.

        Raises:  ConfigError: this node does not run its functions, or cannot import them.
        FunctionError: the function fails.  DataplaneError: as any job that reads the dataset.
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
    """Return how many of a dataset's first rows each of its first blocks has.

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
