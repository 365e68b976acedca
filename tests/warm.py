"""Python processes that have their modules from the start: forked from a process that imported them once.

The import of torch takes 2.5 s of CPU, often more than the rest of a test's trainer; that of what a
service needs takes 0.7 s. Such a process has the given arguments, environment, folder and streams, and
ends like any Python process. Its parent is the process that it was forked from, which runs no other
code.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ORDER_BYTES = 1 << 18
SERVICES = "DATAPLANE_TEST_SERVICES"
"""Where forked processes have their nodes forked."""
SHOWN = ("DATAPLANE_TEST_RUN", "TORCHELASTIC_RUN_ID")
SERVICE = (
    "dataplane.cli", "dataplane.commands.serve", "dataplane.coordinator.front",
    "dataplane.coordinator.server", "dataplane.node.fork_server", "dataplane.node.pool",
    "dataplane.node.server", "dataplane.rpc.calls", "dataplane.security.security",
    "dataplane.settings", "dataplane.store.obstore_store", "dataplane.formats.arrow_ipc",
    "dataplane.formats.jsonl", "dataplane.formats.parquet", "dataplane.formats.tar",
    "dataplane.formats.tfrecord", "pyarrow.compute",
)  # fmt: skip
"""What a service, a node and a fork server import."""
TRAINER = (
    "dataplane_torch", "torch._dynamo", "torch.distributed", "dataplane_bench.trial.process",
    "bench_loaders",
)  # fmt: skip
"""What trainers import, and the processes of a trial of the benchmark."""
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""As `dataplane.worker.forking` has it, which nothing imports here before numpy."""
EXECUTABLE = """#!{python} -IS
# Runs a module or a script as a fork of a process that has its modules; else as Python does.
import json, os, socket, sys
options, rest = [], sys.argv[1:]
while rest and rest[0] in ("-P", "-u"):
    options.append(rest.pop(0))
kind = "module" if rest[:1] == ["-m"] else "script"
command = rest[1:] if kind == "module" else rest
of_python = {{n: v for n, v in os.environ.items() if n.startswith(("PYTHON", "LD_"))}}
of_python.pop("PYTHON_EXEC", None)
if not command or kind == "script" and command[0][:1] == "-" or of_python != {of_python!r}:
    os.execv({python!r}, [{python!r}, *options, *rest])
ends, tell = os.pipe()
order = dict(environ=dict(os.environ), folder=os.getcwd(), inherits=[], is_tied=True)
order[kind] = command
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    socket.send_fds(server, [json.dumps(order).encode()], [tell, 0, 1, 2])
os.close(tell)
with open(ends) as lines:
    lines.readline()
    status = int(lines.readline() or -9)
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class WarmProcess:
    """A process like subprocess.Popen's, as far as tests need it. Texts go to stdin and from stdout."""

    def __init__(self, told: IO[str], stdin: IO[str] | None, stdout: IO[str] | None) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._told = told
        self._waiting = threading.Lock()
        self.pid = int(told.readline())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        late = subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        # Another thread may wait without a timeout.
        if not self._waiting.acquire(timeout=-1 if timeout is None else timeout):
            raise late
        try:
            if self.returncode is None:
                if not select.select([self._told], [], [], timeout)[0]:
                    raise late
                self.returncode = int(self._told.readline() or -signal.SIGKILL)
                self._told.close()
            return self.returncode
        finally:
            self._waiting.release()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """The process that others are forked from."""

    def __init__(self, address: str, pid: int, environ: Mapping[str, str]) -> None:
        """`environ` is the environment that it was started with."""
        self.address, self.pid = address, pid
        self._python = _of_python(environ)

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Whether this environment has what Python itself reads at its start, as this one had it."""
        return _of_python(environ) == self._python

    def run(
        self,
        script: Sequence[str],
        environ: Mapping[str, str],
        stderr: int,
        folder: Path | None = None,
    ) -> WarmProcess:
        """Run a script with its arguments, in the folder of this process or in another one."""
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        order = {
            "script": list(script), "environ": dict(environ), "folder": str(folder or Path.cwd()),
        }  # fmt: skip
        told = self._send(order, [stdin, stdout, stderr], closed=(stdin, stdout))
        return WarmProcess(told, os.fdopen(to_stdin, "w"), os.fdopen(from_stdout))

    def run_module(
        self, *command: str, environ: Mapping[str, str], stderr: int, inherits: Sequence[int] = ()
    ) -> WarmProcess:
        """Run a module with its arguments, as `python -m` does, in the folder of this process. It
        has no stdin. If it inherits descriptors, whose numbers are among its arguments, it has a
        session of its own, and no stdout.
        """
        order = {
            "module": command, "environ": dict(environ), "folder": str(Path.cwd()),
            "inherits": [*map(str, inherits)],
        }  # fmt: skip
        stdin = os.open(os.devnull, os.O_RDWR)
        if inherits:
            streams = [stdin, stdin, stderr, *inherits]
            return WarmProcess(self._send(order, streams, closed=(stdin,)), None, None)
        from_stdout, stdout = os.pipe()
        told = self._send(order, [stdin, stdout, stderr], closed=(stdin, stdout))
        return WarmProcess(told, None, os.fdopen(from_stdout))

    def _send(
        self, order: Mapping[str, object], descriptors: list[int], closed: Sequence[int]
    ) -> IO[str]:
        """Have a process forked; what it tells of its start and end."""
        told, tell = os.pipe()
        try:
            theirs = [tell, *descriptors]
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
                server.connect(f"\0{self.address}")
                socket.send_fds(server, [json.dumps(order).encode()], theirs)
        finally:
            for fd in (tell, *closed):
                os.close(fd)
        return os.fdopen(told)

    def executable(self, folder: Path) -> Path:
        """A file in this folder that does what Python's executable does, with fewer imports."""
        text = EXECUTABLE.format(
            python=sys.executable, address=f"\0{self.address}", of_python=self._python
        )
        file = folder / "python"
        file.write_text(text)
        file.chmod(0o755)
        return file


