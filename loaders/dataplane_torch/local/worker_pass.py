"""One pass over a user's Dataset with worker processes.

Invariants:
1. Tasks go to the workers in turn, and batches come back in that order; with in_order=False each
   batch is yielded as soon as it is ready.
2. At most prefetch_factor batches per worker are in progress or waiting to be taken.
3. A pass's state covers exactly the batches that it has yielded.
4. Each parcel is either unpacked or discarded, once, so that its memory is released.
5. Threads take turns. If a signal handler raises while a pass waits, nothing changes. If it raises
   elsewhere, the pass is torn, and yields no more batches; the next pass is not affected.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from dataplane_torch.device import Target
from dataplane_torch.local import frames
from dataplane_torch.local.beginning import Beginning, PassPlace
from dataplane_torch.local.crew import Crew, hire
from dataplane_torch.local.parcel import Arrived, discard
from dataplane_torch.local.progress import PassState, SamplerState, WorkerState
from dataplane_torch.local.segments import MappedSegments
from dataplane_torch.sending import CopyStream, Sending
from dataplane_torch.torch_private.iteration import WorkerPassBase
from dataplane_torch.torch_private.memory import pin_memory


class BatchTask(Struct):
    """A batch that a worker makes, and the sampler's position after its index. `make` returns the
    batch. It is set when the memory of the parcel is taken, which may happen before the batch is
    due if it is copied to a device. `raised` is the last error of `make`.
    """

    worker_id: int
    index: Any
    sampler: SamplerState | None
    answer: frames.Made | frames.Ended | None = None
    make: Callable[[], Any] | None = None
    raised: str | None = None

    def take(
        self,
        made: frames.Made,
        mapped: MappedSegments,
        copy_stream: CopyStream | None,
        pin: Callable[[Any], Any] | None,
    ) -> Callable[[], Any]:
        """Take the memory of the parcel. Return a function that returns the batch, or raises the
        worker's error; if it raises, it may be called again.
        """
        if self.make is None:
            unpack = partial(_unpacked, Arrived(made.parcel, mapped), pin)
            self.make = unpack
            if copy_stream is not None and made.kind != "error":
                self.make = Sending(copy_stream, unpack)
        return self.make

    def raises_again(self, error: Exception) -> bool:
        """Return whether making the batch has raised the same error before. An exception from a
        signal handler is not raised again; an unpickling error is, and is reported once.
        """
        before, self.raised = self.raised, repr(error)
        return before == self.raised


def _unpacked(arrived: Arrived, pin: Callable[[Any], Any] | None) -> Any:
    batch = arrived.unpack()
    return batch if pin is None else pin(batch)


class WorkerPass(WorkerPassBase):
    """A pass like torch's with num_workers > 0."""

    def __init__(
        self,
        loader: Any,
        resume: PassState | None,
        loaded_in: Mapping[str, int],
        target: Target | None,
    ) -> None:
        self._crew: Crew | None = None
        self._lock, self._is_torn = threading.RLock(), False
        self._pass_id = 0
        self._tasks: dict[int, BatchTask] = {}
        self._target = target
        self._loader, self._may_rehire = weakref.ref(loader), False
        self._in_order = loader.in_order
        if loader.prefetch_factor < 1:
            raise ValueError(
                f"prefetch_factor={loader.prefetch_factor} keeps workers from making batches: with "
                "num_workers > 0 it must be 1 or more"
            )
        self._depth = loader.prefetch_factor * loader.num_workers
        begin = self._begin(loader, resume, loaded_in)
        with begin.drawing():
            super().__init__(loader)
            seed = self.shared_seed
            if begin.is_anew:  # torch's constructor also makes the iterator twice
                begin.remember()
                super().begin_again(loader, is_first=True)
            self._take_places(begin)
        self.shared_seed = seed
        self._crew = hire(self, loader, target)
        self._open(resume)

    @property
    def place(self) -> PassPlace:
        """Return the state of the pass. Waits for the states that workers send when they start."""
        if not self._has_states:
            with self._lock:
                while not self._has_states:
                    self._hear(None, rests=True)
        return self.beginning.place

    @property
    def _has_states(self) -> bool:
        is_over = self.beginning.place.is_finished or self._is_closed or self._is_torn
        return is_over or all(self._is_ready) or not self.is_ours

    @property
    def is_ours(self) -> bool:
        """Whether this process began the pass; false in a child that was forked since."""
        return self._crew is None or self._crew.is_ours

    @property
    def processes(self) -> list[Any]:
        """The worker processes."""
        return [] if self._crew is None else self._crew.processes

    def close(self) -> None:
        """End the workers. Batches that are held stay valid. May be called twice."""
        self._is_closed = True
        self._tasks.clear()
        if self._crew is not None:
            self._crew.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def begin_again(self, loader: Any, *, is_first: bool = False) -> None:
        """Begin the next pass, with the same workers if all live and no frame is incomplete."""
        with self._lock:
            was_torn, self._is_torn = self._is_torn, True
            begin = self._begin(loader, None, {})
            with begin.drawing():
                super().begin_again(loader, is_first=is_first)
                self._take_places(begin)
            if self._crew is not None and self._crew.is_to_be_replaced(was_torn):
                self._tasks.clear()
                self._crew.close()
                self._crew = hire(self, loader, self._target)
            else:
                self._may_rehire = True
            self._open_anew()
            self._is_torn = False

    def _rehired(self) -> bool:
        """Replace workers that an interrupt of the previous pass ended, if this is only noticed
        now. The new workers get the same tasks. Return False if the workers ended in another way.
        """
        crew, loader, may = self._crew, self._loader(), self._may_rehire
        self._may_rehire = False
        if crew is None or loader is None or not may or self._next_out or not crew.was_interrupted:
            return False
        crew.close()
        self._crew = crew = hire(self, loader, self._target)
        self._pass_id += 1
        self._is_active, self._is_ready = [True] * self.worker_count, [False] * self.worker_count
        for worker_id in range(self.worker_count):
            crew.send(worker_id, frames.Begin(self._pass_id, self.shared_seed, None, anew=False))
        for task_id, task in self._tasks.items():
            task.answer = task.make = None
            crew.send(task.worker_id, frames.Make(self._pass_id, task_id, task.index))
        return True

    def _open_anew(self) -> None:
        self._pass_id += 1
        for task in self._tasks.values():
            if isinstance(task.answer, frames.Made) and task.make is None:
                self._discard(task.worker_id, task.answer)
        self._open(None)

    def _begin(
        self, loader: Any, resume: PassState | None, loaded_in: Mapping[str, int]
    ) -> Beginning:
        self._is_closed = False
        self.beginning = Beginning(loader, loader.num_workers, resume, loaded_in)
        return self.beginning

    def _take_places(self, begin: Beginning) -> None:
        self._places = begin.places(self)
        if self._places is not None:
            begin.place.sampler = self._places.place()

    def _open(self, resume: PassState | None) -> None:
        """Tell the workers where to begin, and give them their first tasks."""
        assert self._crew is not None
        count, place = self.worker_count, self.beginning.place
        self._tasks = {}
        self._copy_stream = None if self._target is None else self._target.copy_stream()
        self._next_task = self._next_out = 0
        self._is_active, self._is_ready = [True] * count, [False] * count
        self._has_indices = True
        self._furthest = -1, place.sampler
        states = self._states_to_load(resume)
        first = 0
        if self.beginning.goes_on is not None and len(self.beginning.goes_on.workers) == count:
            first = place.next_worker
            place.workers = [state or WorkerState() for state in states]
        self._turns = itertools.cycle([*range(first, count), *range(first)])
        for worker_id, state in enumerate(states):
            anew = resume is not None and resume.is_finished
            begin = frames.Begin(self._pass_id, self.shared_seed, state, anew)
            self._crew.send(worker_id, begin)
        self._fill()
        self.beginning.begun()

    def _states_to_load(self, resume: PassState | None) -> list[WorkerState | None]:
        count = self.worker_count
        # Load the states of a finished pass only into persistent workers: other workers begin the
        # next pass with a new copy of the dataset.
        is_over = resume is not None and resume.is_finished
        is_kept = self.persists or not is_over
        if resume is None or not is_kept or len(resume.workers) != count:
            return [None] * count
        return list(resume.workers)

    def __next__(self) -> Any:
        if not self.is_ours:
            raise RuntimeError(
                "this pass and its workers belong to another process: call iter() on the loader in "
                "this process"
            )
        with self._lock:
            self._check_whole()
            self._is_torn = True
            try:
                batch = self._next()
            except StopIteration:
                self._is_torn = False
                raise
            self._is_torn = False
            return batch

    def _check_whole(self) -> None:
        if self._is_torn and self._crew is not None:
            self._crew.look_after()
            raise RuntimeError(
                "an exception interrupted this pass as it handed a batch over, and the batch is "
                "lost: begin another pass with iter(loader)"
            )

    def _next(self) -> Any:
        if self.beginning.has_new_epoch():
            self.beginning.forget_resumed(self)
            self._take_places(self.beginning)
            self._open_anew()
        try:
            return super().__next__()
        except StopIteration:
            if self._tasks and not self._is_closed:  # the dataset has raised StopIteration
                raise
            if not self.beginning.place.is_finished and not self._is_closed:
                self.beginning.finish()
            if not self.persists:
                self.close()
            raise

    def next_batch(self) -> Any:
        """Return the next batch when its worker has made it."""
        if self._is_closed:
            raise StopIteration
        deadline = time.monotonic() + self.timeout_s if self.timeout_s > 0 else None
        while True:
            task_id = self._answered()
            if task_id is not None:
                return self._taken(task_id)
            if not self._tasks:
                raise StopIteration
            if not self._hear(deadline, rests=True):
                self._is_torn = False
                raise RuntimeError(f"DataLoader timed out after {self.timeout_s} seconds")

    def _answered(self) -> int | None:
        """Return the task of the next batch, if the batch is ready. Skip tasks without a batch."""
        for task_id in list(self._tasks) if not self._in_order else itertools.count(self._next_out):
            task = self._tasks.get(task_id)
            if task is None or (task.answer is None and self._in_order):
                return None
            if isinstance(task.answer, frames.Made):
                return task_id
            if task.answer is not None:
                self._pass_over(task_id, task.answer)
        return None

    def _pass_over(self, task_id: int, answer: frames.Ended) -> None:
        worker_id = self._tasks.pop(task_id).worker_id
        self._next_out = task_id + 1
        if answer.state is not None:
            self.beginning.place.workers[worker_id] = answer.state
        self._fill()

    def _taken(self, task_id: int) -> Any:
        task = self._tasks[task_id]
        make, was_reported = self._take(task), False
        batch: Any = None
        self._is_torn = False  # if `make` raises, the next call tries again
        try:
            batch = make()
        except Exception as error:
            if not (was_reported := task.raises_again(error)):
                raise
        self._is_torn = True
        self._tasks.pop(task_id, None)
        self._next_out = task_id + 1
        self._fill()
        if was_reported:
            return self.next_batch()
        made = cast("frames.Made", task.answer)
        if made.kind == "error":
            self._is_torn = False
            batch.reraise()
        if self._copy_stream is not None:
            self._look_ahead()
        self._step(task_id, task, made.state)
        return batch

    def _take(self, task: BatchTask) -> Callable[[], Any]:
        assert self._crew is not None
        mapped, made = self._crew.mapped[task.worker_id], cast("frames.Made", task.answer)
        pin = None
        # With a copy stream, the memory of the parcel is already pinned.
        if self.is_pinning and self._copy_stream is None:
            pin = functools.partial(pin_memory, device=self.pinned_for)
        return task.take(made, mapped, self._copy_stream, pin)

    def _look_ahead(self) -> None:
        """Begin to copy the next batch, if it has arrived. Never waits; errors are raised when that
        batch is due.
        """
        task = self._next_made()
        if task is None:
            with contextlib.suppress(RuntimeError):  # waiting for the batch will raise again
                self._hear(0.0, rests=False)
            task = self._next_made()
        if task is not None and isinstance(sending := self._take(task), Sending):
            sending.begin()

    def _next_made(self) -> BatchTask | None:
        """Return the task of the next batch that has arrived, without changing anything; None if
        its worker sent an error.
        """
        for task in self._tasks.values():
            if isinstance(task.answer, frames.Made):
                return task if task.answer.kind != "error" else None
            if task.answer is None and self._in_order:
                return None
        return None

    def _step(self, task_id: int, task: BatchTask, state: WorkerState | None) -> None:
        place = self.beginning.place
        place.step += 1
        place.next_worker = (task.worker_id + 1) % self.worker_count
        if task.sampler is not None and self._in_order:
            place.sampler = task.sampler
        elif task.sampler is not None:
            self._furthest = max(self._furthest, (task_id, task.sampler), key=lambda pair: pair[0])
            last, reached = self._furthest
            # Record indices that were drawn earlier, but whose batches are still being made.
            missing = tuple(other.index for i, other in self._tasks.items() if i < last)
            place.sampler = replace(reached, missing=missing + reached.missing)
        if state is not None:
            place.workers[task.worker_id] = state
        elif place.is_iterable:
            before = place.workers[task.worker_id]
            place.workers[task.worker_id] = replace(before, skip=before.skip + 1)

    def _fill(self) -> None:
        while self._has_indices and len(self._tasks) < self._depth:
            worker_id = self._next_worker()
            if worker_id is None:
                return
            try:
                index = self.next_index()
            except StopIteration:
                self._has_indices = False
                return
            assert self._crew is not None
            make = frames.Make(self._pass_id, self._next_task, index)
            self._crew.send(worker_id, make)
            place = None if self._places is None else self._places.place()
            self._tasks[self._next_task] = BatchTask(worker_id, index, place)
            self._next_task += 1

    def _next_worker(self) -> int | None:
        """Return the worker whose turn it is; None if no worker has samples left."""
        active = sum(self._is_active)
        for _ in range(2 * self.worker_count):
            if not active:
                break
            worker_id: int = next(self._turns)
            if not self._is_active[worker_id]:
                continue
            if self._in_order or self._under_way(worker_id) < max(1, self._depth // active):
                return worker_id
        return None

    def _under_way(self, worker_id: int) -> int:
        tasks = self._tasks.values()
        return sum(task.worker_id == worker_id and task.answer is None for task in tasks)

    def _hear(self, deadline: float | None, *, rests: bool) -> bool:
        """Process the workers' messages. Return False if the deadline came first. `rests` means
        that no batch is being handed over, so that an interrupt of the wait does not tear the pass.

        Raises:  RuntimeError: a worker died.
        """
        try:
            return self._heard(deadline, rests=rests)
        except RuntimeError:
            if not self._rehired():
                raise
            return True

    def _heard(self, deadline: float | None, *, rests: bool) -> bool:
        assert self._crew is not None
        was_torn, self._is_torn = self._is_torn, not rests
        ready = self._crew.wait(deadline)
        self._is_torn = True
        for worker_id, frame in self._crew.heard(ready):
            match frame:
                case frames.Made() if frame.pass_id != self._pass_id:
                    self._discard(worker_id, frame)
                case frames.Made():
                    self._tasks[frame.task].answer = frame
                case frames.Ready() if frame.pass_id == self._pass_id:
                    self._is_ready[worker_id] = True
                    if frame.state is not None:
                        self.beginning.place.workers[worker_id] = frame.state
                case frames.Ended() if frame.pass_id == self._pass_id:
                    self._ended(worker_id, frame)
                case _:
                    pass
        self._is_torn = was_torn
        return deadline is None or time.monotonic() < deadline

    def _ended(self, worker_id: int, frame: frames.Ended) -> None:
        """Note that a worker has no more samples, and will not answer its other tasks."""
        assert self._crew is not None
        self._is_active[worker_id] = False
        for task in self._tasks.values():
            if task.worker_id == worker_id and task.answer is None:
                task.answer = replace(frame, state=None)
        self._tasks[frame.task].answer = frame
        if not self.persists:
            self._crew.let_go(worker_id)

    def _discard(self, worker_id: int, made: frames.Made) -> None:
        assert self._crew is not None
        discard(made.parcel, self._crew.mapped[worker_id])
