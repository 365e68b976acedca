"""`dataplane status`: show the jobs, ranks and nodes that the coordinator knows."""

from __future__ import annotations

import asyncio
import heapq
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dataplane.base.trace import printable
from dataplane.base.units import show_time
from dataplane.commands import output
from dataplane.commands.options import (
    CLIENT_SETTINGS,
    Settings,
    json_option,
    setting_options,
)
from dataplane.commands.traced import asked_coordinator
from dataplane.model.config import PROTOCOL_VERSION, VERSION
from dataplane.model.errors import (
    AccessDenied,
    ConfigError,
    DataplaneError,
    PeerLost,
    VersionMismatch,
)
from dataplane.model.redact import redacted
from dataplane.page.figures import bounds, by_host, by_wait, present, speeds
from dataplane.rpc.address import served_name
from dataplane.rpc.membership import (
    JobStatus,
    MemberStatus,
    NodeStatus,
    StatusRequest,
    StatusResponse,
)

if TYPE_CHECKING:
    # Imported for types only: at run time this takes 30 ms, and only commands that connect need it.
    from dataplane.rpc.calls import CoordinatorClient

WATCH_PERIOD_S = 1.0
PROBE_S = 10.0
RANKS_MAX, NODES_MAX = 16, 8
"""More members of jobs, or more nodes, are summed up: a status has to fit a screen."""
_WORST_HOSTS, _WORST_NODES, _WORK_MAX = 4, 2, 2

Fetch = Callable[[], Awaitable[StatusResponse]]
Show = Callable[[StatusResponse | None, str], None]
"""Shows a status, if there is a new one, and a line about the watching itself, "" for none."""


@click.command("status")
@click.argument("address", required=False)
@click.option("--job", default="", metavar="ID", help="Only this job.")
@click.option("--all", "whole", is_flag=True, help="Show every rank and node, also of large jobs.")
@click.option("--watch", is_flag=True, help="Refresh every second, until Ctrl-C.")
@click.option("--node", "of_node", is_flag=True, help="Only check this host's node.")
@setting_options(*CLIENT_SETTINGS, "service")
@json_option
def status(
    settings: Settings,
    *,
    address: str | None,
    job: str,
    whole: bool,
    watch: bool,
    of_node: bool,
    as_json: bool,
) -> None:
    """Show jobs, ranks and nodes, the origin of blocks, and stores that do not answer.

    ADDRESS is the coordinator's address. By default, the command uses the setting `join`, or if
    `join` is not set, `listen` (the coordinator on this machine).

    For more than 16 ranks or 8 nodes, the command shows sums, medians, and the ranks and nodes that
    waited longest. --all and --json show every rank and node. --watch also waits while a
    coordinator restarts. If stdout is a pipe or file, --watch writes one status after another. With
    --json, each status is one line.

    --node asks the node of this user on this host, and is meant for probes. The exit status is 0 if
    the node opens jobs, 1 if the node waits for its coordinator, and 3 if the node does not answer.
    For this answer, the node does not check stores.

    \b
    Examples:
      dataplane status
      dataplane status head-node:7077 --watch
      dataplane status --job pretrain-7 --all
      dataplane status --watch --json >> status.jsonl
      dataplane status --node --service head-node:7077
    """
    if of_node:
        if watch or as_json or job or whole:
            raise click.UsageError("--node excludes --job, --all, --watch and --json")
        click.get_current_context().exit(_probe(settings, address))
    target = address or str(settings["join"].value or settings["listen"].value)

    def write(status: StatusResponse) -> None:
        if as_json:
            at = {"time": _now()} if watch else {}
            output.write_json(at | msgspec.to_builtins(status), on_one_line=watch)
            return
        head = [Text(f"coordinator at {target}, {_now()}", style="bold")] if watch else []
        output.stdout().print(*head, render(status, whole=whole), sep="\n")

    # Check stdout itself: with FORCE_COLOR, rich takes a pipe for a terminal.
    on_screen = sys.stdout.isatty() and not as_json and not output.stdout().is_dumb_terminal
    view = (_on_screen(whole=whole) if on_screen else _in_lines(write)) if watch else None
    request = StatusRequest(job)

    async def report(client: CoordinatorClient) -> None:
        if view is None:
            write(await client.status(request))
            return
        with view as show:
            await _watch(lambda: client.status(request), show)

    asked_coordinator(settings, report, address=target)


