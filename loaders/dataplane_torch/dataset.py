"""ShardedIterableDataset: the same batches for torch's own DataLoader and its workers."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import re
import socket
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import Unpack

from dataplane.base.units import whole
from dataplane.client.describe import describe_columns, read_categories
from dataplane.client.mixing import catch_up, epoch_steps, place_of, state_at
from dataplane.client.session import Session
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import PLACE_MAX
from dataplane.model.records import MixHistory
from dataplane.transforms.mixture_options import Mixture, Urls
from dataplane_torch.arguments import Before, before_of, job_of
from dataplane_torch.epoch_reader import EpochReader
from dataplane_torch.options import DEFAULTS, Arguments, UrlOptions, epoch_of, url_options
from dataplane_torch.resume import chosen, resumed
from dataplane_torch.schema import Schema, schema_of
from dataplane_torch.tensors import Batch, Decoder
from dataplane_torch.torch_private import workers

# How many passes to remember. Workers of older passes can no longer start.
_PASSES_KEPT = 64
_LOCK_S_MAX, _LOCK_PAUSE_S = 60.0, 0.0005


class ShardedIterableDataset(IterableDataset[Batch]):
    """Batches of the shards at `urls`, for `torch.utils.data.DataLoader(dataset, batch_size=None,
    num_workers=n)`. Of n workers, worker w makes the steps w, w + n, …. Since torch takes batches
    from workers in turn, they come in exactly the order of dataplane_torch.DataLoader, whose
    arguments this class has.

    Every pass is the next epoch, however workers are started and however far the previous pass
    came; `set_epoch` chooses another epoch.

    Source:  torch.utils.data.dataloader._MultiProcessingDataLoaderIter, for the workers' turns.
    """

    @url_options
    def __init__(
        self,
        urls: Urls | Mixture,
        batch_size: int | None = 1,
        shuffle: bool = False,
        *,
        drop_last: bool = False,
        timeout: float = 0,
        **options: Unpack[UrlOptions],
    ) -> None:
        super().__init__()
        filled = cast("UrlOptions", {**DEFAULTS, **options})
        for name in ("replay_first_slab", "follow", "stages"):
            if filled[name]:
                raise ConfigError(
                    f"{name} is an option of dataplane_torch.DataLoader: use that", field=name
                )
        given = Arguments(urls, batch_size, bool(shuffle), drop_last, timeout, filled)
        self._job = job_of(given)
        self._job.check_files()
        self._dataset_moved = filled["dataset_moved"]
        self._passes = _Passes()
        # The weights of a loaded state: workers need them, and inherit them with the dataset.
        self._mix: MixHistory | None = None
        self._mix_mark = _shared_zeros(1)
        self._session: Session | None = None
        self._reader: EpochReader | None = None
        self._resume_steps: tuple[int, int, int, int] | None = None

    def __iter__(self) -> Iterator[Batch]:
        worker, count = _place()
        session = self._session_of_process()
        if int(self._mix_mark) != _mark(self._mix):
            raise ConfigError(
                "a state with other weights of the mixture was loaded after the DataLoader workers"
                " had started: load it before the first iter(), or leave out persistent_workers",
                field="state_dict",
            )
        place, first_step = None, worker
        if self._resume_steps is not None:
            epoch, cursor, first_step, stride = self._resume_steps
            place, self._resume_steps = (epoch, cursor), None
            if stride != count:
                raise ConfigError(
                    f"this state was saved with {stride} DataLoader workers, and now there are "
                    f"{count}: use {stride}, or a state that the main process's dataset returned",
                    field="num_workers",
                )
        self._job.check_ranks(session.job)
        in_worker = get_worker_info() is not None
        decoder = Decoder(session.job.columns, shared=in_worker, parts=self._job.parts)
        return self._pass(session, decoder, place, first_step, count)

    def __len__(self) -> int:
        """Return the number of steps of the whole epoch of the running pass, or of the next pass if
        none is running, over all DataLoader workers.
        """
        return epoch_steps(self._session_of_process(), self._passes.present()[0]).count

    @property
    def schema(self) -> Schema:
        """Return the columns of batches: see DataLoader.schema."""
        job, columns = self._job, describe_columns(self._session_of_process())
        is_collated = bool(job.request.spec.view.collate)
        return schema_of(columns, job.parts, is_collated=is_collated)

    def categories(self, column: str) -> tuple[Any, ...]:
        """Return the values of a column's codes: see DataLoader.categories."""
        return read_categories(self._session_of_process(), column)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. If a state of that epoch was loaded, its position is
        kept. Call this in the main process; workers, even persistent ones, see it when the next
        pass begins.
        """
        epoch = epoch_of(epoch)
        cursor = None
        if self._job.request.spec.stages and epoch != self._passes.next_epoch:
            session = self._session_of_process()
            cursor = chosen(session, epoch)
            self._job = replace(self._job, request=session.request)
        self._passes.choose(epoch, cursor)
        self._reader = None

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the position of the running pass.

        With DataLoader workers, the main process cannot see the position: pass the number of
        `batches` that this pass has yielded. Inside a worker, this is the worker's own state.
        """
        session = self._session_of_process()
        worker, count = _place()
        reader = self._reader
        epoch, cursor = self._passes.present(is_over=not batches)
        if reader is not None:
            epoch, cursor = reader.epoch, reader.start_cursor
        if get_worker_info() is not None:
            step = worker if reader is None else reader.step
            state = state_at(session, epoch, cursor).to_dict()
            return {**state, "step": step, "step_stride": count}
        if batches is not None:
            start, cursor = cursor, epoch_steps(session, epoch, cursor).after(batches)
            catch_up(session, epoch, start, cursor)
        elif reader is not None:
            cursor = reader.cursor
        found = state_at(session, epoch, cursor)
        return found.to_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], change: str | None = None, before: Before = None
    ) -> str:
        """Continue the next pass where the state was taken; an empty state means the start. With a
        `change`, a state of another recipe is accepted: see DataLoader.load_state_dict.

        Raises:  SpecMismatch: the state is of another job.  VersionMismatch: a newer version saved
        the state.  ConfigError: the state is damaged.
        """
        session = self._session_of_process()
        state, sentence = resumed(
            state_dict,
            session,
            dataset_moved=self._dataset_moved,
            change=change,
            before=before_of(before),
        )
        if session.following is not None:
            session.return_to_own()
            raise ConfigError(
                'change="finish" is for DataLoader: with a ShardedIterableDataset, read the rest of'
                ' the epoch with the former arguments, then pass change="restart"',
                field="change",
            )
        if sentence and "step" in state_dict:
            raise ConfigError(
                "this is the state of one DataLoader worker, and the recipe changes at one place of"
                " the whole run: with change=, load a state of the main process's dataset",
                field="change",
            )
        # Keep the changed request, so that DataLoader workers, which start later, open the same
        # stage.
        self._job = replace(self._job, request=session.request)
        mixture = session.job.spec.mixture
        is_own = mixture is None or session.mix == mixture.history
        self._mix, self._reader = None if is_own else session.mix, None
        self._mix_mark.fill_(_mark(self._mix))
        if "step" in state_dict:
            step, stride = whole(state_dict["step"]), whole(state_dict.get("step_stride"))
            if step is None or stride is None or not 0 <= step < PLACE_MAX or stride < 0:
                raise ConfigError("this state of a DataLoader worker is damaged", key="step")
            self._resume_steps = (state.epoch, state.cursor, step, stride)
            return ""
        self._passes.choose(*place_of(session, state))
        return sentence

    def close(self) -> None:
        """Leave the job in this process. May be called twice."""
        if self._reader is not None:
            self._reader.close()
        if self._session is not None:
            self._session.close()
            self._session = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_reader": None}

    def _pass(
        self,
        session: Session,
        decoder: Decoder,
        place: tuple[int, int] | None,
        first_step: int,
        count: int,
    ) -> Iterator[Batch]:
        number, epoch, cursor = self._passes.begin(place)
        in_worker = get_worker_info() is not None
        reader = EpochReader(
            session, decoder, epoch, cursor, first_step, count, in_worker=in_worker
        )
        self._reader = reader
        try:
            while (batch := reader.next()) is not None:
                yield batch
                del batch  # do not keep the batch alive while the next one is made
        finally:
            reader.close()
        self._passes.finish(number)
        if self._reader is reader:
            self._reader = None

    def _session_of_process(self) -> Session:
        if self._session is None:
            job = self._job
            self._session = Session(
                job.endpoint,
                job.request,
                stall_timeout_s=job.stall_timeout_s,
                warns=_place()[0] == 0,  # warn in only one of the DataLoader workers
            )
            self._session.mix = self._mix
            weakref.finalize(self, self._session.close).atexit = False
            if get_worker_info() is not None:
                workers.end_queues_at_exit()
        return self._session


