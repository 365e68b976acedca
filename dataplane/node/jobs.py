"""Opens jobs for ranks: dataset, spec, place at the coordinator, memory.

Invariants:
1. The ranks of one launch of a job see one manifest: it is opened once.
2. A member that was admitted is renewed until it leaves, its process ends, or its lease is lost.
3. A delivery arena lives as long as a member uses it; two members with one dp_rank share it.
4. Slabs are shared by the members of one delivery, and by jobs of one group with equal spec and
   place, but only with transforms, where making a slab costs more than copying it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from msgspec import Struct

from dataplane.arena.memfd import Arena
from dataplane.arena.slots import SlotLayout, plan_slots
from dataplane.config import JobSpec, NodeConfig
from dataplane.errors import BudgetTooSmall, DataplaneError, PeerLost
from dataplane.machine import numa_node_of, numa_nodes
from dataplane.model import DatasetIdentity
from dataplane.node.categories import CategoryReader
from dataplane.node.dataset import Dataset
from dataplane.node.datasets import Datasets, declared, shown
from dataplane.node.delivery import DeliveryArena
from dataplane.node.engine import Engine
from dataplane.node.joining import patiently
from dataplane.node.member import ServedMember, progress_of
from dataplane.node.slab_sizes import slab_sizes
from dataplane.node.streams import Streams
from dataplane.plan import advice
from dataplane.plan.cluster import Cluster
from dataplane.plan.defaults import BlockSizes, Shuffle, shuffle_of
from dataplane.plan.identity import identity_of
from dataplane.plan.manifest import Manifest
from dataplane.plan.slices import Slice
from dataplane.rpc import membership, messages
from dataplane.rpc.base import Coordination
from dataplane.rpc.bounds import check_name
from dataplane.scheduler import budgets
from dataplane.scheduler.walk import SlabSizes
from dataplane.trace import Trace
from dataplane.transforms.images import delivered
from dataplane.transforms.options import in_order

OpenManifest = Callable[[messages.DatasetSource], Manifest]

_trace = Trace("node")

_MANIFESTS_MAX = 16
_ManifestKey = tuple[messages.DatasetSource, str, str]


class _Opened(Struct, frozen=True):
    """An opened dataset, with values that need a pass over its blocks, which runs in a thread."""

    manifest: Manifest
    identity: DatasetIdentity
    sizes: BlockSizes
    stored_bytes: int


class Jobs:
    """Everything that the members on this node share."""

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        coordination: Coordination,
        node_id: str,
        open_manifest: OpenManifest,
    ) -> None:
        self._config = config
        self._engine = engine
        self._coordination = coordination
        self._node_id = node_id
        self._open_manifest = open_manifest
        self._numa_nodes = numa_nodes()
        self._manifests: OrderedDict[_ManifestKey, asyncio.Future[_Opened]] = OrderedDict()
        self._datasets = Datasets(config)
        self._deliveries: dict[object, DeliveryArena] = {}
        self._numbers = itertools.count(1)
        self._category_reader = CategoryReader(config, engine, self._numbers, self._datasets.new_id)
        self.streams = Streams(engine)
        self.members: dict[str, ServedMember] = {}

    async def open(
        self, request: messages.OpenJob, pid: int = 0
    ) -> tuple[ServedMember, messages.JobOpened]:
        """Admit a rank, whose process has this id; 0 if that is unknown.

        Raises:  ConfigError and its subclasses: the dataset, the spec, the place or a budget is
        wrong.  DataStallError: the coordinator does not answer within the stall timeout.
        """
        _check_names(request)
        began, place = time.monotonic(), request.topology
        opened = await self._manifest(request)
        indexed = time.monotonic()
        manifest, spec = opened.manifest, _spec_of(opened, request)
        categories = await self._category_reader.of_job(manifest, spec, self._datasets.check)
        dataset = await self._datasets.open(manifest, spec, categories)
        try:
            member = await self._admit(request, dataset, spec, await _pixels_of(spec), pid)
        except BaseException:  # also if the trainer went away while it joined
            self._forget_unread(dataset)
            raise
        self.members[member.member_id] = member
        _trace.noted(
            "job opened",
            job=request.job_id,
            rank=place.rank,
            dp_rank=place.dp_rank,
            dp_size=place.dp_size,
            ranks_from=place.source,
            dataset=shown(manifest.urls),
            shards=len(manifest.shards),
            blocks=manifest.block_count,
            samples=manifest.sample_count,
            took_s=round(time.monotonic() - began, 3),
        )
        delivery = member.delivery
        layout = delivery.layout
        return member, messages.JobOpened(
            spec,
            spec.digest(),
            opened.identity,
            manifest.sample_count,
            delivered(member.dataset.columns.specs, spec.transforms),
            layout.arena_bytes,
            layout.held_bytes_max,
            member.generation,
            self._config.stall_timeout_s,
            member.pixels,
            index_s=indexed - began,
            plan_s=time.monotonic() - indexed,
            advice=_advice(opened, member, self._config.block_arena_bytes),
        )

    async def _admit(
        self, request: messages.OpenJob, dataset: Dataset, spec: JobSpec, pixels: str, pid: int
    ) -> ServedMember:
        """Check what can be checked here, take the place, then the memory."""
        manifest, place = dataset.manifest, request.topology
        Slice(manifest.sample_count, 0, spec.global_batch, spec.end, place.dp_rank, place.dp_size)
        self._check_budget(dataset)
        joining = self._join_request(request, spec, manifest, pixels)
        joined = await patiently(
            partial(self._coordination.join, joining),
            self._config.stall_timeout_s,
            job=request.job_id,
            coordinator=self._config.coordinator,
            node=self._node_id,
        )
        # The dataset's last reader may have left meanwhile.
        dataset = self._datasets.keep(dataset, spec)
        sizes = slab_sizes(dataset, spec, place.dp_size, self._config.slab_bytes)
        try:
            delivery = self._delivery(request, dataset, spec, sizes, pid)
        except DataplaneError:
            await self._tell_left(request, lost=False)
            raise
        delivery.users += 1
        return ServedMember(
            request, spec, dataset, delivery, sizes, joined.generation, next(self._numbers), pixels
        )

    def close(self, member: ServedMember) -> None:
        """The rank is gone: free everything that only it used. May be called twice."""
        if self.members.get(member.member_id) is member:
            del self.members[member.member_id]
        if member.closed:
            return
        member.closed = True
        self.streams.close_all(member)
        delivery = member.delivery
        self._engine.release_all(delivery, member.holder)
        delivery.users -= 1
        if delivery.users == 0:
            self._deliveries = {k: d for k, d in self._deliveries.items() if d is not delivery}
            self._engine.close_delivery(delivery)
            for dataset in delivery.datasets:
                self._forget_unread(dataset)

    def forget_manifest(self, job_id: str) -> None:
        """The last rank has closed this job: the next rank that opens it lists the dataset
        again.
        """
        if not any(member.job_id == job_id for member in self.members.values()):
            for key in [key for key in self._manifests if key[1] == job_id]:
                del self._manifests[key]

    def _forget_unread(self, dataset: Dataset) -> None:
        """Free a dataset's blocks, unless somebody reads it."""
        if not any(dataset in delivery.datasets for delivery in self._deliveries.values()):
            self._engine.forget_dataset(dataset)
            self._datasets.forget(dataset)

    async def leave(self, member: ServedMember, *, lost: bool) -> None:
        """Tell the coordinator. If it does not answer now, it finds out when the lease ends."""
        _trace.noted(
            "rank lost" if lost else "job closed",
            job=member.job_id,
            rank=member.request.topology.rank,
            epoch=member.epoch,
            cursor=member.cursor,
        )
        await self._tell_left(member.request, lost=lost, progress=progress_of(member))

    async def _tell_left(
        self,
        request: messages.OpenJob,
        *,
        lost: bool,
        progress: membership.MemberProgress | None = None,
    ) -> None:
        leaving = membership.LeaveRequest(request.job_id, request.member_id, lost, progress)
        try:
            await self._coordination.leave(leaving)
        except PeerLost:
            return
        except DataplaneError as error:  # such as a full disk
            _trace.failed("leave", job=request.job_id, error=error)

    async def rejoin(self, member: ServedMember) -> None:
        """Join again after the lease ran out."""
        manifest = member.dataset.manifest
        joined = await self._coordination.join(
            self._join_request(member.request, member.spec, manifest, member.pixels)
        )
        member.generation = joined.generation

    # -- parts -----------------------------------------------------------------------------------

    async def _manifest(self, request: messages.OpenJob) -> _Opened:
        key = (request.source, request.job_id, request.incarnation)
        future = self._manifests.get(key)
        if future is None:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(None, self._opened, request.source)
            self._manifests[key] = future
            future.add_done_callback(partial(self._forget_failed, key))
            if len(self._manifests) > _MANIFESTS_MAX:
                self._manifests.popitem(last=False)
        return await asyncio.shield(future)

    def _forget_failed(self, key: _ManifestKey, done: asyncio.Future[_Opened]) -> None:
        """Opening failed: let the next rank that opens this dataset try again."""
        if (done.cancelled() or done.exception()) and self._manifests.get(key) is done:
            del self._manifests[key]

    def _opened(self, source: messages.DatasetSource) -> _Opened:
        manifest = self._open_manifest(source)
        sizes = BlockSizes.of(manifest.block_rows, manifest.block_decoded)
        return _Opened(manifest, identity_of(manifest), sizes, int(manifest.block_length.sum()))

    def _check_budget(self, dataset: Dataset) -> None:
        """One block must fit: raw and decoded together, while it is decoded."""
        marks, budget = dataset.blocks.marks, self._config.block_arena_bytes
        largest = dataset.largest_block
        need = int(marks.raw[largest] + marks.decoded[largest])
        if need > budget:
            url = dataset.url(largest)
            raise budgets.block_too_large(url, need, budget)

    def _check_delivery(self, layout: SlotLayout, sizes: SlabSizes) -> None:
        """Limit the memory reserved for one rank, however large its batches are."""
        config = self._config
        budget = max(config.delivery_bytes_per_rank, 2 * config.block_arena_bytes)
        if layout.arena_bytes > budget:
            raise budgets.rank_takes_too_much(layout, sizes.batch_bytes, config.slab_bytes, budget)

    def _join_request(
        self, request: messages.OpenJob, spec: JobSpec, manifest: Manifest, pixels: str
    ) -> membership.JoinRequest:
        return membership.JoinRequest(
            request.job_id, shown(manifest.urls), spec, request.topology, request.incarnation,
            request.member_id, self._node_id, manifest.sample_count, pixels,
            declared(manifest.urls),
        )  # fmt: skip

    def _delivery(
        self,
        request: messages.OpenJob,
        dataset: Dataset,
        spec: JobSpec,
        sizes: SlabSizes,
        pid: int,
    ) -> DeliveryArena:
        place = request.topology
        key = (
            request.job_id, request.incarnation, request.sharing, spec,
            place.dp_rank, place.dp_size,
        )  # fmt: skip
        delivery = self._deliveries.get(key)
        if delivery is None:
            layout = plan_slots(self._config.delivery_bytes_per_rank, sizes.slot_bytes)
            self._check_delivery(layout, sizes)
            arena = Arena.create("dataplane-delivery", layout.arena_bytes)
            try:
                # The other slots when they are used: mapping all of them takes a quarter of a
                # second.
                arena.reserve(0, layout.slot_bytes)
            except BudgetTooSmall:
                arena.close()
                raise
            number = next(self._numbers)
            delivery = DeliveryArena(
                number,
                arena,
                layout,
                (dataset,),
                group=_group(request, spec, alone=number),
                is_declared=bool(request.sharing),
                numa_node=numa_node_of(pid, self._numa_nodes),
            )
            self._deliveries[key] = delivery
            self._engine.open_delivery(delivery)
        return delivery


