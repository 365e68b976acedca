"""Have other nodes make slabs of this node's trainers, and check the results.

Invariants:
1. Each MakeElsewhere is answered by one SlabAssembled, once its memory is no longer written.
2. A maker proves that it knows the key of the job, so its slabs come from a node of the same
   cluster, and are as trustworthy as those of the own workers. Their descriptions are checked:
   nothing may point outside of the slab.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, cast

from msgspec import Raw, Struct, field
from msgspec.structs import replace

from dataplane.model.errors import ConfigError, DataplaneError, NeighbourGone
from dataplane.node.delivery import DeliveryArena
from dataplane.node.lent import Neighbours
from dataplane.rpc import fetches, making, tasks
from dataplane.rpc.codec import decode, encode
from dataplane.rpc.messages import Layout, OpenJob
from dataplane.scheduler import events
from dataplane.scheduler.events import GiveUpSlab


class SlabReads(Protocol):
    """The interface that reads slabs from makers. `Fetcher` implements it."""

    def read_slab(
        self, order: fetches.ReadSlab, arena_fd: int, report: Callable[[fetches.SlabRead], None]
    ) -> int:
        """Have a slab made, and read it into this arena; `report` is called later, once. Return the
        number of the order.
        """

    def end_slab(self, number: int) -> None:
        """Report the end of this order soon, with an error unless the slab is here."""

    def detach_arena(self, arena_id: int) -> None:
        """Stop reading into this arena."""


class _Delegated(Struct, eq=False):
    """A delivery that other nodes may make slabs of. `opening` is an encoded OpenJob,
    which may name many urls: it is encoded once.
    """

    delivery: DeliveryArena
    opening: Raw
    makers: dict[str, fetches.SlabMaker] = field(default_factory=dict)


class Delegating:
    """The delegated slabs of one node. `tell` passes an event to the scheduler; `made` is called
    with each result before that.
    """

    def __init__(
        self,
        reads: SlabReads,
        neighbours: Neighbours,
        tell: Callable[[events.Event], None],
        made: Callable[[DeliveryArena, object], None],
    ) -> None:
        self._reads, self._neighbours, self._tell, self._made = reads, neighbours, tell, made
        self._deliveries: dict[int, _Delegated] = {}
        self._orders: dict[int, int] = {}
        """Their numbers, by those of the slab tasks."""

    def open(self, delivery: DeliveryArena) -> None:
        """Allow slabs to be made elsewhere for this delivery, which the scheduler knows."""
        job = delivery.job
        if job is None:
            return
        known = _Delegated(delivery, Raw(encode(job.opening)))
        self._deliveries[delivery.delivery_id] = known
        self._learn(known)

    def drop(self, delivery_id: int) -> None:
        """Forget a delivery that is gone."""
        if self._deliveries.pop(delivery_id, None) is not None:
            self._reads.detach_arena(delivery_id)

    def nodes_changed(self, job_id: str) -> None:
        """Note that other nodes make slabs of this job now, or that they have other keys."""
        for known in self._deliveries.values():
            job = known.delivery.job
            if job is not None and job.opening.job_id == job_id:
                self._learn(known)

    def make(self, effect: events.MakeElsewhere) -> None:
        """Send the order to the maker, unless it is gone."""
        known = self._deliveries[effect.delivery_id]
        job, maker = known.delivery.job, known.makers.get(effect.maker)
        assert job is not None
        if maker is None:
            gone = NeighbourGone(f"the node {effect.maker} makes no slabs any more")
            self._tell(events.SlabAssembled(effect.number, gone, 0.0))
            return
        at = effect.stream
        wanted = making.MakeSlab(
            job.digest,
            at.epoch,
            at.cursor,
            at.dp_rank,
            at.dp_size,
            at.step_stride,
            effect.steps,
            effect.slot_bytes,
            job.software,
            effect.coming,
            mix=at.mix,
        )
        opening = cast(OpenJob, known.opening)  # as it is sent
        order = fetches.ReadSlab(
            0,
            maker,
            known.makers.get(effect.hedge),
            encode(wanted),
            encode(replace(wanted, opening=opening)),
            effect.delivery_id,
            effect.slab,
        )
        self._orders[effect.number] = self._reads.read_slab(
            order, known.delivery.arena.fd, lambda read: self._read(effect, known, read)
        )

    def give_up(self, effect: GiveUpSlab) -> None:
        """Stop waiting for this slab."""
        if (number := self._orders.get(effect.number)) is not None:
            self._reads.end_slab(number)

    def _learn(self, known: _Delegated) -> None:
        job = known.delivery.job
        assert job is not None
        makers = {one.node_id: one for one in self._neighbours.makers(job.opening.job_id)}
        has_changed = makers.keys() != known.makers.keys()
        known.makers = makers
        if has_changed:
            self._tell(events.MakersKnown(known.delivery.delivery_id, tuple(makers)))

    def _read(
        self, effect: events.MakeElsewhere, known: _Delegated, read: fetches.SlabRead
    ) -> None:
        del self._orders[effect.number]
        result = _result(effect, known.delivery.column_count, read)
        self._made(known.delivery, result)
        started = time.monotonic() - read.took_s
        self._tell(
            events.SlabAssembled(
                effect.number, result, started, is_kept=False, made_by=read.node_id
            )
        )


def _result(
    effect: events.MakeElsewhere, column_count: int, read: fetches.SlabRead
) -> tasks.Assembled | DataplaneError:
    if read.error is not None:
        return read.error
    try:
        body = decode(tasks.Result, read.note).body
        if isinstance(body, tasks.Assembled):
            _check(effect, column_count, read.length, body)
            return body
    except ConfigError as error:
        return NeighbourGone(f"the node {read.node_id} sent what is no slab: {error}")
    if isinstance(body, DataplaneError):
        return body
    return NeighbourGone(f"the node {read.node_id} answered with {type(body).__name__}")


def _check(
    effect: events.MakeElsewhere, column_count: int, length: int, made: tasks.Assembled
) -> None:
    """Check the description of a slab.

    Raises:  ConfigError: it does not describe a slab of this many bytes.
    """
    if made.batch_count > effect.steps.count or made.bytes_used != length:
        raise ConfigError(f"{made.batch_count} batches in {made.bytes_used} of {length} bytes")
    if not made.batch_count:
        if made.bytes_needed <= effect.slab.length:
            raise ConfigError(f"{made.bytes_needed} bytes are too many for {effect.slab.length}")
        return
    columns = decode(Layout, made.layout).columns
    ends = [max(at, default=0) for one in columns for at in (one.values, one.lengths)]
    if len(columns) != column_count or max(ends, default=0) > length:
        raise ConfigError(f"{len(columns)} columns, up to byte {max(ends, default=0)} of {length}")
