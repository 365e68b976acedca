"""A worker process: decodes blocks into the block arena and gathers slabs. One task at a time.

Invariants:
1. A worker keeps no state that another could not rebuild: whatever kills it, its task is given to
   the next one.
2. It writes only into the regions that its task names, and reads nothing it was not told of.
3. It ends when its socket does: a node that dies takes its workers along.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from dataplane.arena.memfd import Arena
from dataplane.errors import (
    CorruptShard,
    DataplaneError,
    DatasetChangedError,
    PeerLost,
    ShardNotFound,
)
from dataplane.formats import base, registry
from dataplane.model import Region
from dataplane.node.gather import BlockColumns, Gather, open_block
from dataplane.rpc import local, messages
from dataplane.store.local import local_etag
from dataplane.transforms.columns import ColumnPlan, canonical, plan_columns

_OPEN_SHARDS_MAX = 256
_MADV_POPULATE_READ = 22


@dataclass(slots=True)
class _Dataset:
    format: base.Format
    schema: pa.Schema
    plan: ColumnPlan
    fill_null: Mapping[str, float]


@dataclass(slots=True)
class _State:
    """All that a worker remembers between two tasks."""

    arenas: dict[int, Arena] = field(default_factory=dict)
    datasets: dict[int, _Dataset] = field(default_factory=dict)
    schema_parts: dict[int, bytes] = field(default_factory=dict)
    blocks: dict[int, BlockColumns] = field(default_factory=dict)
    shards: OrderedDict[tuple[str, str], tuple[int, mmap.mmap]] = field(default_factory=OrderedDict)


def run(sock: socket.socket) -> None:
    """Answer tasks until the node goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    state = _State()
    while True:
        try:
            task, descriptors = local.receive(sock, messages.Task)
            local.send(sock, messages.Result(_answer(state, task.body, descriptors)))
        except PeerLost:
            return


def _answer(
    state: _State, body: messages.TaskBody, descriptors: tuple[int, ...]
) -> messages.ResultBody:
    try:
        if isinstance(body, messages.Assemble):
            return _assemble(state, body)
        if isinstance(body, messages.Decode):
            return _decode(state, body)
        if isinstance(body, messages.OpenBlocks):
            return _open_blocks(state, body)
        if isinstance(body, messages.OpenDataset):
            return _open_dataset(state, body)
        if isinstance(body, messages.AttachArena):
            fd = descriptors[0]
            size = os.fstat(fd).st_size
            state.arenas[body.arena_id] = Arena.attach(fd, size, populate=False)
            return messages.Done()
        arena = state.arenas.pop(body.arena_id, None)
        if arena is not None:
            arena.close()
        return messages.Done()
    except DataplaneError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a worker answers, whatever went wrong
        return _unexpected(body, error)


def _unexpected(body: messages.TaskBody, error: Exception) -> DataplaneError:
    what = type(error).__name__
    shard = body.raw.url if isinstance(body, messages.Decode) else None
    if shard is not None:
        return CorruptShard(f"{shard}: cannot be decoded: {what}: {error}", shard=shard)
    return DataplaneError(f"a worker failed at {type(body).__name__}: {what}: {error}")


def _open_dataset(state: _State, body: messages.OpenDataset) -> messages.Done:
    schema_bytes = state.schema_parts.pop(body.dataset_id, b"") + body.schema
    if body.more:
        state.schema_parts[body.dataset_id] = schema_bytes
        return messages.Done()
    schema = pa.ipc.read_schema(pa.py_buffer(schema_bytes))
    state.datasets[body.dataset_id] = _Dataset(
        registry.by_name(body.format),
        schema,
        plan_columns(schema, body.columns, body.lists),
        dict(body.fill_null),
    )
    return messages.Done()


