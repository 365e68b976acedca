"""The slabs of a job that other nodes request, each made as the slab of a stream of its own.

       requested or coming ──> a stream of these steps ──> slab ──sent──> released

Such a stream is like that of a trainer of this node, but has the steps of one slab.

Invariants:
1. Every request is answered exactly once: with a slab, with an error of its data, or with a
   refusal. A request that is older than `PATIENCE_S` is refused, or answered with a report of
   progress if there was any in that time.
2. A slab is released after every node that got it has read it, or `HELD_S` after it was made if no
   node takes it. Steps that no node requests or announces for `STREAM_IDLE_S` are given up.
3. A slab that was not requested yet may lose its slot to a requested one (scheduler, 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from dataplane.arena.slots import SlotLayout, plan_slots
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError, DataplaneError, DataStallError
from dataplane.model.records import Region
from dataplane.node.delivery import (
    DeliveryArena,
    ServedStream,
    delivery_bytes_max,
    delivery_memory,
    slab_sizes,
)
from dataplane.node.engine import Engine
from dataplane.node.neighbours import Lending
from dataplane.node.opener import DatasetOpener, OpenedJob
from dataplane.rpc.codec import encode
from dataplane.rpc.lending import StepRange
from dataplane.rpc.messages import FromNode, FromNodeBody, Slab, Working
from dataplane.scheduler.walk import SlabSizes, Walk

PATIENCE_S = 25.0
HELD_S = 10.0
STREAM_IDLE_S = 60.0
_COMING_MAX = 64


class Ask(Struct, frozen=True):
    """A node's request, made at `since`, for the slab of these steps, with room for this many
    bytes.
    """

    number: int
    steps: StepRange
    room: int
    since: float


class _Range(Struct, eq=False):
    """Steps whose slab is being made, or is here; when they were last requested or, before that,
    announced; the requests that wait for the slab; and how often it is being sent.
    """

    steps: StepRange
    served: ServedStream
    since: float
    asks: list[Ask] = field(default_factory=list)
    is_requested: bool = False
    slab: Slab | None = None
    sending: int = 0


class Answers(Struct, eq=False):
    """Sends slabs of delivery arenas, and counts them."""

    lender: Lending
    slab_count: int = 0
    slab_bytes: int = 0

    def give(
        self,
        number: int,
        arena_id: int,
        body: FromNodeBody,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Send this answer; with `after`, also the bytes of a slab, and call `after` once they are
        no longer read.
        """
        note, region = encode(FromNode(number, body)), Region(0, 0)
        if isinstance(body, Slab) and after is not None:
            self.slab_count += 1
            self.slab_bytes += body.bytes_used
            region = Region(body.region.offset, body.bytes_used)
        self.lender.give(number, region, arena_id, note, ends=(), after=after or (lambda: None))


