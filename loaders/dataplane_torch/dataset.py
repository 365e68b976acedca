"""ShardedIterableDataset: the same batches for torch's own DataLoader and its workers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import Unpack

from dataplane.client.describe import describe_columns, read_categories
from dataplane.client.mixing import catch_up, epoch_steps, place_of, state_at
from dataplane.client.session import Session
from dataplane.errors import ConfigError
from dataplane.ledger import PLACE_MAX
from dataplane.transforms.mixture_options import Mixture, Urls
from dataplane.units import whole
from dataplane.weights import MixHistory
from dataplane_torch.arguments import Arguments, epoch_of, job_of
from dataplane_torch.epoch_reader import EpochReader
from dataplane_torch.options import DEFAULTS, UrlOptions, url_options
from dataplane_torch.resume import resumed
from dataplane_torch.schema import Schema, schema_of
from dataplane_torch.tensors import Batch, Decoder

_WORKER_COUNT_MAX = 1024


class ShardedIterableDataset(IterableDataset[Batch]):
    """Batches of the shards at `urls`, for `torch.utils.data.DataLoader(dataset, batch_size=None,
    num_workers=n)`. Of n workers, worker w makes the steps w, w + n, …; since torch asks workers in
    turn, batches come in exactly the order of dataplane_torch.DataLoader, whose arguments this
    class shares.

    Every full pass is one epoch, and the next pass is the next epoch, however workers are started;
    `set_epoch` chooses another. After a pass that was left early, the next pass starts that epoch
    again, at the position of the state last loaded for it.

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
        given = Arguments(urls, batch_size, bool(shuffle), drop_last, timeout, filled)
        self._job = job_of(given)
        self._job.check_files()
        self._dataset_moved = filled["dataset_moved"]
        # Shared by all processes of one DataLoader: where to resume, and each worker's next epoch.
        # A worker that starts late finds its own entry, not yet advanced.
        self._resume = _shared_zeros(2)
        # The weights of a loaded state, which workers inherit, and which they need.
        self._mix: MixHistory | None = None
        self._mix_mark = _shared_zeros(1)
        self._next_epochs = _shared_zeros(_WORKER_COUNT_MAX)
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
        epoch = int(self._next_epochs[:count].min())
        cursor = int(self._resume[1]) if epoch == int(self._resume[0]) else 0
        first_step = worker
        if self._resume_steps is not None:
            epoch, cursor, first_step, stride = self._resume_steps
            self._resume_steps = None
            if stride != count:
                raise ConfigError(
                    f"this state was saved with {stride} DataLoader workers, and now there are "
                    f"{count}: use {stride}, or a state that the main process's dataset returned",
                    field="num_workers",
                )
        self._job.check_ranks(session.job)
        in_worker = get_worker_info() is not None
        decoder = Decoder(session.job.columns, shared=in_worker, parts=self._job.parts)
        reader = EpochReader(
            session, decoder, epoch, cursor, first_step, count, in_worker=in_worker
        )
        self._reader = reader
        return self._pass(reader, worker, count)

    def __len__(self) -> int:
        """Steps of the next pass's whole epoch, over all DataLoader workers."""
        session = self._session_of_process()
        epoch = int(self._next_epochs.min())
        return epoch_steps(session, epoch).count

    @property
    def schema(self) -> Schema:
        """The columns of batches: see DataLoader.schema."""
        job, columns = self._job, describe_columns(self._session_of_process())
        is_collated = bool(job.request.view.collate)
        return schema_of(columns, job.parts, is_collated=is_collated)

    def categories(self, column: str) -> tuple[Any, ...]:
        """The values of a column's codes: see DataLoader.categories."""
        return read_categories(self._session_of_process(), column)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; if a state was loaded for it, the position is kept.
        Call it in the main process; workers, even persistent ones, see it when the next pass
        begins.
        """
        self._next_epochs.fill_(epoch_of(epoch))
        self._reader = None

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position of the running pass.

        With DataLoader workers, the main process cannot see the position: pass the number of
        `batches` that this pass has yielded. Inside a worker, this is the worker's own state.
        """
        session = self._session_of_process()
        worker, count = _place()
        reader = self._reader
        epoch = int(self._next_epochs[:count].min()) if reader is None else reader.epoch
        cursor = int(self._resume[1]) if epoch == int(self._resume[0]) else 0
        if get_worker_info() is not None:
            step = worker if reader is None else reader.step
            start = cursor if reader is None else reader.start_cursor
            state = state_at(session, epoch, start).to_dict()
            return {**state, "step": step, "step_stride": count}
        if batches is not None:
            start, cursor = cursor, epoch_steps(session, epoch, cursor).after(batches)
            catch_up(session, epoch, start, cursor)
        elif reader is not None:
            cursor = reader.cursor
        found = state_at(session, epoch, cursor)
        return found.to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the next pass where the state was taken; an empty state means the start.

        Raises:  SpecMismatch: the state is of another job.  VersionMismatch: a newer version saved
        it.  ConfigError: it is damaged.
        """
        session = self._session_of_process()
        state = resumed(state_dict, session, dataset_moved=self._dataset_moved)
        mixture = session.job.spec.mixture
        is_own = mixture is None or session.mix == mixture.history
        self._mix, self._reader = None if is_own else session.mix, None
        self._mix_mark.fill_(_mark(self._mix))
        if "step" in state_dict:
            step, stride = whole(state_dict["step"]), whole(state_dict.get("step_stride"))
            if step is None or stride is None or not 0 <= step < PLACE_MAX or stride < 0:
                raise ConfigError("this state of a DataLoader worker is damaged", key="step")
            self._resume_steps = (state.epoch, state.cursor, step, stride)
            return
        epoch, cursor = place_of(session, state)
        self._resume[0], self._resume[1] = epoch, cursor
        self._next_epochs.fill_(epoch)

    def close(self) -> None:
        """Leave the job in this process. May be called twice."""
        if self._reader is not None:
            self._reader.close()
        if self._session is not None:
            self._session.close()
            self._session = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_reader": None}

    def _pass(self, reader: EpochReader, worker: int, count: int) -> Iterator[Batch]:
        try:
            while (batch := reader.next()) is not None:
                yield batch
                del batch  # or it would be kept alive while the next one is made
        finally:
            reader.close()
        # Advance every entry i with i % count == worker, so that the next pass may have another
        # number of workers. Entries that set_epoch has changed meanwhile stay as they are.
        slots = self._next_epochs[worker::count]
        slots[slots == reader.epoch] = reader.epoch + 1
        if self._reader is reader:
            self._reader = None

    def _session_of_process(self) -> Session:
        if self._session is None:
            job = self._job
            self._session = Session(
                job.endpoint,
                job.request,
                stall_timeout_s=job.stall_timeout_s,
                warns=_place()[0] == 0,  # and not every DataLoader worker
            )
            self._session.mix = self._mix
            weakref.finalize(self, self._session.close).atexit = False
        return self._session


def _shared_zeros(count: int) -> torch.Tensor:
    """int64[count] in the memory of all processes of one loader, whatever the default device is."""
    zeros = torch.zeros(count, dtype=torch.int64, device="cpu")
    return zeros.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def _mark(mix: MixHistory | None) -> int:
    return 0 if mix is None else int(mix.digest[:15], 16)


def _place() -> tuple[int, int]:
    info = get_worker_info()
    if info is None:
        return 0, 1
    if info.num_workers > _WORKER_COUNT_MAX:
        raise ConfigError(f"{info.num_workers} DataLoader workers: at most {_WORKER_COUNT_MAX}")
    return info.id, info.num_workers