class _Passes:
    """The epochs of a dataset's passes, in memory that all processes of its loaders share.

    Invariants:
    1. A pass takes the next epoch when its first batch is requested, and keeps it. No other pass
       gets that epoch, unless it is chosen.
    2. All DataLoader workers of a pass get the same epoch, even those that start when others have
       finished, or when the next pass has begun.
    """

    def __init__(self) -> None:
        self._lock = f"\0dataplane-passes-{uuid.uuid4().hex}"
        # `_next` is the next epoch and its cursor, `_count` the number of passes that have begun.
        self._next, self._count = _shared_zeros(2), _shared_zeros(1)
        # A row per recent pass: its key (seed, begun, first), epoch, cursor, and the number of
        # workers that are still reading.
        self._rows = _shared_zeros(_PASSES_KEPT, 6)
        # `_begun` counts the passes that this process has begun; `_chosen` is the `_count` at this
        # process's last choice of an epoch.
        self._begun = self._chosen = 0

    @property
    def next_epoch(self) -> int:
        """The epoch of the next pass."""
        return int(self._next[0])

    def choose(self, epoch: int, cursor: int | None = None) -> None:
        """Make the next pass read this epoch from this cursor on. Without a cursor, keep the cursor
        that was chosen for this epoch before, if any.
        """
        if cursor is None:
            cursor = int(self._next[1]) if epoch == int(self._next[0]) else 0
        with self._alone():
            self._next[0], self._next[1] = epoch, cursor
            self._chosen = int(self._count)

    def begin(self, place: tuple[int, int] | None) -> tuple[int, int, int]:
        """Begin a pass of this process, at this place or in the next epoch. Return its number,
        epoch and cursor.
        """
        worker, count = _place()
        info = get_worker_info()
        self._begun += 1
        # Find the row of this pass. Workers of one pass have the same seed, but torch may draw the
        # same seed for two passes. So also compare how many passes the processes have begun, which
        # persistent workers do in turn, and the number of the pass's first process: torch starts
        # the workers of a pass one after the other.
        seed = -1 if info is None else info.seed - worker
        started = re.search(r"\d+$", multiprocessing.current_process().name)
        first = int(started[0]) - worker if started else 0
        with self._alone():
            passes = int(self._count)
            for number in range(passes - 1, max(passes - _PASSES_KEPT, 0) - 1, -1):
                known_seed, begun, known_first, epoch, cursor, _ = self._row(number)
                is_same = (known_seed, begun) == (seed, self._begun) and info is not None
                if is_same and abs(first - known_first) < count:
                    return (number, *(place or (epoch, cursor)))
            epoch, cursor = place or (int(self._next[0]), int(self._next[1]))
            row = [seed, self._begun, first, epoch, cursor, count]
            self._rows[passes % _PASSES_KEPT] = torch.tensor(row, device="cpu")
            self._next[0], self._next[1] = epoch + 1, 0
            self._count += 1
        return passes, epoch, cursor

    def finish(self, number: int) -> None:
        """Note that a worker has read all of its steps of a pass."""
        with self._alone():
            if number >= int(self._count) - _PASSES_KEPT:
                self._rows[number % _PASSES_KEPT, 5] -= 1

    def present(self, *, is_over: bool = True) -> tuple[int, int]:
        """Return the epoch and cursor at which the last pass began, if it has steps left, or if
        `is_over` is false; otherwise the epoch and cursor of the next pass.
        """
        number = int(self._count) - 1
        if number >= self._chosen:
            *_, epoch, cursor, left = self._row(number)
            if left > 0 or not is_over:
                return epoch, cursor
        return int(self._next[0]), int(self._next[1])

    def _row(self, number: int) -> list[int]:
        row: list[int] = self._rows[number % _PASSES_KEPT].tolist()
        return row

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other processes and threads within the block. The lock is the name of a socket:
        workers need to inherit no descriptor, and the kernel releases the name when a process ends.
        """
        deadline = time.monotonic() + _LOCK_S_MAX
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
            while True:
                try:
                    lock.bind(self._lock)
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                        raise
                time.sleep(_LOCK_PAUSE_S)
            yield


def _shared_zeros(*shape: int) -> torch.Tensor:
    """Return int64[shape] in memory that all processes of a loader share, on the CPU."""
    zeros = torch.zeros(shape, dtype=torch.int64, device="cpu")
    return zeros.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def _mark(mix: MixHistory | None) -> int:
    return 0 if mix is None else int(mix.digest[:15], 16)


def _place() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