def _probe(settings: Settings, address: str | None) -> int:
    """Say whether the node of this host for this service answers. Return the exit status.

    Raises:  PeerLost: the node does not answer.  VersionMismatch.
    """
    from dataplane.rpc import local, messages

    given = (settings[name].value for name in ("service", "join", "listen"))
    name = served_name(os.getuid(), address or str(next(filter(None, given))))
    with local.connect(name, PROBE_S) as sock:
        hello = messages.Hello(VERSION, PROTOCOL_VERSION, os.getpid())
        try:
            local.send(sock, messages.ToNode(1, hello))
            answer, _ = local.receive(sock, messages.FromNode)
        except TimeoutError as error:
            raise PeerLost(
                f"the node at @{name} has not answered for {PROBE_S:g} s: it hangs or was stopped",
                peer=f"@{name}",
            ) from error
    if isinstance(answer.body, DataplaneError):
        raise answer.body
    assert isinstance(answer.body, messages.Welcome)
    awaited = answer.body.awaited
    click.echo(f"node {answer.body.node_id} " + (f"waits for {awaited}" if awaited else "is ready"))
    return output.EXIT_BAD_DATA if awaited else output.EXIT_OK


async def _watch(fetch: Fetch, show: Show) -> None:
    """Show the status every second until cancelled. Once there was an answer, the coordinator may
    go away for any time, and may not know the job yet when it is back.

    Raises:  DataplaneError: the first call failed; or a later one was refused.
    """
    status, answered_at, problem = await fetch(), time.monotonic(), None
    show(status, "")
    while True:
        await asyncio.sleep(WATCH_PERIOD_S)
        before = status.coordinator_id
        try:
            status = await fetch()
        except (AccessDenied, VersionMismatch):
            raise
        except (PeerLost, ConfigError) as error:
            if problem is not type(error):
                problem = type(error)
                show(None, f"trying again every second: {redacted(str(error))}")
            continue
        line = ""
        if problem is not None:
            line = f"going on after {show_time(time.monotonic() - answered_at)} without a status"
            line += "" if status.coordinator_id == before else ": the coordinator was restarted"
            problem = None
        answered_at = time.monotonic()
        show(status, line)


@contextmanager
def _on_screen(*, whole: bool) -> Iterator[Show]:
    """Show the last status in one place of a terminal."""
    shown: list[StatusResponse] = []
    # Let rich redirect stderr only if it is a terminal: otherwise rich would write lines to the
    # terminal that belong into a file.
    with Live(
        console=output.stdout(), auto_refresh=False, redirect_stderr=sys.stderr.isatty()
    ) as live:

        def show(status: StatusResponse | None, line: str) -> None:
            shown[:] = shown if status is None else [status]
            above = [Text(printable(line), style="yellow")] if line else []
            live.update(Group(*above, render(shown[0], whole=whole)), refresh=True)

        yield show


