"""The job of a DataLoader over urls, for which a node does the work."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs
from msgspec.structs import replace
from torch.utils.data import IterableDataset

from dataplane.client.describe import describe_columns, read_categories
from dataplane.client.endpoint import Embedded
from dataplane.client.launch import BegunNode
from dataplane.client.mixing import (
    changed,
    epoch_steps,
    place_of,
    rows_reached,
    sample_count,
    state_at,
)
from dataplane.client.mount import Pinning
from dataplane.client.session import Session
from dataplane.client.stages import FINISH, RESTART
from dataplane.client.state import RowsDigest
from dataplane.client.statistics import Statistics
from dataplane.model.changes import TakenOut
from dataplane.model.errors import ClosedError, ConfigError, DataplaneError
from dataplane.model.ledger import Schedule
from dataplane.rpc.messages import OpenJob, WeightsChanged
from dataplane.transforms.mixture_options import MixStep, weights_of
from dataplane_torch.arguments import Before, JobToOpen, before_of
from dataplane_torch.device import Target
from dataplane_torch.epoch_reader import EpochReader, check_process
from dataplane_torch.options import brief
from dataplane_torch.resume import REPLAY, chosen, entered, resumed, turned, warn_of_replaced
from dataplane_torch.schema import Schema, schema_of
from dataplane_torch.sending import CopyStream
from dataplane_torch.stages import StageToOpen, scheduled
from dataplane_torch.tensors import Batch, Decoder


class Shards(IterableDataset[Batch]):
    """The `dataset` attribute of a loader over urls. Only that loader can read it."""

    def __init__(self, urls: Sequence[str], job: UrlJob | None = None) -> None:
        super().__init__()
        self._urls = tuple(urls)
        self._job = None if job is None else weakref.ref(job)

    @property
    def urls(self) -> tuple[str, ...]:
        """The urls of the present stage."""
        job = None if self._job is None else self._job()
        return self._urls if job is None else job.urls

    def __len__(self) -> int:
        """Return the number of samples that all ranks read in the present epoch. Open the dataset.

        Raises:  ClosedError: the loader is gone.
        """
        job = None if self._job is None else self._job()
        if job is None:
            raise ClosedError("only the loader of these shards knows how many samples they have")
        with brief:
            return job.sample_count

    def __bool__(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_urls": self.urls, "_job": None}

    def __iter__(self) -> Iterator[Batch]:
        """Refuse to iterate, which only the loader can do.

        Raises:  ConfigError: always.
        """
        raise ConfigError(
            "only dataplane_torch.DataLoader can read this dataset: for another loader pass "
            "dataplane_torch.ShardedIterableDataset",
            field="dataset",
        )

    def __getitem__(self, index: object) -> Batch:
        """Refuse to read single samples.

        Raises:  ConfigError: always.
        """
        raise ConfigError(
            f"shards are read in batches, so dataset[{index!r:.40}] does not exist: take a batch,"
            " next(iter(loader)), or look at rows with `dataplane inspect --rows`",
            field="dataset",
        )

    def __repr__(self) -> str:
        return f"Shards({', '.join(self.urls)})"


class UrlJob:
    """The job of a loader over urls, and the position of its passes."""

    def __init__(
        self,
        stages: Sequence[StageToOpen],
        begun: BegunNode | None = None,
        *,
        dataset_moved: bool = False,
        follows: bool = False,
        replays: bool = False,
        pinning: Pinning | None = None,
        target: Target | None = None,
    ) -> None:
        self._stages, self._number = stages, 0
        has_columns = self._job.parts.columns != ()  # without columns, no slabs are requested
        self._session = Session(
            self._job.endpoint,
            replace(self._with_ahead(), follows=has_columns),
            pinning=pinning if target is None else target.pinning(reads_all=True),
            stall_timeout_s=self._job.stall_timeout_s,
            begun=begun,
        )
        weakref.finalize(self, self._session.close).atexit = False
        self._target, self._dataset_moved, self._replays = target, dataset_moved, replays
        self._follows, self._listed = follows, 0
        self._decoder: Decoder | None = None
        self._schema: Schema | None = None
        self._epoch, self._cursor = 0, 0
        self._made, self._reached = 0, (0, 0)  # the steps made in this stage, and the last place
        self._reader: EpochReader | None = None
        self._last: EpochReader | None = None
        self._digest = RowsDigest()
        self._digested: EpochReader | None = None
        self._digest_from = 0
        self._weights_set = 0
        self._changed: WeightsChanged | None = None  # by set_weights() since a state was loaded

    @property
    def _job(self) -> JobToOpen:
        return self._stages[self._number].job

    def _with_ahead(self) -> OpenJob:
        """Return the request of the present stage; on the first rank of a host, with later ones."""
        request = self._job.request
        later = () if request.topology.local_rank else self._stages[self._number + 1 :]
        ahead = [(number, of.job.request) for number, of in enumerate(later, self._number + 2)]
        return replace(request, ahead=tuple(ahead))

    def begin(self) -> BatchIterator:
        """Begin the next pass. This ends the previous pass and its epoch, even in the middle."""
        if self._replays and self._session.request.topology.rank == 0:
            warnings.warn(
                "replay_first_slab=True: every step gets the first batches of the epoch, to "
                "measure the trainer without its data. This is no real epoch: remove the argument "
                "to train",
                stacklevel=3,
            )
        self._leave_pass()
        self._turn()
        decoder = self._decoder_of_job()
        copy_stream = None if self._target is None else self._target.copy_stream()
        return BatchIterator(self, decoder, copy_stream)

    def open_reader(self, decoder: Decoder, copy_stream: CopyStream | None) -> EpochReader:
        """Open the reader of a pass when its first batch is requested. Until then `set_epoch` may
        still change the epoch, as some frameworks do after iter(); so a pass of which no batch is
        requested does not use up an epoch.
        """
        self._leave_pass()  # another iterator may have begun a pass after this iterator was made
        if self._turn():  # set_epoch() was called since
            decoder = self._decoder_of_job()
        reader = EpochReader(
            self._session, decoder, self._epoch, self._cursor, copy_stream=copy_stream,
            replays=self._replays, steps_max=self._steps_left,
        )  # fmt: skip
        self._digest = self._rows()
        self._cursor = 0
        self._reader = self._last = self._digested = reader
        self._digest_from = reader.start_cursor
        return reader

    @property
    def urls(self) -> tuple[str, ...]:
        """The urls of the present stage."""
        return self._job.request.source.urls

    @property
    def dataset(self) -> Shards:
        """The dataset of this job."""
        return Shards(self.urls, self)

    @property
    def batch_size(self) -> int:
        """The samples of this rank in a step; the rank may get one sample less if the number of
        ranks does not divide the global batch.
        """
        request = self._job.request
        return -(-request.spec.global_batch // request.topology.dp_size)

    @property
    def sample_count(self) -> int:
        """The samples of the whole present epoch, over all ranks."""
        self._turn()
        return epoch_steps(self._session, self.epoch).left

    @property
    def step_count(self) -> int:
        """The steps of the whole present epoch."""
        self._turn()
        count, left = epoch_steps(self._session, self.epoch).count, self._steps_left
        if left is None:
            return count
        cursor = self._cursor if self._reader is None else self._reader.cursor
        return min(count, count - epoch_steps(self._session, self.epoch, cursor).count + left)

    @property
    def schema(self) -> Schema:
        """Return the columns of batches."""
        self._turn()
        if self._schema is None:
            job, columns = self._job, describe_columns(self._session)
            is_collated = bool(job.request.spec.view.collate)
            self._schema = schema_of(columns, job.parts, is_collated=is_collated)
        return self._schema

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources of a mixture."""
        mixture = self._job.request.mixture
        return () if mixture is None else tuple(source.name for source in mixture.sources)

    def categories(self, column: str) -> tuple[Any, ...]:
        """Return the values of a column's codes."""
        return read_categories(self._session, column)

    @property
    def valid_count(self) -> int | None:
        """The rows of the last batch that are not padding; None before the first."""
        return None if self._last is None else self._last.valid_count

    @property
    def epoch(self) -> int:
        """The epoch of the running pass, or of the next one if none is running."""
        return self._reader.epoch if self._reader is not None else self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. If a state of the same epoch was loaded, its position
        is kept; at the end of the epoch, the pass has no batches. A pass of the epoch in which the
        recipe was changed has no batches either.

        Raises:  ConfigError: `epoch` belongs to a former stage of the run.
        """
        if epoch != self._epoch:
            self._cursor = chosen(self._session, epoch)
        self._count_steps()
        self._epoch, self._reader = epoch, None

    def set_weights(self, weights: Mapping[str, float]) -> MixStep:
        """Change the shares of a mixture's sources from the next round on. Return the first step of
        that round.

        Raises:  ConfigError: there is no mixture, or the weights do not fit it.  SpecMismatch:
        another rank has set other weights.
        """
        self._refuse_replay("weights to change")
        self._turn()
        reader, start = self._reader, self._cursor
        if self._job.request.mixture is None:
            raise ConfigError(
                "this loader reads one dataset: only loaders over a Mixture have weights",
                field="set_weights",
            )
        if self._session.following is not None:
            raise ConfigError(
                "weights do not change in the rest of an epoch with a former recipe: set them when"
                f" epoch {self._session.following.epoch + 1} begins",
                field="set_weights",
            )
        if self._steps_left == 0:
            raise ConfigError(
                "this stage has no steps left: set weights when the next one begins",
                field="set_weights",
            )
        asked = weights_of(self.sources, weights, "set_weights")
        epoch, cursor = self._epoch, start
        if reader is not None:
            epoch, cursor, start = reader.epoch, reader.cursor, reader.start_cursor
        is_over = reader is not None and reader.is_complete
        if is_over or state_at(self._session, epoch, cursor).epoch > epoch:
            epoch, cursor, start = epoch + 1, 0, 0
        found = changed(self._session, epoch, cursor, asked)
        self._job.check_weights(found, epoch, cursor, self._weights_set)
        self._weights_set += 1
        self._session.mix, self._changed = found.mix, found
        if reader is not None and reader.epoch == epoch:
            reader.change(found.position if found.epoch == epoch else None)
        if found.epoch != epoch:
            return MixStep(found.epoch, 0)
        if found.position >= sample_count(self._session, epoch):
            return MixStep(epoch + 1, 0)
        batch = self._job.request.spec.global_batch
        return MixStep(epoch, -(-start // batch) + (found.position - start) // batch)

    def skip(self, steps: int) -> int:
        """Skip the next steps of the running pass, or of the next one. Return the number of skipped
        steps, which is smaller at the end of the epoch.
        """
        self._turn()
        reader, self._digest = self._reader, self._rows()
        if reader is not None:
            before = reader.step
            reader.skip(steps)
            self._digest_from = reader.cursor
            return reader.step - before
        left, of_stage = epoch_steps(self._session, self._epoch, self._cursor), self._steps_left
        skipped = min(steps, left.count, steps if of_stage is None else of_stage)
        self._cursor, self._digested = left.after(skipped), None
        self._made, self._reached = self._made + skipped, (self._epoch, self._cursor)
        return skipped

    def tombstone(self, names: Sequence[str]) -> None:
        """Take rows and shards out of the run, from the present position on. The running pass ends,
        and the next pass continues its epoch.
        """
        self._refuse_replay("rows to take out")
        if not isinstance(self._job.endpoint, Embedded):
            raise ConfigError(
                "a job of a service keeps what is taken out of it at the coordinator: run"
                " `dataplane tombstone`",
                field="tombstone",
            )
        self._turn()
        session, reader, rows = self._session, self._reader, self._rows()
        place, known = (self._epoch, self._cursor), session.job.gone
        if reader is not None:
            place = reader.epoch, reader.cursor
        new = [TakenOut(name, *place) for name in names]
        try:
            session.take_out((*known, *new))
            if len(session.job.gone) < len(known) + len(new):
                raise ConfigError(
                    f"the dataset does not have all of these shards: {', '.join(names)}",
                    field="tombstone",
                )
        except DataplaneError:
            session.take_out(known)
            raise
        if reader is not None:
            reader.is_left = True
        self._count_steps()
        (self._epoch, self._cursor), self._reader = place, None
        self._digest, self._digested = rows, None

    def statistics(self) -> Statistics:
        """Return the work so far, and the causes of the loop's waits."""
        return self._session.statistics()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this run, which is equal on all ranks after the same number of
        batches. A run that replays its first slab has no position, and loaders refuse its state.
        """
        if self._replays:
            return {REPLAY: True}
        reader = self._reader
        if reader is None:
            state = state_at(self._session, self._epoch, self._cursor)
        else:
            state = state_at(self._session, reader.epoch, reader.cursor)
        return structs.replace(state, digest=self._rows(), schedule=self._schedule()).to_dict()

    def ledger(self) -> str:
        """Return the job's ledger as JSON lines, at the position of this run."""
        self._refuse_replay("record of what it read")
        reader = self._reader
        place = (self._epoch, self._cursor) if reader is None else (reader.epoch, reader.cursor)
        return self._session.ledger(*place, self._schedule())

    def load_state_dict(
        self, state_dict: Mapping[str, Any], change: str | None = None, before: Before = None
    ) -> str:
        """Continue the next pass where the state was taken, on any number of ranks; an empty state
        means the start. With a `change`, accept a state of another recipe, whose datasets were at
        the urls `before`.

        Raises:  SpecMismatch: the state is of another job.  VersionMismatch: a newer version saved
        the state.  ConfigError: the state is damaged.
        """
        if self._follows and change is None and state_dict:
            change = FINISH
        self._count_steps()
        before_load = self._number
        self._number, self._made = scheduled(self._stages, state_dict)
        if self._number != before_load:
            self._session.adopt(self._with_ahead())
        state, sentence = resumed(
            state_dict, self._session, dataset_moved=self._dataset_moved,
            change=change, before=before_of(before), lists=self._follows,
        )  # fmt: skip
        self._epoch, self._cursor = self._reached = place_of(self._session, state)
        was, self._changed = self._changed, None
        if was is not None:
            warn_of_replaced(was, self._session, self._epoch, self._cursor)
        self._listed = self._epoch
        self._reader = self._digested = self._decoder = self._schema = None
        self._digest = state.digest or RowsDigest()
        return sentence

    def _refuse_replay(self, what: str) -> None:
        if self._replays:
            raise ConfigError(
                f"a run with replay_first_slab=True has no {what}: remove that argument",
                field=REPLAY,
            )

    def close(self) -> None:
        """Leave the job. Tensors that are still held stay valid. May be called twice."""
        if self._last is not None:
            self._last.close()
        self._session.close()

    def finish(self, reader: EpochReader) -> None:
        """Record that a pass has reached the end of its epoch."""
        if self._reader is reader:
            self._leave_pass()
            self._turn()

    def _leave_pass(self) -> None:
        """Leave the pass: the next pass reads the next epoch, or the same epoch if this pass has
        yielded no batch.
        """
        reader = self._reader
        if reader is None:
            return
        self._count_steps()
        self._reader = None
        self._epoch, self._cursor = reader.epoch + 1, 0
        if not reader.step and not reader.is_complete:
            self._epoch, self._cursor = reader.epoch, reader.start_cursor

    @property
    def _steps_made(self) -> int:
        """The steps made in the present stage. Those that finish a former recipe do not count."""
        if self._reader is None or self._session.following is not None:
            return self._made
        return self._made + self._reader.step

    def _count_steps(self) -> None:
        """Count the steps of the pass that ends now."""
        if self._reader is not None:
            self._made, self._reached = self._steps_made, (self._reader.epoch, self._reader.cursor)

    @property
    def _steps_left(self) -> int | None:
        """The steps that the present stage still has; None if it ends elsewhere, or not."""
        lasts = self._stages[self._number].lasts
        if not lasts.steps or self._session.following is not None:
            return None
        return max(0, lasts.steps - self._steps_made)

    def _schedule(self) -> Schedule | None:
        """Return what is left of the schedule; None without one."""
        if len(self._stages) == 1:
            return None
        lasts = tuple(stage.lasts for stage in self._stages[self._number :])
        over = tuple(stage.digest for stage in self._stages[: self._number])
        return Schedule(self._steps_made, lasts, over)

    def _turn(self) -> bool:
        """Begin the stages that are due. Return whether one may have begun."""
        is_turned = self._turn_to_own()
        while self._reader is None and (place := self._stage_end()) is not None:
            rows = self._rows()
            self._number += 1
            following = self._stages[self._number]
            self._digest = entered(
                self._session, rows, place, following.job.request,
                following.lasts.change or RESTART, following.before,
            )  # fmt: skip
            self._made, is_turned = 0, True
            self._digested = self._decoder = self._schema = None
        return is_turned

    def _stage_end(self) -> tuple[int, int] | None:
        """Return where the present stage has ended; None if it goes on."""
        lasts, stages = self._stages[self._number].lasts, self._session.request.spec.stages
        if lasts.epochs:
            first = next((stage.next_epoch for stage in reversed(stages) if stage.planned), 0)
            end = max(first + lasts.epochs, stages[-1].next_epoch if stages else 0)
            return (end, 0) if self._epoch >= first + lasts.epochs else None
        is_left = (self._epoch, self._cursor) > self._reached  # else its last pass may be resumed
        return self._reached if is_left and self._steps_left == 0 else None

    def _turn_to_own(self) -> bool:
        """Begin the stage of the loader's own recipe if a former one was to be finished, and its
        epoch is over; list the shards again if the loader follows them. Return whether a stage may
        have begun.
        """
        following = self._session.following
        last = self._listed if following is None else following.epoch
        is_due = self._follows or following is not None
        if not is_due or self._reader is not None or self._epoch <= last:
            return False
        self._listed = self._epoch
        self._digest = turned(self._session, self._rows(), self._epoch, lists=self._follows)
        self._digested = self._decoder = self._schema = None
        return True

    def _rows(self) -> RowsDigest:
        """Return the digest of the rows of all steps so far."""
        reader = self._digested
        if reader is None:
            return self._digest
        begin = self._digest_from
        return rows_reached(self._session, self._digest, reader.epoch, begin, reader.cursor)

    def _decoder_of_job(self) -> Decoder:
        if self._decoder is None:
            job = self._session.job
            self._job.check_ranks(job)
            on_device = self._target is not None
            self._decoder = Decoder(job.columns, for_device=on_device, parts=self._job.parts)
        return self._decoder


class BatchIterator:
    """One pass over a loader. Several may run at once, each with its own position. Threads may
    share a pass: each batch goes to one of them. A pass works only in the process that made it.
    """

    def __init__(self, job: UrlJob, decoder: Decoder, copy_stream: CopyStream | None) -> None:
        self._job, self._decoder, self._copy_stream = job, decoder, copy_stream
        self._reader: EpochReader | None = None
        self._is_done = False
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        # Check before taking the lock, which another thread may have held at a fork.
        check_process(self._pid)
        with self._lock, brief:
            if self._is_done:
                raise StopIteration
            reader = self._reader
            if reader is None:
                reader = self._reader = self._job.open_reader(self._decoder, self._copy_stream)
            batch = reader.next()
            if batch is None:
                self._is_done = True
                reader.close()
                self._job.finish(reader)
                raise StopIteration
            return batch

    def __del__(self) -> None:
        # Release the slabs that the pass holds, and copies made ahead. The job keeps the position.
        if self._reader is not None:
            self._reader.close()

    @property
    def valid_count(self) -> int | None:
        """Rows of this iterator's last batch that are not padding."""
        return None if self._reader is None else self._reader.valid_count
