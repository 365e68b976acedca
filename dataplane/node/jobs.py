"""Opens jobs for ranks: dataset, spec, place at the coordinator, memory, streams.

Invariants:
1. A member that was admitted is renewed until it leaves, its process ends, or its lease is lost.
2. A delivery arena lives as long as a member uses it; two members with one dp_rank share it.
3. Slabs are shared by the members of one delivery, and by jobs of one group with equal spec and
   place, but only with transforms, where making a slab costs more than copying it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from msgspec.structs import replace

from dataplane.base import background
from dataplane.base.meters import JobMeter, RankMeter
from dataplane.base.trace import Trace
from dataplane.model.changes import LOADER, EpochSteps, apart, changes_of, check_unchanged
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import ClosedError, ConfigError, DataplaneError
from dataplane.model.ledger import LedgerPosition
from dataplane.model.records import Stream
from dataplane.node.dataset import Dataset
from dataplane.node.datasets import Orders, check_left, declared, lacks_left, shown
from dataplane.node.delivery import (
    DeliveryArena,
    Send,
    ServedStream,
    bad_limit,
    delegated_job,
    delivery_memory,
    layout_of,
    slab_sizes,
)
from dataplane.node.engine import Engine
from dataplane.node.member import ServedMember, mix_of, progress_of
from dataplane.node.neighbours import JobTables
from dataplane.node.opener import (
    DatasetOpener,
    OpenedJob,
    check_blocks,
    check_names,
    naming,
    pixels_of,
    software_of,
)
from dataplane.node.places import Following, NodePlaces
from dataplane.plan import advice
from dataplane.plan.cluster import Cluster
from dataplane.plan.order import SampleOrder
from dataplane.plan.shuffled import ShuffledJob, ShuffledSource, source_of_mixture
from dataplane.plan.slices import Slice
from dataplane.plan.tombstones import check_tombstones, own_entries
from dataplane.rpc import membership, messages
from dataplane.rpc.base import Coordination
from dataplane.scheduler.walk import SlabSizes, Walk
from dataplane.transforms.images import masks_advice

_trace = Trace("node")


class Jobs:
    """The state that the members on this node share."""

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        coordination: Coordination,
        node_id: str,
        opener: DatasetOpener,
        tables: JobTables,
    ) -> None:
        self._config = config
        self._engine = engine
        self._node_id = node_id
        self.coordination = coordination
        self.opener = opener
        self._deliveries: dict[object, DeliveryArena] = {}
        self.streams = Streams(engine, opener.orders)
        self.members: dict[str, ServedMember] = {}
        self.places = NodePlaces(config, coordination, node_id)
        self.tables = tables
        self.joined = asyncio.Event()

    async def open(self, request: messages.OpenJob) -> tuple[ServedMember, messages.JobOpened]:
        """Admit a rank.

        Raises:  ConfigError and its subclasses: the dataset, the spec, the place or a budget is
        wrong.  DataStallError: the coordinator does not answer within the stall timeout.
        """
        try:
            return await self._open(request)
        except DataplaneError as error:
            self._log("job not opened", request, error)
            raise

    def no_batch(self, member: ServedMember | None, error: DataplaneError) -> None:
        """Log the error that a rank gets in place of a batch."""
        if member is not None:
            self._log("no batch", member.request, error)

    def _log(self, event: str, request: messages.OpenJob, error: DataplaneError) -> None:
        # The trainer of an embedded node shows the error itself, in the same terminal.
        say = _trace.noted if self._config.embedded else _trace.failed
        shard = error.nouns.get("shard")
        at = {"shard": shard} if shard else {}
        say(event, job=request.job_id, rank=request.topology.rank, **at, error=error)

    async def _open(self, request: messages.OpenJob) -> tuple[ServedMember, messages.JobOpened]:
        check_names(request)
        began, place = time.monotonic(), request.topology
        for number, later in request.ahead:
            check_names(replace(later, member_id=request.member_id))
            with naming(f"stage {number}", later.source):
                for dataset in (await self.opener.job(later)).datasets:
                    self.opener.forget_unread(dataset)
        request = replace(request, ahead=())
        await self.opener.manifests(request)
        indexed = time.monotonic()
        opened = await self.opener.job(request)
        if opened.finishing is not None:
            request = opened.finishing.request
        try:
            joining = self._join_request(request, opened, await pixels_of(opened.spec))
            member = await self._admit(request, opened, joining)
        except BaseException:  # even if the trainer went away during the join
            for dataset in opened.datasets:
                self.opener.forget_unread(dataset)
            raise
        self.members[member.member_id] = member
        self.joined.set()
        _trace.noted(
            "job opened",
            job=request.job_id,
            rank=place.rank,
            dp_rank=place.dp_rank,
            dp_size=place.dp_size,
            ranks_from=place.source,
            dataset=shown(opened.urls),
            shards=opened.shard_count,
            blocks=opened.block_count,
            samples=opened.sample_count,
            took_s=round(time.monotonic() - began, 3),
        )
        delivery = member.delivery
        layout = delivery.layout
        ended = _ended(member)
        if ended:
            _trace.failed("a launch ended another", job=request.job_id, why=ended[0])
        return member, messages.JobOpened(
            opened.spec,
            opened.spec.digest(),
            opened.identity,
            opened.sample_count,
            opened.columns,
            layout.arena_bytes,
            layout.held_bytes_max,
            member.generation,
            self._config.stall_timeout_s,
            member.pixels,
            index_s=indexed - began,
            plan_s=time.monotonic() - indexed,
            advice=(*ended, *_advice(opened, member, self._config.block_arena_bytes)),
            entries=(*member.entries, *(member.following.entries if member.following else ())),
            finishing=opened.finishing,
            gone=member.request.gone,
            **self._marks(member),
        )

    def _marks(self, member: ServedMember) -> dict[str, Any]:
        """Return the past and present marks of the job's ledger, if it outlives this node."""
        if member.joined is None or self._config.embedded:
            return {}
        return {"mark": member.joined.mark, "marks": member.joined.marks}

    async def _admit(
        self,
        request: messages.OpenJob,
        opened: OpenedJob,
        joining: membership.JoinRequest,
    ) -> ServedMember:
        """Check everything that can be checked here, take the place, then the memory."""
        spec, samples, place = opened.spec, opened.sample_count, request.topology
        own = Slice(EpochSteps.of(spec, samples, dp_size=place.dp_size), place.dp_rank)
        own.steps.check_ranks(0)
        for dataset in opened.datasets:
            self._check_budget(dataset)
        joined = await self.places.join(joining)
        # Register the datasets again: their last reader may have left during the join.
        opened = self.opener.keep(opened)
        slab_bytes = self._config.slab_bytes
        sizes = slab_sizes(
            opened.largest, spec, place.dp_size, slab_bytes, samples, opened.collated
        )
        entries, midway = apart(joined.entries, joined.generation)
        try:
            known, added = own_entries(
                request.gone, spec, opened.identity, opened.manifests, entries
            )
            request = replace(request, entries=(*entries, *added), gone=known)
            gone = changes_of(request.entries).tombstones
            await asyncio.to_thread(check_tombstones, spec, opened.manifests, gone)
            delivery = self._delivery(request, opened, sizes, joining.pixels)
        except (DataplaneError, asyncio.CancelledError):
            self.places.leave(request.job_id, request.member_id, lost=False)
            raise
        delivery.users += 1
        self._engine.replaced.begin(delivery)
        self.tables.joined(joined.nodes)
        release = partial(self._release, delivery)
        following = Following(midway, spec.global_batch, release, follows=request.follows)
        meter = self._meter(request.job_id, request.topology.rank)
        delivery.meter = meter.job
        member = ServedMember(
            request,
            opened,
            delivery,
            sizes,
            joined.generation,
            next(self._engine.numbers),
            joining,
            following=following,
            joined=joined,
            meter=meter,
        )
        if joined.knows_all_nodes:
            member.gathered.set()
        return member

    def _meter(self, job_id: str, rank: int) -> RankMeter:
        """Return the counts of a rank, which all members of the rank share, such as its DataLoader
        workers.
        """
        meters = [member.meter for member in self.members.values() if member.job_id == job_id]
        ranks = (
            member.meter
            for member in self.members.values()
            if (member.job_id, member.request.topology.rank) == (job_id, rank)
        )
        job = meters[0].job if meters else JobMeter()
        return next(ranks, None) or RankMeter(job)

    @property
    def delivery_bytes(self) -> int:
        """The size of all delivery arenas."""
        return sum(delivery.layout.arena_bytes for delivery in self._deliveries.values())

    def _release(self, delivery: DeliveryArena, slab_id: int) -> None:
        self._engine.release(delivery, [slab_id])

    def stop(self, member: ServedMember) -> None:
        """Close the streams of a rank that reads no more. May be called twice."""
        if self.members.get(member.member_id) is member:
            del self.members[member.member_id]
        if member.closed:
            return
        member.closed = True
        member.replaced = self._engine.replaced.end(member.delivery, self._deliveries.values())
        if not any(other.job_id == member.job_id for other in self.members.values()):
            self.tables.forget(member.job_id)
        self.streams.close_all(member)

    def close(self, member: ServedMember) -> None:
        """Free everything that only this rank used, since it is gone. May be called twice."""
        self.stop(member)
        if member.released:
            return
        member.released = True
        delivery = member.delivery
        self._engine.release_all(delivery, member.holder)
        delivery.users -= 1
        if delivery.users == 0:
            self._deliveries = {k: d for k, d in self._deliveries.items() if d is not delivery}
            self.opener.close_delivery(delivery)

    def forget_manifest(self, job_id: str) -> None:
        """Forget a job's manifest when its last rank has closed it, so that the next rank lists the
        dataset again.
        """
        if not any(member.job_id == job_id for member in self.members.values()):
            self.opener.forget_manifests(job_id)

    def leave(self, member: ServedMember, *, lost: bool) -> None:
        """Give a rank's place back, in the background, unless that was done before, or the rank
        has the place again on another connection.
        """
        if member.has_left or member.member_id in self.members:
            return
        member.has_left, member.was_lost = True, lost
        _trace.noted(
            "rank lost" if lost else "job closed",
            job=member.job_id,
            rank=member.request.topology.rank,
            epoch=member.epoch,
            cursor=member.cursor,
        )
        progress = replace(progress_of(member), replaced=member.replaced)
        self.places.leave(member.job_id, member.member_id, lost=lost, progress=progress)

    async def rejoin(self, member: ServedMember) -> None:
        """Join again after the lease ran out."""
        joined = await self.places.rejoin(member.joining)
        entries, _ = apart(joined.entries, joined.generation)
        kept = tuple(entry for entry in member.entries if entry.by != LOADER)
        check_unchanged(member.job_id, kept, entries)
        member.generation = joined.generation
        if member.closed:  # the leave may have come before this join: leave again
            self.places.leave(member.job_id, member.member_id, lost=member.was_lost)
            return
        self.tables.joined(joined.nodes)
        self.joined.set()

    # -- parts -----------------------------------------------------------------------------------

    def _check_budget(self, dataset: Dataset) -> None:
        """Check that the largest block fits into the arena, raw and decoded together."""
        if self._config.has_workers:
            check_blocks(dataset, self._config.block_arena_bytes)

    def _join_request(
        self, request: messages.OpenJob, opened: OpenedJob, pixels: str
    ) -> membership.JoinRequest:
        return membership.JoinRequest(
            request.job_id, shown(opened.urls), opened.spec, request.topology, request.incarnation,
            request.member_id, self._node_id, opened.sample_count, pixels, declared(opened.urls),
            request.source.format, opened.identity,
        )  # fmt: skip

    def _delivery(
        self,
        request: messages.OpenJob,
        opened: OpenedJob,
        sizes: SlabSizes,
        pixels: str,
    ) -> DeliveryArena:
        spec, place, has_workers = opened.spec, request.topology, self._config.has_workers
        key = (
            request.job_id, request.incarnation, request.sharing, spec,
            place.dp_rank, place.dp_size, request.entries, lacks_left(request, spec),
        )  # fmt: skip
        delivery = self._deliveries.get(key)
        if delivery is None:
            software = software_of(opened, pixels)
            job = delegated_job(request, spec, software, has_workers=has_workers)
            layout = layout_of(self._config, sizes.slot_bytes)
            arena = delivery_memory(self._config, layout, sizes.batch_bytes)
            number = next(self._engine.numbers)
            delivery = DeliveryArena(
                number,
                arena,
                layout,
                opened.datasets,
                group=_group(request, spec, alone=number) if has_workers else None,
                is_declared=bool(request.sharing),
                job=job,
                is_light=not has_workers,
                names_sources=opened.names_sources,
                collated=opened.collated,
                job_id=request.job_id,
                launch=(request.incarnation, spec.slabs_digest),
                bad_limit=bad_limit(spec, opened.datasets),
            )
            self._deliveries[key] = delivery
            self.opener.open_delivery(delivery)
        return delivery


