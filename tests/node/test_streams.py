"""The next epoch is made while the last slabs of this one are consumed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from engine_run import Run

from dataplane.model import Stream, Topology
from dataplane.node.member import Member
from dataplane.node.streams import Streams
from dataplane.node.walk import SlabSizes
from dataplane.node.work import StreamState
from dataplane.rpc import messages

Scene = Callable[[Run, Streams, Member], Awaitable[None]]


def ignored(_request_id: int, _body: messages.FromNodeBody) -> None:
    """What is sent to the trainer."""


def play(scene: Scene) -> None:
    async def whole() -> None:
        run = Run(random.Random(5), tight=False)
        world = run.worlds[1]
        request = messages.OpenJob("j", "i", "m", messages.DatasetSource(("u",)), Topology())
        delivery = run.deliver_to(world)
        member = Member(request, world.spec, delivery, SlabSizes(4, 16, 0), 1)
        await scene(run, Streams(run.engine), member)
        await run.end()

    asyncio.run(whole())


async def opened(streams: Streams, member: Member, request: messages.OpenStream) -> StreamState:
    stream, _ = await streams.open(member, request, ignored)
    return stream


async def next_epoch(member: Member) -> StreamState:
    """Once it is there: nothing tells so."""
    while member.next_epoch is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return member.next_epoch


@pytest.mark.timeout(100)
def test_the_next_epoch_is_there_when_it_is_asked_for() -> None:
    async def scene(run: Run, streams: Streams, member: Member) -> None:
        first = await opened(streams, member, messages.OpenStream("j", 0, 0))
        ahead = await next_epoch(member)
        assert ahead.walk.stream == Stream(1, 0, 0, 1, 0, 1)
        assert ahead.is_ahead
        run.engine.close_stream(first)
        del member.streams[first.stream_id]
        assert await opened(streams, member, messages.OpenStream("j", 1, 0)) is ahead
        assert not ahead.is_ahead
        assert (await next_epoch(member)).walk.stream.epoch == 2
        streams.close_all(member)

    play(scene)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("asked", [(0, 0), (1, 1), (2, 0), (1, 0, 1)])
def test_what_was_made_for_another_request_is_closed(asked: tuple[int, ...]) -> None:
    async def scene(run: Run, streams: Streams, member: Member) -> None:
        first = await opened(streams, member, messages.OpenStream("j", 0, 0))
        ahead = await next_epoch(member)
        run.engine.close_stream(first)
        del member.streams[first.stream_id]
        other = await opened(streams, member, messages.OpenStream("j", *asked))
        assert other is not ahead
        assert ahead.closed
        assert other.walk.stream.epoch == asked[0]
        streams.close_all(member)

    play(scene)


@pytest.mark.timeout(100)
def test_a_member_that_leaves_takes_its_next_epoch_along() -> None:
    async def scene(_run: Run, streams: Streams, member: Member) -> None:
        first = await opened(streams, member, messages.OpenStream("j", 0, 0))
        ahead = await next_epoch(member)
        member.closed = True
        streams.close_all(member)
        assert first.closed
        assert ahead.closed
        assert member.next_epoch is None

    play(scene)


@pytest.mark.timeout(100)
def test_of_several_streams_none_knows_what_comes_next() -> None:
    async def scene(run: Run, streams: Streams, member: Member) -> None:
        for first_step in (0, 1):
            await opened(streams, member, messages.OpenStream("j", 0, 0, first_step, 2))
        await run.settle()
        assert member.next_epoch is None
        streams.close_all(member)

    play(scene)
