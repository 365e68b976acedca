"""A DataLoader worker: the user's dataset and collate function, in a process of their own.

A worker behaves like torch's workers: it has the same seeds of random, numpy and torch, provides
`get_worker_info()`, uses one thread, calls `worker_init_fn` before it uses the dataset, and sends
exceptions with their traceback.

Source:  the seeds and the order of these steps: torch.utils.data._utils.worker._worker_loop.
"""

from __future__ import annotations

import os
import queue
import random
import select
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed

from dataplane_torch.local import frames
from dataplane_torch.local.parcel import Packer, pickled_whole
from dataplane_torch.local.progress import WorkerState, load_state, skip_samples, state_of
from dataplane_torch.local.segments import Segments
from dataplane_torch.torch_private import workers
from dataplane_torch.torch_private.iteration import fetcher_of

_PARENT_POLL_MS = 5000
_LAST_WORDS_S = 5.0
# Release memory after this time without work: allocating the memory again takes far less time.
_IDLE_S = 0.25
_LONG_IDLE_S = 2.0


class Setup(Struct, frozen=True):
    """A worker's start arguments. `parent_pid` is 0 if a fork server starts it."""

    is_iterable: bool
    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    batch_size: int
    base_seed: int
    init_fn: Callable[[int], None] | None
    worker_id: int
    worker_count: int
    shared_seed: int | None
    is_pinned: bool
    state_every: int  # send a state after every `state_every` batches; 0: only the first state
    parent_pid: int


class Worker:
    """The main loop of one worker."""

    def __init__(self, setup: Setup, connection: Connection, inbox: _Inbox) -> None:
        self._setup, self._connection, self._inbox = setup, connection, inbox
        segments = Segments(self._announce, self._retire, whole=setup.is_pinned)
        self._segments = segments
        self._packer = Packer(segments, everything=setup.is_pinned)
        self._packer.collate_here()
        self._dataset = setup.dataset
        self._shared_rng = torch.Generator()
        self._fetcher: Any = None  # a DatasetFetcher, when the dataset is open
        self._fault: Any = None  # an ExceptionWrapper
        self._is_done = False
        self._pass, self._fetched = 0, 0
        self._is_stateful = False

    def run(self) -> None:
        """Run until the trainer ends this worker, or dies."""
        try:
            self._run()
        finally:
            # Drop the dataset's iterator now, so that an unfinished generator runs its `finally`.
            self._fetcher = None

    def _run(self) -> None:
        setup = self._setup
        seed = setup.base_seed + setup.worker_id
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(workers.numpy_seed(setup.base_seed, setup.worker_id))  # noqa: NPY002
        self._reseed(setup.shared_seed)
        workers.set_worker_info(setup.worker_id, setup.worker_count, seed, self._dataset)
        if setup.init_fn is not None:
            try:
                setup.init_fn(setup.worker_id)
            except Exception:  # noqa: BLE001 - the trainer reports any error
                self._fault = self._wrapped()
        while (frame := self._next_frame()) is not None:
            match frame:
                case frames.Begin():
                    self._begin(frame)
                case frames.Make():
                    if frame.pass_id == self._inbox.pass_id:  # otherwise the pass is over
                        self._fetch(frame)
                case frames.Stop():
                    return

    def _next_frame(self) -> frames.ToWorker | None:
        """Return the next frame. While the worker is idle, it releases unneeded memory."""
        pause_s: float | None = _IDLE_S
        while True:
            try:
                return self._inbox.take(pause_s)
            except queue.Empty:
                pause_s = _LONG_IDLE_S if self._segments.release_unused() else None

    def _begin(self, frame: frames.Begin) -> None:
        self._pass, self._is_done, self._fetched = frame.pass_id, False, 0
        state: WorkerState | None = None
        try:
            if frame.pass_id:
                self._reseed(frame.shared_seed)
            if self._fault is None:
                self._open(frame.state)
                if frame.anew:
                    self._fetched = 0
                    self._open(None)
                state = self._state(is_first=True)
        except Exception:  # noqa: BLE001 - the trainer reports any error
            self._fault = self._wrapped()
        self._send_state(frames.Ready(self._pass, state))

    def _open(self, state: WorkerState | None) -> None:
        """Load the dataset's state, then make its iterator, then load the iterator's state."""
        setup = self._setup
        if state is not None and state.dataset is not None:
            self._dataset = load_state(self._dataset, state.dataset)
        self._fetcher = fetcher = fetcher_of(
            self._dataset,
            is_iterable=setup.is_iterable,
            auto_collation=setup.auto_collation,
            collate_fn=setup.collate_fn,
            drop_last=setup.drop_last,
        )
        if state is None:
            return
        self._fetched = state.fetched
        if not setup.is_iterable:
            return
        if state.iterator is not None:
            fetcher.dataset_iter = load_state(fetcher.dataset_iter, state.iterator)
        fetcher.ended = state.is_ended
        skip_samples(fetcher, state.skip * setup.batch_size)
        self._fetched += state.skip

    def _fetch(self, frame: frames.Make) -> None:
        if self._is_done:
            return
        made: list[Any] = []
        state: WorkerState | None = None
        kind = "batch"
        if self._fault is not None:
            made, self._fault, kind = [self._fault], None, "error"
        else:
            try:
                made.append(self._fetcher.fetch(frame.index))
                self._fetched += 1
                if self._is_stateful and self._is_due():
                    state = self._state()
            except Exception as error:  # noqa: BLE001 - the trainer reports any error
                if isinstance(error, StopIteration) and self._setup.is_iterable:
                    self._is_done = True
                    self._send_state(frames.Ended(self._pass, frame.task, self._last_state()))
                    return
                made, kind = [self._wrapped()], "error"
        self._connection.send_bytes(self._encoded(frame.task, kind, made, state))

    def _encoded(
        self, task: int, kind: str, made: list[Any], state: WorkerState | None
    ) -> bytes | memoryview:
        """Encode the result; if it cannot be sent, encode the error instead."""
        parcel = None
        try:
            parcel = self._packer.pack(made)
            return frames.encode(frames.Made(self._pass, task, kind, parcel, state))
        except Exception:  # noqa: BLE001 - the trainer reports any error
            if parcel is not None:
                self._packer.take_back(parcel)
            parcel = self._packer.pack([self._wrapped()])
            return frames.encode(frames.Made(self._pass, task, "error", parcel, None))

    def _is_due(self) -> bool:
        every = self._setup.state_every
        return every > 0 and self._fetched % every == 0

    def _last_state(self) -> WorkerState | None:
        try:
            return self._state() if self._is_stateful else None
        except Exception:  # noqa: BLE001 - no batch follows that could report the error
            return None

    def _state(self, *, is_first: bool = False) -> WorkerState | None:
        """Return the dataset's state; None if it has no state_dict()."""
        fetcher = self._fetcher
        iterator, is_ended = None, False
        if self._setup.is_iterable:
            iterator, is_ended = fetcher.dataset_iter, fetcher.ended
        dataset = None if iterator is self._dataset else state_of(self._dataset)
        state = WorkerState(
            dataset=dataset,
            iterator=state_of(iterator),
            is_ended=is_ended,
            fetched=self._fetched,
        )
        if is_first:
            self._is_stateful = state.dataset is not None or state.iterator is not None
        return state if self._is_stateful else None

    def _reseed(self, shared_seed: int | None) -> None:
        if isinstance(self._dataset, IterDataPipe):
            assert shared_seed is not None
            self._shared_rng.manual_seed(shared_seed)
            self._dataset = apply_random_seed(self._dataset, self._shared_rng)

    def _wrapped(self) -> Any:
        where = f"in DataLoader worker process {self._setup.worker_id}"
        wrapped = workers.ExceptionWrapper(where=where)
        try:
            pickled_whole(wrapped)
        # The user's exception cannot be pickled, e.g. its class cannot be imported: send its text.
        except Exception:  # noqa: BLE001
            wrapped.exc_type = RuntimeError
        return wrapped

    def _announce(self, segment_id: int, fd: int, size_bytes: int) -> None:
        self._send(frames.NewSegment(segment_id, size_bytes))
        send_handle(self._connection, fd, 0)

    def _retire(self, segment_id: int) -> None:
        self._send(frames.OldSegment(segment_id))

    def _send_state(self, frame: frames.Ready | frames.Ended) -> None:
        try:
            encoded = frames.encode(frame)
        except Exception:  # noqa: BLE001 - pickling the state raised; the next batch reports this
            self._fault = self._wrapped()
            encoded = frames.encode(replace(frame, state=None))
        self._connection.send_bytes(encoded)

    def _send(self, frame: frames.FromWorker) -> None:
        self._connection.send_bytes(frames.encode(frame))