@contextmanager
def _in_lines(write: Callable[[StatusResponse], None]) -> Iterator[Show]:
    """Write each status to stdout, below the last one, and lines about the watching to stderr."""

    def show(status: StatusResponse | None, line: str) -> None:
        if line:
            output.stderr().print(Text(f"{_now()} {printable(line)}"), soft_wrap=True)
        if status is not None:
            write(status)
            sys.stdout.flush()

    yield show


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def render(status: StatusResponse, *, whole: bool = False) -> Group:
    """Make tables of jobs, ranks and nodes, of where blocks came from and are kept, of slabs that
    nodes make for others, and of stores that nodes wait for. Many ranks or nodes are summed up,
    unless the status is to be `whole`.
    """
    jobs = output.table(
        ("job", "state", "launch", "ranks", "missing", "epoch", "done", "samples/s", "dataset"),
        [_job_row(job) for job in status.jobs],
        "jobs",
    )
    has_many_ranks = sum(len(job.members) for job in status.jobs) > RANKS_MAX and not whole
    has_many_nodes = len(status.nodes) > NODES_MAX and not whole
    most = _WORK_MAX if has_many_nodes else None
    tables = (
        jobs,
        _work(status.nodes, most),
        _hosts(status) if has_many_ranks else _ranks(status),
        *((_fleet(status.nodes),) if has_many_nodes else _of_nodes(status.nodes)),
        _makers(status, most),
        _away(status.nodes, most),
    )
    parts: list[Table | Text] = []
    for table in tables:
        if table.row_count:
            parts += [table, Text()]
    lines = _left_out(status)
    if has_many_ranks:
        lines = [*map(_bounds, filter(present, status.jobs)), *lines]
    if has_many_ranks or has_many_nodes:
        lines.append("--all shows every rank and node")
    parts += [Text(line, style="dim") for line in lines]
    about = printable(f"coordinator {status.coordinator_id}, dataplane {status.version}")
    parts.append(Text(about if parts else f"no jobs, no nodes; {about}", style="dim"))
    return Group(*parts)


def _ranks(status: StatusResponse) -> Table:
    """Make a table of all ranks."""
    columns = (
        *("job", "dp rank", "state", "epoch", "cursor", "samples/s", "waited s", "bound by"),
        *("lease s", "node", "ranks from"),
    )
    rows = (
        (
            job.job_id,
            member.topology.dp_rank,
            member.state,
            member.epoch,
            member.cursor,
            member.samples_per_s,
            member.stall_s,
            member.bound or None,
            member.lease_left_s,
            member.node_id,
            member.topology.source or None,
        )
        for job in status.jobs
        for member in sorted(job.members, key=lambda one: (one.topology.dp_rank, one.topology.rank))
    )
    return output.table(columns, rows, "ranks")


def _hosts(status: StatusResponse) -> Table:
    """Make a table that sums up the ranks of each job, and those of the hosts that waited most."""
    of_jobs: list[tuple[object, ...]] = []
    of_hosts: list[tuple[JobStatus, str, Sequence[MemberStatus]]] = []
    for job in status.jobs:
        ranks, hosts = by_wait(job), by_host(status, job)
        if ranks:
            of_jobs.append(_sums_row(job, output.counted(len(hosts), "host"), ranks))
        if len(hosts) > 1:
            of_hosts += [(job, host, members) for host, members in hosts.items()]
    worst = heapq.nlargest(_WORST_HOSTS, of_hosts, key=lambda row: row[2][-1].stall_s)
    return output.table(
        ("job", "of", "ranks", "median s", "bound by", "worst s", "bound by", "dp rank", "rate"),
        [*of_jobs, *(_sums_row(*row) for row in worst)],
        "how long ranks waited for data, and the hosts that waited most (rate in samples/s)",
    )


