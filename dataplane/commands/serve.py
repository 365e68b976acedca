"""`dataplane serve`: a coordinator, a node, or both, until a signal drains them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, MutableMapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dataplane.base import background, collector
from dataplane.base.machine import raise_descriptor_limit
from dataplane.base.trace import LEVELS, Trace, configure, wrap_stray_lines
from dataplane.commands.options import (
    NODE_SETTINGS,
    SECURITY_SETTINGS,
    Settings,
    security_given,
    setting_options,
    settings_of,
)
from dataplane.commands.output import EXIT_INTERRUPTED, EXIT_OK
from dataplane.model.config import VERSION, NodeConfig
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.rpc import address
from dataplane.rpc.address import served_name
from dataplane.rpc.base import Coordination
from dataplane.security.environment import hide_secrets
from dataplane.settings import check_variables, node_config

if TYPE_CHECKING:
    # Imported for types only: at run time this takes 30 ms, and only commands that connect need it.
    from dataplane.metrics.server import MetricsServer
    from dataplane.metrics.table import Reading
    from dataplane.security.node_identity import NodeIdentity
    from dataplane.security.security import Security

    Show = Callable[[Callable[[], Iterable[Reading]]], None]

DRAIN_S = 5.0
CANCEL_S = 3.0
_NOTICE_BYTES_MAX = 4096
_PAGE_LISTEN = "127.0.0.1:9464"

_trace = Trace("serve")

_COORDINATOR_SETTINGS = ("listen", "state_dir", "lease_s")
_LOG_SETTINGS = ("log_level", "log_format")
_IN_FORCE = "dataplane.settings"
"""The key in the `meta` of the command's context under which the settings in force are stored."""


@dataclass(frozen=True, slots=True)
class ServeRole:
    """The role of this process. `listen` is empty if it is not a coordinator. `named` is the
    address by which trainers name the service, if it differs from the coordinator's own.
    """

    listen: str
    named: str
    security: Security
    database: Path
    lease_s: float
    node: NodeConfig | None
    metrics_listen: str = ""
    page: bool = False


@click.command("serve")
@click.option("--coordinator", "only_coordinator", is_flag=True, help="Run only a coordinator.")
@click.option("--node", "only_node", is_flag=True, help="Run only a node; needs --join.")
@click.option(
    "--page",
    is_flag=True,
    help="Open a live page for browsers and print its address: 127.0.0.1:9464, unless "
    "--metrics-listen says where.",
)
@setting_options(
    *_COORDINATOR_SETTINGS, "join", "service", "metrics_listen", *SECURITY_SETTINGS, *NODE_SETTINGS,
    *_LOG_SETTINGS,
    also={"worker_count": "--workers"},
)  # fmt: skip
@click.pass_context
def serve(
    context: click.Context,
    /,
    settings: Settings,
    *,
    only_coordinator: bool,
    only_node: bool,
    page: bool,
) -> None:
    """Run the service: a coordinator and this host's node, or one of them.

    A cluster has one coordinator, and one node per host. Trainers need the coordinator's address,
    and get their batches from the node on their own host. Each process prints `ready: …` when it
    can be used.

    On SIGTERM, Ctrl-C or a closed terminal, the process accepts no new jobs, and exits when its
    jobs have ended. A second signal stops the process at once. On SIGHUP, it reads credentials,
    log_level and log_format again.

    --page opens a port with a live page of jobs, ranks and nodes. Log in with any user name, and
    with the token as password. The same port has metrics for Prometheus at /metrics.

    Over TCP, nodes and commands need the service's token. They take it from DATAPLANE_TOKEN, from
    --token-file, or from the file `token` in the state directory. The first coordinator writes this
    file. Copy the file to the other hosts.

    \b
    Examples:
      dataplane serve
      dataplane serve --page
      dataplane serve --coordinator --listen 10.0.0.1:7077 --insecure
      dataplane serve --node --join 10.0.0.1:7077 --insecure --token-file /etc/dataplane/token
      dataplane serve --listen unix:/run/dataplane/coordinator.sock
    """
    context.meta[_IN_FORCE] = settings
    _configure_log(context)
    check_variables(os.environ)
    hide_secrets()
    service = _service(settings, only_coordinator=only_coordinator, only_node=only_node, page=page)
    notices = Notices(os.environ)
    context.exit(asyncio.run(_run(service, notices, partial(_reload, context, service))))


