"""Start a node as a child process, always with exec, possibly before the node's first use.

This process creates the listening socket, and the child inherits it. So the socket's name is taken
at once, and connections wait in the backlog while the child still imports modules.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import msgspec
from msgspec import Struct

from dataplane.base import bytecode
from dataplane.base.units import IMPORT_PATH_VARIABLE
from dataplane.client.waiting import Notice
from dataplane.client.wire import Wire, hello, welcomed
from dataplane.model.errors import ConfigError, DataplaneError, PeerLost
from dataplane.rpc.messages import DatasetSource, Welcome
from dataplane.settings import cache_dir

_TAIL_BYTES = 4096
_EXIT_WAIT_S = 5.0
_REFUSED = 2


class NodeProcess(Struct, frozen=True):
    """A node that was started and has not answered yet. Until it answers, its stderr is a memfd."""

    process: subprocess.Popen[bytes]
    log_fd: int

    def failure(self) -> DataplaneError:
        """Return the error for a node that closed the connection: its exit status and the last
        lines of its output. Status 2 means that the node refused to start, most likely because of a
        wrong setting. The error has a noun `status` if the node exited by itself with an error, but
        not if it was killed or asked to exit.
        """
        try:
            status = self.process.wait(_EXIT_WAIT_S)
            how = f"exit status {status}" if status >= 0 else f"signal {-status}"
        except subprocess.TimeoutExpired:
            how = "it closed the connection, but is still running"
        size = os.fstat(self.log_fd).st_size
        written = os.pread(self.log_fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        tail = written.decode(errors="replace").strip()
        if self.process.returncode == _REFUSED and tail:
            return ConfigError(f"no node can be started: {tail}")
        return PeerLost(
            f"the node that this process started ended during its start ({how})"
            + (f"; its last output:\n{tail}" if tail else "  without any output"),
            peer=f"pid {self.process.pid}",
            last_error=tail.rpartition("\n")[2],
            **({"status": status} if (status := self.process.returncode or 0) > 0 else {}),
        )

    def close(self) -> None:
        """Close the log."""
        os.close(self.log_fd)


def node_command() -> tuple[str, ...]:
    """Return the command that runs a node. With -P, files beside the training script cannot shadow
    our modules.

    Raises:  ConfigError: this interpreter does not know its own path.
    """
    if not sys.executable:
        raise ConfigError(
            "no node can be started, since this interpreter does not know its own path: start one "
            "with `dataplane serve` and pass service="
        )
    return (sys.executable, "-P", "-m", "dataplane.node")


def start_node(
    listener: socket.socket, command: tuple[str, ...], source: DatasetSource
) -> NodeProcess:
    """Start a node that gets a copy of this listening socket. The node begins to
    open this dataset while it starts.

    The child's stderr is a memfd until the node serves, so that its last output can be reported.
    Then the node copies it to our stderr, which is passed as --stderr-fd, and uses that.
    """
    log_fd = os.memfd_create("dataplane-node-start", os.MFD_CLOEXEC)
    try:
        opening = _written(msgspec.json.encode((source.urls, source.format)))
        ours = (os.dup(listener.fileno()), _our_stderr(), opening)
        handed_down = tuple(map(_above_standard, ours))
        try:
            process = _executed(command, handed_down, log_fd)
        finally:
            for fd in handed_down:
                os.close(fd)
    except OSError as error:
        os.close(log_fd)
        raise ConfigError(f"cannot start a node with {command[0]}: {error}") from error
    # Reap the child in a thread, so that the child does not stay a zombie while the trainer works.
    threading.Thread(target=process.wait, name="dataplane-node-reaper", daemon=True).start()
    return NodeProcess(process, log_fd)


def _executed(
    command: tuple[str, ...], handed_down: tuple[int, ...], log_fd: int
) -> subprocess.Popen[bytes]:
    """Run the command with a listener, a stderr, and a file that names the first dataset."""
    listener, stderr, opening = map(str, handed_down)
    own = ("--listener-fd", listener, "--stderr-fd", stderr, "--opening-fd", opening, "--embedded")
    return subprocess.Popen(
        [*command, *own, *_kept_bytecode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log_fd,
        pass_fds=handed_down,
        env=_environment(),
        start_new_session=True,
    )


def _environment() -> dict[str, str]:
    return {
        # Keep numpy from starting one BLAS thread per core: a node multiplies no matrices.
        "OPENBLAS_NUM_THREADS": "1",
        **os.environ,
        # Pass on this process's import path, from which the node's workers import the user's
        # functions.
        IMPORT_PATH_VARIABLE: json.dumps([*map(_absolute, sys.path)]),
    }


def _kept_bytecode() -> tuple[str, ...]:
    """Return options that give the node a folder for bytecode, if Python keeps none; see
    `dataplane.base.bytecode`.
    """
    if not bytecode.is_kept_nowhere():
        return ()
    with contextlib.suppress(ConfigError):  # the node reports the same error
        folder = bytecode.own_folder(cache_dir())
        return ("--bytecode", folder) if folder else ()
    return ()


def _above_standard(fd: int) -> int:
    """Return the same file with a descriptor above 2, since the child has its own standard streams
    at 0 to 2. In a process without standard streams, other files get these numbers.
    """
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _absolute(folder: str) -> str:
    return str(Path(folder).absolute())


def _written(content: bytes) -> int:
    """Create an unnamed file with this content."""
    fd = os.memfd_create("dataplane-opening", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _our_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:  # this process has no stderr, like some daemons
        return os.open(os.devnull, os.O_WRONLY)


# -- begun -------------------------------------------------------------------------------------
#
# A node that was started when a loader was made, before the loader's first use.
#
# A node takes a while to start, and to list and index a dataset; meanwhile, a training script makes
# its model. The script does not wait for the node, and the node's errors are raised when the loader
# is used.
#
# Invariants:
# 1. The node lives as long as `BegunNode` holds its connection, or as the node has other trainers.
# 2. A forked child does not use the node.

_GREET_S = 5.0


class BegunNode:
    """A started node, and the first connection with it, over which Hello was sent. Used by one
    thread at a time.
    """

    def __init__(self, wire: Wire, node: NodeProcess, name: str) -> None:
        self._wire: Wire | None = wire
        self._node, self._name = node, name
        self._hello = 0
        with contextlib.suppress(DataplaneError, TimeoutError):  # `welcomed` raises again
            self._hello = hello(wire, time.monotonic() + _GREET_S)
        _all.add(self)

    def welcomed(self, deadline: float, notice: Notice) -> tuple[Wire, Welcome]:
        """Return the connection when the node has answered. Call this only once: the caller then
        owns the connection.

        Raises:  PeerLost: the node ended during its start, with its last output, or does not
        answer.  ConfigError: its settings are wrong.  VersionMismatch.
        """
        wire, self._wire = self._wire, None
        assert wire is not None
        try:
            try:
                welcome = welcomed(wire, self._hello, self._name, deadline, notice)
            except PeerLost:
                raise self._node.failure() from None
            return wire, welcome
        finally:
            self._node.close()

    def close(self) -> None:
        """Close the connection, which ends the node if it has no other trainers. May be called
        twice.
        """
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
            self._node.close()

    def abandon(self) -> None:
        """Drop the connection in a forked child, since it belongs to the parent."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.abandon()
            self._node.close()


_all: weakref.WeakSet[BegunNode] = weakref.WeakSet()


def _abandon_all() -> None:
    for each in list(_all):
        each.abandon()
    _all.clear()


os.register_at_fork(after_in_child=_abandon_all)
