"""The next epoch is made while the last slabs of this one are consumed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from small_engine import SmallEngine

from dataplane.model.records import Region, Stream
from dataplane.node.datasets import Orders
from dataplane.node.delivery import ServedStream
from dataplane.node.engine import Engine
from dataplane.node.jobs import Streams
from dataplane.node.member import ServedMember, progress_of
from dataplane.rpc import messages

Scene = Callable[[Engine, Streams, ServedMember], Awaitable[None]]


def ignored(_request_id: int, _body: messages.FromNodeBody) -> None:
    """The messages to the trainer."""


def play(scene: Scene) -> None:
    async def whole() -> None:
        small = SmallEngine(5)
        try:
            await scene(small.engine, Streams(small.engine, Orders()), small.member())
        finally:
            small.close()

    asyncio.run(whole())


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
def test_the_next_epoch_is_ready_when_it_is_requested() -> None:
    async def scene(engine: Engine, streams: Streams, member: ServedMember) -> None:
        first = await opened(streams, member, messages.OpenStream("j", 0, 0))
        ahead = await next_epoch(member)
        assert ahead.walk.stream == Stream(1, 0, 0, 1, 0, 1)
        engine.close_stream(first)
        del member.streams[first.stream_id]
        assert await opened(streams, member, messages.OpenStream("j", 1, 0)) is ahead
        assert (await next_epoch(member)).walk.stream.epoch == 2
        streams.close_all(member)

    play(scene)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("asked", [(0, 0), (1, 1), (2, 0), (1, 0, 1)])
def test_what_was_made_for_another_request_is_closed(asked: tuple[int, ...]) -> None:
    async def scene(engine: Engine, streams: Streams, member: ServedMember) -> None:
        first = await opened(streams, member, messages.OpenStream("j", 0, 0))
        ahead = await next_epoch(member)
        engine.close_stream(first)
        del member.streams[first.stream_id]
        other = await opened(streams, member, messages.OpenStream("j", *asked))
        assert other is not ahead
        assert ahead.is_closed
        assert other.walk.stream.epoch == asked[0]
        streams.close_all(member)

    play(scene)


@pytest.mark.timeout(100)
def test_a_member_that_leaves_takes_its_next_epoch_along() -> None:
    async def scene(_: Engine, streams: Streams, member: ServedMember) -> None:
        first = await opened(streams, member, messages.OpenStream("j", 0, 0))
        ahead = await next_epoch(member)
        member.closed = True
        streams.close_all(member)
        assert first.is_closed
        assert ahead.is_closed
        assert member.next_epoch is None

    play(scene)


@pytest.mark.timeout(100)
def test_with_several_streams_no_next_stream_is_predicted() -> None:
    async def scene(engine: Engine, streams: Streams, member: ServedMember) -> None:
        both = [
            await opened(streams, member, messages.OpenStream("j", 0, 0, first_step, 2))
            for first_step in (0, 1)
        ]
        while not all(stream.is_planned for stream in both):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert member.next_epoch is None
        streams.close_all(member)

    play(scene)


@pytest.mark.timeout(100)
def test_the_scheduler_learns_the_next_order_once_the_first_batch_was_sent() -> None:
    async def scene(engine: Engine, streams: Streams, member: ServedMember) -> None:
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
        assert state.next_order is await streams._order(member, 4)
        streams.close_all(member)

    play(scene)


def test_the_rate_is_that_between_slabs_and_outlives_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slab = messages.Slab(1, 1, Region(0, 64), (messages.Batch(0, 64, 60),), b"")
    rates, slow = [], 60 / 10.01

    async def scene(_: Engine, streams: Streams, member: ServedMember) -> None:
        with monkeypatch.context() as patch:
            for now, slabs in ((100, 0), (102, 1), (104, 0), (108, 1), (110, 0), (114, 0), (118, 0),
                               (118.01, 1), (118.05, 1), (120, 0)):  # fmt: skip
                patch.setattr("dataplane.node.member.time.monotonic", lambda now=now: now)
                for _ in range(slabs):
                    member.count_slab(slab)
                rates.append(progress_of(member).samples_per_s)
                if now == 110:
                    await opened(streams, member, messages.OpenStream("j", 1, 0))

    play(scene)
    assert rates == pytest.approx([0, 0, 0, 10, 10, 10, 6, slow, slow, 60 / 1.99])
