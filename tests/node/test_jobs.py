"""Opening a job that fails halfway leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from membership import node
from msgspec import structs
from msgspec.structs import replace
from openings import opening
from small_engine import SmallEngine

from dataplane.arena.memfd import Arena
from dataplane.base.trace import Trace
from dataplane.base.watchdog import Watchdog
from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.index.indexing import index_dataset
from dataplane.model.config import VERSION, JobSpec, MixtureSpec, SourceSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import Region, Stream, Topology, View
from dataplane.node.datasets import Orders
from dataplane.node.delivery import ServedStream
from dataplane.node.engine import Engine
from dataplane.node.fetch import Fetcher
from dataplane.node.heartbeat import Heartbeat
from dataplane.node.jobs import Jobs, Streams, _advice
from dataplane.node.member import ServedMember, progress_of
from dataplane.node.neighbours import JobTables
from dataplane.node.opener import DatasetOpener, check_names
from dataplane.node.pool import WorkerPool
from dataplane.plan.defaults import GIB, BlockSizes
from dataplane.rpc import messages
from dataplane.rpc.membership import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    NodeReads,
    StatusRequest,
)
from dataplane.rpc.messages import OpenJob
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.scheduler import Scheduler
from dataplane.settings import default_node_config
from dataplane.store.outage import Outages
from dataplane.transforms.images import image_specs
from dataplane.transforms.steps.registry import RandomHorizontalFlip, RandomResizedCrop, Resize

MIB = 1 << 20


class SlowCoordinator(Coordinator):
    """A coordinator that admits all members, and delays its answer."""

    def __init__(self) -> None:
        super().__init__(CoordinatorConfig(VERSION))
        self.asked = asyncio.Event()

    async def join(self, request: JoinRequest) -> JoinResponse:
        await super().join(request)
        self.asked.set()
        return await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def running(
    coordinator: Coordinator, folder: Path, tables: JobTables
) -> AsyncIterator[tuple[Jobs, OpenJob]]:
    """A node's jobs, without its sockets, and a request to open one."""
    url = str(folder / "0.parquet")
    pq.write_table(pa.table({"x": range(10)}), url)
    config = structs.replace(
        default_node_config(), block_arena_bytes=MIB, cache_dir=str(folder / "cache")
    )
    arena, trace = Arena.create("blocks", MIB), Trace("test")
    fetcher, pool = Fetcher.of(config, arena, trace, Outages()), WorkerPool(1, trace)
    scheduler = Scheduler(MIB, 1, Autoscaler(1, 1, 1), 60.0)
    engine = Engine(scheduler, arena, fetcher, pool, trace)
    await coordinator.start()
    found = Jobs(
        config,
        engine,
        coordinator,
        "n0",
        DatasetOpener(config, engine, lambda source, _view, _given: index_dataset(source.urls)),
        tables,
    )
    try:
        yield found, opening(url, global_batch=2)
    finally:
        await coordinator.close()
        engine.close()
        fetcher.close()
        arena.close()


async def test_a_trainer_that_goes_away_while_it_joins_leaves_no_dataset(tmp_path: Path) -> None:
    coordinator = SlowCoordinator()
    async with running(coordinator, tmp_path, JobTables(bool, bool)) as (found, request):
        opening = asyncio.create_task(found.open(request))
        await coordinator.asked.wait()
        assert found.opener.datasets
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not found.opener.datasets
        assert not found.members


class LateCoordinator(Coordinator):
    """A coordinator that answers heartbeats and joins after members have left."""

    def __init__(self) -> None:
        super().__init__(CoordinatorConfig(VERSION))
        self.leaving: list[Callable[[], None]] = []

    async def _left(self) -> None:
        while self.leaving:
            self.leaving.pop()()
            await asyncio.sleep(0)

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        await self._left()
        return await super().heartbeat(request)

    async def join(self, request: JoinRequest) -> JoinResponse:
        await self._left()
        return await super().join(request)


async def test_a_member_that_leaves_during_a_beat_or_is_joined_again_meanwhile_has_left(
    tmp_path: Path,
) -> None:
    """Its place would else be held by nobody until its lease ends."""

    coordinator = LateCoordinator()
    async with running(coordinator, tmp_path, JobTables(bool, bool)) as (found, request):
        beat = Heartbeat(
            default_node_config(), coordinator, found, found._engine, "n0", Trace("test"),
            Outages(), Watchdog(Trace("test")), NodeReads,
        )  # fmt: skip

        async def member_count() -> int:
            job = (await coordinator.status(StatusRequest("j"))).jobs[0]
            return sum(one.state == "joined" for one in job.members)

        def leave(member: ServedMember) -> None:
            found.close(member)
            found.leave(member, lost=False)

        await beat.register()
        for begin in (beat._beat, found.rejoin):
            member, _ = await found.open(request)
            assert await member_count() == 1
            coordinator.leaving.append(partial(leave, member))
            await (begin() if begin == beat._beat else begin(member))
            await asyncio.gather(*found.places._leaving.get("j", ()))
            assert await member_count() == 0


