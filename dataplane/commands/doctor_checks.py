"""Checks of the machine, and of a service, that need no run."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from dataplane.arena import pages
from dataplane.base.machine import this_machine
from dataplane.client.topology import from_environment
from dataplane.commands import output
from dataplane.commands.datasets import STORES
from dataplane.fetcher.kept_files import KeptFiles
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.page.figures import by_wait
from dataplane.plan.manifest import Manifest
from dataplane.plan.shards import Shard
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import (
    JobStatus,
    MemberStatus,
    NodeStatus,
    StatusRequest,
    StatusResponse,
)
from dataplane.store.urls import FILE_PREFIX, local_path
from dataplane.transforms.pixels_advice import INSTALL_LIBJPEG
from dataplane.transforms.pixels_library import maker

MORE = 4
_PROBE_BYTES_MAX = 32 << 20
_PROBE_READS = 5
_WORKER_BYTES = 150 << 20
"""The memory that a worker process takes before its first block."""
_DESCRIPTORS_SPARE = 256

Blocks = npt.NDArray[np.int64]

_Place = tuple[Shard, int, int]
"""A shard, and the offset and the length of one of its blocks."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `advice` is empty if nothing is wrong. `may_stay` means that the
    advice is about a setting that may be intended.
    """

    name: str
    found: str
    advice: str = ""
    may_stay: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """The speed at which a dataset's storage delivers to this machine, without a job."""

    is_local: bool
    latency_s: float
    bytes_per_s: float
    bytes_per_s_of_more: float
    """The rate with `MORE` times as many reads in flight as a node has."""


def environment(config: NodeConfig, manifest: Manifest) -> list[Check]:
    """Run all checks that read nothing from the dataset."""
    return [
        _processors(config),
        _memory(config),
        huge_pages(pages.shared_huge_pages()),
        _images(),
        _descriptors(manifest),
        _ranks(),
    ]


def _ranks() -> Check:
    """Report the ranks that a loader without a framework would detect here. The trial itself runs
    as a single rank.
    """
    try:
        return Check("ranks", from_environment(os.environ).source)
    except ConfigError as error:
        return Check("ranks", "unclear", str(error))


def _processors(config: NodeConfig) -> Check:
    count, installed = this_machine().cpu_count, os.cpu_count() or 1
    shown = f"{count} of {installed}" if count < installed else f"{count}"
    shown += f", {output.counted(config.worker_count, 'worker')}"
    if config.worker_count > count:
        return Check(
            "processors", shown, f"worker_count {count}: more workers would only share processors"
        )
    return Check("processors", shown)


def _memory(config: NodeConfig) -> Check:
    memory, free = this_machine().memory_bytes, psutil.virtual_memory().available
    needed = (
        config.block_arena_bytes
        + config.delivery_bytes_per_rank
        + config.worker_count * _WORKER_BYTES
    )
    shown = (
        f"{output.approximate_bytes(memory)} for this process, "
        f"{output.approximate_bytes(min(free, memory))} free; a node with one rank takes up to "
        f"{output.approximate_bytes(needed)}"
    )
    if needed > min(free, memory):
        return Check("memory", shown, "lower block_arena_bytes, or delivery_bytes_per_rank")
    return Check("memory", shown)


def huge_pages(mode: str) -> Check:
    """Check whether the kernel, with the setting `mode`, uses huge pages for shared memory."""
    if mode not in {"never", "deny"}:
        return Check("huge pages", f"for shared memory: {mode}")
    return Check(
        "huge pages",
        f"none for shared memory ({mode})",
        f"as root, echo advise > {pages.SHARED_HUGE_PAGES}: new memory then costs 0.6 CPU "
        "seconds a GiB less from the start, and with Linux before 6.1",
    )


def _images() -> Check:
    made = maker()
    slow = f"Pillow decodes JPEGs, several times slower: {INSTALL_LIBJPEG}"
    return Check("JPEGs by libjpeg-turbo", made.missing or made.name, slow if made.missing else "")


def _descriptors(manifest: Manifest) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Only the hard limit matters: a worker raises its own soft limit. It keeps two descriptors of
    # each local shard that it has mapped.
    mapped = int(manifest.shards.urls.starting_with(FILE_PREFIX.encode()).sum())
    needed = 2 * mapped + _DESCRIPTORS_SPARE
    shown = f"{soft:,} at once, {hard:,} at most"
    if hard != resource.RLIM_INFINITY and hard < needed:
        return Check("open files", shown, f"ulimit -Hn {needed}, or fewer and larger shards")
    return Check("open files", shown)


