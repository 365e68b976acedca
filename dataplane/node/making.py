"""Answer other nodes of the jobs on this one, and make slabs for nodes with too few workers.

A maker is a consumer of its own engine: it opens the job that a node names, and makes the requested
slabs as for a trainer here.

Invariants:
1. Every request is answered exactly once (remote_slabs.py, 1); no request waits for a dataset to be
   opened.
2. A slab depends only on the request: the spec that is resolved here has the digest that the
   request names, images are decoded by the same software, and functions have the same code.
3. The slabs of all requesting nodes of a job are in one arena for each dp_size and slot size. It
   takes no more memory than the arena of one rank may, and is closed once no slab in it is read.
4. A job without requests is closed, and all of its memory is freed.
5. If a key is restricted to some urls, slabs are made only of datasets under those urls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.base import background
from dataplane.base.trace import Trace
from dataplane.model.changes import Changes, EpochSteps, changes_of
from dataplane.model.config import NodeConfig
from dataplane.model.errors import (
    AccessDenied,
    BudgetTooSmall,
    ConfigError,
    DataplaneError,
    SpecMismatch,
)
from dataplane.model.records import BlockForm, Stream
from dataplane.model.redact import unsigned
from dataplane.node.dataset import Dataset
from dataplane.node.datasets import check_left, lacks_left, requests_of, shown
from dataplane.node.engine import Engine
from dataplane.node.member import mix_of
from dataplane.node.neighbours import JobTables, KnownNeighbours, Lending
from dataplane.node.opener import (
    DatasetOpener,
    OpenedJob,
    check_blocks,
    check_names,
    pixels_of,
    software_of,
)
from dataplane.node.remote_slabs import Answers, Ask, MakingPlace, MakingPlaces, RemoteStream
from dataplane.node.shared_manifests import LentManifests
from dataplane.plan.orders import sample_count_of, with_mix
from dataplane.plan.slices import Slice
from dataplane.rpc.codec import decode
from dataplane.rpc.lending import Asked, MakeSlab, StepRange
from dataplane.rpc.membership import JobNodes, NodeReads
from dataplane.rpc.messages import OpenJob
from dataplane.scheduler.walk import Walk
from dataplane.store.urls import normalise

JOB_IDLE_S = 600.0
TRY_AGAIN_S = 5.0
_JOBS_MAX = 64
_PLACES_MAX = 4
_STREAMS_MAX = 1024
_TOLD_MAX = 16
_NOT_OPENED = "no slabs of this job are made for other nodes"
_NOT_MADE = "a slab is not made for another node"

_trace = Trace("making")


class _Opened(Struct, frozen=True):
    """An open job, the request that opened it, the software that makes its batches on this node,
    and its changes.
    """

    opening: OpenJob
    job: OpenedJob
    software: str
    changes: Changes

    def lacks(self, epoch: int) -> bool:
        """Whether it was opened by a launch that continued in a later epoch, and lacks this one."""
        spec = self.job.spec
        return epoch == spec.first_epoch and lacks_left(self.opening, spec)


class _Job(Struct, eq=False):
    """A requested job that is being opened, is open, or has recently failed to open. The key of its
    requests allows only datasets under the urls `only_under`; () allows all.
    """

    job_id: str
    digest: str
    last_asked: float
    only_under: tuple[str, ...] = ()
    opening: asyncio.Task[None] | None = None
    opened: _Opened | None = None
    closed_until: float = 0.0
    places: dict[object, MakingPlace] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)


class Making:
    """The slabs that one node makes for others. `lender` sends them. Call it only from the event
    loop.
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        opener: DatasetOpener,
        lender: Lending,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._engine, self._opener = config, engine, opener
        self._lender, self._clock = lender, clock
        self._answers = Answers(lender)
        self._places = MakingPlaces(config, engine, opener, lender)
        self._jobs: dict[tuple[str, str, tuple[str, ...]], _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def slab_count(self) -> int:
        """How many slabs were sent so far."""
        return self._answers.slab_count

    @property
    def slab_bytes(self) -> int:
        """The size of the slabs sent so far."""
        return self._answers.slab_bytes

    # -- what happens ----------------------------------------------------------------------------

    def asked(self, ask: Asked) -> None:
        """Handle another node's request for a slab."""
        try:
            wanted = decode(MakeSlab, ask.request.slab)
            now = self._clock()
            job = self._job(ask, wanted, now)
        except ConfigError:
            job = None
        if job is None or job.opened is None:
            self._lender.refuse(ask.number)
            return
        try:
            self._make(job, job.opened, ask, wanted, now)
        except DataplaneError as error:
            self._tell(job, _NOT_MADE, str(error), node=ask.node_id)
            self._lender.refuse(ask.number)

    def close_job(self, job_id: str) -> None:
        """Close a job with which the node has nothing to do any more."""
        for key in [key for key in self._jobs if key[0] == job_id]:
            self._close(self._jobs.pop(key))

    def tick(self) -> None:
        """Close places and jobs that nobody requests any more; call this about twice a second."""
        now = self._clock()
        for key, job in list(self._jobs.items()):
            for name, place in list(job.places.items()):
                place.tick(now)
                is_left = not place.streams and now - place.last_asked > JOB_IDLE_S
                if is_left:
                    self._places.leave(job.places.pop(name))
            if not job.places and job.opening is None and now - job.last_asked > JOB_IDLE_S:
                self._close(self._jobs.pop(key))
        self._places.let_go()

    def close(self) -> None:
        """Stop making slabs. May be called twice."""
        for task in self._tasks:
            task.cancel()
        while self._jobs:
            self._close(self._jobs.popitem()[1])
        self._places.close()

    def _tell(self, job: _Job, event: str, why: str, **facts: object) -> None:
        """Log an event once for each job and reason."""
        if why not in job.logged and len(job.logged) < _TOLD_MAX:
            job.logged.add(why)
            _trace.failed(event, job=job.job_id, why=why, **facts)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = background.start("making", work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- jobs ------------------------------------------------------------------------------------

    def _job(self, ask: Asked, wanted: MakeSlab, now: float) -> _Job | None:
        """Return the requested job, which is opened if it is not; None if there is no room for it.

        Raises:  ConfigError: the request does not say how to open this job.
        """
        key = ask.job_id, wanted.digest, ask.only_under
        job = self._jobs.get(key) or _Job(ask.job_id, wanted.digest, now, ask.only_under)
        if job.opened is not None and job.opened.lacks(wanted.stream.epoch):
            self._close(job)
            job.opened = None
        if job.opened is None and job.opening is None and now >= job.closed_until:
            opening = decode(OpenJob, bytes(wanted.opening))
            if opening.job_id != ask.job_id:
                raise ConfigError("a request for a slab of another job")
            if key not in self._jobs and len(self._jobs) >= _JOBS_MAX:
                return None
            self._jobs[key] = job
            job.opening = self._start(self._open(job, opening))
        job.last_asked = now
        return job

    async def _open(self, job: _Job, opening: OpenJob) -> None:
        began = time.monotonic()
        try:
            job.opened = await self._opened(job, opening)
        except DataplaneError as error:
            self._tell(job, _NOT_OPENED, str(error))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - even a panic must not end other jobs
            _trace.broke(_NOT_OPENED, by=error, job=job.job_id)
        else:
            opened = job.opened.job
            _trace.noted(
                "makes slabs for other nodes",
                job=job.job_id,
                dataset=shown(opened.urls),
                shards=opened.shard_count,
                samples=opened.sample_count,
                took_s=round(time.monotonic() - began, 3),
            )
        finally:
            job.opening, job.closed_until = None, self._clock() + TRY_AGAIN_S

    async def _opened(self, job: _Job, opening: OpenJob) -> _Opened:
        check_names(opening)
        names = [url for part in _parts(opening) for url in part.source.urls]
        names += opening.spec.urls_before
        _check_within(job, map(normalise, names))
        opened = await self._opener.job(opening, job.digest)
        try:
            shards = (manifest.shards for manifest in opened.manifests)
            for table in (*shards, *opened.before):
                listed = map(unsigned, table.urls)
                await asyncio.to_thread(_check_within, job, listed, are_listed=True)
            for dataset in opened.datasets:
                check_blocks(dataset, self._config.block_arena_bytes)
            changes = changes_of(opening.entries)
            software = software_of(opened, await pixels_of(opened.spec))
            return _Opened(opening, opened, software, changes)
        finally:
            for dataset in opened.datasets:
                self._opener.forget_unread(dataset)  # `_place` registers it again

    def _close(self, job: _Job) -> None:
        if job.opening is not None:
            job.opening.cancel()
        while job.places:
            self._places.leave(job.places.popitem()[1])

    # -- places and streams ----------------------------------------------------------------------

    def _make(self, job: _Job, opened: _Opened, ask: Asked, wanted: MakeSlab, now: float) -> None:
        """Make a requested slab.

        Raises:  DataplaneError: this node cannot make the slab.
        """
        mix = mix_of(opened.job.spec, wanted.stream.mix)
        at = replace(wanted.stream, first_step=wanted.steps.first, mix=mix)
        spec = with_mix(opened.job.spec, mix)
        samples = sample_count_of(spec, opened.job.manifests, at.epoch)
        if wanted.software != opened.software:
            raise SpecMismatch(
                f"batches are made by {opened.software or 'nothing'} here, and by "
                f"{wanted.software or 'nothing'} on the node that asks: install the same version "
                "of the software that decodes images, and of the modules of map= and collate=, and "
                "start the node again",
                field="software",
                expected=wanted.software,
                found=opened.software,
            )
        steps = EpochSteps.of(
            spec, samples, at.epoch, cursor=at.cursor, dp_size=at.dp_size,
            gaps=opened.changes.gaps(at.epoch), mix=mix,
        )  # fmt: skip
        Slice(steps, at.dp_rank).check_steps(wanted.steps.first, wanted.steps.count, at.step_stride)
        place = self._place(job, opened, at.dp_size, wanted.slot_bytes, now)
        if not 1 <= wanted.steps.count <= place.sizes.batches_max:
            raise ConfigError(f"a slab of {wanted.steps.count} batches", field="count")
        key = ask.node_id, replace(at, first_step=0)
        stream = place.streams.get(key)
        if stream is None:
            stream = place.streams[key] = self._stream(job, place, now)
            self._start(self._begin(job, opened, place, stream, at))
        place.last_asked = now
        coming = [steps for steps in wanted.coming if 1 <= steps.count <= place.sizes.batches_max]
        stream.ask(Ask(ask.number, wanted.steps, ask.request.length, now), coming)

    def _place(
        self, job: _Job, opened: _Opened, dp_size: int, slot_bytes: int, now: float
    ) -> MakingPlace:
        key = dp_size, slot_bytes
        place = job.places.get(key)
        if place is not None:
            return place
        if len(job.places) >= _PLACES_MAX:
            left = [key for key, place in job.places.items() if not place.streams]
            if not left:
                raise BudgetTooSmall(
                    f"slabs of this job are made for slots of {len(job.places)} sizes already: set "
                    "slab_bytes to one value on all nodes"
                )
            self._places.leave(job.places.pop(left[0]))
        job.opened = replace(opened, job=self._opener.keep(opened.job))
        place = self._places.open(job.job_id, job.opened.job, dp_size, slot_bytes, now)
        job.places[key] = place
        return place

    def _stream(self, job: _Job, place: MakingPlace, now: float) -> RemoteStream:
        count = sum(
            len(other_place.streams)
            for other_job in self._jobs.values()
            for other_place in other_job.places.values()
        )
        if count >= _STREAMS_MAX:
            raise BudgetTooSmall(
                f"slabs of {count} streams are made for other nodes already: add nodes with workers"
            )

        def failed(error: DataplaneError) -> None:
            self._tell(job, _NOT_MADE, str(error))

        holder = next(self._engine.numbers)
        return RemoteStream(self._engine, place.delivery, holder, self._answers, now, failed)

    async def _begin(
        self, job: _Job, opened: _Opened, place: MakingPlace, stream: RemoteStream, at: Stream
    ) -> None:
        try:
            gone, made = opened.changes.tombstones, opened.job
            check_left(opened.opening, made.spec, at.epoch)
            order = await self._opener.orders.of(
                made.spec, made.manifests, at.epoch, at.mix, gone, at.gone
            )
        except Exception as error:  # noqa: BLE001 - a bad request must not affect other nodes
            self._tell(job, _NOT_MADE, repr(error))
            place.drop(stream)
        else:
            gaps = opened.changes.gaps(at.epoch)
            spec, sizes = opened.job.spec, place.sizes

            def walk(steps: StepRange) -> Walk:
                begin = replace(at, first_step=steps.first)
                return Walk(spec, order, begin, sizes, count=steps.count, gaps=gaps)

            stream.begin(walk)


def _parts(opening: OpenJob) -> tuple[OpenJob, ...]:
    return (opening, *(() if opening.mixture is None else requests_of(opening)))


def _check_within(job: _Job, urls: Iterable[str], *, are_listed: bool = False) -> None:
    """Check that a job's urls are under those of its key.

    Raises:  AccessDenied: a url lies elsewhere.
    """
    if not job.only_under:
        return
    from dataplane.security.urls import covers, is_under  # not needed on a single host

    is_within = covers if are_listed else is_under
    for url in urls:
        if not is_within(url, job.only_under):
            within = ", ".join(job.only_under)
            raise AccessDenied(f"{url} lies outside of {within}, which tokens of this job allow")


# -- answers to neighbours -------------------------------------------------------------------------
#
# The exchanges of a node with the other nodes of its jobs: from which nodes it requests blocks, and
# how it answers their requests.


_security = Trace("security")


class Neighbourhood:
    """The exchanges of one node with its neighbours, which reach the node through `lending`, if at
    all; `lending` then belongs to this object. `own_reads` returns the node's reads.
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        opener: DatasetOpener,
        known: KnownNeighbours,
        lending: Lending | None,
        manifests: LentManifests | None,
        own_reads: Callable[[], NodeReads],
    ) -> None:
        self._engine, self._known, self._own_reads = engine, known, own_reads
        self._lending, self._manifests = lending, manifests
        self._making = None if lending is None else Making(config, engine, opener, lending)
        self.tables = JobTables(self._on_nodes, self._on_nodes_gone)

    def start(self) -> None:
        """Begin to answer neighbours."""
        if self._lending is not None:
            self._lending.serve(self._asked)

    def tick(self) -> None:
        """Note that time has passed; call this about twice a second."""
        for part in (self._lending, self._making, self._manifests):
            if part is not None:
                part.tick()

    def reads(self) -> NodeReads:
        """Return what this node has read, found in memory, sent to neighbours, and made
        for them.
        """
        reads = replace(self._own_reads(), memory_bytes=self._engine.scheduler.found_bytes)
        lent, making = self._lending, self._making
        if lent is None or making is None:
            return reads
        return replace(
            reads,
            lent_bytes=lent.lent_bytes,
            made_slabs=making.slab_count,
            made_bytes=making.slab_bytes,
        )

    def close(self) -> None:
        """Send nothing any more. May be called twice."""
        if self._making is not None:
            self._making.close()
        if self._manifests is not None:
            self._manifests.close()
        if self._lending is not None:
            self._lending.close()

    def _on_nodes(self, nodes: JobNodes) -> None:
        if self._lending is not None:
            urls = tuple(map(_canonical, nodes.only_under))
            self._lending.keys(nodes.job_id, nodes.generation, nodes.key, urls)
        self._known.learn(nodes)
        self._engine.delegating.nodes_changed(nodes.job_id)

    def _on_nodes_gone(self, job_id: str) -> None:
        self._known.forget(job_id)
        if self._lending is not None:
            self._lending.keys(job_id, 0, b"")
        if self._making is not None:
            self._making.close_job(job_id)

    def _asked(self, ask: Asked) -> None:
        if self._manifests is not None and self._manifests.asked(ask):
            return
        if ask.request.form is BlockForm.SLAB and self._making is not None:
            self._making.asked(ask)
            return
        of_job = (dataset for name, dataset in self._engine.open_datasets() if name == ask.job_id)
        dataset = next(
            (dataset for dataset in of_job if dataset.digest == ask.request.dataset), None
        )
        if dataset is not None and not self._may_lend(ask, dataset):
            dataset = None
        self._engine.lent.asked(ask, dataset)

    def _may_lend(self, ask: Asked, dataset: Dataset) -> bool:
        """Whether nodes with this key may read the shard of the block."""
        block = ask.request.block
        if not ask.only_under or block >= dataset.manifest.block_count:
            return True
        from dataplane.security.urls import covers  # not needed on a single host

        url = unsigned(dataset.url(block))
        if covers(url, ask.only_under):
            return True
        why = f"{url} lies outside of {', '.join(ask.only_under)}, which tokens of this job allow"
        by, facts = ask.node_id, {"node": ask.node_id, "job": ask.job_id, "why": why}
        _security.refused("data request refused", by=by, **facts)
        return False


def _canonical(prefix: str) -> str:
    """Normalise a prefix like the urls of shards. A text that is not a valid url is returned as it
    is, and matches no shard.
    """
    try:
        return normalise(prefix)
    except ConfigError:
        return prefix