def _service(
    settings: Settings, *, only_coordinator: bool, only_node: bool, page: bool
) -> ServeRole:
    if only_coordinator and only_node:
        raise click.UsageError(
            "--coordinator and --node exclude each other; without either, both run"
        )
    join = settings["join"]
    if only_node and not join.value:
        raise click.UsageError(
            "--node needs the address of a coordinator: --join host:port, DATAPLANE_JOIN, or "
            "`join` in the configuration file"
        )
    if not only_node and join.source == "--join":
        raise click.UsageError("--join only works with --node: add --node, or leave --join out")
    node = None if only_coordinator else node_config(settings)
    listen = "" if only_node else str(settings["listen"].value)
    named = str(settings["service"].value)
    if node is not None:
        _check_nameable(named or listen or node.coordinator)
    metrics_listen = str(settings["metrics_listen"].value) or (_PAGE_LISTEN if page else "")
    listens = bool(metrics_listen) or not (only_node or listen.startswith("unix:"))
    security = security_given(settings, listens=listens)
    if node is not None and node.peer_tls:
        security.check_peer_tls()
    return ServeRole(
        listen=listen,
        named=named,
        security=security,
        database=Path(str(settings["state_dir"].value), "coordinator.sqlite"),
        lease_s=float(settings["lease_s"].value),
        node=node,
        metrics_listen=metrics_listen,
        page=page,
    )