def _group(request: messages.OpenJob, spec: JobSpec, *, alone: int) -> object:
    """Return the group with which this rank shares slabs: all members of a declared group with
    equal spec and place, or only those of its delivery; None if making a slab costs no more than
    copying it.
    """
    place = request.topology
    if not spec.transforms:
        return None
    changes = changes_of(request.entries)
    shared = request.sharing, spec, place.dp_rank, place.dp_size, changes
    return shared if request.sharing else alone


def _ended(member: ServedMember) -> tuple[str, ...]:
    """Return a warning if the member's launch has ended an older one that still ran."""
    count = 0 if member.joined is None else member.joined.ended_count
    if not count:
        return ()
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    said = (
        f"job {member.job_id!r} was being read by {ranks} of another launch, which ends now:"
        " if both were to run, give this one another name="
    )
    return (said,)


def _advice(job: OpenedJob, member: ServedMember, arena_bytes: int) -> tuple[str, ...]:
    """Return the advice that this rank gives its user. Rank 0 of the job gives all advice, and one
    rank of each other host the advice about the memory of that host.
    """
    spec, place = member.spec, member.request.topology
    texts = []
    if place.rank == 0:
        texts = [*_of_sources(job, spec), masks_advice(spec.transforms)]
    if spec.shuffle:
        on_host = place.local_world_size * place.dp_size // place.world_size
        cluster = Cluster(place.dp_size, min(max(on_host, 1), place.dp_size))
        sources = tuple(_shuffled(job, spec))
        shuffled = ShuffledJob(sources, spec.lanes, cluster, spec.global_batch, arena_bytes)
        if place.rank == 0:
            texts.append(advice.advice(shuffled))
        elif place.local_rank == 0:
            texts.append(advice.memory(shuffled))
    return tuple(filter(None, texts))