def _decode(state: _State, body: messages.Decode) -> messages.Decoded:
    dataset = state.datasets[body.dataset_id]
    batch = _canonical_batch(state, dataset, body.raw)
    schema = dataset.plan.schema
    mock = pa.MockOutputStream()
    with pa.ipc.new_stream(mock, schema) as writer:
        writer.write_batch(batch)
    size = int(mock.size())
    if size > body.into.length:
        return messages.Decoded(size, stored=False)
    into = pa.py_buffer(state.arenas[0].view(body.into.offset, body.into.length))
    with (
        pa.FixedSizeBufferWriter(into) as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        writer.write_batch(batch)
    return messages.Decoded(size, stored=True)


def _canonical_batch(state: _State, dataset: _Dataset, raw: messages.RawBlock) -> pa.RecordBatch:
    preamble, body = _raw_views(state, raw)
    block = base.RawBlock(
        raw.url, raw.index, raw.rows, raw.place, raw.shard_bytes, raw.preamble_place,
        preamble, body,
    )  # fmt: skip
    batch = dataset.format.decode(block, dataset.schema, dataset.plan.top_level)
    if batch.num_rows != raw.rows:
        raise CorruptShard(
            f"{raw.url}: block {raw.index} has {batch.num_rows} rows, its index says {raw.rows}",
            shard=raw.url,
            offset=raw.place.offset,
            expected=raw.rows,
            found=batch.num_rows,
        )
    return canonical(batch, dataset.plan, dataset.fill_null, raw.url)


def _raw_views(state: _State, raw: messages.RawBlock) -> tuple[memoryview, memoryview]:
    """(preamble, body): from the arena, or from the mapped file."""
    if raw.arena is not None:
        whole = state.arenas[0].view(raw.arena.offset, raw.arena.length).toreadonly()
        cut = raw.preamble_place.length
        return whole[:cut], whole[cut : cut + raw.place.length]
    mapping = _mapped_shard(state, raw)
    _populate(mapping, raw.place)
    shard = memoryview(mapping)
    return _cut(shard, raw.preamble_place), _cut(shard, raw.place)


def _populate(mapping: mmap.mmap, place: Region) -> None:
    """Read a block of a mapped file as one piece, in place of a page fault for every few rows."""
    start = place.offset // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # Linux before 5.14 does not know how
        mapping.madvise(_MADV_POPULATE_READ, start, place.offset + place.length - start)


def _cut(view: memoryview, region: Region) -> memoryview:
    return view[region.offset : region.offset + region.length]


def _mapped_shard(state: _State, raw: messages.RawBlock) -> mmap.mmap:
    """The local file of a block, mapped; checked against its etag every time.

    Raises:  ShardNotFound, DatasetChangedError.
    """
    path, key = str(raw.path), (str(raw.path), raw.etag)
    if key in state.shards:
        state.shards.move_to_end(key)
        fd, mapping = state.shards[key]
    else:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ShardNotFound(f"{raw.url}: {error}", shard=raw.url) from error
        mapping = None
    found = local_etag(os.fstat(fd))
    if found != raw.etag:
        if mapping is None:
            os.close(fd)
        raise DatasetChangedError(
            f"{raw.url} changed since it was indexed (etag {raw.etag}, now {found}): "
            "index the dataset again",
            shard=raw.url,
            expected=raw.etag,
            found=found,
        )
    if mapping is None:
        mapping = mmap.mmap(fd, raw.shard_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        state.shards[key] = (fd, mapping)
        if len(state.shards) > _OPEN_SHARDS_MAX:
            os.close(state.shards.popitem(last=False)[1][0])
    return mapping


def _open_blocks(state: _State, body: messages.OpenBlocks) -> messages.Done:
    for key in body.forget:
        state.blocks.pop(key, None)
    dataset = state.datasets[body.dataset_id] if body.blocks else None
    for source in body.blocks:
        assert dataset is not None
        state.blocks[source.key] = open_block(_batch_of(state, dataset, source), dataset.plan.specs)
    return messages.Done()


def _batch_of(state: _State, dataset: _Dataset, source: messages.BlockSource) -> pa.RecordBatch:
    if source.raw is not None:
        return _canonical_batch(state, dataset, source.raw)
    assert source.decoded is not None
    region = source.decoded
    view = state.arenas[0].view(region.offset, region.length).toreadonly()
    with pa.ipc.open_stream(pa.py_buffer(view)) as reader:
        return reader.read_next_batch()


def _assemble(state: _State, body: messages.Assemble) -> messages.Assembled:
    dataset = state.datasets[body.dataset_id]
    blocks = [state.blocks[key] for key in body.block_keys]
    arena = state.arenas[body.arena_id]
    index = arena.view(body.row_index.offset, body.row_index.length)
    rows = np.frombuffer(index, np.int32).reshape(-1, 2)
    gather = Gather(dataset.plan.specs, blocks, rows, body.batches)
    return gather.into(arena.view(body.slab.offset, body.slab.length))


def main(descriptor: int) -> None:
    """The process: its socket is an inherited descriptor."""
    with socket.socket(fileno=descriptor) as sock:
        run(sock)