def _group(request: messages.OpenJob, spec: JobSpec, *, alone: int) -> object:
    """The group with which this rank shares slabs: all members of a declared group with equal spec
    and place, or only those of its delivery; None if making a slab costs no more than copying it.
    """
    place = request.topology
    if not spec.transforms:
        return None
    return (request.sharing, spec, place.dp_rank, place.dp_size) if request.sharing else alone


def _check_names(request: messages.OpenJob) -> None:
    """Names are stored and logged, so their lengths are limited. (Urls and columns are limited by
    the packet.)
    """
    check_name("job_id", request.job_id)
    check_name("incarnation", request.incarnation)
    check_name("member_id", request.member_id)
    check_name("sharing", request.sharing, needed=False)
    check_name("format", request.source.format, needed=False)


def _spec_of(opened: _Opened, request: messages.OpenJob) -> JobSpec:
    """The spec with every default filled in."""
    shuffle = Shuffle(1, 1, 0)
    if request.shuffle:
        shuffle = shuffle_of(opened.sizes, request.lanes, request.window)
    return JobSpec(
        fingerprint=opened.manifest.fingerprint,
        seed=request.seed,
        shuffle=request.shuffle,
        lanes=shuffle.lanes,
        window=shuffle.window,
        global_batch=request.global_batch,
        end=request.end,
        transforms=tuple(sorted(request.transforms, key=lambda image: image.column)),
        column_options=in_order(request.column_options),
        ramp=shuffle.ramp,
    )


def _advice(opened: _Opened, member: ServedMember, arena_bytes: int) -> tuple[str, ...]:
    """What this rank tells its user: rank 0 of the job as a whole, and one rank a host of it."""
    spec, place = member.spec, member.request.topology
    if not spec.shuffle:
        return ()
    sizes, shuffle = opened.sizes, Shuffle(spec.lanes, spec.window, spec.ramp)
    on_host = place.local_world_size * place.dp_size // place.world_size
    cluster = Cluster(place.dp_size, min(max(on_host, 1), place.dp_size))
    told: tuple[str, ...] = ()
    if place.rank == 0:
        told = advice.advice(sizes, shuffle, cluster, spec.global_batch, opened.stored_bytes)
    if place.local_rank == 0:
        kept = member.dataset.kept_bytes
        told += tuple(filter(None, [advice.memory(sizes, shuffle, cluster, kept, arena_bytes)]))
    return told


async def _pixels_of(spec: JobSpec) -> str:
    """The name of the software that decodes this job's images on this host; "" without images."""
    return await asyncio.to_thread(_maker_name) if spec.transforms else ""


def _maker_name() -> str:
    # This imports Pillow, which a node without images does not need.
    from dataplane.transforms.pixels_library import maker

    return maker().name