async def _run(service: ServeRole, notices: Notices, reload: Callable[[], str]) -> int:
    from dataplane.security.node_identity import own_identity

    background.end_process_on_failure()
    raise_descriptor_limit()
    stop = asyncio.Event()
    notices.keep_pinging(asyncio.get_running_loop())
    with handled_signals(stop, notices, reload) as received:
        try:
            identity = own_identity()
            with _metrics(service) as metrics:
                show = (lambda _: None) if metrics is None else metrics.add
                async with _coordination(service, identity, show) as (coordination, joined):
                    if metrics is not None:
                        _show_page(service, metrics, coordination, joined)
                    if service.node is None:
                        notices.ready(f"coordinator {joined}")
                        await stop.wait()
                    else:
                        ready = partial(_serving, service.named or joined, notices)
                        await _run_node(service, coordination, joined, identity, stop, ready, show)
        except asyncio.CancelledError:
            if len(received) < 2:
                raise
            _trace.failed("stopped at once by a second signal")
        except (DataplaneError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - end it despite stuck threads
            background.end_process("serve", error)
    return exit_status(received)


def _reload(context: click.Context, service: ServeRole) -> str:
    """Read files with credentials and the configuration file again. Settings of the log take effect
    now; other settings need a restart. Return a text that says what was done.
    """
    files = service.security.refresh()
    facts = {what.replace(" ", "_"): came for what, came in files.items()}
    before: Settings = context.meta[_IN_FORCE]
    try:
        now = settings_of(context)
    except ConfigError as error:
        facts["settings"] = f"unchanged, since they are wrong: {error}"
        _trace.failed("reloaded", **facts)
    else:
        chosen = {n for n, one in now.items() if {one.source, before[n].source} != {"default"}}
        changed = [name for name in chosen if now[name].value != before[name].value]
        done = sorted(f"{n}={now[n].value}" for n in changed if n in _LOG_SETTINGS)
        later = sorted(name for name in changed if name not in _LOG_SETTINGS)
        facts["settings"] = " ".join(done) or "unchanged"
        if later:
            facts["need_a_restart"] = " ".join(later)
        context.meta[_IN_FORCE] = {**before, **{name: now[name] for name in _LOG_SETTINGS}}
        quieter = LEVELS.index(_log_level(context)) > LEVELS.index(str(before["log_level"].value))
        if not quieter:
            _configure_log(context)
        _trace.noted("reloaded", **facts)
        if quieter:
            _configure_log(context)
    return "reloaded: " + ", ".join(f"{name} {came}" for name, came in facts.items())


def _log_level(context: click.Context) -> str:
    is_debug = context.find_root().params["debug"]
    return "debug" if is_debug else str(context.meta[_IN_FORCE]["log_level"].value)


def _configure_log(context: click.Context) -> None:
    form = str(context.meta[_IN_FORCE]["log_format"].value)
    configure(_log_level(context), form)
    if form == "json":
        wrap_stray_lines()


@asynccontextmanager
async def _coordination(
    service: ServeRole, identity: NodeIdentity, show: Show
) -> AsyncIterator[tuple[Coordination, str]]:
    """Yield the coordinator of this process, or the one that its node joins, and its address."""
    # Silence gRPC before it is imported: it logs each TLS handshake that fails, without a limit and
    # without naming the peer. The coordinator's own log lines are limited and name the peer.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from dataplane.coordinator.front import CoordinatorConfig
    from dataplane.coordinator.server import CoordinatorServer
    from dataplane.rpc.calls import CoordinatorClient
    from dataplane.security import node_identity

    if not service.listen:
        assert service.node is not None
        where = service.node.coordinator
        client = CoordinatorClient(where, service.security, identity=identity)
        try:
            yield client, where
        finally:
            await client.close()
        return
    config = CoordinatorConfig(
        VERSION,
        str(service.database),
        service.lease_s,
        key_file=str(service.database.with_name(node_identity.OWN_NAME)),
    )
    server = CoordinatorServer(config, service.listen, service.security)
    listening = await server.start()
    show(server.coordinator.readings)
    _announce(f"coordinator {listening}")
    grace_s = DRAIN_S
    try:
        yield server.coordinator, listening
    except BaseException:
        grace_s = 0.0
        raise
    finally:
        await server.stop(grace_s)


@contextmanager
def _metrics(service: ServeRole) -> Iterator[MetricsServer | None]:
    """Open the port of metrics and of the page, if there is one."""
    if not service.metrics_listen:
        yield None
        return
    from dataplane.metrics.server import MetricsServer

    with closing(MetricsServer(service.metrics_listen, service.security)) as server:
        server.start()
        yield server


def _show_page(
    service: ServeRole, server: MetricsServer, coordination: Coordination, joined: str
) -> None:
    from dataplane.page.server import Page

    Page(server, coordination, service.named or joined)
    if service.page:
        scheme = "http" if service.security.tls is None else "https"
        _announce(f"page {scheme}://{server.address}/")


async def _run_node(
    service: ServeRole,
    coordination: Coordination,
    joined: str,
    identity: NodeIdentity,
    stop: asyncio.Event,
    ready: Callable[[], None],
    show: Show,
) -> None:
    from dataplane.node.server import run_node
    from dataplane.rpc import local

    # Import this now rather than when a trainer waits for its first dataset.
    from dataplane.store import obstore_store  # noqa: F401

    config, named = service.node, service.named or joined
    assert config is not None
    name = served_name(os.getuid(), named)
    try:
        listener = local.listen(name)
    except FileExistsError as error:
        raise _taken(name, named) from error
    with listener:
        data_listener = await asyncio.to_thread(_data_listener, service, joined)
        await run_node(
            config, listener, coordination, identity.node_id, stop, ready,
            data_listener=data_listener, show=show,
        )  # fmt: skip


def _taken(name: str, named: str) -> ConfigError:
    """Return the error for a socket name that is taken, which says whose process has it."""
    from dataplane.rpc import local

    holder, own = local.holder_of(name), os.getuid()
    if holder is None:
        words = (
            f"a process that takes no connections has the socket name @{name}, by which trainers "
            f"find the node for {named} on this host: end it (`ss -xlp` shows your own)"
        )
    elif holder[1] == own:
        words = (
            f"another node of yours (process {holder[0]}) already serves {named} on this host "
            f"(@{name}): stop it first"
        )
    else:
        pid, uid = holder
        words = (
            f"process {pid} of user {uid} has taken the socket name @{name}, by which trainers of "
            f"user {own} find the node for {named} on this host; they refuse to talk to it. Have "
            "it ended by that user or root, or give the service another name with --service, and "
            "trainers the same"
        )
    return ConfigError(words, service=named)


def _data_listener(service: ServeRole, joined: str) -> socket.socket | None:
    from dataplane.node.server import open_data_port

    assert service.node is not None
    security = service.security
    return open_data_port(
        service.node.data_listen,
        service.named if service.listen and _is_everywhere(joined) else joined,
        is_own=bool(service.listen),
        is_safe=service.node.peer_tls or security.insecure or security.tls is None,
    )


def _check_nameable(named: str) -> None:
    """Refuse an address by which trainers cannot name the service.

    Raises:  ConfigError: trainers cannot connect to this address.
    """
    if _is_everywhere(named):
        port = named.rpartition(":")[2]
        raise ConfigError(
            f"{named} means every address of this host, so trainers cannot use it to find the "
            "node: pass an address that they can use with --service HOST:"
            f"{'PORT, and that port with --listen' if port == '0' else port}",
            key="service",
            found=named,
        )


def _is_everywhere(where: str) -> bool:
    parsed = address.parse(where)
    return isinstance(parsed, address.TcpAddress) and parsed.host in ("0.0.0.0", "::")  # noqa: S104


def _serving(named: str, notices: Notices) -> None:
    """Print that the node of this service is ready."""
    collector.settle()
    _announce(f"node {named}")
    notices.ready(f"node {named}")


def _announce(what: str) -> None:
    """Print the ready line; nothing else is written to stdout."""
    sys.stdout.write(f"ready: {what}\n")
    sys.stdout.flush()


# -- supervision -------------------------------------------------------------------------------
#
# The side of `dataplane serve` that faces its supervisor: signals, and notices to systemd.
#
# SIGTERM and SIGINT drain, and a second one stops at once. SIGHUP reloads, unless it comes because
# the terminal of this process was closed: then it drains, too.
#
# Source: sd_notify(3), sd_watchdog_enabled(3) of systemd


class Notices:
    """Notices for the service manager that has started this process, if it listens for them.

    The variables that name the manager's socket are removed from the environment, so that no child
    of this process sends notices in its name.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        watchdog_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_watched = watchdog_us.isdecimal() and pid in ("", str(os.getpid()))
        self._ping_s = int(watchdog_us) / 2e6 if is_watched else 0.0

    def ready(self, status: str) -> None:
        """Say that this process does its work."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Say that settings are being read; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Say that this process drains."""
        self._send("STOPPING=1", "STATUS=draining")

    def keep_pinging(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say that the event loop still runs, now and from then on twice in each period that the
        service manager allows.
        """
        if self._address and self._ping_s:
            self._send("WATCHDOG=1")
            loop.call_later(self._ping_s, self.keep_pinging, loop)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        notice = "\n".join(lines).encode()[:_NOTICE_BYTES_MAX]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(notice, self._address)
        except (OSError, ValueError) as error:
            _trace.failed("the service manager takes no notices", error=str(error))


@contextmanager
def handled_signals(
    stop: asyncio.Event, notices: Notices, reload: Callable[[], str]
) -> Iterator[list[int]]:
    """Handle signals, and yield those that end this process: the first starts a drain. The second
    cancels this task, and kills the process if that takes long: the kernel frees its memory, and
    its workers exit with it. `reload` returns what it did.
    """
    received: list[int] = []
    had_terminal = _has_terminal()
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def on_end(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            _trace.noted("draining; a second signal stops at once", by=signal.Signals(number).name)
            notices.stopping()
            stop.set()
        elif len(received) == 2:
            task.cancel()
            loop.call_later(CANCEL_S, os._exit, exit_status(received))

    def on_hangup() -> None:
        if received:
            return  # a closed terminal sends SIGHUP, and then its shell sends another one
        if had_terminal and not _has_terminal():
            on_end(signal.SIGHUP)
            return
        notices.reloading()
        notices.ready(reload())

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_end, number)
    # Under nohup, SIGHUP stays ignored.
    takes_hangups = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    if takes_hangups:
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        yield received
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, *[signal.SIGHUP] * takes_hangups):
            loop.remove_signal_handler(number)


def exit_status(received: list[int]) -> int:
    """Return the exit status of a process that these signals have ended."""
    return EXIT_INTERRUPTED if signal.SIGINT in received else EXIT_OK


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal that is still open."""
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
        return True
    return False
