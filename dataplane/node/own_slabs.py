"""Slabs that the node reads for itself, in the way of a trainer: fetching, decoding and budgets are
the same as for any job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from dataplane.arena.memfd import Arena
from dataplane.arena.slots import plan_slots
from dataplane.model.config import JobSpec
from dataplane.model.errors import DataplaneError
from dataplane.model.records import Stream
from dataplane.node.dataset import Dataset
from dataplane.node.delivery import DeliveryArena, slab_sizes
from dataplane.node.engine import Engine
from dataplane.plan.order import SampleOrder
from dataplane.rpc.messages import EndOfStream, FromNodeBody, Slab, Working
from dataplane.scheduler.walk import Walk

_SLAB_BYTES = 1 << 20
_SLOTS, _KEPT_BATCHES = 8, 4


class OwnReads:
    """The node's own reads."""

    def __init__(self, engine: Engine, new_dataset_id: Callable[[], int]) -> None:
        self._engine, self.new_dataset_id = engine, new_dataset_id

    async def slabs(
        self,
        dataset: Dataset,
        spec: JobSpec,
        order: SampleOrder,
        *,
        cursor: int = 0,
        keeps_blocks: bool = False,
    ) -> AsyncGenerator[tuple[Slab, bytes], None]:
        """Yield all slabs of a job with this spec, in this order from the cursor on, and a copy of
        each. The dataset is forgotten at the end, unless it `keeps_blocks`: then the blocks read
        first stay in memory, as far as there is room, until the caller forgets it.

        Raises:  DataplaneError: as any job that reads it.
        """
        engine = self._engine
        sizes = slab_sizes(dataset, spec, 1, _SLAB_BYTES)
        if keeps_blocks:  # each block may take long, and what is known of it is wanted soon
            sizes.batches_max = min(sizes.batches_max, _KEPT_BATCHES)
            sizes.batches = min(sizes.batches, _KEPT_BATCHES)
        layout = plan_slots(_SLOTS * sizes.slot_bytes, sizes.slot_bytes)
        arena = Arena.create("dataplane-own", layout.arena_bytes)
        sources = spec.mixture is not None and bool(spec.mixture.source_column)
        delivery = DeliveryArena(
            next(engine.numbers), arena, layout, (dataset,), names_sources=sources
        )
        engine.open_delivery(delivery)
        holder = delivery.delivery_id
        inbox: asyncio.Queue[FromNodeBody] = asyncio.Queue()
        walk = Walk(spec, order, Stream(0, cursor, 0, 1), sizes)
        stream = engine.open_stream(delivery, walk, lambda _, body: inbox.put_nowait(body), holder)
        if keeps_blocks:
            engine.expect_next(stream, order)
        try:
            while True:
                engine.request(stream, 1)
                body = await inbox.get()  # the engine answers by its stall timeout
                while isinstance(body, Working):
                    body = await inbox.get()
                if isinstance(body, DataplaneError):
                    raise body
                if isinstance(body, EndOfStream):
                    return
                assert isinstance(body, Slab)
                content = bytes(arena.view(body.region.offset, body.region.length))
                engine.release(delivery, [body.slab_id])
                yield body, content
        finally:
            engine.close_stream(stream)
            engine.release_all(delivery, holder)
            engine.close_delivery(delivery)
            if not keeps_blocks:
                engine.forget_dataset(dataset)

    def forget(self, dataset: Dataset) -> None:
        """Forget the blocks that were kept."""
        self._engine.forget_dataset(dataset)

    async def first_slab(
        self, dataset: Dataset, spec: JobSpec, order: SampleOrder
    ) -> tuple[Slab, bytes]:
        """Return the first slab, and a copy of it: only this one is made.

        Raises:  DataplaneError: as any job that reads it, or it has no rows.
        """
        async with contextlib.aclosing(self.slabs(dataset, spec, order)) as slabs:
            async for each in slabs:
                return each
        raise DataplaneError("the first block has no rows")
