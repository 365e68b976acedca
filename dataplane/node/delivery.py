"""The node's record of the delivery arena of one dp_rank of a job."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.arena.slots import AHEAD_SLOTS_MIN, SlotLayout, plan_slots
from dataplane.model.changes import changes_of
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import BudgetTooSmall, ConfigError
from dataplane.model.redact import redacted, unsigned
from dataplane.node.dataset import Dataset
from dataplane.rpc.messages import OpenJob
from dataplane.rpc.tasks import Collation
from dataplane.scheduler import budgets
from dataplane.scheduler.dataset import Ints
from dataplane.transforms.made_columns import CollatedColumns


class DelegatedJob(Struct, frozen=True):
    """The facts that a node needs to make slabs of a job for another one: how to open the job, the
    digest of its spec and its changes, and the software that makes its batches
    (`opener.software_of`).
    """

    opening: OpenJob
    digest: str
    software: str


class DeliveryArena(Struct, eq=False):
    """The memory of one delivery, and the number of members that use it. The orders of its streams
    cover `datasets`, number their blocks consecutively, and need datasets with equal columns.
    Deliveries of one `group` have equal slabs for equal steps; None if slabs are made only for this
    arena. `job`: other nodes may make slabs for it.
    """

    delivery_id: int
    arena: Arena
    layout: SlotLayout
    datasets: tuple[Dataset, ...]
    group: object = None
    is_declared: bool = False
    users: int = 0
    job: DelegatedJob | None = None
    is_light: bool = False
    """Whether only other nodes can make its slabs."""
    names_sources: bool = False
    """Whether the last column of its batches says which of the datasets a sample is of."""
    collated: CollatedColumns | None = None
    """The columns that a collate function makes; None if there is no function, or if columns
    of rows are requested."""
    job_id: str = ""
    """The job whose slabs these are; "" if the node itself reads them."""
    is_for_nodes: bool = False
    """Whether the slabs are for other nodes, not for trainers of this one."""

    @property
    def column_count(self) -> int:
        """The number of columns of its batches."""
        if self.collated is not None:
            return len(self.collated.specs)
        return self.datasets[0].column_count + self.names_sources

    def collate(self, asked: Collation | None) -> Collation | None:
        """Return the description of the collate function for workers."""
        if asked is None or self.collated is None:
            return asked
        return replace(asked, columns=self.collated.specs, code=self.collated.code)

    def sources_of(self, blocks: Ints) -> tuple[int, ...]:
        """Return the dataset of each block of its orders; () if batches do not name their sources.

        Shapes:  blocks: int64[n].
        """
        if not self.names_sources:
            return ()
        counts = [each.manifest.block_count for each in self.datasets]
        return tuple(np.cumsum(counts).searchsorted(blocks, side="right").tolist())


def delegated_job(
    request: OpenJob, spec: JobSpec, software: str, *, has_workers: bool
) -> DelegatedJob | None:
    """Return the facts that other nodes need to make slabs of this job; None if its urls are
    signed, since signed urls are not passed on.

    Raises:  ConfigError: other nodes cannot make what a node without workers has to deliver.
    """
    signed = [url for url in request.source.urls if unsigned(url) != url]
    if signed and not has_workers:
        raise ConfigError(
            f"{redacted(signed[0])} is signed, and this node has no workers (worker_count is 0): a "
            "signed url is sent to no other node. Use a url without a signature and credentials on "
            "the nodes that make slabs, or give this node workers",
            field="url",
        )
    digest = changes_of(request.entries).job_digest(spec.slabs_digest)
    return None if signed else DelegatedJob(request, digest, software)


def layout_of(config: NodeConfig, slot_bytes: int) -> SlotLayout:
    """Return the slots of one dp rank, of this size: as many as all workers can fill at the same
    time.
    """
    slots_max = config.worker_count_most + AHEAD_SLOTS_MIN
    return plan_slots(config.delivery_bytes_per_rank, slot_bytes, slots_max)


def delivery_bytes_max(config: NodeConfig) -> int:
    """The most memory that one delivery arena may take, however large its batches are."""
    return max(config.delivery_bytes_per_rank, 2 * config.block_arena_bytes)


def delivery_memory(config: NodeConfig, layout: SlotLayout, batch_bytes: int) -> Arena:
    """Allocate memory for slabs whose batches take about `batch_bytes`.

    Raises:  BudgetTooSmall: it takes too much, or the machine has no memory.
    """
    budget = delivery_bytes_max(config)
    if layout.arena_bytes > budget:
        raise budgets.rank_takes_too_much(layout, batch_bytes, config.slab_bytes, budget)
    arena = Arena.create("dataplane-delivery", layout.arena_bytes)
    try:
        # The other slots when they are used: mapping all of them takes a quarter of a second.
        arena.reserve(0, layout.slot_bytes)
    except BudgetTooSmall:
        arena.close()
        raise
    return arena