def probe(manifest: Manifest, fetch_count: int) -> Probe:
    """Make a few reads like a node's: first single small ones, then many blocks at once.

    Raises:  StoreError and its subclasses.  DatasetChangedError.
    """
    blocks = np.flatnonzero(manifest.block_length)
    if not len(blocks):
        return Probe(is_local=True, latency_s=0.0, bytes_per_s=0.0, bytes_per_s_of_more=0.0)
    first = _place(manifest, int(blocks[0]))[0]
    latency_s = statistics.median([_read((first, 0, 1)) for _ in range(_PROBE_READS)][1:])
    is_local = local_path(first.url) is not None
    # Spread the reads over the dataset, and read other blocks each time, since blocks that were
    # read before may be cached.
    some = _rate(_some(manifest, blocks, 4 * fetch_count, 0), fetch_count)
    reads = MORE * fetch_count
    more = some if is_local else _rate(_some(manifest, blocks, 2 * reads, 1), reads)
    return Probe(is_local, latency_s, some, more)


def _place(manifest: Manifest, block: int) -> _Place:
    shard = manifest.shards[int(manifest.block_shard[block])]
    return shard, int(manifest.block_offset[block]), int(manifest.block_length[block])


def _some(manifest: Manifest, blocks: Blocks, count: int, start: int) -> list[_Place]:
    step = max(len(blocks) // count, 1)
    places: list[_Place] = []
    size = 0
    for block in blocks[min(start, len(blocks) - 1) :: step].tolist():
        place = _place(manifest, block)
        if places and size + place[2] > _PROBE_BYTES_MAX:
            break
        places.append(place)
        size += place[2]
    return places[:count]


def _rate(places: list[_Place], reads: int) -> float:
    """Measure bytes/s with this many parallel reads."""
    began = time.monotonic()
    with ThreadPoolExecutor(reads) as threads:
        list(threads.map(_read, places))
    return sum(place[2] for place in places) / max(time.monotonic() - began, 1e-9)


def _read(place: _Place) -> float:
    """Read a place, and return the seconds that it took."""
    shard, offset, length = place
    began = time.monotonic()
    STORES.connect(shard.url).read(shard.url, offset, length, shard.etag)
    return time.monotonic() - began


def storage(probe: Probe) -> Check:
    """Convert a probe to a check."""
    if not probe.bytes_per_s:
        return Check("storage", "nothing to read")
    where = "local files" if probe.is_local else "remote"
    latency = f"{probe.latency_s * 1e3:,.1f} ms to the first byte"
    return Check("storage", f"{where}, {latency}, {probe.bytes_per_s / 1e6:,.0f} MB/s")


def lines(checks: Sequence[Check]) -> list[tuple[str, str, str]]:
    """Return the checks as rows of a table."""
    return [(check.name, check.found, check.advice or "well") for check in checks]


# -- disk --------------------------------------------------------------------------------------
#
# The check of the disk on which a node keeps blocks.


def disk(config: NodeConfig) -> list[Check]:
    """Check whether blocks can be kept on the disk, and whether it has room for them. Returns
    nothing if the settings keep no blocks there.
    """
    if not config.cache_bytes:
        return []
    from dataplane.node.server import FolderTakenError, open_cache_folder

    try:
        folder = open_cache_folder(config.cache_dir, config.cache_bytes, patience_s=0.0)
    except FolderTakenError as error:
        return [Check("disk", "in use by another node", str(error))]
    except ConfigError as error:
        return [Check("disk", "cannot be used", str(error))]
    try:
        room = shutil.disk_usage(folder.path).free + _taken(folder.path)
    finally:
        folder.close()
    size = output.approximate_bytes
    shown = f"{size(config.cache_bytes)} for blocks in {folder.path}, and room for {size(room)}"
    advice = "lower cache_bytes, or choose another disk with cache_dir"
    return [Check("disk", shown, advice if room < config.cache_bytes else "")]


def _taken(folder: Path) -> int:
    """Return the bytes that kept blocks take."""
    return sum(sum(kept.disk_bytes) for kept in KeptFiles(str(folder)).scan())


# -- a service -----------------------------------------------------------------------------------
#
# `dataplane doctor --join`: find what is wrong with a service that runs. Two statuses of the
# coordinator, some seconds apart, are compared; no node is disturbed.

_WAIT_MIN = 0.1
_GONE_S = 10.0
_WAIT_ADVICE = {
    "storage": "read more at once (fetch_count), keep blocks on disk (cache_bytes), let nodes lend "
    "each other (data_listen); `dataplane doctor URL` measures the store",
    "decode": "more worker_count or a faster map=; see `dataplane doctor URL`",
    "assemble": "more worker_count, smaller images, a faster collate=",
    "workers": "more worker_count, or fewer jobs at this node",
    "room": "the trainer keeps batches: release them, or raise delivery_bytes_per_rank",
    "node": "look into the node's log: it was replaced, or its event loop is held",
}


async def service_checks(client: CoordinatorClient, span_s: float) -> list[Check]:
    """Compare two statuses.

    Raises:  DataplaneError: the coordinator does not answer, or refuses.
    """
    before = await client.status(StatusRequest(""))
    await asyncio.sleep(span_s)
    return compared(before, await client.status(StatusRequest("")), span_s)


def compared(before: StatusResponse, now: StatusResponse, span_s: float) -> list[Check]:
    """Return what two statuses say, `span_s` seconds apart."""
    jobs = {job.job_id: job for job in before.jobs}
    checks = [check for node in now.nodes for check in _node(node)]
    nodes = {node.node_id: node for node in before.nodes}
    silent = {
        node.node_id
        for node in now.nodes
        if node.node_id in nodes
        and not node.stores_away
        and node.reads.read_bytes == nodes[node.node_id].reads.read_bytes
    }
    for job in now.jobs:
        if job.state == "idle":
            continue
        if job.missing_count:
            ranks = ", ".join(map(str, job.missing_dp_ranks[:8]))
            advice = "look at their processes: each says what it waits for"
            checks.append(Check(f"job {job.job_id}", f"waits for ranks {ranks}", advice))
        if job.job_id in jobs:
            checks += _waits(jobs[job.job_id], job, silent, span_s)
    return checks


def _node(node: NodeStatus) -> list[Check]:
    name, checks = f"node {node.node_id}", list[Check]()
    if node.last_seen_s > _GONE_S:
        where = f"on host {node.host}, process {node.pid}"
        checks.append(
            Check(name, f"was last seen {node.last_seen_s:.0f} s ago, {where}",
                  "look whether it runs: its supervisor starts it again")
        )  # fmt: skip
    for store in node.stores_away[:4]:
        shown = f"{store.store} has not answered for {store.away_s:.0f} s: {store.error}"
        checks.append(Check(name, shown, "see the store's status, DNS, proxy and credentials"))
    return checks or [Check(name, f"answers, {node.version}")]


def _waits(before: JobStatus, now: JobStatus, silent: set[str], span_s: float) -> list[Check]:
    """Say for what the ranks of a job have waited, by stage."""
    waited = {member.member_id: member for member in before.members}
    by_stage: defaultdict[str, list[tuple[float, MemberStatus]]] = defaultdict(list)
    for member in by_wait(now):
        former = waited.get(member.member_id)
        if former is None or not member.bound:
            continue
        # Waits are counted by epoch: a new one begins at 0.
        since_s = former.stall_s if former.epoch == member.epoch else 0.0
        share = min(max(member.stall_s - since_s, 0.0) / span_s, 1.0)
        if share >= _WAIT_MIN and member.bound in _WAIT_ADVICE:
            by_stage[member.bound].append((share, member))
    checks = []
    for stage, ranks in by_stage.items():
        share, worst = max(ranks, key=lambda pair: pair[0])
        shown = (
            f"{len(ranks)} of {now.member_count} ranks wait for {stage}, rank "
            f"{worst.topology.rank} {share:.0%} of the time"
        )
        advice = _WAIT_ADVICE[stage]
        if stage == "storage" and worst.node_id in silent:
            shown += ", and no byte came"
            advice = "look for `fetcher hung` or `fetcher ended` in the node's log"
        checks.append(Check(f"job {now.job_id}", shown, advice))
    moves = (before.epoch, before.cursor) != (now.epoch, now.cursor)
    speed = "goes on, and does not wait for data" if moves else "takes no batch: see its trainers"
    return checks or [Check(f"job {now.job_id}", speed)]