class RemoteStream:
    """The slabs of one stream that one node requests. `holder` holds them. `failed` is called with
    errors of the data.
    """

    def __init__(
        self,
        engine: Engine,
        delivery: DeliveryArena,
        holder: int,
        answers: Answers,
        now: float,
        failed: Callable[[DataplaneError], None],
    ) -> None:
        self._engine, self._delivery, self._holder = engine, delivery, holder
        self._answers, self._failed = answers, failed
        self._new_walk: Callable[[StepRange], Walk] | None = None
        self._waiting: list[tuple[Ask, Sequence[StepRange]]] = []
        """Requests that came before the order of the stream was known."""
        self._ranges: dict[int, _Range] = {}
        """The steps whose slabs are being made or not released yet, by the first step."""
        self._is_closed = False
        self.last_asked = self._now = now
        self._worked_at = 0.0
        """When the engine last reported progress on a slab."""

    @property
    def is_idle(self) -> bool:
        """Whether no node waits for slabs of the stream, or reads them."""
        used = (steps.asks or steps.sending for steps in self._ranges.values())
        return not (self._waiting or any(used))

    def begin(self, new_walk: Callable[[StepRange], Walk]) -> None:
        """Make the requested slabs, now that `new_walk` can make walks over the known order."""
        if self._is_closed:
            return
        self._new_walk = new_walk
        waiting, self._waiting = self._waiting, []
        for ask, coming in waiting:
            self.ask(ask, coming)

    def ask(self, ask: Ask, coming: Sequence[StepRange]) -> None:
        """Handle a request for the slab of these steps; `coming` will be requested next."""
        self.last_asked = self._now = max(self._now, ask.since)
        if self._new_walk is None:
            self._waiting.append((ask, coming))
            return
        steps = self._ranges.get(ask.steps.first)
        if steps is None or steps.slab is None:
            self._request(ask)
        elif len(steps.slab.batches) > ask.steps.count and not steps.sending:
            self._drop(ask.steps.first)
            self._request(ask)
        else:
            self._answer(ask, steps, steps.slab)
        self._follow(coming)

    def tick(self, now: float) -> None:
        """Handle a tick: refuse old requests, and release old slabs."""
        self._now = now
        self._waiting = [request for request in self._waiting if not self._is_late(request[0])]
        for first, steps in list(self._ranges.items()):
            steps.asks = [ask for ask in steps.asks if not self._is_late(ask)]
            idle_s = STREAM_IDLE_S if steps.slab is None else HELD_S
            if not (steps.asks or steps.sending) and now - steps.since > idle_s:
                self._drop(first)

    def close(self) -> None:
        """Refuse all requests. Slabs that are being read are released later."""
        self._is_closed = True
        for ask, _ in self._waiting:
            self._answers.lender.refuse(ask.number)
        self._waiting.clear()
        for first, steps in list(self._ranges.items()):
            if not steps.sending:
                self._drop(first)

    def _is_late(self, ask: Ask) -> bool:
        if self._now - ask.since <= PATIENCE_S:
            return False
        if self._now - self._worked_at > PATIENCE_S:
            self._answers.lender.refuse(ask.number)
        else:
            self._answers.give(ask.number, self._delivery.delivery_id, Working("making the slab"))
        return True

    # -- requests --------------------------------------------------------------------------------

    def _request(self, ask: Ask) -> None:
        try:
            steps = self._open(ask.steps)
        except ConfigError:
            self._answers.lender.refuse(ask.number)
            return
        steps.asks.append(ask)
        self._want(steps)

    def _open(self, steps: StepRange) -> _Range:
        """Have these steps made, unless they are.   Raises:  ConfigError: they do not exist."""
        assert self._new_walk is not None
        opened = self._ranges.get(steps.first)
        if opened is not None and (opened.asks or opened.steps.count <= steps.count):
            opened.since = self._now
            return opened
        walk = self._new_walk(steps)
        if opened is not None:
            self._drop(steps.first)

        def hear(_request_id: int, body: FromNodeBody) -> None:
            self._hear(new, body)

        served = self._engine.open_stream(self._delivery, walk, hear, self._holder)
        new = self._ranges[steps.first] = _Range(steps, served, self._now)
        return new

    def _want(self, steps: _Range) -> None:
        """Request the slab of these steps from the engine, once."""
        if steps.asks and not steps.is_requested:
            steps.is_requested = True
            self._engine.request(steps.served, 1)

    def _follow(self, coming: Sequence[StepRange]) -> None:
        """Have the steps made that will be requested next."""
        for steps in coming[:_COMING_MAX]:
            known = self._ranges.get(steps.first)
            if known is None or known.slab is None:
                try:
                    self._open(steps)
                except ConfigError:
                    return

    def _drop(self, first: int) -> None:
        """Make these steps no more, or release their slab."""
        steps = self._ranges.pop(first)
        if steps.slab is not None:
            self._engine.release(self._delivery, [steps.slab.slab_id])
            return
        self._engine.close_stream(steps.served)
        for ask in steps.asks:
            self._answers.lender.refuse(ask.number)

    def _answer(self, ask: Ask, steps: _Range, slab: Slab) -> None:
        steps.since = self._now
        if len(slab.batches) > ask.steps.count:
            self._answers.lender.refuse(ask.number)
            return
        is_sent = slab.bytes_used <= ask.room
        steps.sending += is_sent
        after = (lambda: self._given(steps)) if is_sent else None
        self._answers.give(ask.number, self._delivery.delivery_id, slab, after)

    def _given(self, steps: _Range) -> None:
        steps.sending -= 1
        if not steps.sending:
            self._drop(steps.steps.first)

    # -- answers of the engine -------------------------------------------------------------------

    def _hear(self, steps: _Range, body: FromNodeBody) -> None:
        first = steps.steps.first
        if isinstance(body, Working):
            self._worked_at = self._now
            return
        steps.is_requested = False
        if isinstance(body, Slab):
            self._take(steps, body)
        elif isinstance(body, DataStallError):
            self._want(steps)
        elif self._ranges.get(first) is steps and isinstance(body, DataplaneError):
            asks, steps.asks = steps.asks, []
            self._drop(first)
            if asks:
                self._failed(body)
            for ask in asks:
                self._answers.give(ask.number, self._delivery.delivery_id, body)

    def _take(self, steps: _Range, slab: Slab) -> None:
        """Handle the slab of some steps, or of the first of them; the others are left to do."""
        first, count = steps.steps.first, len(slab.batches)
        if self._ranges.get(first) is not steps:
            self._engine.release(self._delivery, [slab.slab_id])
            return
        done = StepRange(first, count)
        made = self._ranges[first] = _Range(done, steps.served, self._now, slab=slab)
        asks, steps.asks = steps.asks, []
        rest = first + count * steps.served.walk.stream.step_stride
        if count < steps.steps.count and rest not in self._ranges:
            steps.steps = StepRange(rest, steps.steps.count - count)
            self._ranges[rest] = steps
        else:
            self._engine.close_stream(steps.served)
        for ask in asks:
            self._answer(ask, made, slab)