async def test_the_nodes_of_a_job_are_known_from_its_first_member_to_its_last(
    tmp_path: Path,
) -> None:
    coordinator, said = Coordinator(CoordinatorConfig(VERSION)), []
    tables = JobTables(said.append, said.append)
    async with running(coordinator, tmp_path, tables) as (found, request):
        await coordinator.register_node(node(version=VERSION, data_address="10.0.0.1:7078"))
        members = [(await found.open(request))[0]]
        known = tables.get("j")
        assert known is not None
        assert [one.node_id for one in known.nodes] == ["n0"]
        assert len(known.key) == 32
        members.append((await found.open(structs.replace(request, member_id="m2")))[0])
        found.close(members.pop())
        assert tables.get("j") == known
        assert found.joined.is_set()
        found.close(members.pop())
        assert tables.get("j") is None
        assert said == [known, "j"]


def test_names_that_are_too_long_are_refused_before_any_work() -> None:
    whole = opening("file:///x.parquet")
    check_names(whole)
    for field in ("job_id", "incarnation", "member_id", "sharing"):
        with pytest.raises(ConfigError, match=f"{field} has 300 characters"):
            check_names(structs.replace(whole, **{field: "x" * 300}))


# -- Which rank of a job tells its user what, when the job opens


# 1.28 million photographs in blocks of 1,000: with one lane, whose window is 1.4 blocks, batches
# come from few blocks, and every host reads all of them.
PHOTOS = BlockSizes(1_280_000, 1280, 1000, 110_000_000, 110_000, 1000)
SPEC = JobSpec("f", shuffle=True, lanes=1, window=1440, global_batch=256)
SOURCES = tuple(SourceSpec(name, "f", 1 << 31, window=1440) for name in ("web", "code"))
MIXTURE = JobSpec(
    "f", shuffle=True, lanes=1, window=1440, global_batch=256, mixture=MixtureSpec(SOURCES)
)
HOSTS = 4
URLS = ("s3://bucket/a.parquet", "s3://bucket/b.parquet")


def told(spec: JobSpec, rank: int, arena_bytes: int = 4 * GIB) -> tuple[str, ...]:
    count = 1 if spec.mixture is None else len(spec.mixture.sources)
    stored = PHOTOS.dataset_bytes
    opened = SimpleNamespace(
        sizes=PHOTOS, stored_bytes=stored, packing=None, view=View(), folders="",
        manifest=SimpleNamespace(
            sample_count=PHOTOS.samples, urls=URLS, shards=SimpleNamespace(urls=URLS), schema=b"",
        ),
    )  # fmt: skip
    dataset = SimpleNamespace(kept_bytes=stored)
    job: Any = SimpleNamespace(
        opened=(opened,) * count, datasets=(dataset,) * count, sample_count=count * PHOTOS.samples
    )
    place = Topology(
        dp_rank=rank, dp_size=8 * HOSTS, rank=rank, world_size=8 * HOSTS,
        local_rank=rank % 8, local_world_size=8,
    )  # fmt: skip
    member: Any = SimpleNamespace(spec=spec, request=SimpleNamespace(topology=place))
    return _advice(job, member, arena_bytes)


@pytest.mark.parametrize("spec", [SPEC, MIXTURE], ids=["dataset", "mixture"])
def test_one_rank_tells_of_the_job_and_one_a_host_of_its_memory(spec: JobSpec) -> None:
    (of_job,) = told(spec, 0)
    assert "come from about" in of_job
    assert f"each of {HOSTS} hosts reads about" in of_job
    assert f"{HOSTS}.0 times its share" in of_job
    small = GIB // 8
    (whole,) = told(spec, 0, small)
    others, (memory,), same_host = (told(spec, rank, small) for rank in (7, 8, 9))
    assert others == same_host == ()
    for said in (whole, memory):
        assert "its block arena has 128.0 MiB" in said
        assert said.count("raise block_arena_bytes to") == 1
    assert "come from about" in whole
    assert "come from about" not in memory
    assert told(spec, 1) == ()


@pytest.mark.parametrize("spec", [SPEC, MIXTURE], ids=["dataset", "mixture"])
def test_what_is_not_shuffled_needs_no_advice(spec: JobSpec) -> None:
    assert told(replace(spec, shuffle=False), 0, 1) == ()


def test_masks_beside_pictures_are_told_of_and_single_pictures_are_not() -> None:
    crop, flip, still = (
        [RandomResizedCrop(8)],
        [Resize((8, 8)), RandomHorizontalFlip()],
        [Resize((8, 8))],
    )

    def of(**transforms: Any) -> tuple[str, ...]:
        spec = replace(SPEC, shuffle=False, transforms=image_specs(transforms))
        assert told(spec, 1) == ()
        return told(spec, 0)

    (both,) = of(jpg=crop, png=flip)
    assert "columns jpg and png independently" in both
    assert "map=" in both
    (mask,) = of(jpg=crop, **{"seg.png": still})
    assert "column 'seg.png'" in mask
    (beside,) = of(jpg=crop, png=still)
    assert "column 'png'" in beside
    assert of(jpg=crop) == of(png=crop) == of(left=still, labelled_photo=still) == ()


