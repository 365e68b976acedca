"""Python processes that have their modules from the start: forked from a process that imported them once.

The import of torch takes 2.5 s of CPU, often more than the rest of a test's trainer; that of what a
service needs takes 0.7 s. Such a process has the given arguments, environment, folder and streams, and
ends like any Python process. Its parent is a process that waits for it; the process that it was forked
from has run no other code.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ORDER_BYTES = 1 << 18
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


class WarmProcess:
    """What subprocess.Popen is, as far as tests need it. Texts go to stdin and from stdout."""

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
    """The process that others are forked from. It ends when this object is closed."""

    def __init__(self, *modules: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                # Read when libraries are loaded: these processes share few processors.
                env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"},
            )
        self.pid = self._process.pid
        self._python = _of_python(os.environ)

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
            socket.send_fds(self._socket, [json.dumps(order).encode()], theirs)
        finally:
            for fd in (tell, *closed):
                os.close(fd)
        return os.fdopen(told)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@contextlib.contextmanager
def warm_python(*modules: str) -> Iterator[WarmPython]:
    """One that has these modules, for a session or for a file of tests."""
    import hygiene  # not in the process that others are forked from

    with contextlib.closing(WarmPython(*modules)) as made:
        for pids in (hygiene.SHARED_PIDS, hygiene.WARM_PIDS):
            pids.add(made.pid)
        try:
            yield made
        finally:
            for pids in (hygiene.SHARED_PIDS, hygiene.WARM_PIDS):
                pids.discard(made.pid)


def _of_python(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(("PYTHON", "LD_"))}


def _orders(ours: socket.socket) -> dict[str, Any] | None:
    """Fork a process for every order; in that process, the order. None when there are no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, fds, _, _ = socket.recv_fds(ours, ORDER_BYTES, 7)
        if not order:
            return None
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ours.close()
            tell, *streams = fds
            if pid := os.fork():
                _wait_for(pid, streams, tell)
            os.close(tell)
            for place, fd in enumerate(streams[:3]):
                os.dup2(fd, place)
                os.close(fd)
            return {**json.loads(order), "inherited": streams[3:]}
        for fd in fds:
            os.close(fd)


def _wait_for(pid: int, streams: list[int], tell: int) -> None:
    """Report the process id, and how the process ended; does not return."""
    for fd in (0, 1, *streams):
        os.close(fd)
    with contextlib.suppress(BrokenPipeError):
        os.write(tell, b"%d\n" % pid)
        os.write(tell, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def show(command: Sequence[str]) -> None:
    """Have others see this command as that of this process, as far as there is room."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    told = b"\0".join(map(os.fsencode, command))[: end - start]
    ctypes.memmove(start, told.ljust(end - start, b"\0"), end - start)


def main() -> None:
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    order = _orders(socket.socket(fileno=int(sys.argv[1])))
    if order is None:
        return
    os.environ.clear()
    os.environ.update(order["environ"])
    tempfile.tempdir = None
    os.chdir(order["folder"])
    if "module" in order:
        numbers = dict(zip(order["inherits"], map(str, order["inherited"]), strict=True))
        if numbers:
            os.setsid()
        name, *arguments = order["module"]
        sys.argv = [name, *(numbers.get(one, one) for one in arguments)]
        show(sys.argv)
        sys.path[0] = order["folder"]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    sys.argv = order["script"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
