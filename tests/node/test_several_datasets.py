"""A delivery over several datasets, with real workers: slabs have rows of all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from other_orders import Backwards, Concatenated

from dataplane.arena.memfd import Arena
from dataplane.arena.slots import plan_slots
from dataplane.base.trace import Trace
from dataplane.index.indexing import index_dataset
from dataplane.model.config import JobSpec
from dataplane.model.records import Stream
from dataplane.node.dataset import Dataset, dataset_of
from dataplane.node.delivery import DeliveryArena, slab_sizes
from dataplane.node.engine import Engine
from dataplane.node.fetch import Fetcher
from dataplane.node.pool import WorkerPool
from dataplane.plan.order import Order, SampleOrder
from dataplane.rpc.codec import decode
from dataplane.rpc.messages import EndOfStream, FromNodeBody, Layout, Slab
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import Walk
from dataplane.settings import default_node_config
from dataplane.store.outage import Outages

MIB = 1 << 20
ROWS = 20
DEADLINE_S = 120


def _order_over(datasets: list[Dataset]) -> SampleOrder:
    orders = [Order(each.manifest.block_rows, 3, True, 2, 7, 0) for each in datasets]
    return Backwards(Concatenated(orders, [each.manifest.block_count for each in datasets]))


async def _values(engine: Engine, datasets: list[Dataset]) -> list[int]:
    """All batches of a stream over these datasets."""
    spec = JobSpec("several", global_batch=8)
    sizes = slab_sizes(datasets[0], spec, 1, MIB)
    layout = plan_slots(4 * sizes.slot_bytes, sizes.slot_bytes)
    arena = Arena.create("delivery", layout.arena_bytes)
    delivery = DeliveryArena(1, arena, layout, tuple(datasets))
    engine.open_delivery(delivery)
    inbox: asyncio.Queue[FromNodeBody] = asyncio.Queue()
    walk = Walk(spec, _order_over(datasets), Stream(0, 0, 0, 1), sizes)
    stream = engine.open_stream(delivery, walk, lambda _, body: inbox.put_nowait(body), 1)
    found: list[int] = []
    while True:
        engine.request(stream, 1)
        body = await asyncio.wait_for(inbox.get(), DEADLINE_S)
        if isinstance(body, EndOfStream):
            engine.close_stream(stream)
            engine.close_delivery(delivery)
            return found
        assert isinstance(body, Slab), body
        view = arena.view(body.region.offset, body.region.length)
        (column,) = decode(Layout, body.layout).columns
        for batch, at in zip(body.batches, column.values, strict=True):
            found += np.frombuffer(view, np.int64, batch.rows, at).tolist()
        view.release()
        engine.release(delivery, [body.slab_id])


def test_one_slab_has_rows_of_blocks_of_several_datasets(tmp_path: Path) -> None:
    datasets = []
    for at in range(2):
        path = tmp_path / f"{at}.parquet"
        values = pa.table({"x": pa.array(range(at * ROWS, (at + 1) * ROWS), pa.int64())})
        pq.write_table(values, path, row_group_size=3)
        manifest = index_dataset(str(path))
        datasets.append(dataset_of(5 + at, manifest, JobSpec(manifest.fingerprint)))
    blocks, rows = _order_over(datasets).locate(np.arange(2 * ROWS))

    async def play() -> list[int]:
        arena, trace = Arena.create("blocks", MIB), Trace("test")
        config = default_node_config()
        fetcher, pool = Fetcher.of(config, arena, trace, Outages()), WorkerPool(1, trace)
        engine = Engine(Scheduler(MIB, 1, Autoscaler(1, 1, 1), 60.0), arena, fetcher, pool, trace)
        pool.start()
        try:
            return await _values(engine, datasets)
        finally:
            engine.close()
            pool.close()
            fetcher.close()
            arena.close()

    starts = np.concatenate([each.row_starts[:-1] + at * ROWS for at, each in enumerate(datasets)])
    assert asyncio.run(play()) == (starts[blocks] + rows).tolist()