class _Inbox:
    """The frames of the trainer. A thread reads them from the socket as they arrive, so that the
    trainer never waits to send a frame. The thread ends the process when the trainer dies, even
    while the user's code runs.
    """

    def __init__(self, connection: Connection, parent_pid: int) -> None:
        self._connection, self._parent_pid = connection, parent_pid
        self._frames: queue.SimpleQueue[frames.ToWorker | Exception | None] = queue.SimpleQueue()
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        self.pass_id: int | None = None
        threading.Thread(target=self._read, name="dataplane-inbox", daemon=True).start()

    def take(self, timeout_s: float | None) -> frames.ToWorker | None:
        """Return the next frame; None if the trainer is gone.

        Raises:  queue.Empty: no frame has arrived within `timeout_s`.  Whatever the unpickling of a
        user's index or state raises.
        """
        frame = self._frames.get(timeout=timeout_s)
        if isinstance(frame, Exception):
            raise frame
        return frame

    def _read(self) -> None:
        while (encoded := self._received()) is not None:
            try:
                frame = frames.decode(encoded)
            except Exception as error:  # noqa: BLE001 - `take` raises this error, which ends the worker
                self._frames.put(error)
                continue
            if isinstance(frame, frames.Begin):
                self.pass_id = frame.pass_id
            elif isinstance(frame, frames.Stop):
                self.pass_id = None
            self._frames.put(frame)
        self._frames.put(None)
        # The trainer is dead: end the process soon, even if the user's code never returns.
        threading.Event().wait(_LAST_WORDS_S)
        os._exit(1)

    def _received(self) -> bytes | None:
        """Wait for the trainer's next message; return None if the trainer is gone."""
        try:
            while not self._poll.poll(_PARENT_POLL_MS):
                if self._parent_pid and os.getppid() != self._parent_pid:
                    return None
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            return None


def work(setup: Setup, connection: Connection, inherited: list[Connection]) -> None:
    """Run a worker. This is the main function of its process."""
    try:
        for trainers in inherited:
            trainers.close()
        workers.report_fatal_signals()
        workers.name_thread("dataplane_work")
        torch.set_num_threads(1)
        inbox = _Inbox(connection, setup.parent_pid)
        Worker(setup, connection, inbox).run()
    except (KeyboardInterrupt, BrokenPipeError, ConnectionResetError):
        pass  # the trainer was interrupted as well, or is gone
