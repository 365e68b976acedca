"""The table of all metrics, from which the exposition, docs/metrics.md, the dashboard and the alert
rules are made. Names, types and labels are an interface: other people's dashboards use them.

Units are those of Prometheus: seconds, bytes, and shares of 1. The values of every label are
bounded: `job` and `rank` are served by this node now, and disappear when they leave; `stage`,
`source`, `kind`, `holder`, `error`, `event` and `state` come from our code; `store` has at most 64
values and "others"; `dataset` is a source of the mixture of a job.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct

from dataplane.base.meters import Durations


class Kind(enum.Enum):
    """The Prometheus types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Group(enum.Enum):
    """The parts of the docs and the rows of the dashboard."""

    WAITING = "Is it the data?"
    STREAM = "Slabs on their way"
    BYTES = "Bytes"
    STORES = "Object stores"
    MEMORY = "Memory"
    PROCESSES = "Processes"
    DATA = "What is in the batches"
    JOBS = "Jobs and members (coordinator)"
    SAFETY = "Refusals"


class Metric(Struct, frozen=True):
    """One metric. `unit` is "" for counts."""

    name: str
    kind: Kind
    group: Group
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""


class Reading(NamedTuple):
    """The present value of a metric, for these values of its labels. A value that takes a while to
    read is a function, which the thread that answers a scrape calls.
    """

    name: str
    value: float | Durations | Callable[[], float]
    labels: tuple[str, ...] = ()


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_RANK = ("job", "rank")
_SOURCE = ("job", "dataset")

