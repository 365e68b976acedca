"""Nodes on a Ray cluster: one on each host, as an actor that starts it again when it ends. And new
shards, written as a job of Ray Data: `pack_shards(urls, dest, config, run=pack_with_ray)`.

    nodes = start_nodes(environ={"DATAPLANE_INSECURE": "true"})
    DataLoader(url, service=nodes.service)  # in tasks and actors of the same user

Ray places and restarts the actors; each runs `dataplane serve` as a process, as systemd would. One
more actor, on the host of the caller, runs the coordinator. Whoever reaches a Ray cluster may run
code in it, so its network is one trust domain, and the token of the service travels in it.

Needs `pip install 'dataplane-loader[ray]'`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from msgspec import structs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane.base.trace import Trace
from dataplane.model.errors import ConfigError, PeerLost
from dataplane.pack import PackedPart, PackJob, write_part

READY_S = 120.0
STOP_S = 60.0
_PAUSE_S = 1.0
_LINES = 20
_PROGRAM = """
from dataplane.__main__ import main
from dataplane.base.machine import set_process
set_process("dataplane", dies_with_parent=True)
main()
"""

_trace = Trace("ray")


class Nodes:
    """The service that runs on the hosts of a cluster. `service` is what loaders pass."""

    def __init__(self, service: str, environ: Mapping[str, str]) -> None:
        self.service = service
        self._environ = dict(environ)
        self._actors: dict[str, Any] = {}
        self._state: Path | None = None

    def start_missing(self) -> None:
        """Start a node on each host of the cluster that has none, such as a host that joined later,
        and wait until these nodes are ready.

        Raises:  ConfigError, PeerLost: as `start_nodes`.
        """
        hosts = {host["NodeID"] for host in ray.nodes() if host["Alive"]}
        for gone in self._actors.keys() - hosts - {""}:
            ray.kill(self._actors.pop(gone))
        self._start(("--node", "--join", self.service), *(hosts - self._actors.keys()))

    def start_coordinator(self, host: str, state: Path) -> None:
        """Start the coordinator on this host, with its state in a folder that `close` removes."""
        self._state = state
        command = ("--coordinator", "--listen", self.service, "--state-dir", str(state))
        self._start(command, "", at=host)

    def _start(self, command: Sequence[str], *names: str, at: str = "") -> None:
        remote = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4)(_Daemon)
        for name in names:
            where = NodeAffinitySchedulingStrategy(node_id=at or name, soft=False)
            placed = remote.options(scheduling_strategy=where)
            self._actors[name] = placed.remote(command, self._environ)
        try:
            ready = [self._actors[name].ready.remote() for name in names]
            failures = ray.get(ready, timeout=2 * READY_S)
        except ray.exceptions.RayError as error:
            raise PeerLost(f"an actor of Ray does not run: {error}", peer="Ray") from error
        for name, failure in zip(names, failures, strict=True):
            if failure:
                what = f"the node on Ray's host {name}" if name else "the coordinator"
                raise ConfigError(f"{what} is not ready: {failure}")

    def close(self) -> None:
        """Drain all nodes, then stop them. May be called twice."""
        actors, self._actors = self._actors, {}
        # Stop the coordinator, whose key is "", last.
        for name in sorted(actors, reverse=True):
            try:
                ray.get(actors[name].stop.remote(), timeout=STOP_S + READY_S)
            except ray.exceptions.RayError as error:
                _trace.failed("a node did not stop", host=name, error=str(error))
            ray.kill(actors[name])
        if self._state is not None:
            shutil.rmtree(self._state, ignore_errors=True)


def start_nodes(*, join: str = "", environ: Mapping[str, str] | None = None) -> Nodes:
    """Start a node on each host that the Ray cluster has now, and a coordinator beside the caller
    unless `join` is the address of one. Waits until all are ready.

    `environ` are variables of these processes: settings (DATAPLANE_BLOCK_ARENA_BYTES), keys of
    object stores, and DATAPLANE_TOKEN, which is generated if it is missing.

    Raises:  ConfigError: a process ends at once, or is not ready in time; its last lines follow.
    PeerLost: an actor does not run.
    """
    given = dict(environ or {})
    if join:
        nodes = Nodes(join, given)
    else:
        given.setdefault("DATAPLANE_TOKEN", secrets.token_urlsafe(32))
        nodes = Nodes(f"{ray.util.get_node_ip_address()}:{_free_port()}", given)
    try:
        if not join:
            state = Path(tempfile.gettempdir(), f"dataplane-ray-{secrets.token_hex(8)}")
            nodes.start_coordinator(ray.get_runtime_context().get_node_id(), state)
        nodes.start_missing()
    except BaseException:
        nodes.close()
        raise
    return nodes


def pack_with_ray(job: PackJob, parts: Sequence[int]) -> Iterator[PackedPart]:
    """Write these parts of a pack as a job of Ray Data, each in one task. Its processes need what
    the map imports, and the keys of the stores.

    Raises:  as `write_part`, wrapped in a RayTaskError.
    """
    import ray.data

    shared = ray.put(job)

    def write(row: dict[str, Any]) -> dict[str, Any]:
        return structs.asdict(write_part(ray.get(shared), int(row["item"])))

    numbers = ray.data.from_items([*parts], override_num_blocks=max(len(parts), 1))
    for row in numbers.map(write).iter_rows():
        yield PackedPart(**row)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        port: int = sock.getsockname()[1]
        return port


class _Daemon:
    """Runs `dataplane serve` again and again until `stop`. If this actor is killed, so is its
    process, and trainers wait for the process of the next actor.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-c", _PROGRAM, "serve", *command]
        self._environ = {**os.environ, **environ}
        self._is_stopping, self._is_ready = threading.Event(), threading.Event()
        self._last: deque[str] = deque(maxlen=_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._failure = ""
        # Start the process from a thread that lives as long as the process: the kernel ends a
        # process together with the thread that has started it.
        self._thread = threading.Thread(target=self._keep_running, daemon=True)
        self._thread.start()

    def ready(self) -> str:
        """Wait until the process is ready. Return "", or why it is not ready."""
        self._is_ready.wait(READY_S)
        if self._failure or self._is_ready.is_set():
            return self._failure
        return f"it is not ready after {READY_S:g} s: " + " | ".join(self._last)

    def stop(self) -> None:
        """Drain the process, and wait for its end; kill it if that takes long."""
        self._is_stopping.set()
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            process.kill()
            self._thread.join()

    def _keep_running(self) -> None:
        while not self._is_stopping.is_set():
            with subprocess.Popen(
                self._command, env=self._environ, stdin=subprocess.DEVNULL, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            ) as process:  # fmt: skip
                self._process = process
                assert process.stdout is not None
                for line in process.stdout:
                    self._last.append(line.rstrip())
                    sys.stderr.write(line)
                    if line.startswith("ready: "):
                        self._failure = ""
                        self._is_ready.set()
            if self._is_stopping.is_set():
                return
            if not self._is_ready.is_set():
                self._failure = " | ".join(self._last)
                self._is_ready.set()
            _trace.failed("a process ended and is started again", status=process.returncode)
            self._is_stopping.wait(_PAUSE_S)
