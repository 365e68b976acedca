"""A node's counts as readings of metrics: everything is counted elsewhere, and only read here, on
the event loop, in time proportional to the number of readings.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dataplane.base.meters import FIRST_BATCH_STAGES, StoreMeters
from dataplane.base.watchdog import Watchdog
from dataplane.metrics.table import Reading
from dataplane.node.engine import Engine
from dataplane.node.fetchers import Fetchers
from dataplane.node.jobs import Jobs
from dataplane.node.pool import WorkerPool
from dataplane.rpc.membership import NodeReads
from dataplane.store.connect import Stores
from dataplane.store.outage import Outages

_RSS_ANON = re.compile(r"^RssAnon:\s+(\d+) kB$", re.MULTILINE)


def of_node(
    jobs: Jobs,
    engine: Engine,
    reads: NodeReads,
    pool: WorkerPool,
    fetchers: Fetchers,
    stores: Stores,
    outages: Outages,
    watchdog: Watchdog,
) -> Iterator[Reading]:
    """Yield all readings of a node."""
    yield from _of_ranks(jobs, engine)
    yield from _of_bytes(reads)
    yield from _of_memory(engine, jobs)
    yield from _of_stores(fetchers.stores, stores, outages)
    yield from _of_processes(pool, fetchers, watchdog)


def _of_ranks(jobs: Jobs, engine: Engine) -> Iterator[Reading]:
    """Yield the readings of the jobs and ranks that are served now."""
    members = jobs.members.values()
    for (job, rank), meter in {
        (member.job_id, str(member.request.topology.rank)): member.meter for member in members
    }.items():
        for stage, wait_us in meter.waits_us.items():
            yield Reading("dataplane_exposed_seconds_total", wait_us / 1e6, (job, rank, stage))
        for stage, took_s in zip(FIRST_BATCH_STAGES, meter.first_batch_s, strict=False):
            yield Reading("dataplane_first_batch_seconds", took_s, (job, rank, stage))
        yield Reading("dataplane_samples_total", meter.samples, (job, rank))
    ahead: dict[tuple[str, str], int] = {}
    for member in members:
        at = member.job_id, str(member.request.topology.rank)
        steps = sum(map(engine.scheduler.steps_ahead, member.streams))
        ahead[at] = ahead.get(at, 0) + steps
    yield from (Reading("dataplane_steps_ahead", steps, at) for at, steps in ahead.items())
    for job, of_job in {member.job_id: member.meter.job for member in members}.items():
        for stage, took in of_job.stages.items():
            yield Reading("dataplane_stage_seconds", took, (job, stage))


def _of_bytes(reads: NodeReads) -> Iterator[Reading]:
    """Yield where blocks came from, and what others were given."""
    for source, count in (
        ("origin", reads.read_bytes),
        ("neighbour", reads.neighbour_bytes),
        ("disk", reads.disk_bytes),
        ("memory", reads.memory_bytes),
    ):
        yield Reading("dataplane_read_bytes_total", count, (source,))
    yield Reading("dataplane_hedged_bytes_total", reads.hedged_bytes)
    yield Reading("dataplane_lent_bytes_total", reads.lent_bytes)
    yield Reading("dataplane_made_slabs_total", reads.made_slabs)


def _of_stores(meters: StoreMeters, own: Stores, outages: Outages) -> Iterator[Reading]:
    """Yield the requests of fetchers, and those of this process, which lists and indexes."""
    for store, counts in own.take_counts():
        meters.add(store, counts)
    for store, total in meters.by_store.items():
        yield Reading("dataplane_store_request_seconds", total.took, (store,))
        yield Reading("dataplane_store_retries_total", total.retries, (store,))
        for error, count in total.errors.items():
            yield Reading("dataplane_store_errors_total", count, (store, error))
    now = time.time()
    for outage in outages.now(now):
        if outage.store in meters.by_store:
            away_s = max(0.0, now - outage.since)
            yield Reading("dataplane_store_away_seconds", away_s, (outage.store,))


def _of_memory(engine: Engine, jobs: Jobs) -> Iterator[Reading]:
    """Yield who holds the node's memory, and what was dropped."""
    scheduler, held = engine.scheduler, engine.scheduler.held
    slabs, excerpts = scheduler.kept_slab_bytes, scheduler.excerpt_bytes
    holders = {
        "blocks": held.memory_bytes - slabs - excerpts,
        "slabs": slabs,
        "excerpts": excerpts,
        "delivery": jobs.delivery_bytes,
    }
    for holder, size in holders.items():
        yield Reading("dataplane_arena_bytes", size, (holder,))
    yield Reading("dataplane_arena_limit_bytes", held.memory_limit_bytes)
    yield Reading("dataplane_disk_bytes", held.disk_bytes)
    evicted, needed = scheduler.evictions
    yield Reading("dataplane_evictions_total", evicted - needed, ("spent",))
    yield Reading("dataplane_evictions_total", needed, ("needed",))


def _of_processes(pool: WorkerPool, fetchers: Fetchers, watchdog: Watchdog) -> Iterator[Reading]:
    """Yield the processes that a node has started."""
    for kind, processes in (("worker", pool), ("fetcher", fetchers)):
        pids, at = processes.pids, (kind,)
        yield Reading("dataplane_processes", len(pids), at)
        yield Reading("dataplane_process_starts_total", processes.start_count, at)
        yield Reading("dataplane_process_deaths_total", processes.death_count, at)
        yield Reading("dataplane_process_memory_bytes", partial(_own_bytes, pids), at)
    yield Reading("dataplane_loop_holds_total", watchdog.statistics().count)


def _own_bytes(pids: Sequence[int]) -> int:
    """Return the memory of these processes that they share with nobody; some may be gone."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
            size = _RSS_ANON.search(text)
            total += 0 if size is None else int(size[1]) * 1024
    return total