# -- arenas for other nodes -----------------------------------------------------------------------
#
# The arenas for slabs that are made for other nodes, and the streams that fill them.


# Slots per worker: for slabs that are being made, are ready, or are being sent, and for the zone.
_SLOTS_A_WORKER = 8


class MakingPlace(Struct, eq=False):
    """The arena of all slabs of a job with one dp_size and slot size, and the streams that fill it;
    slabs of some `closed` streams are still being read.
    """

    delivery: DeliveryArena
    sizes: SlabSizes
    last_asked: float
    streams: dict[object, RemoteStream] = field(default_factory=dict)
    closed: list[RemoteStream] = field(default_factory=list)

    def tick(self, now: float) -> None:
        """Close streams without requests."""
        for key, stream in list(self.streams.items()):
            stream.tick(now)
            if stream.is_idle and now - stream.last_asked > STREAM_IDLE_S:
                self.close_stream(key)
        self.closed = [stream for stream in self.closed if not stream.is_idle]

    def close_stream(self, key: object) -> None:
        """Make nothing more of this stream."""
        stream = self.streams.pop(key)
        stream.close()
        self.closed.append(stream)

    def drop(self, stream: RemoteStream) -> None:
        """Drop a stream that failed: the next request for it tries again."""
        for key in [key for key, open_stream in self.streams.items() if open_stream is stream]:
            self.close_stream(key)

    @property
    def is_read(self) -> bool:
        """Whether a slab is being sent."""
        return not all(stream.is_idle for stream in (*self.streams.values(), *self.closed))


class MakingPlaces:
    """The arenas of one node. The lender may send their content until they are closed."""

    def __init__(
        self, config: NodeConfig, engine: Engine, opener: DatasetOpener, lender: Lending
    ) -> None:
        self._config, self._engine = config, engine
        self._opener, self._lender = opener, lender
        self._leaving: list[MakingPlace] = []
        """Places that were left, but whose slabs may still be read."""

    def open(
        self, job_id: str, job: OpenedJob, dp_size: int, slot_bytes: int, now: float
    ) -> MakingPlace:
        """Create an arena with slots of this size.

        Raises:  ConfigError: slots are not whole pages.  BudgetTooSmall: slots are too large.
        """
        layout = self._layout(slot_bytes)
        slab_bytes, samples = self._config.slab_bytes, job.sample_count
        sizes = slab_sizes(job.largest, job.spec, dp_size, slab_bytes, samples, job.collated)
        arena = delivery_memory(self._config, layout, sizes.batch_bytes)
        delivery = DeliveryArena(
            next(self._engine.numbers),
            arena,
            layout,
            job.datasets,
            names_sources=job.names_sources,
            collated=job.collated,
            job_id=job_id,
            is_for_nodes=True,
        )
        self._opener.open_delivery(delivery)
        self._lender.lend_arena(delivery.delivery_id, arena.fd)
        return MakingPlace(delivery, sizes, now)

    def leave(self, place: MakingPlace) -> None:
        """Close an arena once none of its slabs is being read."""
        for key in list(place.streams):
            place.close_stream(key)
        self._leaving.append(place)
        self.let_go()

    def let_go(self) -> None:
        """Close abandoned arenas that are not being read any more."""
        for place in [place for place in self._leaving if not place.is_read]:
            self._leaving.remove(place)
            self._close(place)

    def close(self) -> None:
        """Close abandoned arenas, even if they are being read."""
        while self._leaving:
            self._close(self._leaving.pop())

    def _close(self, place: MakingPlace) -> None:
        self._lender.return_arena(place.delivery.delivery_id)
        self._opener.close_delivery(place.delivery)

    def _layout(self, slot_bytes: int) -> SlotLayout:
        config, budget = self._config, delivery_bytes_max(self._config)
        workers = max(config.worker_count_most, 1)
        wanted = max(slot_bytes * workers * _SLOTS_A_WORKER, config.delivery_bytes_per_rank)
        layout = plan_slots(min(wanted, budget), max(slot_bytes, 1))
        if layout.slot_bytes != slot_bytes:
            raise ConfigError(
                f"slots of {slot_bytes} bytes are not whole pages", field="slot_bytes"
            )
        return layout