METRICS = (
    Metric(
        "dataplane_exposed_seconds_total", _C, Group.WAITING,
        "Time that a rank's trainer waited for batches after the first one, by the stage that the "
        "trainer waited for", (*_RANK, "stage"), "seconds",
    ),
    Metric(
        "dataplane_waiting_seconds", _G, Group.WAITING,
        "How long a rank's trainer has waited so far for its next slab (a few batches), by the "
        "present stage of the slab; absent below 5 s", (*_RANK, "stage"), "seconds",
    ),
    Metric(
        "dataplane_first_batch_seconds", _G, Group.WAITING,
        "Time from a loader's first use to its first batch, by stage", (*_RANK, "stage"), "seconds",
    ),
    Metric(
        "dataplane_samples_total", _C, Group.WAITING,
        "Samples handed over to a rank's trainer", _RANK,
    ),
    Metric(
        "dataplane_steps_ahead", _G, Group.STREAM,
        "Batches that are ready for a rank's trainer but not yet handed over", _RANK,
    ),
    Metric(
        "dataplane_stage_seconds", _H, Group.STREAM,
        "Time that a slab spent in each stage; the stage `ready` ends when the trainer takes it",
        ("job", "stage"), "seconds",
    ),
    Metric(
        "dataplane_read_bytes_total", _C, Group.BYTES,
        "Bytes of blocks, by source: origin (object stores), neighbour (another node), disk, or "
        "memory (blocks that another rank or epoch has read)", ("source",), "bytes",
    ),
    Metric(
        "dataplane_hedged_bytes_total", _C, Group.BYTES,
        "Bytes that were read a second time because the first answer was late", (), "bytes",
    ),
    Metric(
        "dataplane_lent_bytes_total", _C, Group.BYTES,
        "Bytes of blocks that were sent to neighbours", (), "bytes",
    ),
    Metric(
        "dataplane_made_slabs_total", _C, Group.BYTES, "Slabs that were made for other nodes",
    ),
    Metric(
        "dataplane_store_request_seconds", _H, Group.STORES,
        "Time that requests to an object store took, failed requests included",
        ("store",), "seconds",
    ),
    Metric(
        "dataplane_store_errors_total", _C, Group.STORES,
        "Requests to an object store that failed, by the class of the error", ("store", "error"),
    ),
    Metric(
        "dataplane_store_retries_total", _C, Group.STORES,
        "Failed requests to an object store that were sent again", ("store",),
    ),
    Metric(
        "dataplane_store_away_seconds", _G, Group.STORES,
        "How long an object store has not answered; absent while it answers", ("store",),
        "seconds",
    ),
    Metric(
        "dataplane_arena_bytes", _G, Group.MEMORY,
        "Memory in use, by holder. In the block arena: blocks, slabs (kept for other trainers), "
        "excerpts (rows of evicted blocks). In the delivery arenas of ranks: delivery",
        ("holder",), "bytes",
    ),
    Metric(
        "dataplane_arena_limit_bytes", _G, Group.MEMORY, "The size of the block arena", (), "bytes",
    ),
    Metric(
        "dataplane_disk_bytes", _G, Group.MEMORY,
        "Disk space that blocks take", (), "bytes",
    ),
    Metric(
        "dataplane_evictions_total", _C, Group.MEMORY,
        "Blocks evicted from memory to make room: spent (no longer needed) or needed (will be "
        "read again)", ("kind",),
    ),
    Metric(
        "dataplane_processes", _G, Group.PROCESSES,
        "Processes that run now, by kind: worker, fetcher", ("kind",),
    ),
    Metric(
        "dataplane_process_starts_total", _C, Group.PROCESSES,
        "Process starts, including restarts", ("kind",),
    ),
    Metric(
        "dataplane_process_deaths_total", _C, Group.PROCESSES,
        "Processes that ended although they were needed; the node starts each again", ("kind",),
    ),
    Metric(
        "dataplane_process_memory_bytes", _G, Group.PROCESSES,
        "Private memory of all processes of a kind, without arenas and files",
        ("kind",), "bytes",
    ),
    Metric(
        "dataplane_loop_holds_total", _C, Group.PROCESSES,
        "How often the node's event loop was blocked for more than 20 ms",
    ),
    Metric(
        "dataplane_mixture_asked_ratio", _G, Group.DATA,
        "The share of a mixture's samples that a source should have at present", _SOURCE, "ratio",
    ),
    Metric(
        "dataplane_mixture_samples_total", _C, Group.DATA,
        "Samples of each source in the slabs that this node made for its own ranks; their rates"
        " give the actual shares", _SOURCE,
    ),
    Metric(
        "dataplane_pack_fill_ratio", _G, Group.DATA,
        "The share of the tokens in packs that are not padding", _SOURCE, "ratio",
    ),
    Metric(
        "dataplane_replaced_rows_total", _C, Group.DATA,
        "Rows that cannot be read, or whose images cannot be read, and that other rows replaced;"
        " counted up to 1024, or up to a larger bad_max=", ("job",),
    ),
    Metric(
        "dataplane_jobs", _G, Group.JOBS, "Jobs, by state: forming, running", ("state",),
    ),
    Metric(
        "dataplane_nodes", _G, Group.JOBS, "Nodes that sent a heartbeat within the last lease time",
    ),
    Metric(
        "dataplane_job_generation", _G, Group.JOBS,
        "The generation of a job, which grows with each launch", ("job",),
    ),
    Metric(
        "dataplane_job_leases", _G, Group.JOBS, "Members of a job that hold a lease", ("job",),
    ),
    Metric(
        "dataplane_job_missing_ranks", _G, Group.JOBS,
        "Data-parallel ranks of a job that have not joined", ("job",),
    ),
    Metric("dataplane_job_epoch", _G, Group.JOBS, "The epoch that a job has reached", ("job",)),
    Metric(
        "dataplane_job_consumed_samples", _G, Group.JOBS,
        "Samples of its present epoch that a job has consumed", ("job",),
    ),
    Metric(
        "dataplane_refusals_total", _C, Group.SAFETY,
        "Refused calls, connections, urls and functions, by the name of the event in the log",
        ("event",),
    ),
)  # fmt: skip

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def by_metric(readings: Iterable[Reading]) -> dict[Metric, list[Reading]]:
    """Sort readings by metric, in the order of the table. Leave out metrics without readings."""
    sorted_by = {metric.name: list[Reading]() for metric in METRICS}
    for reading in readings:
        sorted_by[reading.name].append(reading)
    return {BY_NAME[name]: some for name, some in sorted_by.items() if some}
