"""`dataplane status`: show the jobs, ranks and nodes that the coordinator knows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from itertools import chain
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
    security_given,
    setting_options,
)
from dataplane.model.errors import DataplaneError, PeerLost
from dataplane.rpc.membership import (
    JobStatus,
    MemberStatus,
    NodeStatus,
    StatusRequest,
    StatusResponse,
)

if TYPE_CHECKING:
    # Takes 30 ms, and only commands that connect need it.
    from dataplane.security.security import Security

WATCH_PERIOD_S = 1.0
PROBE_S = 10.0

Ask = Callable[[], Awaitable[StatusResponse]]


@click.command("status")
@click.argument("address", required=False)
@click.option("--job", default="", metavar="ID", help="Only this job.")
@click.option("--watch", is_flag=True, help="Refresh every second, until Ctrl-C.")
@click.option("--node", "of_node", is_flag=True, help="Only whether this host's node answers.")
@setting_options(*CLIENT_SETTINGS, "service")
@json_option
def status(
    settings: Settings, *, address: str | None, job: str, watch: bool, of_node: bool, as_json: bool
) -> None:
    """Show jobs, their ranks, and nodes; where blocks came from; and stores that do not answer.

    ADDRESS is the coordinator's address. The default is the setting `join`, or else `listen`: the
    coordinator on this machine.

    --node asks the node that serves trainers of this user on this host, for probes: the exit status
    is 0 if it opens jobs, 1 if it answers but waits for its coordinator, 3 if it does not answer.
    No store is asked.

    \b
    Examples:
      dataplane status
      dataplane status head-node:7077 --watch
      dataplane status --job pretrain-7 --json
      dataplane status --node --service head-node:7077
    """
    if watch and as_json:
        raise click.UsageError("--watch and --json exclude each other: choose one")
    if of_node:
        if watch or as_json or job:
            raise click.UsageError("--node excludes --job, --watch and --json")
        named = address or next(
            str(settings[name].value)
            for name in ("service", "join", "listen")
            if settings[name].value
        )
        click.get_current_context().exit(_probe(named))
    target = address or str(settings["join"].value or settings["listen"].value)
    security = security_given(settings, listens=False)
    asyncio.run(_report(target, security, job, watch=watch, as_json=as_json))


def _probe(service: str) -> int:
    """Say whether the node of this service on this host answers. Returns the exit status.

    Raises:  PeerLost: it does not. VersionMismatch.
    """
    from dataplane.model.config import PROTOCOL_VERSION, VERSION
    from dataplane.rpc import local, messages, names, sockets

    name = names.served_name(os.getuid(), service)
    with sockets.connect(name, PROBE_S) as sock:
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


async def _report(
    address: str, security: Security, job: str, *, watch: bool, as_json: bool
) -> None:
    from dataplane.rpc.calls import CoordinatorClient

    client = CoordinatorClient(address, security)

    async def ask() -> StatusResponse:
        return await client.status(StatusRequest(job))

    try:
        if watch:
            await _watch(ask)
            return
        status = await ask()
    finally:
        await client.close()
    if as_json:
        output.write_json(msgspec.to_builtins(status))
    else:
        output.stdout().print(render(status))


async def _watch(ask: Ask) -> None:
    with Live(console=output.stdout(), auto_refresh=False, screen=False) as live:
        while True:
            live.update(render(await ask()), refresh=True)
            await asyncio.sleep(WATCH_PERIOD_S)


def render(status: StatusResponse) -> Group:
    """Make tables of jobs, ranks and nodes, of where blocks came from and are kept, of slabs that
    nodes make for others, and of stores that nodes wait for.
    """
    jobs = output.table(
        ("job", "state", "launch", "ranks", "missing", "epoch", "done", "samples/s", "dataset"),
        [_job_row(job) for job in status.jobs],
        "jobs",
    )
    ranks = output.table(
        (
            "job",
            "dp rank",
            "state",
            "epoch",
            "cursor",
            "samples/s",
            "waited s",
            "bound by",
            "lease s",
            "node",
            "ranks from",
        ),
        chain.from_iterable(_member_rows(job) for job in status.jobs),
        "ranks",
    )
    parts: list[Table | Text] = []
    nodes, blocks, away = _of_nodes(status.nodes)
    work = _work(status.nodes)
    for table in (jobs, work, ranks, nodes, blocks, _held(status.nodes), _makers(status), away):
        if table.row_count:
            parts += [table, Text()]
    parts += [Text(line, style="dim") for line in _left_out(status)]
    about = printable(f"coordinator {status.coordinator_id}, dataplane {status.version}")
    parts.append(Text(about if parts else f"no jobs, no nodes; {about}", style="dim"))
    return Group(*parts)


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


def _of_nodes(node_list: tuple[NodeStatus, ...]) -> tuple[Table, ...]:
    """Make tables of nodes, the sources of their blocks, and the stores that they wait for."""
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
    away = output.table(
        ("node", "store", "away s", "error"),
        [
            (node.node_id, store.store, store.away_s, store.error)
            for node in node_list
            for store in node.stores_away
        ],
        "stores that do not answer",
    )
    return nodes, blocks, away


def _work(nodes: tuple[NodeStatus, ...]) -> Table:
    """Make a table of the work that nodes do before they can open jobs, with its progress."""
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
    return output.table(("node", "work", "dataset", "done", "left"), rows, "jobs being opened")


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


def _makers(status: StatusResponse) -> Table:
    """Make a table of the nodes that make slabs for others, and of those short of workers."""
    makes: dict[str, list[str]] = {}
    wants: dict[str, dict[str, None]] = {}
    for job in status.jobs:
        for maker in job.nodes:
            if maker.worker_count:
                makes.setdefault(maker.node_id, []).append(job.job_id)
        for member in _present(job):
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
    return output.table(columns, rows, "slabs from other nodes")


def _share(part: int, whole: int) -> str | None:
    return f"{part / whole:.2%}" if part else None


def _peers(job: JobStatus) -> str:
    """Return how many ranks have joined, if several read the same batches: " (7 of 8)"."""
    places = [member.topology for member in _present(job)]
    world = max((place.world_size for place in places), default=0)
    if world <= job.dp_size or job.member_count > len(job.members):
        return ""
    return f" ({len({place.rank for place in places})} of {world})"


def _job_row(job: JobStatus) -> tuple[object, ...]:
    # Members of one dp rank (DataLoader workers, tensor-parallel peers) each report its speed.
    speeds: dict[int, float] = {}
    for member in _present(job):
        rank = member.topology.dp_rank
        speeds[rank] = max(speeds.get(rank, 0.0), member.samples_per_s)
    missing = ", ".join(map(str, job.missing_dp_ranks))
    others = job.missing_count - len(job.missing_dp_ranks)
    return (
        job.job_id,
        job.state,
        job.generation,
        f"{max(len(speeds), job.joined_dp_rank_count)}/{job.dp_size}{_peers(job)}",
        f"{missing} and {others} others" if others > 0 else missing or None,
        job.epoch,
        f"{job.cursor / job.sample_count:.1%}" if job.sample_count else None,
        sum(speeds.values()),
        job.dataset,
    )


def _member_rows(job: JobStatus) -> list[tuple[object, ...]]:
    return [
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
        for member in sorted(
            job.members, key=lambda member: (member.topology.dp_rank, member.topology.rank)
        )
    ]


def _present(job: JobStatus) -> list[MemberStatus]:
    return [member for member in job.members if member.state == "joined"]