@contextlib.contextmanager
def warm_python(*modules: str) -> Iterator[WarmPython]:
    """One that has these modules, for a session or for a file of tests."""
    import hygiene  # not in the process that others are forked from

    address = f"dataplane-warm-{uuid.uuid4().hex}"
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack:
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{address}")
            listener.listen(100)
            fds = [theirs.fileno(), listener.fileno()]
            # Variables that are read when libraries are loaded: processes share few processors.
            process = stack.enter_context(subprocess.Popen(
                [sys.executable, __file__, *map(str, fds), *modules],
                pass_fds=fds, env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"},
            ))  # fmt: skip
        stack.enter_context(ours)
        for pids in (hygiene.SHARED_PIDS, hygiene.WARM_PIDS):
            pids.add(process.pid)
            stack.callback(pids.discard, process.pid)
        yield WarmPython(address, process.pid, os.environ)


def start_nodes_by_forks(python: WarmPython, setattr_: Callable[[Any, str, Any], object]) -> None:
    """Have nodes of this process forked from another one that has their modules."""
    from dataplane.client import launch

    executed, usual = launch._executed, launch.node_command()

    @functools.wraps(executed)
    def forked(command: tuple[str, ...], handed_down: tuple[int, ...], log_fd: int) -> Any:
        given, rest = command[: -len(usual)], command[-len(usual) :]
        # Commands start theirs by `env NAME=VALUE ...`.
        if rest != usual or given[:1] not in {(), ("env",)} or not python.fits(os.environ):
            return executed(command, handed_down, log_fd)
        listener, stderr, opening = map(str, handed_down)
        return python.run_module(
            "dataplane.node", "--embedded", "--listener-fd", listener, "--stderr-fd", stderr,
            "--opening-fd", opening,
            environ={
                # They log what held their loops only if somebody has chosen a level.
                "DATAPLANE_LOG_LEVEL": "warning",
                **launch._environment(),
                **dict(pair.split("=", 1) for pair in given[1:]),
            },
            stderr=log_fd, inherits=handed_down,
        )  # fmt: skip

    setattr_(launch, "_executed", forked)


def start_fork_servers_by_forks(python: WarmPython, patch: pytest.MonkeyPatch) -> None:
    """Have fork servers of this process forked from another one that has their modules."""
    from dataplane.security.environment import without_secrets
    from dataplane.worker import forking

    executed, usual = forking._executed, (sys.executable, forking._MODULE)

    @functools.wraps(executed)
    def forked(sock: socket.socket, stderr_fd: int | None) -> Any:
        if (sys.executable, forking._MODULE) != usual or not python.fits(os.environ):
            return executed(sock, stderr_fd)
        return python.run_module(
            "dataplane.node", "--fork-server-fd", str(sock.fileno()),
            environ={**forking.ENVIRONMENT, **without_secrets(os.environ)},
            stderr=2 if stderr_fd is None else stderr_fd, inherits=[sock.fileno()],
        )  # fmt: skip

    patch.setattr(forking, "_executed", forked)


