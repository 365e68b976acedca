"""Start the worker processes of one loader, exchange messages with them, and end them.

Each worker has one socket, which carries frames (frames.py) and the descriptors of its segments.
The trainer reads the sockets while it waits for a batch; no thread reads them.

Invariants:
1. If a worker dies, in any way, the trainer that waits for it gets an exception within one second.
2. After `close`, no process of a crew is left: workers that do not end are killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe

from dataplane.client.mount import Pinning
from dataplane_torch.device import Target
from dataplane_torch.local import frames
from dataplane_torch.local.segments import MappedSegments
from dataplane_torch.local.worker import Setup, work
from dataplane_torch.pinning import cuda_pinning
from dataplane_torch.torch_private import workers
from dataplane_torch.torch_private.iteration import PassNames, is_iterable, sharding_init_fn

_END_S = 5.0
_POLL_MS = 1000


class Crew:
    """Workers 0..n-1, made by `setup_of(worker_id, parent_pid)`."""

    def __init__(
        self,
        count: int,
        context: Any,
        setup_of: Callable[[int, int], Setup],
        pinning: Pinning | None,
    ) -> None:
        self.processes: list[Any] = []
        self.mapped: list[MappedSegments] = []
        self._connections: list[Connection] = []
        self._by_fd: dict[int, int] = {}
        self._gone: set[int] = set()
        self._ended: set[int] = set()
        self._poll = select.poll()
        self._pid = os.getpid()
        self._is_closed = self._has_raised = False
        forked = context.get_start_method() in {"fork", "spawn"}
        parent_pid = self._pid if forked else 0
        try:
            for worker_id in range(count):
                self._start(context, setup_of(worker_id, parent_pid), pinning)
        except BaseException:
            self.close()
            raise
        workers.watch(id(self), [process.pid for process in self.processes])
        _crews.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process started the crew."""
        return os.getpid() == self._pid

    def send(self, worker_id: int, frame: frames.ToWorker) -> None:
        """Send a frame. Ignore a dead worker, since waiting for its answer raises.

        Raises:  whatever the pickling of the frame's index raises.
        """
        self.mapped[worker_id].let_go()
        encoded = frames.encode(frame)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connections[worker_id].send_bytes(encoded)

    def let_go(self, worker_id: int) -> None:
        """Tell a worker that it is no longer needed."""
        if worker_id not in self._ended:
            self._ended.add(worker_id)
            self.send(worker_id, frames.Stop())

    def wait(self, deadline: float | None) -> list[int]:
        """Wait until workers send something, or until the deadline (by time.monotonic). Pass the
        result, which is empty after the deadline, to `heard`.

        Raises:  RuntimeError: a worker died.
        """
        while not (ready := self._poll.poll(self._wait_ms(deadline))):
            if deadline is not None and time.monotonic() >= deadline:
                break
            self.look_after()
        return [fd for fd, _ in ready]

    def heard(self, ready: list[int]) -> Iterator[tuple[int, frames.FromWorker]]:
        """Yield the messages that workers have sent.

        Raises:  RuntimeError: a worker died.
        """
        for fd in ready:
            worker_id = self._by_fd[fd]
            try:
                frame = frames.decode(self._connections[worker_id].recv_bytes())
                if isinstance(frame, frames.NewSegment):
                    received = recv_handle(self._connections[worker_id])
                    self.mapped[worker_id].attach(frame.segment_id, received, frame.size_bytes)
                    continue
            except (EOFError, OSError):  # the worker has ended, perhaps in the middle of a frame
                self._lost(worker_id)
                continue
            if isinstance(frame, frames.OldSegment):
                self.mapped[worker_id].detach(frame.segment_id)
                continue
            yield worker_id, frame

    def look_after(self) -> None:
        """Raise torch's error for a dead worker, whether torch's SIGCHLD handler or the closed
        socket noticed its death first. Afterwards the handler, which may raise anywhere in the
        trainer, reports no other worker of this crew.
        """
        self._has_raised = True
        try:
            workers.raise_for_dead()
            for worker_id in self._gone - self._ended:
                process = self.processes[worker_id]
                process.join(_END_S)
                # Exit status 0 means that an interrupt ended the worker. This does not count as
                # raised, so that a pass may replace such workers.
                self._has_raised = process.exitcode != 0
                raise RuntimeError(_obituary(process.pid, process.exitcode))
        except BaseException:
            self._unwatch()
            raise
        self._has_raised = False

    @property
    def was_interrupted(self) -> bool:
        """Whether an interrupt ended workers, and nothing else did."""
        codes = {process.exitcode for process in self.processes}
        return not self._has_raised and codes <= {None, 0} and 0 in codes

    def is_to_be_replaced(self, was_torn: bool) -> bool:
        """Return whether the next pass needs new workers: an exception may have interrupted a
        frame, or an interrupt may have ended the workers too. `look_after` reports workers that
        died.
        """
        codes = {process.exitcode for process in self.processes}
        is_torn = was_torn and not self._has_raised and codes <= {None}
        return is_torn or self.was_interrupted

    def close(self) -> None:
        """End all workers. May be called twice. In a forked child, do nothing."""
        if self._is_closed or not self.is_ours:
            return
        self._is_closed = True
        _crews.discard(self)
        self._unwatch()
        try:
            for worker_id in range(len(self._connections)):
                self.let_go(worker_id)
                self._hear_no_more(worker_id)
            deadline = time.monotonic() + _END_S
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                    process.join(_END_S)
            for connection in self._connections:
                connection.close()
            for mapped in self.mapped:
                mapped.close()

    def _start(self, context: Any, setup: Setup, pinning: Pinning | None) -> None:
        ours, theirs = context.Pipe(duplex=True)
        # Have a forked worker close its copies of the trainer's sockets: with open copies, workers
        # would not notice the end of the trainer.
        inherited = [ours, *self._connections] if context.get_start_method() == "fork" else []
        process = context.Process(target=work, args=(setup, theirs, inherited))
        process.daemon = True
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.processes.append(process)
        self.mapped.append(MappedSegments(pinning))
        self._connections.append(ours)
        self._by_fd[ours.fileno()] = setup.worker_id
        self._poll.register(ours.fileno(), select.POLLIN)

    def _hear_no_more(self, worker_id: int) -> None:
        """Stop receiving: a worker that is blocked in a send gets an error, and ends."""
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connections[worker_id].fileno())) as ours,
        ):
            ours.shutdown(socket.SHUT_RD)

    def _unwatch(self) -> None:
        with contextlib.suppress(Exception):  # the crew is not watched yet, or no longer
            workers.unwatch(id(self))

    def _lost(self, worker_id: int) -> None:
        """Note that a worker's socket was closed, on request or because the worker died."""
        self._poll.unregister(self._connections[worker_id].fileno())
        self._gone.add(worker_id)
        self.look_after()

    def _wait_ms(self, deadline: float | None) -> int:
        if deadline is None:
            return _POLL_MS
        return max(0, min(_POLL_MS, int(1000 * (deadline - time.monotonic()) + 1)))


