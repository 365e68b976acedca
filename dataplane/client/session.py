"""One loader's membership in a job: opened on first use, and opened again after a loss or a fork.

All requests of a loader use its current connection, the mount. If the node is lost, the mount is
retired, and a new mount is made to a new embedded node or to the same service. Then the same member
opens the job again.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing.util
import operator
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

from msgspec import structs

from dataplane.arena.memfd import Arena
from dataplane.client.endpoint import Endpoint
from dataplane.client.launch import BegunNode
from dataplane.client.mount import Mount, NoDevice, Pinning, close_all
from dataplane.client.stages import recipe_of
from dataplane.client.state import RunState
from dataplane.client.statistics import (
    NOT_YET,
    Opening,
    Recent,
    Statistics,
    Tally,
    Waits,
    sum_of,
)
from dataplane.client.waiting import Notice, Patience
from dataplane.client.wire import NoAnswer, Wire
from dataplane.model.changes import (
    MIX,
    TOMBSTONE,
    Ahead,
    Changes,
    MixAt,
    TakenOut,
    apart,
    changes_of,
    check_unchanged,
    is_midway,
    mix_of_entry,
    taken_by,
)
from dataplane.model.config import Stage
from dataplane.model.errors import (
    ClosedError,
    DataplaneError,
    DatasetChangedError,
    DataStallError,
    PeerLost,
    SpecMismatch,
)
from dataplane.model.ledger import (
    Ledger,
    LedgerEntry,
    LedgerMark,
    LedgerPosition,
    Schedule,
    SourceUrls,
)
from dataplane.model.records import MixHistory
from dataplane.model.redact import unsigned
from dataplane.rpc.messages import JobOpened, OpenJob, StageTimes, Waited, Welcome
from dataplane.settings import stall_timeout_s

# Long, since opening a job may index a dataset, which means reading the whole dataset if its format
# has no index.
OPEN_TIMEOUT_S = 1800.0
_GRACE_S = 2.0
# How often to start a node in the middle of a run, if nodes exit by themselves while they start.
_STARTS_MAX = 3
_NO_WAITS: Waits = (0, 0, 0, 0, 0, 0)


class Session:
    """A job's open state in this process. Thread-safe. Fills in `request.member_id`.

    With `warns`, the node's advice is shown as warnings when the job is first opened. If `begun` is
    a node that was started ahead, it is used first, and closed with the session if it was not used.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        request: OpenJob,
        *,
        pinning: Pinning | None = None,
        stall_timeout_s: float | None = None,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        warns: bool = True,
        begun: BegunNode | None = None,
    ) -> None:
        self.endpoint, self.request, self._begun = endpoint, request, begun
        self._pinning, self._warns = pinning or NoDevice(), warns
        self._stall_timeout_s, self._open_timeout_s = stall_timeout_s, open_timeout_s
        self._mount: Mount | None = None
        self.following: OpenJob | None = None
        """The loader's own request, while a former stage is read to the end of its epoch."""
        self.asked_weights = ""
        """The hash of the weights in the state whose epoch is finished with a former recipe."""
        self._ahead: Ahead | None = None
        self._job: JobOpened | None = None
        self._state: tuple[JobOpened, RunState] | None = None
        self._mix: MixHistory | None = None
        self._decide_mix: Callable[[JobOpened], MixHistory | None] | None = None
        self._midway: dict[int, LedgerEntry] = {}
        self._begin: tuple[int, LedgerPosition | None] = 0, None
        self.mixes_asked: tuple[MixAt, ...] = ()
        """The known weights that people requested, in the order of their places. The tuple is
        replaced when more weights become known.
        """
        self.mixes_applied: set[int] = set()
        """The numbers of ledger entries whose place a pass has reached. Their weights are in `mix`,
        or were ignored with a warning.
        """
        self.epoch_samples: dict[tuple[int, MixHistory | None], int] = {}
        """The known sample counts of epochs, by (epoch, weights)."""
        self._closed = False
        self._pid = os.getpid()
        self._making = threading.Lock()
        self._member_id = _member_id(request)
        self._counting = threading.Lock()
        self._tallies: list[Tally] = []
        self._past = Statistics()
        self._recent = Recent(self.statistics)
        self._opening: Opening | None = None
        self._first_batch = NOT_YET
        self._unreported = _NO_WAITS
        self._is_first_reported = False

    @property
    def job(self) -> JobOpened:
        """The job, which is equal on every rank. Opened if needed."""
        return self.mount().job

    @property
    def changes(self) -> Changes:
        """The steps and rows that are left out of the job."""
        return changes_of(self.job.entries)

    @property
    def mix(self) -> MixHistory | None:
        """The weights of a mixture: the weights of the job's spec, until others are set. None
        without a mixture.
        """
        job, mixture = self.job, self.job.spec.mixture
        if self._decide_mix is not None:
            self._mix, self._decide_mix = self._decide_mix(job), None
        return None if mixture is None else self._mix or mixture.history

    @mix.setter
    def mix(self, mix: MixHistory | None) -> None:
        self._mix, self._decide_mix = mix, None

    def decide_mix(self, decide: Callable[[JobOpened], MixHistory | None]) -> None:
        """Have the weights decided when the job is open, which may wait for other ranks."""
        self._decide_mix = decide

    @property
    def known_entry(self) -> int:
        """The number of the last known ledger entry that takes effect within the launch."""
        return max(self._midway, default=0)

    @property
    def _generation(self) -> int:
        return 0 if self._job is None else self._job.generation

    @property
    def _taken(self) -> list[LedgerEntry]:
        """The entries that take rows out while the job runs."""
        return [entry for entry in self._midway.values() if entry.kind == TOMBSTONE]

    def rows_digest(self, digest: str, place: LedgerPosition) -> str:
        """Return a digest over `digest` and the rows that are left out at this place."""
        entries = {entry.seq: entry for entry in (*self.job.entries, *self._taken)}.values()
        return changes_of(taken_by(entries, self._generation, place)).rows_digest(digest)

    def taken_between(self, epoch: int, begin: int, end: int) -> tuple[int, ...]:
        """Return the positions between these, exclusive, from which on rows are left out."""
        return tuple(
            entry.position.cursor
            for entry in self._taken
            if entry.position.epoch == epoch and begin < entry.position.cursor < end
        )

    def begins(self, epoch: int, cursor: int) -> None:
        """Note that a stream begins at this place. The launch begins at the first of these."""
        at, (generation, known) = LedgerPosition(epoch, cursor), self._begin
        if known is None or generation != self._generation or at < known:
            self._begin = self._generation, at

    def learn(self, entries: Iterable[LedgerEntry]) -> None:
        """Note weights and rows to leave out that people requested while the job ran."""
        some = {entry.seq: entry for entry in entries if is_midway(entry, self._generation)}
        if some.keys() <= self._midway.keys():
            return
        self._midway |= some
        mixes = [mix_of_entry(entry) for entry in self._midway.values() if entry.kind == MIX]
        self.mixes_asked = tuple(sorted(mixes, key=lambda entry: (entry.position, entry.seq)))

    def state(self, epoch: int, cursor: int, sample_count: int) -> RunState:
        """Return the state of the job at this place of an epoch of this many samples. At the last
        step, this is the start of the next epoch. The cost does not depend on the job's options.
        """
        job, (known, state) = self.job, self._state or (None, None)
        if state is None or known is not job:
            state = RunState.of(job, 0, 0)
            self._state = job, state
        if self.following is not None:
            state = structs.replace(state, ahead=self._ahead, asked_weights=self.asked_weights)
        gaps = changes_of(job.entries).gaps(epoch)
        mark = state.mark
        # At the start of an epoch, not all ranks know of rows beyond the end of the epoch before.
        is_begin = epoch > 0 and not cursor
        at = LedgerPosition(epoch - 1, sample_count) if is_begin else LedgerPosition(epoch, cursor)
        taken = {entry.seq for entry in self._taken if entry.position < at}
        if applied := self.mixes_applied | taken:
            last = LedgerMark.of(self._midway[max(applied)])
            mark = last if mark is None or mark.seq < last.seq else mark
        return structs.replace(
            state,
            epoch=epoch,
            cursor=cursor,
            sample_count=sample_count,
            mix=self.mix,
            mark=mark,
        ).normalised(job.spec, gaps)

    def ledger(self, epoch: int, cursor: int, schedule: Schedule | None = None) -> str:
        """Return the job's ledger at this place, as JSON lines."""
        source, mixture, job = self.request.source, self.request.mixture, self.job
        mixed = job.spec.mixture
        if mixed is not None and self.mix is not None:
            mixed = mixed.with_history(self.mix)
        sources = () if mixture is None else mixture.sources
        known = {entry.seq: entry for entry in (*job.entries, *self._midway.values())}
        entries = tuple(known.values())
        return Ledger(
            self.request.job_id,
            tuple(map(unsigned, source.urls)),
            structs.replace(job.spec, mixture=mixed),
            job.sample_count,
            self.request.topology.dp_size,
            source.format,
            epoch,
            cursor,
            job.dataset,
            tuple(
                SourceUrls(named.name, tuple(map(unsigned, named.source.urls)), named.source.format)
                for named in sources
            ),
            schedule,
            job.generation if self._taken else 0,
            self._begin[1] if any(entry.kind == TOMBSTONE for entry in entries) else None,
            entries,
        ).to_lines()

    def tally(self) -> Tally:
        """Return a tally for a new stream; the counts of closed streams are kept as one sum."""
        made = Tally()
        with self._counting:
            past = [tally.statistics() for tally in self._tallies if tally.is_closed]
            self._past = sum_of([self._past, *past])
            self._tallies = [*(tally for tally in self._tallies if not tally.is_closed), made]
        return made

    def statistics(self) -> Statistics:
        """Return the sum over all streams so far, in this process."""
        with self._counting:
            total = sum_of([self._past, *(tally.statistics() for tally in self._tallies)])
        return structs.replace(total, first_batch=self._first_batch)

    def slab_arrived(self, asked: float, times: StageTimes) -> bool:
        """Note that a slab has arrived that was requested at `asked`, in time.monotonic(). Return
        whether it is the first slab, whose stages are recorded.
        """
        opening = self._opening
        if opening is None:
            return False
        self._opening = None
        self._first_batch = opening.first_batch(asked, time.monotonic(), times)
        return True

    def waited(self, waits: Waits) -> None:
        """Note a wait beyond the first slab, for the next report to the node."""
        with self._counting:
            self._unreported = cast("Waits", tuple(map(operator.add, self._unreported, waits)))

    def take_waited(self) -> Waited | None:
        """Return the waits that were not reported yet; None if there are none."""
        first: tuple[float, ...] = ()
        with self._counting:
            waits, self._unreported = self._unreported, _NO_WAITS
            if self._first_batch is not NOT_YET and not self._is_first_reported:
                self._is_first_reported = True
                first = tuple(self._first_batch.stages().values())
        return Waited(waits, first) if first or waits != _NO_WAITS else None

    def first_slab_notice(self) -> Notice | None:
        """Return a notice that shows the node's progress with the first slab; None if the slab has
        arrived, or on all but the first rank of a host.
        """
        place = self.request.topology
        if self._opening is None or place.local_rank:
            return None
        about: dict[str, Any] = {
            "job": self.request.job_id, "rank": place.rank, "dp_rank": place.dp_rank,
        }  # fmt: skip
        return Notice("the first batch", work_of="first batch", **about)

    def bound(self, now: float) -> str:
        """Return the stage that limited the last seconds; "" if not known yet."""
        return self._recent.stage(now)

    def stall_timeout_s(self, job: JobOpened) -> float:
        """Return how long a rank waits for one slab. Unless the user set the time, it is slightly
        longer than the node waits, since the node's error says more.
        """
        if self._stall_timeout_s is not None:
            return self._stall_timeout_s
        return job.stall_timeout_s + min(_GRACE_S, job.stall_timeout_s / 4)

    def mount(self, deadline: float | None = None) -> Mount:
        """Return the current connection. Make a new connection in a forked child, or if the last
        connection was lost. Retry until the deadline, or without a deadline for the stall timeout.

        Raises:  ClosedError: after `close`.  PeerLost: no node could be reached in that time, or a
                 node exits by itself.  DataStallError: the node does not open the job.
                 DatasetChangedError: the job has changed.  DataplaneError: the node's error.
        """
        if os.getpid() != self._pid:
            self._pid, self._mount, self._begun = os.getpid(), None, None
            self._making, self._counting = threading.Lock(), threading.Lock()
            self._unreported = _NO_WAITS  # the parent reports its waits itself
            self._member_id = _member_id(self.request)
        mount = self._mount
        if mount is not None and not mount.wire.is_lost:
            return mount
        with self._making:
            if self._closed:
                raise ClosedError("this loader was closed; make a new one")
            mount, is_first = self._mount, self._job is None
            if mount is not None and mount.wire.is_lost:
                mount.retire()
                mount = None
            if mount is None:
                mount = self._open(deadline)
                _leave_at_the_end_of(os.getpid())
            self._mount = mount
        if self._closed:  # while the job was opened: `close` had nothing to leave yet
            self.close()
            raise ClosedError("this loader was closed while its job was opened")
        if is_first and self._warns:
            for sentence in mount.job.advice:
                warnings.warn(sentence, stacklevel=2)
        return mount

    def change(self, stages: tuple[Stage, ...], epoch: int = 0, *, finishes: bool = False) -> None:
        """Change to the job of a run with these former stages, which continues in this epoch; with
        `finishes`, to the last of these stages. Leave a job that was opened before, also if it only
        lacks what earlier stages left for the epoch.
        """
        request = self.request
        first = stages[-1].next_epoch if stages else 0
        is_same = (request.epoch <= first) == (epoch <= first) or not stages
        if request.spec.stages == stages and is_same and request.finishes == finishes:
            return
        spec = structs.replace(request.spec, stages=stages)
        self._change(structs.replace(request, spec=spec, epoch=epoch, finishes=finishes))
        if request.spec.stages != stages:
            self.mix, self.mixes_asked = None, ()
            self._midway.clear()

    def return_to_own(self) -> None:
        """Return to the loader's own job, if a former stage is being finished."""
        own, self.following = self.following, None
        if own is not None:
            spec = structs.replace(own.spec, stages=())
            self._change(structs.replace(own, spec=spec, finishes=False))

    def adopt(self, request: OpenJob) -> None:
        """Have the job of this request opened next, by the same rank of the same launch."""
        own, self.following = self.request, None
        self._change(structs.replace(request, gone=own.gone, follows=own.follows))

    def list_again(self, epoch: int) -> None:
        """Have the shards listed again when the job is opened next, for this epoch."""
        request, mixture = self.request, self.request.mixture
        if mixture is not None:
            sources = tuple(
                structs.replace(of, source=structs.replace(of.source, listed=epoch))
                for of in mixture.sources
            )
            mixture = structs.replace(mixture, sources=sources)
        source = structs.replace(request.source, listed=epoch)
        self.request = structs.replace(request, source=source, mixture=mixture)

    def take_out(self, gone: tuple[TakenOut, ...]) -> None:
        """Open the job again without these rows and shards."""
        if gone == self.request.gone:
            return
        if self.following is not None:
            self.following = structs.replace(self.following, gone=gone)
        self._change(structs.replace(self.request, gone=gone))

    def _change(self, request: OpenJob) -> None:
        with self._making:
            mount, self._mount, self._job = self._mount, None, None
            self.request = request
            self._member_id = _member_id(request)
        self.epoch_samples.clear()
        if mount is not None:
            mount.retire()

    def settle(self) -> None:
        """Drop from the request a last stage that the node dropped, since nothing had changed."""
        stages = self.job.spec.stages
        self.request = structs.replace(
            self.request, spec=structs.replace(self.request.spec, stages=stages)
        )

    def lost(self, mount: Mount) -> None:
        """Retire this mount. `mount()` then makes another."""
        with self._making:
            if self._mount is mount:
                self._mount = None
        mount.retire()

    def close(self) -> None:
        """Leave the job. Tensors that are still held stay valid. May be called twice."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()
        mount, self._mount = self._mount, None
        if mount is not None:
            mount.retire()

    def _open(self, deadline: float | None) -> Mount:
        """Reach a node and open the job there; retry if the connection is lost meanwhile."""
        now = time.monotonic()
        until = now + self._patience_s() if deadline is None else deadline
        patience = Patience(until, now + self._open_timeout_s)
        place, mixture = self.request.topology, self.request.mixture
        early = self.request.source if mixture is None else mixture.sources[0].source
        about: dict[str, Any] = {
            "job": self.request.job_id, "rank": place.rank, "dp_rank": place.dp_rank,
        }  # fmt: skip
        notice = Notice(self.endpoint.whom, **about)
        starts_left = 1 if self._job is None else _STARTS_MAX
        while True:
            try:
                begun, self._begun = self._begun, None
                if begun is not None:
                    wire, welcome = begun.welcomed(patience.until, notice)
                else:
                    wire, welcome = self.endpoint.reach(patience.until, notice, early)
                notice.over()
                return self._opened(wire, welcome, patience, now)
            except PeerLost as error:
                starts_left -= "status" in error.nouns
                if not starts_left:
                    raise
                if not patience.pause(notice, error, self.endpoint.remedy):
                    raise self.endpoint.given_up(patience.waited_s, error) from None
            if self._closed:
                raise ClosedError("this loader was closed while it waited for its node")

    def _patience_s(self) -> float:
        """Return how long to wait for a node before the first batch is requested."""
        if self._job is not None:
            return self.stall_timeout_s(self._job)
        return max(stall_timeout_s(), self.endpoint.start_s)

    def _opened(self, wire: Wire, welcome: Welcome, patience: Patience, began: float) -> Mount:
        reached = time.monotonic()
        try:
            request = structs.replace(self.request, member_id=self._member_id)
            mount = self._mounted(wire, welcome, request, patience)
        except BaseException:
            wire.close()
            raise
        if self._job is not None:
            try:
                self._check_same(self._job, mount.job)
            except DataplaneError:
                mount.retire()
                raise
        if self._job is None:
            self._opening = Opening.of(began, reached, time.monotonic(), mount.job)
        self._job = mount.job
        if mount.job.finishing is not None:
            former, self.following = mount.job.finishing.request, self.request
            own, stage = mount.job.finishing, self.request.spec.stages[-1]
            self._ahead = Ahead(recipe_of(own.spec, own.dataset), stage.before)
            self.request = structs.replace(former, member_id=self.request.member_id)
        # Use the stages of the opened job: the node leaves out the last stage if nothing has
        # changed since that stage.
        spec = structs.replace(self.request.spec, stages=mount.job.spec.stages)
        gone = mount.job.gone
        if self.following is not None:  # names are those of shards of the former stage
            self.following = structs.replace(self.following, gone=gone)
        self.request = structs.replace(self.request, spec=spec, finishes=False, gone=gone, ahead=())
        self._is_first_reported = False  # report the first batch to the new node too
        self.learn(mount.job.entries)
        return mount

    def _check_same(self, known: JobOpened, opened: JobOpened) -> None:
        """Check that a new node opened the same job as the node before it."""
        both = [apart(job.entries, job.generation)[0] for job in (known, opened)]
        check_unchanged(self.request.job_id, *both)
        if known.digest != opened.digest:
            raise DatasetChangedError(
                "the dataset changed while the node was away, so this is now a different job. "
                "Restore the old shards, or start a new run",
                shard=", ".join(self.request.source.urls),
                expected=known.digest,
                found=opened.digest,
            )
        if known.pixels != opened.pixels:
            raise SpecMismatch(
                f"after a restart, the node makes images with {opened.pixels}; before, it used "
                f"{known.pixels}. Install the earlier versions again, or stop this run and resume "
                "it from its checkpoint",
                field="pixels",
                expected=known.pixels,
                found=opened.pixels,
            )

    def _mounted(self, wire: Wire, welcome: Welcome, request: OpenJob, patience: Patience) -> Mount:
        urls, job, began = ", ".join(request.source.urls), request.job_id, time.monotonic()
        place, node_id = request.topology, welcome.node_id
        about: dict[str, Any] = {
            "node": node_id, "job": job, "rank": place.rank, "dp_rank": place.dp_rank,
        }  # fmt: skip
        shows_work = not place.local_rank
        notice = Notice(welcome.awaited or "a job to be opened", shows_work=shows_work, **about)
        try:
            body, fds = wire.call(request, patience.last, notice)
        except NoAnswer:
            raise DataStallError(
                f"node {node_id} did not open job {job!r} over {urls} within "
                f"{patience.waited_s:.0f} s: see `dataplane status` and the node's log for what it"
                " waits for; if the shards have no index of their own, or the job has a condition,"
                " run `dataplane index` on them once, with the same --where",
                stage="open",
                job=job,
                shard=urls,
                node=node_id,
            ) from None
        except BaseException as error:
            notice.over(str(error))
            raise
        finally:
            patience.extend(time.monotonic() - began)
            patience.worked(max(wire.worked_at - began, 0.0))
        notice.over()
        if not isinstance(body, JobOpened) or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise PeerLost(f"the node answered OpenJob with a {type(body).__name__}", peer=node_id)
        arena = Arena.attach(fds[0], body.arena_bytes)
        job_id, worked_s = request.job_id, patience.worked_s
        return Mount(wire, node_id, job_id, body, arena, self._pinning, worked_s)


def _member_id(request: OpenJob) -> str:
    return f"{request.topology.rank}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


@functools.cache
def _leave_at_the_end_of(_pid: int) -> None:
    """Make this process leave its jobs explicitly when it exits. A child forked by multiprocessing,
    such as a DataLoader worker, exits without atexit, and would otherwise count as lost.
    """
    if multiprocessing.parent_process() is not None:
        # The lowest priority runs last, after finalizers that send the rest of queues.
        multiprocessing.util.Finalize(None, close_all, exitpriority=-100)


atexit.register(close_all)