def _sums_row(job: JobStatus, of: str, ranks: Sequence[MemberStatus]) -> tuple[object, ...]:
    median, worst = ranks[len(ranks) // 2], ranks[-1]
    return (
        job.job_id,
        of,
        len(ranks),
        median.stall_s,
        median.bound or None,
        worst.stall_s,
        worst.bound or None,
        worst.topology.dp_rank,
        sum(speeds(ranks).values()),
    )


def _bounds(job: JobStatus) -> str:
    """Return how many ranks each stage bounds, and how many members are in which state."""
    states = Counter(member.state for member in job.members)
    by_stage, by_state = (
        ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
        for counts in (bounds(job), states)
    )
    return printable(f"{job.job_id}: ranks bound by: {by_stage}; members: {by_state}")


def _left_out(status: StatusResponse) -> list[str]:
    lines = []
    if status.job_count > len(status.jobs):
        count = status.job_count - len(status.jobs)
        lines.append(f"and {count} jobs that are idle or were active earlier")
    for job in status.jobs:
        count = job.member_count - len(job.members)
        if count > 0:
            lines.append(printable(f"and {count} members of {job.job_id}, which are not in sums"))
    if status.node_count > len(status.nodes):
        count = status.node_count - len(status.nodes)
        lines.append(f"and {count} nodes that were heard of earlier")
    return lines


_SUMMED = (
    *("reads.read_bytes", "reads.neighbour_bytes", "reads.disk_bytes", "reads.memory_bytes"),
    *("held.memory_bytes", "held.memory_limit_bytes", "held.disk_bytes", "held.disk_limit_bytes"),
)


def _fleet(nodes: tuple[NodeStatus, ...]) -> Table:
    """Make a table that sums up many nodes, and lists those that have been silent longest."""
    silent = heapq.nlargest(_WORST_NODES, nodes, key=lambda node: node.last_seen_s)
    rows = []
    for name, some in [
        (f"all {len(nodes)}", nodes),
        *((node.host or node.node_id, (node,)) for node in silent),
    ]:
        origin, near, disk, memory, kept, kept_max, files, files_max = (
            sum(map(attrgetter(size), some)) for size in _SUMMED
        )
        came = (output.approximate_bytes(size) for size in (origin, near, disk, memory))
        rows.append(
            (
                name,
                f"{max(node.last_seen_s for node in some):.1f} s ago",
                f"{max(node.longest_hold_s for node in some) * 1e3:.0f} ms",
                *came,
                f"{kept / kept_max:.0%}" if kept_max else None,
                f"{files / files_max:.0%}" if files_max else None,
            )
        )
    columns = ("node", "seen", "longest hold", "origin", "neighbours", "disk", "memory")
    title = "nodes, those silent longest, and where blocks came from"
    return output.table((*columns, "memory full", "disk full"), rows, title)


def _of_nodes(node_list: tuple[NodeStatus, ...]) -> tuple[Table, ...]:
    """Make tables of nodes, of the sources of their blocks, and of how many each keeps."""
    nodes = output.table(
        ("node", "host", "pid", "version", "longest hold", "read", "read twice", "seen"),
        [
            (
                node.node_id,
                node.host,
                str(node.pid),
                node.version,
                f"{node.longest_hold_s * 1e3:.0f} ms" if node.loop_holds else None,
                output.approximate_bytes(node.reads.read_bytes) if node.reads.read_bytes else None,
                _share(node.reads.hedged_bytes, node.reads.read_bytes),
                f"{node.last_seen_s:.1f} s ago",
            )
            for node in node_list
        ],
        "nodes",
    )
    places = ("read_bytes", "neighbour_bytes", "disk_bytes", "memory_bytes", "lent_bytes")
    counts = [(node, [getattr(node.reads, name) for name in places]) for node in node_list]
    blocks = output.table(
        ("node", "data address", "origin", "neighbours", "disk", "memory", "lent"),
        [
            (
                node.node_id,
                node.data_address or None,
                *(output.approximate_bytes(count) if count else None for count in of_node),
            )
            for node, of_node in counts
            if node.data_address or any(of_node)
        ],
        "where blocks came from",
    )
    return nodes, blocks, _held(node_list)


def _away(nodes: tuple[NodeStatus, ...], most: int | None) -> Table:
    """Make a table of the stores that nodes wait for, the longest waits first."""
    rows = [
        (node.node_id, store.store, store.away_s, store.error)
        for node in nodes
        for store in node.stores_away
    ]
    rows.sort(key=lambda row: -row[2])
    return _first(("node", "store", "away s", "error"), rows, "stores that do not answer", most)


def _first(
    columns: Sequence[str], rows: Sequence[tuple[object, ...]], title: str, most: int | None
) -> Table:
    """Make a table of the first rows, at most `most`; its title says how many there are in all."""
    shown = rows if most is None else rows[:most]
    if len(shown) < len(rows):
        title += f" ({len(shown)} of {len(rows):,})"
    return output.table(columns, shown, title)


def _work(nodes: tuple[NodeStatus, ...], most: int | None) -> Table:
    """Make a table of the work that nodes do before they can open jobs, with its progress, and of
    the loaders for which draining nodes wait.
    """
    rows = [
        (
            node.node_id,
            work.what,
            work.dataset,
            f"{work.done:,} of {work.total:,} {work.unit}" if work.total else None,
            show_time(work.left_s) if work.left_s else None,
        )
        for node in nodes
        for work in node.work
    ]
    columns = ("node", "work", "dataset", "done", "left")
    return _first(columns, rows, "jobs that nodes open or finish", most)


def _held(nodes: tuple[NodeStatus, ...]) -> Table:
    """Make a table of how full each node's block memory and disk are."""
    rows = [
        (
            node.node_id,
            _filled(node.held.memory_bytes, node.held.memory_limit_bytes),
            _filled(node.held.disk_bytes, node.held.disk_limit_bytes),
            node.held.disk_blocks or None,
        )
        for node in nodes
        if node.held.memory_limit_bytes
    ]
    return output.table(("node", "memory", "disk", "files"), rows, "where blocks are kept")


def _filled(used: int, limit: int) -> str | None:
    if not limit:
        return None
    show = output.approximate_bytes
    return f"{show(used)} of {show(limit)} ({used / limit:.0%})"


def _makers(status: StatusResponse, most: int | None) -> Table:
    """Make a table of the nodes that make slabs for others, and of those short of workers."""
    makes: dict[str, list[str]] = {}
    wants: dict[str, dict[str, None]] = {}
    for job in status.jobs:
        for maker in job.nodes:
            if maker.worker_count:
                makes.setdefault(maker.node_id, []).append(job.job_id)
        for member in present(job):
            wants.setdefault(member.node_id, {})[job.job_id] = None
    rows = []
    for node in status.nodes:
        made_for = makes.get(node.node_id, ())
        wanted_for = wants.get(node.node_id, ()) if node.is_short else ()
        if made_for or wanted_for:
            shown = (", ".join(jobs) or None for jobs in (made_for, wanted_for))
            count, size = node.reads.made_slabs, node.reads.made_bytes
            made = (f"{count:,}", output.approximate_bytes(size)) if count else (None, None)
            rows.append((node.node_id, str(node.worker_count), *shown, *made))
    columns = ("node", "workers", "makes slabs for", "wants slabs for", "made", "bytes")
    return _first(columns, rows, "slabs from other nodes", most)


def _share(part: int, whole: int) -> str | None:
    return f"{part / whole:.2%}" if part else None


def _peers(job: JobStatus) -> str:
    """Return how many ranks have joined, if several read the same batches: " (7 of 8)"."""
    places = [member.topology for member in present(job)]
    world = max((place.world_size for place in places), default=0)
    if world <= job.dp_size or job.member_count > len(job.members):
        return ""
    return f" ({len({place.rank for place in places})} of {world})"


def _job_row(job: JobStatus) -> tuple[object, ...]:
    rates = speeds(present(job))
    missing = ", ".join(map(str, job.missing_dp_ranks))
    others = job.missing_count - len(job.missing_dp_ranks)
    return (
        job.job_id,
        job.state,
        job.generation,
        f"{max(len(rates), job.joined_dp_rank_count)}/{job.dp_size}{_peers(job)}",
        f"{missing} and {others} others" if others > 0 else missing or None,
        job.epoch,
        f"{job.cursor / job.sample_count:.1%}" if job.sample_count else None,
        sum(rates.values()),
        job.dataset,
    )
