"""Streams of members: the current one, and the next one, which is prepared ahead.

Invariants:
1. When a member opens its next stream, the stream that was prepared ahead is either used as it is
   or closed; it holds no resources that another stream of the member needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from dataplane.base import background
from dataplane.model.errors import ClosedError, ConfigError, DataplaneError
from dataplane.model.ledger import LedgerPosition
from dataplane.model.records import MixHistory, Stream
from dataplane.node.changes import mix_of
from dataplane.node.delivery import Send, ServedStream
from dataplane.node.engine import Engine
from dataplane.node.member import ServedMember
from dataplane.node.mixing import Orders
from dataplane.plan.order import SampleOrder
from dataplane.rpc import messages
from dataplane.scheduler.walk import Walk


async def _at_once(_: ServedMember) -> None:
    pass


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
        ready: Callable[[ServedMember], Awaitable[None]] = _at_once,
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
        )
        stream = self._made_ahead(member, at)
        if stream is None:
            order = await self._order(member, at.epoch, at.mix)
            walk = _walk(member, order, at)
            await ready(member)
            if member.closed:
                raise ClosedError(f"job {member.job_id!r} was closed while it was opened")
            stream = self._engine.open_stream(member.delivery, walk, send, member.holder)
        if member.following is not None:
            steps, known = stream.walk.steps, request.known_entry
            send = member.following.sending(request.epoch, steps, known, send)
        stream.send = send
        member.streams[stream.stream_id] = stream
        member.epoch, member.cursor = request.epoch, request.cursor
        member.seen = (0.0, 0, 0)  # the way to this place was not read
        member.began = member.began or LedgerPosition(request.epoch, request.cursor)
        first_step = min(request.first_step, stream.walk.step_count)
        begin = stream.walk.steps.begin(first_step)
        member.mix, member.mix_from = at.mix, LedgerPosition(request.epoch, begin)
        # Not before: the order takes processor time that the first batch needs.
        stream.on_begun = partial(self._start, "next order", self._expect_next, member, stream)
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
        self._engine.adopt_stream(stream)
        return stream

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
            return await self._order(member, at.epoch + 1, at.mix)
        except DataplaneError:
            return None  # the error comes when it is requested

    async def _open_next_epoch(self, member: ServedMember, stream: ServedStream) -> None:
        """Open the next epoch, which the trainer will request, since the present one is planned."""
        now = stream.walk.stream
        order = await self._next_order(member, stream)
        is_only = [*member.streams.values()] == [stream] and member.next_epoch is None
        if order is None or stream.is_closed or not is_only or member.closed:
            return
        at = Stream(now.epoch + 1, 0, now.dp_rank, now.dp_size, 0, 1, now.mix)
        walk = _walk(member, order, at, is_ahead=True)
        member.next_epoch = self._engine.open_stream(
            member.delivery, walk, stream.send, member.holder, after=stream
        )

    def close_all(self, member: ServedMember) -> None:
        """Close all streams of a member that is gone."""
        for stream in [*member.streams.values(), *filter(None, [member.next_epoch])]:
            self._engine.close_stream(stream)
        member.streams.clear()
        member.next_epoch = None

    async def _order(
        self, member: ServedMember, epoch: int, mix: MixHistory | None = None
    ) -> SampleOrder:
        gone = member.changes.tombstones
        return await self._orders.of(member.spec, member.opened.manifests, epoch, mix, gone)


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
