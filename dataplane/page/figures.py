"""The figures of the live page, made from the status that `dataplane status` shows and from the
readings of this process. They are bounded, however large the fleet is.
"""

from __future__ import annotations

import heapq
import importlib.resources
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from msgspec import Struct

from dataplane.metrics.table import Reading
from dataplane.rpc.membership import JobStatus, MemberStatus, NodeStatus, StatusResponse

PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
JOBS_MAX, NODES_MAX, CELLS_MAX = 16, 16, 256
RANKS_MAX = 64
"""A job with more ranks than this has a cell per host instead of a cell per rank."""
_TEXT_MAX = 120
_PARTS_MAX = 8
_PLACES = ("read_bytes", "neighbour_bytes", "disk_bytes", "memory_bytes", "lent_bytes")
_HELD = ("memory_bytes", "memory_limit_bytes", "disk_bytes", "disk_limit_bytes")


def page_text() -> str:
    """Return the live page."""
    return importlib.resources.files("dataplane.page").joinpath("page.html").read_text("utf-8")


def page_style() -> str:
    """Return the style sheet of all pages."""
    styles = [part for kind, part in PARTS.findall(page_text()) if kind == "style"]
    return "".join(styles)


class Cell(Struct, frozen=True):
    """A rank of a job, or all its ranks on one host. `waited_s` and `bound` are those of the rank
    that waited longest.
    """

    name: str
    host: str
    ranks: int
    waited_s: float
    """The time waited in the present epoch, including the wait for its first batch."""
    bound: str
    rate: float


class JobFigures(Struct, frozen=True):
    """One job. `cells` are sorted by name. All jobs together have at most `CELLS_MAX`: the cells
    that waited longest are kept.
    """

    job: str
    state: str
    dataset: str
    launch: int
    epoch: int
    cursor: int
    samples: int
    ranks: int
    dp_size: int
    missing: int
    hosts: int
    rate: float
    median: Cell | None
    worst: Cell | None
    bounds: dict[str, int]
    """The number of ranks that each stage bounds."""
    is_by_host: bool
    cells: tuple[Cell, ...]


class NodeFigures(Struct, frozen=True):
    """One node, or the sums of all nodes. `reads` are bytes by origin, `held` the memory and disk
    in use, and their limits.
    """

    node: str
    host: str
    seen_s: float
    workers: int
    fetchers: int
    is_short: bool
    reads: dict[str, int]
    held: dict[str, int]
    work: tuple[str, ...]
    away: tuple[str, ...]


class Fleet(Struct, frozen=True):
    """The figures of all jobs and nodes that the coordinator knows."""

    coordinator: str
    version: str
    jobs: tuple[JobFigures, ...]
    job_count: int
    nodes: tuple[NodeFigures, ...]
    node_count: int
    sums: NodeFigures


class OwnNode(Struct, frozen=True):
    """The node of this process: values of some metrics, by label."""

    processes: dict[str, int]
    deaths: dict[str, int]
    arena: dict[str, int]
    arena_limit: int
    ahead: dict[str, int]
    waits: dict[str, float]
    """Seconds that the node's ranks waited after their first batch, by stage."""
    holds: int


def by_wait(job: JobStatus) -> list[MemberStatus]:
    """Return one member per rank, in rising order of the time waited. If a rank has several
    members, which are DataLoader workers, return the one that waited longest.
    """
    members = sorted(present(job), key=lambda member: member.stall_s)
    ranks = {member.topology.rank: member for member in members}
    return sorted(ranks.values(), key=lambda member: member.stall_s)


def by_host(status: StatusResponse, job: JobStatus) -> dict[str, list[MemberStatus]]:
    """Return the ranks of a job by host, the ranks of each host in the order of `by_wait`."""
    hosts = {node.node_id: node.host for node in status.nodes}
    ranks: defaultdict[str, list[MemberStatus]] = defaultdict(list)
    for member in by_wait(job):
        ranks[hosts.get(member.node_id) or member.node_id].append(member)
    return dict(ranks)


def present(job: JobStatus) -> list[MemberStatus]:
    """Return the members that have joined."""
    return [member for member in job.members if member.state == "joined"]


def speeds(members: Sequence[MemberStatus]) -> dict[int, float]:
    """Return the rate of each dp rank. Each of its members (DataLoader workers, tensor-parallel
    peers) reports the rate of the dp rank.
    """
    rates: dict[int, float] = {}
    for member in members:
        rank = member.topology.dp_rank
        rates[rank] = max(rates.get(rank, 0.0), member.samples_per_s)
    return rates


def bounds(job: JobStatus) -> Counter[str]:
    """Return the number of ranks that each stage bounds."""
    return Counter(member.bound or "nothing yet" for member in by_wait(job))


