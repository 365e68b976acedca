"""The slabs of one stream that another node requests, made one by one.

       requested or coming ──fed──> planned and made by the engine ──> made ──given──> released
                                                                  └─ not requested: released

Invariants:
1. Every request is answered exactly once: with a slab, with the number of bytes that the slab
   needs, with an error of its data, or with a refusal. A request that is older than `PATIENCE_S` is
   refused, or answered with a report of progress if there was any in that time.
2. A slab is released after every node that got it has read it. A slab that no node requests is
   released after `HELD_S`, or when too many newer ones wait in the arena: a part of the slots is
   always left for requested slabs.
3. As many slabs are requested from the engine as there are slabs that nodes wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import Struct, field

from dataplane.arena.slots import SlotLayout, plan_slots
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError, DataplaneError, DataStallError, NeighbourGone
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
from dataplane.rpc import tasks
from dataplane.rpc.codec import encode
from dataplane.rpc.lending import StepRange
from dataplane.rpc.messages import FromNodeBody, Slab, Working
from dataplane.scheduler.walk import SlabSizes, Walk

PATIENCE_S = 25.0
HELD_S = 10.0
_COMING_MAX = 64
_NOTHING = Region(0, 0)


class Ask(Struct, frozen=True):
    """A node's request, made at `since`, for the slab of these steps, with room for this many
    bytes.
    """

    number: int
    steps: StepRange
    room: int
    since: float


class MadeSlab(Struct, eq=False):
    """A slab, its encoded description, and how often it is being sent."""

    slab: Slab
    note: bytes
    since: float
    sending: int = 0


class HeldSlabs(Struct, eq=False):
    """The slabs of one arena that no node requests now, oldest first: `most` at most. Maps each to
    the function that releases it.
    """

    most: int
    _held: dict[MadeSlab, Callable[[], None]] = field(default_factory=dict)

    def hold(self, made: MadeSlab, release: Callable[[], None]) -> None:
        """Keep a slab for a while; the oldest one may be released for it."""
        self._held.pop(made, None)
        self._held[made] = release
        if len(self._held) > self.most:
            next(iter(self._held.values()))()

    def let_go(self, made: MadeSlab) -> None:
        """Forget a slab that is being sent, or was released."""
        self._held.pop(made, None)


class Answers(Struct, eq=False):
    """Sends slabs of delivery arenas, and counts them."""

    lender: Lending
    slab_count: int = 0
    slab_bytes: int = 0

    def give(self, number: int, arena_id: int, made: MadeSlab, after: Callable[[], None]) -> None:
        """Send this slab; call `after` once it is no longer read."""
        slab = made.slab
        self.slab_count += 1
        self.slab_bytes += slab.bytes_used
        region = Region(slab.region.offset, slab.bytes_used)
        self.lender.give(number, region, arena_id, made.note, after=after)

    def tell(self, number: int, arena_id: int, result: tasks.ResultBody) -> None:
        """Answer without a slab."""
        self.lender.give(number, _NOTHING, arena_id, encode(tasks.Result(result)))


class AskedStream:
    """One stream. `holder` holds its slabs. `failed` is called with errors of the data."""

    def __init__(
        self,
        engine: Engine,
        delivery: DeliveryArena,
        held: HeldSlabs,
        holder: int,
        answers: Answers,
        now: float,
        failed: Callable[[DataplaneError], None],
    ) -> None:
        self._engine, self._delivery, self._holder = engine, delivery, holder
        self._held = held
        self._answers, self._failed = answers, failed
        self._new_walk: Callable[[], Walk] | None = None
        self._walk: Walk | None = None
        self._served: ServedStream | None = None
        self._asks: dict[int, list[Ask]] = {}
        """Requests that wait for a slab, by its first step."""
        self._waiting: list[tuple[Ask, Sequence[StepRange]]] = []
        """Requests that came before the order of the stream was known."""
        self._made: dict[int, MadeSlab] = {}
        """Slabs that are made, by their first step."""
        self._outstanding: Counter[int] = Counter()
        """How many ranges were fed to the walk and are not made, by their first step."""
        self._requested = 0
        self._is_closed = False
        self.last_asked = self._now = now
        self._worked_at = 0.0
        """When the engine last reported progress on the next slab."""

    @property
    def is_idle(self) -> bool:
        """Whether no node waits for slabs of the stream, or reads them."""
        return not (self._asks or self._waiting or self.sending_count)

    @property
    def sending_count(self) -> int:
        """The number of its slabs that are being read."""
        return sum(made.sending > 0 for made in self._made.values())

    def begin(self, new_walk: Callable[[], Walk]) -> None:
        """Make the requested slabs, now that `new_walk` can make a walk over the known order."""
        if self._is_closed:
            return
        self._new_walk = new_walk
        self._open()
        waiting, self._waiting = self._waiting, []
        for ask, coming in waiting:
            self._make(ask, coming)

    def ask(self, ask: Ask, coming: Sequence[StepRange]) -> None:
        """Handle a request for the slab of these steps; `coming` will be requested next."""
        self.last_asked = self._now = ask.since
        if self._walk is None:
            self._waiting.append((ask, coming))
        else:
            self._make(ask, coming)

    def tick(self, now: float) -> None:
        """Handle a tick: refuse old requests, and release old slabs."""
        self._now = now
        self._waiting = [request for request in self._waiting if not self._is_late(request[0])]
        for first, asks in list(self._asks.items()):
            self._asks[first] = [ask for ask in asks if not self._is_late(ask)]
            if not self._asks[first]:
                del self._asks[first]
        for first, made in list(self._made.items()):
            if not made.sending and now - made.since > HELD_S:
                self._release(first)

    def close(self) -> None:
        """Refuse all requests. Slabs that are being read are released later."""
        self._is_closed = True
        asks = [ask for some in self._asks.values() for ask in some]
        asks += [ask for ask, _ in self._waiting]
        self._asks.clear()
        self._waiting.clear()
        for ask in asks:
            self._answers.lender.refuse(ask.number)
        if self._served is not None:
            self._engine.close_stream(self._served)
        for first, made in list(self._made.items()):
            if not made.sending:
                self._release(first)

    def _is_late(self, ask: Ask) -> bool:
        if self._now - ask.since <= PATIENCE_S:
            return False
        if self._now - self._worked_at > PATIENCE_S:
            self._answers.lender.refuse(ask.number)
        else:
            still = NeighbourGone("it is still making the slab", working=1)
            self._answers.tell(ask.number, self._delivery.delivery_id, still)
        return True

    # -- asks ------------------------------------------------------------------------------------

    def _make(self, ask: Ask, coming: Sequence[StepRange]) -> None:
        first = ask.steps.first
        made = self._made.get(first)
        if made is not None and len(made.slab.batches) > ask.steps.count and not made.sending:
            self._release(first)
            made = None
        if made is not None:
            self._answer(ask, made)
        elif self._feed(ask.steps):
            self._asks.setdefault(first, []).append(ask)
        else:
            self._answers.lender.refuse(ask.number)
        self._follow(coming)
        self._request()

    def _feed(self, steps: StepRange) -> bool:
        """Have these steps made, unless they are in progress; return False if they do not exist."""
        assert self._walk is not None
        first = steps.first
        for other in [plan for plan in self._walk.fed if plan.first == first]:
            if other.count > steps.count:
                self._take_back(other)
        if self._outstanding[first]:
            return True
        try:
            self._walk.feed(steps)
        except ConfigError:
            return False
        self._outstanding[first] += 1
        return True

    def _take_back(self, steps: StepRange) -> None:
        assert self._walk is not None
        self._walk.fed.remove(steps)
        self._came(steps.first)

    def _came(self, first: int) -> None:
        self._outstanding[first] -= 1
        if not self._outstanding[first]:
            del self._outstanding[first]

    def _follow(self, coming: Sequence[StepRange]) -> None:
        """Feed the steps that will be requested next; take back others that nobody requests."""
        assert self._walk is not None
        wanted = {steps.first for steps in coming}
        for steps in list(self._walk.fed):
            if steps.first not in wanted and steps.first not in self._asks:
                self._take_back(steps)
        for steps in coming[:_COMING_MAX]:
            if steps.first not in self._made and not self._feed(steps):
                break

    def _request(self) -> None:
        assert self._served is not None
        while self._requested < len(self._asks):
            self._requested += 1
            self._engine.request(self._served, 1)
        self._engine.settle()

    def _answer(self, ask: Ask, made: MadeSlab) -> None:
        need, arena_id = made.slab.bytes_used, self._delivery.delivery_id
        made.since = self._now
        if len(made.slab.batches) > ask.steps.count:
            self._answers.lender.refuse(ask.number)
        elif need > ask.room:
            self._answers.tell(ask.number, arena_id, tasks.Assembled(0, bytes_needed=need))
        else:
            made.sending += 1
            self._held.let_go(made)
            self._answers.give(ask.number, arena_id, made, lambda: self._given(made))

    def _given(self, made: MadeSlab) -> None:
        made.sending -= 1
        if not made.sending:
            self._release(made.slab.batches[0].step)

    def _release(self, first: int) -> None:
        made = self._made.pop(first)
        self._held.let_go(made)
        self._engine.release(self._delivery, [made.slab.slab_id])

    # -- answers of the engine -------------------------------------------------------------------

    def _open(self) -> None:
        assert self._new_walk is not None
        walk = self._walk = self._new_walk()
        self._requested = 0

        def hear(_request_id: int, body: FromNodeBody) -> None:
            if isinstance(body, Working):
                self._worked_at = self._now
            elif self._walk is walk and not self._is_closed:
                self._hear(body)
            elif isinstance(body, Slab):
                self._engine.release(self._delivery, [body.slab_id])

        self._served = self._engine.open_stream(self._delivery, walk, hear, self._holder)

    def _hear(self, body: FromNodeBody) -> None:
        self._requested -= 1
        if isinstance(body, Slab):
            self._take(body)
        elif isinstance(body, DataplaneError) and not isinstance(body, DataStallError):
            self._fail(body)
        self._request()

    def _take(self, slab: Slab) -> None:
        """Handle a slab made of the range that was fed first, or of its first batches."""
        assert self._walk is not None
        steps, count = self._walk.taken.popleft(), len(slab.batches)
        first = slab.batches[0].step
        assert steps.first == first
        self._came(first)
        if count < steps.count:
            stride = self._walk.stream.step_stride
            rest = StepRange(first + count * stride, steps.count - count)
            self._walk.taken.appendleft(rest)
            self._outstanding[rest.first] += 1
        if first in self._made:  # the range was fed twice
            self._engine.release(self._delivery, [slab.slab_id])
        else:
            assembled = tasks.Assembled(count, 0, slab.bytes_used, slab.layout)
            note = encode(tasks.Result(assembled))
            self._made[first] = MadeSlab(slab, note, self._now)
        made = self._made[first]
        for ask in self._asks.pop(first, ()):
            self._answer(ask, made)
        if not made.sending:
            self._held.hold(made, lambda: self._release(first))

    def _fail(self, error: DataplaneError) -> None:
        """Answer requests for a slab that cannot be made; make others in a new engine stream."""
        assert self._walk is not None
        assert self._served is not None
        taken, fed = self._walk.taken, self._walk.fed
        steps = taken.popleft() if taken else None
        asks = self._asks.pop(steps.first, []) if steps is not None else []
        if steps is not None:
            self._came(steps.first)
        if asks:
            self._failed(error)
        for ask in asks:
            self._answers.tell(ask.number, self._delivery.delivery_id, error)
        self._engine.close_stream(self._served)
        self._open()
        for left in (*taken, *fed):
            self._walk.feed(left)


# -- arenas for other nodes -----------------------------------------------------------------------
#
# The arenas for slabs that are made for other nodes, and the streams that fill them.


STREAM_IDLE_S = 60.0
# Slots per worker: for slabs that are being made, are ready, or are being sent, and for the zone.
_SLOTS_A_WORKER = 8
# One slot in this many may have a slab that no node requests now.
_HELD_PART = 4


class MakingPlace(Struct, eq=False):
    """The arena of all slabs of a job with one dp_size and slot size, and the streams that fill it;
    slabs of some `closed` streams are still being read.
    """

    delivery: DeliveryArena
    sizes: SlabSizes
    held: HeldSlabs
    last_asked: float
    streams: dict[object, AskedStream] = field(default_factory=dict)
    closed: list[AskedStream] = field(default_factory=list)

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

    def drop(self, stream: AskedStream) -> None:
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
        return MakingPlace(delivery, sizes, HeldSlabs(layout.slot_count // _HELD_PART), now)

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