def _of_sources(job: OpenedJob, spec: JobSpec) -> list[str]:
    """Return advice on folders, on series of shards, and on packs, by source."""
    names = [""] if spec.mixture is None else [source.name for source in spec.mixture.sources]
    texts = []
    for name, opened in zip(names, job.opened, strict=True):
        of_one = [opened.folders]
        if opened.view.pack is not None and opened.packing is not None:
            blocks = opened.manifest.block_count
            of_one.append(advice.packing(opened.packing, opened.view.pack, blocks))
        texts += [f"source {name!r}: {said}" if said and name else said for said in of_one]
    return texts


def _shuffled(job: OpenedJob, spec: JobSpec) -> list[ShuffledSource]:
    """Return the sources that an epoch reads, with the shares with which the job begins."""
    mixture = spec.mixture
    if mixture is None:
        (opened,), (dataset,) = job.opened, job.datasets
        stored, kept = opened.stored_bytes, dataset.kept_bytes
        return [ShuffledSource(opened.sizes, spec.window, spec.global_batch, stored, kept)]
    sources, total = [], sum(mixture.shares)
    for source, opened, dataset in zip(mixture.sources, job.opened, job.datasets, strict=True):
        share = source.share / total
        passes = share * job.sample_count / opened.manifest.sample_count
        read_bytes, kept = round(passes * opened.stored_bytes), dataset.kept_bytes
        sources.append(source_of_mixture(spec, source, opened.sizes, share, read_bytes, kept))
    return [source for source in sources if source.stored_bytes]