# -- The next epoch is made while the last slabs of this one are consumed


def ignored(_request_id: int, _body: messages.FromNodeBody) -> None:
    """The messages to the trainer."""


@asynccontextmanager
async def streaming() -> AsyncIterator[tuple[Engine, Streams, ServedMember]]:
    """An engine, its streams, and a member that opens them."""
    small = SmallEngine(5)
    try:
        yield small.engine, Streams(small.engine, Orders()), small.member()
    finally:
        small.close()


async def at_once(_: ServedMember) -> None: ...


async def opened(
    streams: Streams, member: ServedMember, request: messages.OpenStream
) -> ServedStream:
    stream, _ = await streams.open(member, request, ignored, at_once)
    return stream


async def next_epoch(member: ServedMember) -> ServedStream:
    """The prepared epoch, found by polling, since no event reports it."""
    while member.next_epoch is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return member.next_epoch


@pytest.mark.timeout(100)
async def test_the_next_epoch_is_ready_when_it_is_requested() -> None:
    async with streaming() as (engine, streams, member):
        first = await opened(streams, member, messages.OpenStream("j", 0, 0))
        ahead = await next_epoch(member)
        assert ahead.walk.stream == Stream(1, 0, 0, 1, 0, 1)
        engine.close_stream(first)
        del member.streams[first.stream_id]
        assert await opened(streams, member, messages.OpenStream("j", 1, 0)) is ahead
        assert (await next_epoch(member)).walk.stream.epoch == 2
        streams.close_all(member)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("asked", [(0, 0), (1, 1), (2, 0), (1, 0, 1)])
async def test_what_was_made_for_another_request_is_closed(asked: tuple[int, ...]) -> None:
    async with streaming() as (engine, streams, member):
        first = await opened(streams, member, messages.OpenStream("j", 0, 0))
        ahead = await next_epoch(member)
        engine.close_stream(first)
        del member.streams[first.stream_id]
        other = await opened(streams, member, messages.OpenStream("j", *asked))
        assert other is not ahead
        assert ahead.is_closed
        assert other.walk.stream.epoch == asked[0]
        streams.close_all(member)


@pytest.mark.timeout(100)
async def test_a_member_that_leaves_takes_its_next_epoch_along() -> None:
    async with streaming() as (_, streams, member):
        first = await opened(streams, member, messages.OpenStream("j", 0, 0))
        ahead = await next_epoch(member)
        member.closed = True
        streams.close_all(member)
        assert first.is_closed
        assert ahead.is_closed
        assert member.next_epoch is None


@pytest.mark.timeout(100)
async def test_with_several_streams_no_next_stream_is_predicted() -> None:
    async with streaming() as (_, streams, member):
        both = [
            await opened(streams, member, messages.OpenStream("j", 0, 0, first_step, 2))
            for first_step in (0, 1)
        ]
        while not all(stream.is_planned for stream in both):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert member.next_epoch is None
        streams.close_all(member)


@pytest.mark.timeout(100)
async def test_the_scheduler_learns_the_next_order_once_the_first_batch_was_sent() -> None:
    async with streaming() as (engine, streams, member):
        stream = await opened(streams, member, messages.OpenStream("j", 3, 0, 0, 2))
        state = engine.scheduler._streams.find(stream.stream_id)
        assert state is not None
        await asyncio.sleep(0)
        assert state.next_order is None
        stream.answer(1, messages.EndOfStream(stream.stream_id))
        assert stream.on_begun is not None
        batch = messages.Slab(stream.stream_id, 1, Region(0, 1), (messages.Batch(0, 8, 8),), b"")
        stream.answer(2, batch)
        stream.answer(3, batch)
        while state.next_order is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert state.next_order is await streams._order(member, stream.walk.stream, 4)
        streams.close_all(member)


async def test_the_rate_is_that_between_slabs_and_outlives_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slab = messages.Slab(1, 1, Region(0, 64), (messages.Batch(0, 64, 60),), b"")
    rates, slow = [], 60 / 10.01

    async with streaming() as (_, streams, member):
        with monkeypatch.context() as patch:
            for now, slabs in ((100, 0), (102, 1), (104, 0), (108, 1), (110, 0), (114, 0), (118, 0),
                               (118.01, 1), (118.05, 1), (120, 0)):  # fmt: skip
                patch.setattr("dataplane.node.member.time.monotonic", lambda now=now: now)
                for _ in range(slabs):
                    member.count_slab(slab)
                rates.append(progress_of(member).samples_per_s)
                if now == 110:
                    await opened(streams, member, messages.OpenStream("j", 1, 0))
    assert rates == pytest.approx([0, 0, 0, 10, 10, 10, 6, slow, slow, 60 / 1.99])
