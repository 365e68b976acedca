"""Find the columns that a job's map makes, by having a worker call it with the first rows of the
dataset.

The node itself never imports a user's code.

Invariants:
1. A map of a dataset is tried once at a time (found_once.py, 1). The result is remembered for as
   long as the workers that imported it may live: as long as this node.
2. A served node has workers import only functions that its operator lists.
"""

from __future__ import annotations

import asyncio

import numpy as np
from msgspec import structs

from dataplane.arena.slab_layout import texts
from dataplane.base.trace import Trace
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.node.dataset import dataset_of
from dataplane.node.found_once import FoundOnce
from dataplane.node.job_columns import columns_to_find
from dataplane.node.own_slabs import OwnReads
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane.rpc.codec import decode
from dataplane.rpc.messages import Layout
from dataplane.transforms.codes import coded_columns
from dataplane.transforms.made_columns import MappedColumns
from dataplane.worker.limits import WorkerBytes

_trace = Trace("security")


class MappedReader:
    """Tries maps for one node."""

    def __init__(
        self,
        config: NodeConfig,
        reads: OwnReads,
    ) -> None:
        self._config, self._reads = config, reads
        self._found = FoundOnce[MappedColumns]("map")

    async def of_job(self, manifest: Manifest, spec: JobSpec) -> MappedColumns | None:
        """The columns that the job's map makes; None without a map.

        Raises:  ConfigError: this node does not run its functions, or cannot import them.
        FunctionError: the map fails.  DataplaneError: as any job that reads the dataset.
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
        found = texts(np.frombuffer(content, np.uint8), column, 0, 1)
        return MappedColumns.from_bytes(found.values.tobytes())


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
    # The trainer that has started an embedded one may run the same itself.
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