def _obituary(pid: int | None, exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        cause = (
            f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-exit_code)}. "
        )
        if -exit_code == signal.SIGKILL:
            return f"{cause}Most often the kernel was out of memory: try fewer num_workers"
        return f"{cause}To debug the dataset, run it in this process with num_workers=0"
    return (
        f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {exit_code}: look above "
        "for its last output; num_workers=0 runs the dataset in this process"
    )


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


def _close_all() -> None:
    for crew in list(_crews):
        crew.close()


# Register this after multiprocessing's exit handler, so that it runs first: multiprocessing's
# handler would terminate workers by a signal.
atexit.register(_close_all)


def hire(worker_pass: PassNames, loader: Any, target: Target | None) -> Crew:
    """Start the workers of a pass, which torch's constructor has made by now."""
    init_fn = loader.worker_init_fn
    if isinstance(worker_pass.dataset, IterDataPipe | MapDataPipe):
        init_fn = sharding_init_fn(init_fn, worker_pass.world_size, worker_pass.rank)
    pinning = (
        cuda_pinning(wanted=worker_pass.is_pinning)
        if target is None
        else target.pinning(reads_all=False)  # the user may read arrays on the host
    )
    of_iterable = is_iterable(loader)
    every = loader.snapshot_every_n_steps
    # Save the state of a map-style dataset after each batch, since such a dataset cannot skip any.
    state_every = -(-every // loader.num_workers) if of_iterable else 1

    def setup(worker_id: int, parent_pid: int) -> Setup:
        return Setup(
            is_iterable=of_iterable,
            dataset=worker_pass.dataset,
            auto_collation=worker_pass.auto_collation,
            collate_fn=worker_pass.collate_fn,
            drop_last=worker_pass.drop_last,
            batch_size=loader.batch_size or 1,
            base_seed=int(worker_pass.base_seed),
            init_fn=init_fn,
            worker_id=worker_id,
            worker_count=worker_pass.worker_count,
            shared_seed=worker_pass.shared_seed,
            is_pinned=pinning is not None,
            state_every=state_every,
            parent_pid=parent_pid,
        )

    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    return Crew(worker_pass.worker_count, context, setup, pinning)
