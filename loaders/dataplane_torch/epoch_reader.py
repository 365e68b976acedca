"""Convert a stream of slabs to single batches, with the position after each batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial

from dataplane.client.mixing import asked_of, epoch_steps, follow
from dataplane.client.session import Session
from dataplane.client.stream import Batches, SlabStream
from dataplane.model.changes import MixAt
from dataplane.model.errors import ConfigError
from dataplane.model.records import MixHistory
from dataplane.rpc import messages
from dataplane_torch.sending import CopyStream, Sending
from dataplane_torch.tensors import Batch, Decoder
from dataplane_torch.torch_private.profiling import in_profile

_Made = tuple[messages.Batch, Callable[[], Batch]]


class EpochReader:
    """The batches of steps first_step, first_step + stride, … of an epoch, counted from a cursor.

    `valid_count` is the number of rows of the last batch that are not padding. With a copy stream,
    batches are on its device, and the next batch is copied ahead if it has already arrived. The
    reader never waits for it, since a slab that is taken too early could hold memory that the slab
    that is due needs. If batches have no columns, as on a middle stage of a pipeline, the node
    makes no slabs for this reader, and batches are {}. With `steps_max`, the epoch ends after so
    many steps.
    """

    def __init__(
        self,
        session: Session,
        decoder: Decoder,
        epoch: int,
        cursor: int,
        first_step: int = 0,
        stride: int = 1,
        *,
        in_worker: bool = False,
        copy_stream: CopyStream | None = None,
        replays: bool = False,
        steps_max: int | None = None,
    ) -> None:
        """Prepare the reader. With `replays`, every slab is the first slab again."""
        self.epoch, self.start_cursor = epoch, cursor
        self.step, self.stride = first_step, stride
        self.valid_count: int | None = None
        self.is_left = False
        self._decoder, self._steps_max = decoder, steps_max
        self._session, self._steps = session, epoch_steps(session, epoch, cursor)
        self._steps.check_ranks(epoch)
        # The step at which new weights of a mixture take effect, and the new weights.
        self._change: tuple[int, MixHistory] | None = None
        # The session's last `mixes_asked`: weights that people requested while the job runs.
        self._known: tuple[MixAt, ...] = ()
        self._asked: list[MixAt] = []
        self._place = session.request.topology
        # Do not read ahead in a DataLoader worker: a worker that waits for its turn must not keep a
        # slab that another worker needs.
        self._stream = (
            None
            if decoder.is_empty
            else SlabStream(
                session, epoch, cursor, first_step, stride,
                mix=session.mix, ahead=not in_worker, replays=replays,
            )
        )  # fmt: skip
        self._replays = replays
        self._in_worker, self._copy_stream = in_worker, copy_stream
        self._pid = os.getpid()
        self._ready: list[_Made] = []

    @property
    def cursor(self) -> int:
        """The number of samples that all ranks have consumed after the last returned batch."""
        return self._steps.after(max(0, self.step - self.stride + 1))

    @property
    def is_complete(self) -> bool:
        """Whether the epoch's last batch was returned."""
        return self.step >= self._count

    @property
    def _count(self) -> int:
        count = self._steps.count
        return count if self._steps_max is None else min(count, self._steps_max)

    def next(self) -> Batch | None:
        """Return the next batch; None at the end of the epoch.

        Raises:  ConfigError: in a forked child.  DataplaneError: the error that the node reports.
        """
        check_process(self._pid)
        if self.is_left:
            return None
        if self._stream is None:
            self._follow()
            return self._without_columns()
        if self.step == self._steps_max or not self._fetched(self._stream):
            return None
        about, make = self._ready[-1]
        batch = make()
        self._ready.pop()
        if self._copy_stream is not None:
            self._look_ahead(self.step + self.stride)
        self.valid_count = about.valid
        self.step += self.stride
        self._stream.consumed = self.cursor
        return batch

    def _fetched(self, stream: SlabStream) -> bool:
        """Get the batch of the present step ready; return False at the end of the epoch."""
        while True:
            if not self._replays:
                self._follow()
            elif self.is_complete:
                self._ready = []
            if self._change is not None and self.step >= self._change[0]:
                # Drop batches that were read ahead, which have the previous weights.
                self._ready = []
                stream.change(self._change[1])
                self._change = None
                if self.is_complete:
                    return False
            # Use a ready batch only if it is that of the present step: after an interrupt it may be
            # of another step, and the right one is requested again.
            if self._ready and self._ready[-1][0].step == self.step:
                return True
            # Release the present slab first, since the next slab may need its memory.
            self._ready = []
            known = self._session.mixes_asked
            with in_profile("dataplane.wait"):
                batches = stream.batches_from(self.step)
            self._ready = self._unpacked(batches)
            if not self._ready and known is self._session.mixes_asked:
                return False

    def _follow(self) -> None:
        """Apply the weights that people requested from the present step on. After the last step,
        these are requests for the next epoch.
        """
        session = self._session
        if session.mixes_asked is not self._known:
            self._known = session.mixes_asked
            self._asked = asked_of(session, self.epoch, self.start_cursor)
        while (
            self._asked
            and not self.is_complete
            and self._asked[0].position.cursor < self._steps.after(self.step + 1)
        ):
            found = follow(session, self._asked[0], self.cursor)
            del self._asked[0]
            if found is not None:
                self.change(found.position if found.epoch == self.epoch else None)

    def change(self, position: int | None) -> None:
        """Apply the session's new weights of a mixture, from this position of the epoch on; with
        None, only in the next epoch. Earlier steps that were read ahead keep their batches.
        """
        mix, before = self._session.mix, self._steps
        self._steps = epoch_steps(self._session, self.epoch, self.start_cursor)
        is_known = self._stream is None or self._stream.mix == mix
        if is_known or mix is None or position is None:
            self._change = None
            return
        # Limit the step to the last one with the previous weights, which may have more samples than
        # a global batch.
        live, last = before.gaps.live, before.count - 1
        step = (live(position) - live(self.start_cursor)) // before.global_batch
        self._change = (min(step, last), mix)

    def skip(self, steps: int) -> None:
        """Pass over the next steps, at most to the end of the epoch."""
        self.step = min(self.step + steps * self.stride, self._count)

    def close(self) -> None:
        """Release the stream and the current slab. May be called twice."""
        if self._stream is not None:
            self._stream.close()
        self._ready = []

    def _without_columns(self) -> Batch | None:
        if self.is_complete:
            return None
        gaps, after = self._steps.gaps, self._steps.after
        pieces = gaps.pieces(gaps.live(after(self.step)), gaps.live(after(self.step + 1)))
        size, rank = self._place.dp_size, self._place.dp_rank
        self.valid_count = sum(len(range(at + (rank - at) % size, end, size)) for at, end in pieces)
        self.step += self.stride
        return {}

    def _look_ahead(self, step: int) -> None:
        stream = self._stream
        # Ignore errors of a batch that is not due yet: they are raised again when it is due.
        with contextlib.suppress(Exception):
            at_hand = stream is not None and step < self._count and stream.is_at_hand
            if stream is not None and at_hand and not self._ready:
                self._ready = self._unpacked(stream.batches_from(step))
            if self._ready and isinstance(sending := self._ready[-1][1], Sending):
                sending.begin()

    def _unpacked(self, slab: list[Batches]) -> list[_Made]:
        """Return the batches of a slab, last first. A DataLoader worker copies all of them at once,
        so that it holds no slab while it waits for its turn.
        """
        made: list[_Made] = []
        for batches in slab:
            for i, about in enumerate(batches.batches):
                make = partial(self._decoder.batch, batches, i)
                if self._in_worker:
                    made.append((about, partial(_same, make())))
                else:
                    made.append(
                        (
                            about,
                            make if self._copy_stream is None else Sending(self._copy_stream, make),
                        )
                    )
        made.reverse()
        return made


def check_process(pid: int) -> None:
    """Check that this process began the pass. A forked child has a copy of the pass, which would
    read the same samples as its parent.

    Raises:  ConfigError: this is another process.
    """
    if os.getpid() != pid:
        raise ConfigError(
            f"this pass was begun by process {pid} and continues only there: the forked process "
            f"{os.getpid()} would read every sample a second time. Call iter() on the loader in "
            "this process for a new pass, which is the next epoch",
            field="iterator",
        )


def _same(batch: Batch) -> Batch:
    return batch