def _of_python(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(("PYTHON", "LD_")) and name != "PYTHON_EXEC"  # torchrun's
    }


class _Children:
    """The processes that were forked: each reports its process id and how it ended."""

    def __init__(self, *others: socket.socket) -> None:
        self._events = select.poll()
        self._others = others
        for other in others:
            self._events.register(other, select.POLLIN)
        self._ends: dict[int, tuple[int, int]] = {}
        self._tied: dict[int, int] = {}

    def wait(self) -> list[int]:
        """Report the ends of children until there is something to read of the others: of which."""
        while True:
            ready = [fd for fd, _ in self._events.poll()]
            for fd in ready:
                if fd in self._ends:
                    self._report(fd)
                elif fd in self._tied:
                    os.kill(self._tied[fd], signal.SIGKILL)
                    self._events.unregister(fd)
            if others := [fd for fd in ready if any(fd == one.fileno() for one in self._others)]:
                return others

    def fork(self, report: int, *, is_tied: bool) -> bool:
        """Whether this is the child. If it is tied, it ends when nobody reads the report."""
        pid = os.fork()
        if not pid:
            for end, (_, fd) in self._ends.items():
                os.close(end)
                os.close(fd)
            for other in self._others:
                other.close()
            os.close(report)
            return True
        end = os.pidfd_open(pid)
        self._ends[end] = pid, report
        self._events.register(end, select.POLLIN)
        if is_tied:
            self._tied[report] = pid
            self._events.register(report, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(report, b"%d\n" % pid)
        return False

    def _report(self, end: int) -> None:
        pid, report = self._ends.pop(end)
        self._events.unregister(end)
        os.close(end)
        if self._tied.pop(report, None):
            with contextlib.suppress(KeyError):
                self._events.unregister(report)
        with contextlib.suppress(BrokenPipeError):
            os.write(report, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os.close(report)


def _orders(lives: socket.socket, listener: socket.socket) -> dict[str, Any] | None:
    """Fork a process for every order; in that process, the order. None when there are no more."""
    children = _Children(lives, listener)
    while lives.fileno() not in children.wait():
        with listener.accept()[0] as caller:
            text, fds, _, _ = socket.recv_fds(caller, ORDER_BYTES, 7)
        if not text:
            continue
        order = json.loads(text)
        report, *streams = fds
        if children.fork(report, is_tied=order.get("is_tied", False)):
            for place, fd in enumerate(streams[:3]):
                os.dup2(fd, place)
                os.close(fd)
            return {**order, "inherited": streams[3:]}
        for fd in streams:
            os.close(fd)
    return None


def show(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have others see this command and environment as those of this process, as far as there is
    room, the variables that tests look for first.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first = {name: environ[name] for name in SHOWN if name in environ}
    variables = [f"{name}={value}" for name, value in {**first, **environ}.items()]
    for words, places in ((command, fields[45:47]), (variables, fields[47:49])):
        start, end = map(int, places)
        text = b"\0".join(map(os.fsencode, words))[: end - start]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def main() -> None:
    for name in ("dataplane.client.launch", *sys.argv[3:]):
        importlib.import_module(name)
    gc.freeze()
    order = _orders(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:3]))
    if order is None:
        return
    own = dict(os.environ)
    os.environ.clear()
    os.environ.update(order["environ"])
    tempfile.tempdir = None
    os.chdir(order["folder"])
    if services := os.environ.get(SERVICES):
        address, pid = services.split()
        start_nodes_by_forks(WarmPython(address, int(pid), own), setattr)
    if "module" in order:
        numbers = dict(zip(order["inherits"], map(str, order["inherited"]), strict=True))
        if numbers:
            os.setsid()
        name, *arguments = order["module"]
        sys.argv = [name, *(numbers.get(argument, argument) for argument in arguments)]
        show(sys.argv, os.environ)
        sys.path[0] = order["folder"]
        ending(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))
    else:
        sys.argv = order["script"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        ending(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))


def ending(run: Callable[[], object]) -> None:
    """Run this and end the process as Python does, but let the kernel take its memory: to look at
    all objects of torch takes 0.3 s of CPU.
    """
    status = 0
    try:
        run()
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        status = ended.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
