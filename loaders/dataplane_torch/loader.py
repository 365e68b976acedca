"""DataLoader: torch's, over urls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from dataplane.client.session import Session
from dataplane.client.state import State, step_count
from dataplane.client.statistics import Statistics
from dataplane.errors import ConfigError
from dataplane.model import Topology
from dataplane.transforms.images import Transform
from dataplane.transforms.stacks import Stack
from dataplane_torch.arguments import Arguments, Urls, job_of, refuse_torch_arguments
from dataplane_torch.pinning import cuda_pinning
from dataplane_torch.tensors import Batch, Decoder
from dataplane_torch.walk import Walk


class DataLoader:
    """Batches of the shards at `urls`, one pass an epoch. Arguments have torch's meaning where
    torch has them.

    `batch_size` counts samples of one data-parallel rank; `global_batch_size` of all of them, so
    that a run may go on with another number of ranks. `end` is what becomes of an incomplete last
    global batch: "ragged" (every rank has as many steps, local batches may differ by one and be
    empty), "drop" (as drop_last=True), or "pad" (samples of the epoch's start fill it;
    `valid_count` tells how many rows of the last batch are not padding). `timeout` is how long to
    wait for a batch in seconds, 0 for what the node says. `transforms` names columns of encoded
    images, and what the node makes of them: {"jpg": [RandomResizedCrop(224), ToLayout("CHW")]}.
    Jobs of one host that load alike and have one `sharing` name decode each image once, together.
    `stack` names tensors [B, columns] that columns of one number a sample come as, in the order
    given: {"x": ["age", "price"]}, or {"x": Stack(["age", "price"], dtype="float32")} where they
    differ in type.

    Every pass over the loader is one epoch, and the next pass is the next epoch; a pass that was
    left early is begun again by the next. `state_dict()` tells of the pass begun last: what it has
    yielded counts as consumed.

    Raises:  ConfigError, TypeError: arguments that mean nothing. What is wrong with the dataset
    shows when the first length, batch or state is asked for.
    """

    def __init__(
        self,
        urls: Urls,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        drop_last: bool = False,
        end: str | None = None,
        global_batch_size: int | None = None,
        columns: Sequence[str] | None = None,
        lists: str = "padded",
        fill_null: Mapping[str, float] | None = None,
        transforms: Mapping[str, Sequence[Transform]] | None = None,
        stack: Mapping[str, Stack | Sequence[str]] | None = None,
        format: str | None = None,  # noqa: A002 - what it is
        lanes: int | None = None,
        window: int | None = None,
        service: str | None = None,
        name: str | None = None,
        sharing: str | None = None,
        pin_memory: bool = False,
        topology: Topology | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        timeout: float = 0,
        **only_torch: Any,
    ) -> None:
        refuse_torch_arguments(only_torch)
        self._job = job_of(
            Arguments(
                urls, batch_size, bool(shuffle), seed, drop_last, end, global_batch_size, columns,
                lists, fill_null, transforms, stack, format, lanes, window, service, name,
                sharing, topology, dp_rank, dp_size, timeout,
            )
        )  # fmt: skip
        self._session = Session(
            self._job.endpoint,
            self._job.request,
            pinning=cuda_pinning(wanted=pin_memory),
            stall_timeout_s=self._job.stall_timeout_s,
        )
        weakref.finalize(self, self._session.close).atexit = False
        self._decoder: Decoder | None = None
        self._epoch, self._cursor = 0, 0
        self._walk: Walk | None = None
        self._last: Walk | None = None

    def __iter__(self) -> BatchIterator:
        walk = Walk(self._session, self._decoder_of_job(), self._epoch, self._cursor)
        # A resumed pass is resumed once: if it is left early, the next one begins the epoch anew.
        self._cursor = 0
        self._walk = self._last = walk
        return BatchIterator(self, walk)

    def __len__(self) -> int:
        """Steps of a whole epoch, also where a resumed pass has fewer left."""
        job = self._session.job
        return step_count(job.sample_count, job.spec.global_batch, job.spec.end)

    @property
    def valid_count(self) -> int | None:
        """Rows of the last batch that are not padding; None before the first."""
        return None if self._last is None else self._last.valid_count

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way, or else of the next one."""
        return self._walk.epoch if self._walk is not None else self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this epoch's. Of a state that was loaded the same epoch keeps the place,
        so that the usual `for epoch in range(start, …): loader.set_epoch(epoch)` resumes.
        """
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise ConfigError(f"an epoch is 0 or more, not {epoch!r}", field="epoch")
        if epoch != self._epoch:
            self._cursor = 0
        self._epoch, self._walk = epoch, None

    def state_dict(self) -> dict[str, int | str]:
        """Where this run stands: the same on every rank after the same number of batches."""
        job, walk = self._session.job, self._walk
        epoch, cursor = (
            (walk.epoch, walk.cursor) if walk is not None else (self._epoch, self._cursor)
        )
        return State(job.digest, epoch, cursor, job.sample_count).to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next pass goes on where the state was taken, on any number of ranks.

        Raises:  SpecMismatch: of another job.  VersionMismatch: of a newer version.  ConfigError.
        """
        state, job = State.from_dict(state_dict), self._session.job
        state.check(job.digest, job.sample_count, job.spec)
        self._epoch, self._cursor, self._walk = state.epoch, state.cursor, None

    def statistics(self) -> Statistics:
        """What this loader did so far, and what the time of its loop went into. The difference of
        two values (`later.since(earlier)`) leaves the first batches out, and whatever came before.
        """
        return self._session.statistics()

    def close(self) -> None:
        """Leave the job; tensors that are held stay good. May be called twice."""
        if self._last is not None:
            self._last.close()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def finish(self, walk: Walk) -> None:
        """An iterator came to the end of its epoch."""
        if self._walk is walk:
            self._epoch, self._cursor, self._walk = walk.epoch + 1, 0, None

    def _decoder_of_job(self) -> Decoder:
        if self._decoder is None:
            self._decoder = Decoder(self._session.job.columns)
        return self._decoder


class BatchIterator:
    """One pass over a loader. Several may be under way at once; each has its own place. Threads
    may share one: each batch comes to one of them.
    """

    def __init__(self, loader: DataLoader, walk: Walk) -> None:
        self._loader, self._walk = loader, walk
        self._is_done = False
        self._lock = threading.Lock()

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        with self._lock:
            if self._is_done:
                raise StopIteration
            batch = self._walk.next()
            if batch is None:
                self._is_done = True
                self._walk.close()
                self._loader.finish(self._walk)
                raise StopIteration
            return batch

    @property
    def valid_count(self) -> int | None:
        """Rows of this iterator's last batch that are not padding."""
        return self._walk.valid_count