def fleet(status: StatusResponse) -> Fleet:
    """Return the figures of a status."""
    running = heapq.nsmallest(JOBS_MAX, status.jobs, key=lambda job: job.state == "idle")
    left, jobs = CELLS_MAX, []
    for job in running:
        figures = _job(status, job, left)
        left -= len(figures.cells)
        jobs.append(figures)
    worst = heapq.nlargest(
        NODES_MAX,
        status.nodes,
        key=lambda node: (bool(node.stores_away), node.is_short, node.last_seen_s),
    )
    return Fleet(
        status.coordinator_id,
        status.version,
        tuple(jobs),
        status.job_count,
        tuple(_node(node) for node in sorted(worst, key=attrgetter("host", "node_id"))),
        status.node_count,
        _sums(status.nodes),
    )


def _job(status: StatusResponse, job: JobStatus, cells_max: int) -> JobFigures:
    hosts, ranks = by_host(status, job), by_wait(job)
    names = {member.member_id: host for host, members in hosts.items() for member in members}
    is_by_host = len(ranks) > RANKS_MAX
    if is_by_host:
        cells = [_cell(members, host, host) for host, members in hosts.items()]
    else:
        cells = [_of_rank(member, names) for member in ranks]
    chosen = heapq.nlargest(cells_max, cells, key=attrgetter("waited_s"))
    return JobFigures(
        job=job.job_id[:_TEXT_MAX],
        state=job.state,
        dataset=job.dataset[:_TEXT_MAX],
        launch=job.generation,
        epoch=job.epoch,
        cursor=job.cursor,
        samples=job.sample_count,
        ranks=len(ranks),
        dp_size=job.dp_size,
        missing=job.missing_count,
        hosts=len(hosts),
        rate=sum(speeds(ranks).values()),
        median=_of_rank(ranks[len(ranks) // 2], names) if ranks else None,
        worst=_of_rank(ranks[-1], names) if ranks else None,
        bounds=dict(bounds(job)),
        is_by_host=is_by_host,
        cells=tuple(sorted(chosen, key=lambda cell: (len(cell.name), cell.name))),
    )


def _of_rank(member: MemberStatus, hosts: Mapping[str, str]) -> Cell:
    return _cell([member], str(member.topology.rank), hosts[member.member_id])


def _cell(members: Sequence[MemberStatus], name: str, host: str) -> Cell:
    worst = members[-1]
    rate = sum(speeds(members).values())
    return Cell(name[:_TEXT_MAX], host[:_TEXT_MAX], len(members), worst.stall_s, worst.bound, rate)


def _node(node: NodeStatus) -> NodeFigures:
    work = (f"{work.what} {work.dataset}"[:_TEXT_MAX] for work in node.work[:_PARTS_MAX])
    away = (
        f"{store.store} has not answered for {store.away_s:.0f} s: {store.error}"[: 2 * _TEXT_MAX]
        for store in node.stores_away[:_PARTS_MAX]
    )
    return NodeFigures(
        node.node_id[:_TEXT_MAX],
        node.host[:_TEXT_MAX],
        node.last_seen_s,
        node.worker_count,
        node.reads.fetchers,
        node.is_short,
        {name: getattr(node.reads, name) for name in _PLACES},
        {name: getattr(node.held, name) for name in _HELD},
        tuple(work),
        tuple(away),
    )


def _sums(nodes: Sequence[NodeStatus]) -> NodeFigures:
    return NodeFigures(
        node="",
        host="",
        seen_s=max((node.last_seen_s for node in nodes), default=0.0),
        workers=sum(node.worker_count for node in nodes),
        fetchers=sum(node.reads.fetchers for node in nodes),
        is_short=any(node.is_short for node in nodes),
        reads={name: sum(getattr(node.reads, name) for node in nodes) for name in _PLACES},
        held={name: sum(getattr(node.held, name) for node in nodes) for name in _HELD},
        work=(),
        away=(),
    )


def own_node(readings: Iterable[Reading]) -> OwnNode | None:
    """Return the node of this process; None if the process is only a coordinator."""
    values: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for reading in readings:
        if isinstance(reading.value, int | float):
            values[reading.name][reading.labels] = reading.value
    if "dataplane_arena_limit_bytes" not in values:
        return None

    def whole(name: str) -> dict[str, int]:
        return {labels[-1]: int(value) for labels, value in values[name].items()}

    waits: Counter[str] = Counter()
    for (_, _, stage), waited_s in values["dataplane_exposed_seconds_total"].items():
        waits[stage] += waited_s  # type: ignore[assignment]
    ahead = {
        f"{job[:_TEXT_MAX]} {rank}": int(steps)
        for (job, rank), steps in values["dataplane_steps_ahead"].items()
    }
    return OwnNode(
        whole("dataplane_processes"),
        whole("dataplane_process_deaths_total"),
        whole("dataplane_arena_bytes"),
        int(values["dataplane_arena_limit_bytes"][()]),
        dict(heapq.nsmallest(RANKS_MAX, ahead.items(), key=lambda one: one[1])),
        dict(waits),
        int(values["dataplane_loop_holds_total"][()]),
    )