# -- streams ---------------------------------------------------------------------------------------
#
# Streams of members: the current one, and the next one, which is prepared ahead.
#
# Invariants:
# 1. When a member opens its next stream, the stream that was prepared ahead is either used as it is
#    or closed; it holds no resources that another stream of the member needs.


class Streams:
    """Opens streams."""

    def __init__(self, engine: Engine, orders: Orders) -> None:
        self._engine, self._orders = engine, orders
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(
        self,
        member: ServedMember,
        request: messages.OpenStream,
        send: Send,
        ready: Callable[[ServedMember], Awaitable[None]],
    ) -> tuple[ServedStream, messages.StreamOpened]:
        """Open a stream of this member, and begin to read for it as soon as it is `ready`.

        Raises:  ConfigError: no such cursor or step.  ClosedError: the member has left meanwhile.
        """
        if request.step_stride < 1:
            raise ConfigError("step_stride counts from 1", field="step_stride")
        place = member.request.topology
        at = Stream(
            request.epoch,
            request.cursor,
            place.dp_rank,
            place.dp_size,
            request.first_step,
            request.step_stride,
            mix_of(member.spec, request.mix),
            () if member.following is None else member.following.gone(request.known_entry),
        )
        ahead = self._made_ahead(member, at)
        if ahead is None:
            walk = _walk(member, await self._order(member, at, at.epoch), at)
            await ready(member)
            if member.closed:
                raise ClosedError(f"job {member.job_id!r} was closed while it was opened")
        else:
            walk = ahead.walk
        if member.following is not None:
            send = member.following.sending(request.epoch, walk.steps, request.known_entry, send)
        if ahead is None:
            stream = self._opened(member, walk, send)
        else:
            stream = ahead
            self._engine.adopt_stream(stream, send)
        member.streams[stream.stream_id] = stream
        member.epoch, member.cursor = request.epoch, request.cursor
        member.began = member.began or LedgerPosition(request.epoch, request.cursor)
        first_step = min(request.first_step, stream.walk.step_count)
        begin = stream.walk.steps.begin(first_step)
        member.mix, member.mix_from = at.mix, LedgerPosition(request.epoch, begin)
        if request.step_stride == 1:
            follow = partial(self._start, "next epoch", self._open_next_epoch, member, stream)
            self._engine.when_planned(stream, follow)
        return stream, messages.StreamOpened(stream.stream_id, stream.walk.step_count)

    def _made_ahead(self, member: ServedMember, at: Stream) -> ServedStream | None:
        """Return the stream that was prepared ahead, if it is the requested one."""
        stream, member.next_epoch = member.next_epoch, None
        if stream is None:
            return None
        if stream.walk.stream != at or stream.has_failed:
            self._engine.close_stream(stream)
            return None
        return stream

    def _opened(
        self, member: ServedMember, walk: Walk, send: Send, after: ServedStream | None = None
    ) -> ServedStream:
        # Plan the next order only after the first batch: the batch needs the processor time.
        expect_next = partial(self._start, "next order", self._expect_next, member)
        return self._engine.open_stream(
            member.delivery, walk, send, member.holder, after, expect_next
        )

    def _start(
        self,
        name: str,
        call: Callable[[ServedMember, ServedStream], Coroutine[Any, Any, None]],
        member: ServedMember,
        stream: ServedStream,
    ) -> None:
        task = background.start(name, call(member, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _expect_next(self, member: ServedMember, stream: ServedStream) -> None:
        """Determine, after the trainer's first batch, which blocks the next epoch needs first, so
        that they are kept.
        """
        order = await self._next_order(member, stream)
        if order is not None:
            self._engine.expect_next(stream, order)

    async def _next_order(self, member: ServedMember, stream: ServedStream) -> SampleOrder | None:
        try:
            at = stream.walk.stream
            return await self._order(member, at, at.epoch + 1)
        except DataplaneError:
            return None  # the trainer gets the error when it requests that epoch

    async def _open_next_epoch(self, member: ServedMember, stream: ServedStream) -> None:
        """Open the next epoch, which the trainer will request, since the present one is planned."""
        now = stream.walk.stream
        order = await self._next_order(member, stream)
        is_only = [*member.streams.values()] == [stream] and member.next_epoch is None
        if order is None or stream.is_closed or not is_only or member.closed:
            return
        at = Stream(now.epoch + 1, 0, now.dp_rank, now.dp_size, 0, 1, now.mix, now.gone)
        walk = _walk(member, order, at, is_ahead=True)
        member.next_epoch = self._opened(member, walk, stream.send, after=stream)

    def close_all(self, member: ServedMember) -> None:
        """Close all streams of a member that is gone."""
        for stream in [*member.streams.values(), *filter(None, [member.next_epoch])]:
            self._engine.close_stream(stream)
        member.streams.clear()
        member.next_epoch = None

    async def _order(self, member: ServedMember, at: Stream, epoch: int) -> SampleOrder:
        """Return the order of an epoch, as it holds for this stream."""
        check_left(member.request, member.spec, epoch)
        gone, manifests = member.changes.tombstones, member.opened.manifests
        return await self._orders.of(member.spec, manifests, epoch, at.mix, gone, at.gone)


def _walk(member: ServedMember, order: SampleOrder, at: Stream, *, is_ahead: bool = False) -> Walk:
    delivery = member.delivery
    return Walk(
        member.spec,
        order,
        at,
        member.sizes,
        is_ahead=is_ahead,
        is_aligned=delivery.group is not None,
        is_light=delivery.is_light,
        gaps=member.changes.gaps(at.epoch),
    )
