"""Bytes that nodes read from the store, of which blocks, and for which epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from caches import least_recent
from hosts_service import BUCKET, Job, Shape

from dataplane.index.indexing import index_dataset
from dataplane.model.config import JobSpec
from dataplane.node.dataset import can_pack, dataset_of
from dataplane.plan.defaults import BlockSizes, shuffle_of
from dataplane.plan.order import Order

AHEAD_SLABS = 40
"""More than a node plans ahead of a trainer, with small slabs."""


@dataclass(frozen=True, slots=True)
class EpochReads:
    """Bytes of blocks that were read until the last batch of an epoch, since that of the one
    before. `again` of them had been read before in this time, but not `ahead`, for the next epoch.
    """

    epoch: int
    origin_bytes: int
    again_bytes: int
    ahead_bytes: int
    share: float


class Plan:
    """The blocks of the dataset, and the ids of an epoch in planned order."""

    def __init__(self, url: str, shape: Shape) -> None:
        self.manifest = index_dataset(url)
        rows = self.manifest.block_rows
        sizes = BlockSizes.of(rows, self.manifest.block_decoded)
        ramp = shuffle_of(sizes, shape.lanes, shape.window).ramp
        self._options = shape.options | {"ramp": ramp}
        self._first = np.cumsum(rows) - rows
        self.shape, self.arena_bytes = shape, int(shape.arena.removesuffix("MiB")) << 20
        self.spec = JobSpec(
            self.manifest.fingerprint, global_batch=shape.batch, **(shape.options | self._options)
        )
        packed = can_pack(self.manifest, self.spec, self.arena_bytes)
        size = self.arena_bytes
        self.dataset = dataset_of(
            1, self.manifest, self.spec, packed=packed, arena_bytes=size
        ).blocks

    def order(self, epoch: int) -> Order:
        return Order(self.manifest.block_rows, epoch=epoch, **self._options)

    def epoch(self, epoch: int) -> np.ndarray:
        """Shapes:  int64[rows], ids."""
        blocks, rows = self.order(epoch).locate(np.arange(self.manifest.sample_count))
        return self._first[blocks] + rows

    def least_recent_bytes(self, size: int, hosts: int, epochs: int) -> int:
        """Return the bytes that so many epochs would read from the store if all nodes were one LRU cache."""
        marks = self.dataset.marks
        held = np.where(marks.decoded > 0, marks.decoded, marks.raw)
        room = hosts * self.arena_bytes // int(held.max())
        length = self.shape.batches_per_slab(size) * self.shape.batch
        slabs = []
        for epoch in range(epochs):
            order = self.order(epoch)
            for at in range(0, order.sample_count, length):
                stop = min(at + length, order.sample_count)
                slabs.append(np.unique(order.locate(np.arange(at, stop))[0]).tolist())
        whole = float(self.manifest.block_length.mean())
        return round(least_recent(slabs, room) * whole)

    def first_blocks(self, epoch: int, ranks: Sequence[int], size: int) -> set[int]:
        """Return the blocks that these ranks need soon after the start of an epoch."""
        steps = AHEAD_SLABS * self.shape.batches_per_slab(size)
        positions = np.arange(min(steps * self.shape.batch, self.manifest.sample_count))
        own = positions[np.isin(positions % size, ranks)]
        return set(self.order(epoch).locate(own)[0].tolist())


@dataclass(frozen=True, slots=True)
class LaterReads:
    """Bytes that the epochs after the first one read from the store: as measured, and of an LRU
    cache of all the memory, which reads nothing ahead. `better`: how many times as much LRU reads.
    """

    measured_bytes: int
    least_recent_bytes: int

    @property
    def better(self) -> float:
        return self.least_recent_bytes / max(self.measured_bytes, 1)


def later_reads(plan: Plan, reads: Sequence[EpochReads], ranks: int, hosts: int) -> LaterReads:
    """What the first epoch has read ahead is left out, and what the last one has read ahead is in
    it.
    """
    count, whole = len(reads), int(plan.manifest.block_length.sum())
    return LaterReads(
        sum(each.origin_bytes for each in reads[1:]),
        plan.least_recent_bytes(ranks, hosts, count) - whole,
    )


def epoch_reads(log: Path, plan: Plan, job: Job) -> list[EpochReads]:
    """Return the bytes that each epoch of a job has read; `log` is that of hosts_store_log.py."""
    times, hosts, blocks = _block_reads(log, plan)
    lengths, size = plan.manifest.block_length, len(job.ranks)
    steps = [rank.steps() for rank in job.ranks]
    found, since = [], min(float(own["time"][0]) for own in steps) - 60.0
    for epoch in range(int(steps[0]["epoch"][-1]) + 1):
        until = max(float(own["time"][own["epoch"] == epoch][-1]) for own in steps)
        origin = again = ahead = 0
        seen = set[int]()
        soon = {}
        for address in {rank.host.address for rank in job.ranks}:
            ranks = [i for i, rank in enumerate(job.ranks) if rank.host.address == address]
            left = AHEAD_SLABS * plan.shape.batches_per_slab(size)
            nears = (steps[i]["time"][steps[i]["epoch"] == epoch][-left:][0] for i in ranks)
            soon[address] = (min(nears), plan.first_blocks(epoch + 1, ranks, size))
        inside = np.flatnonzero((times > since) & (times <= until))
        for at in inside:
            block, host = int(blocks[at]), hosts[at]
            if host not in soon:
                continue
            length = int(lengths[block])
            origin += length
            if block in seen:
                # An owner reads for whoever asks it.
                is_ahead = any(
                    times[at] >= near and block in first for near, first in soon.values()
                )
                ahead, again = ahead + length * is_ahead, again + length * (not is_ahead)
            seen.add(block)
        share = (origin - ahead) / float(lengths.sum())
        found.append(EpochReads(epoch, origin, again, ahead, round(share, 4)))
        since = until
    return found


def _block_reads(log: Path, plan: Plan) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Each reading of the start of a block: when, by whom, which."""
    manifest, numbers = plan.manifest, {}
    for number, shard in enumerate(manifest.shards):
        numbers[shard.url.split("://")[-1]] = number
    times, hosts, blocks = [], [], []
    for line in log.read_text(encoding="utf-8").splitlines():
        at, host, name, first, last = line.split()
        shard = numbers.get(name if name.startswith(BUCKET) else f"{BUCKET}/{name}")
        if shard is None:
            continue
        among = slice(*np.searchsorted(manifest.block_shard, [shard, shard + 1]))
        starts = manifest.block_offset[among]
        ends = starts + manifest.block_length[among]
        # By their ends: a preamble is read with a piece of the first block.
        whole = (starts >= int(first)) & (ends <= int(last) + 1)
        for block in np.flatnonzero(whole) + among.start:
            times.append(float(at))
            hosts.append(host)
            blocks.append(int(block))
    return np.array(times), hosts, np.array(blocks, dtype=np.int64)
