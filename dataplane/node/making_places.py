"""The arenas for slabs that are made for other nodes, and the streams that fill them."""

from __future__ import annotations

from msgspec import Struct, field

from dataplane.arena.slots import SlotLayout, plan_slots
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.node.asked_stream import AskedStream, HeldSlabs, SlabLender
from dataplane.node.delivery import DeliveryArena, delivery_bytes_max, delivery_memory
from dataplane.node.engine import Engine
from dataplane.node.opener import DatasetOpener, OpenedJob
from dataplane.node.slab_sizes import slab_sizes
from dataplane.scheduler.walk import SlabSizes

STREAM_IDLE_S = 60.0
# Slots for what a worker makes, for what is ready and what is being sent, and the zone beside them.
_SLOTS_A_WORKER = 8
# The part of the slots for slabs that nobody asks for.
_HELD_PART = 4


class MakingPlace(Struct, eq=False):
    """The arena of all slabs of a job with one size of slots, and the streams that fill it; slabs
    of some `closed` streams are still being read.
    """

    delivery: DeliveryArena
    sizes: SlabSizes
    held: HeldSlabs
    last_asked: float
    streams: dict[object, AskedStream] = field(default_factory=dict)
    closed: list[AskedStream] = field(default_factory=list)

    def look(self, now: float) -> None:
        """Close streams without requests."""
        for key, stream in list(self.streams.items()):
            stream.look(now)
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
        for key in [key for key, each in self.streams.items() if each is stream]:
            self.close_stream(key)

    @property
    def is_read(self) -> bool:
        """Whether a slab is being sent."""
        return not all(stream.is_idle for stream in (*self.streams.values(), *self.closed))


class MakingPlaces:
    """The arenas of one node. The lender may send their content until they are closed."""

    def __init__(
        self, config: NodeConfig, engine: Engine, opener: DatasetOpener, lender: SlabLender
    ) -> None:
        self._config, self._engine = config, engine
        self._opener, self._lender = opener, lender
        self._leaving: list[MakingPlace] = []
        """Places from which something may still be read."""

    @property
    def is_empty(self) -> bool:
        """Whether no abandoned arena is still being read."""
        return not self._leaving

    def open(
        self, job_id: str, job: OpenedJob, dp_size: int, slot_bytes: int, now: float
    ) -> MakingPlace:
        """Create an arena with slots of this size.

        Raises:  ConfigError: they are not whole pages.  BudgetTooSmall: they are too large.
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
        for dataset in job.datasets:
            self._opener.read(dataset)
        self._engine.open_delivery(delivery)
        self._lender.lend_arena(delivery.delivery_id, arena.fd)
        return MakingPlace(delivery, sizes, HeldSlabs(layout.slot_count // _HELD_PART), now)

    def leave(self, place: MakingPlace) -> None:
        """Close an arena once nothing of it is being read."""
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
        self._engine.close_delivery(place.delivery)
        for dataset in place.delivery.datasets:
            self._opener.leave(dataset)

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
