"""Streams of members: the current one, and the next one, which is prepared ahead.

Invariants:
1. When a member opens its next stream, the stream that was prepared ahead is either used as it is
   or closed; it holds no resources that another stream of the member needs.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial

from dataplane import background
from dataplane.errors import ConfigError, DataplaneError
from dataplane.model import Stream
from dataplane.node.engine import Engine
from dataplane.node.member import ServedMember
from dataplane.node.served import Send, ServedStream
from dataplane.plan.order import Order, SampleOrder
from dataplane.rpc import messages
from dataplane.scheduler.walk import Walk

_ORDERS_MAX = 8


class Streams:
    """Opens streams. Orders are cached, since the ranks of a job use the same one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._orders: OrderedDict[object, asyncio.Future[SampleOrder]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(
        self, member: ServedMember, request: messages.OpenStream, send: Send
    ) -> tuple[ServedStream, messages.StreamOpened]:
        """Open a stream of this member.

        Raises:  ConfigError: no such cursor or step.
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
        )
        stream = self._made_ahead(member, at)
        if stream is None:
            order = await self._order(member, request.epoch)
            walk = _walk(member, order, at)
            stream = self._engine.open_stream(member.delivery, walk, send, member.holder)
        member.streams[stream.stream_id] = stream
        member.epoch, member.cursor = request.epoch, request.cursor
        if request.step_stride == 1:
            self._engine.when_planned(stream, partial(self._follow, member, stream))
        return stream, messages.StreamOpened(stream.stream_id, stream.walk.step_count)

    def _made_ahead(self, member: ServedMember, at: Stream) -> ServedStream | None:
        """The stream that was prepared ahead, if it is the requested one."""
        stream, member.next_epoch = member.next_epoch, None
        if stream is None:
            return None
        if stream.walk.stream != at or stream.has_failed:
            self._engine.close_stream(stream)
            return None
        self._engine.adopt_stream(stream)
        return stream

    def _follow(self, member: ServedMember, stream: ServedStream) -> None:
        """The whole epoch is planned: start the next one, which the trainer will request."""
        task = background.start("next epoch", self._open_next_epoch(member, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open_next_epoch(self, member: ServedMember, stream: ServedStream) -> None:
        now = stream.walk.stream
        try:
            order = await self._order(member, now.epoch + 1)
        except DataplaneError:
            return  # the error comes when it is requested
        is_only = [*member.streams.values()] == [stream] and member.next_epoch is None
        if stream.is_closed or not is_only or member.closed:
            return
        at = Stream(now.epoch + 1, 0, now.dp_rank, now.dp_size, 0, 1)
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

    async def _order(self, member: ServedMember, epoch: int) -> SampleOrder:
        spec = member.spec
        shape = (spec.seed, spec.shuffle, spec.lanes, spec.window, epoch, spec.ramp)
        key = (spec.fingerprint, *shape)
        future = self._orders.get(key)
        if future is None:
            rows = member.dataset.manifest.block_rows
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(None, Order, rows, *shape)
            self._orders[key] = future
            future.add_done_callback(partial(self._forget_failed, key))
            if len(self._orders) > _ORDERS_MAX:
                self._orders.popitem(last=False)
        return await asyncio.shield(future)

    def _forget_failed(self, key: object, done: asyncio.Future[SampleOrder]) -> None:
        """Planning failed: let the next request for this order try again."""
        if (done.cancelled() or done.exception()) and self._orders.get(key) is done:
            del self._orders[key]


def _walk(member: ServedMember, order: SampleOrder, at: Stream, *, is_ahead: bool = False) -> Walk:
    is_aligned = member.delivery.group is not None
    return Walk(member.spec, order, at, member.sizes, is_ahead=is_ahead, is_aligned=is_aligned)
