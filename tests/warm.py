"""Python processes that have torch from the start: forked from a process that imported it once.

The import takes 2.5 s of CPU, often more than the rest of a test's trainer. Such a process has the
given arguments, environment and streams, and ends like any Python process. Its parent is a process
that waits for it; the process that it was forked from has run no other code.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ORDER_BYTES = 1 << 18


class WarmProcess:
    """What subprocess.Popen is, as far as trainers need it. Texts go to stdin and from stdout."""

    def __init__(self, told: IO[str], stdin: IO[str], stdout: IO[str]) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._told = told
        self.pid = int(told.readline())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class WarmPython:
    """The process that others are forked from. It ends when this object is closed."""

    def __init__(self, *modules: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                # Read when torch is loaded: trainers share few processors.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.pid = self._process.pid

    def run(self, script: Sequence[str], environ: Mapping[str, str], stderr: int) -> WarmProcess:
        """Run a script with its arguments."""
        order = json.dumps({"script": list(script), "environ": dict(environ)}).encode()
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        told, tell = os.pipe()
        theirs = [stdin, stdout, stderr, tell]
        try:
            socket.send_fds(self._socket, [order], theirs)
        finally:
            for fd in (stdin, stdout, tell):
                os.close(fd)
        return WarmProcess(os.fdopen(told), os.fdopen(to_stdin, "w"), os.fdopen(from_stdout))

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


def _orders(ours: socket.socket) -> dict[str, Any] | None:
    """Fork a process for every order; in that process, the order. None when there are no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, fds, _, _ = socket.recv_fds(ours, ORDER_BYTES, 4)
        if not order:
            return None
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ours.close()
            *streams, tell = fds
            if pid := os.fork():
                _wait_for(pid, streams, tell)
            os.close(tell)
            for place, fd in enumerate(streams):
                os.dup2(fd, place)
                os.close(fd)
            return json.loads(order)
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
    sys.argv = order["script"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
