"""A worker process: decodes blocks into the block arena and gathers slabs, one task at a time; or
indexes shards (indexing.py), several at once, since most of that time is spent waiting for bytes.

Invariants:
1. A worker keeps no state that another could not rebuild: if a worker is killed, its task goes to
   another.
2. A worker writes only into the regions that its task names, and into the restart indexes of the
   task's blocks; it reads only memory and files named by the node.
3. A worker exits when its socket closes, so workers do not outlive their node.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.base.machine import ProcessorWaits, collect_rarely, limit_memory
from dataplane.formats.faults import is_out_of_memory
from dataplane.model.changes import ReplacedRow
from dataplane.model.errors import ConfigError, CorruptShard, DataplaneError, PeerLost
from dataplane.model.records import Region
from dataplane.rpc import local, tasks
from dataplane.rpc.codec import encode
from dataplane.rpc.messages import Batch, Layout
from dataplane.worker import row_layout
from dataplane.worker.apart import (
    OpenBlock,
    check_images,
    gather_apart,
    image_fault,
    open_excerpt,
    places_of,
    scratch,
    slab_images_of,
    write_excerpt,
    write_packs,
)
from dataplane.worker.collating import slab_gather
from dataplane.worker.columns import BlockColumns, Bytes, Ints, RowIndex, open_block
from dataplane.worker.decoding import ReadDataset, canonical_batch, other_batch, read_dataset
from dataplane.worker.gather import Gather, Gathers
from dataplane.worker.indexing import Indexing
from dataplane.worker.mapped import MappedShards
from dataplane.worker.pack_blocks import AskedPacks, KnownPacks, PackBlock, PackForm
from dataplane.worker.packing import CountGather, PackGather
from dataplane.worker.replacing import ReplacingGather, stand_ins
from dataplane.worker.rows import TriedImages
from dataplane.worker.salvaging import replaced_of

# -- times of disk and processor -------------------------------------------------------------------

_FAULT_S_MAX = 0.02
"""Reading a page from a disk usually takes no longer than this."""


def timed(
    work: Callable[[], tasks.Assembled | tasks.Decoded | tasks.Extracted],
) -> tasks.Assembled | tasks.Decoded | tasks.Extracted:
    """Perform a task; return its answer, with the time spent waiting for a processor, and for the
    disk, if pages were read from one.
    """
    waits = _waits(os.getpid())
    before, began, waited_s = resource.getrusage(resource.RUSAGE_THREAD), time.monotonic(), waits()
    done = work()
    after = resource.getrusage(resource.RUSAGE_THREAD)
    done = replace(done, queued=max(round((waits() - waited_s) * 1e6), 0))
    if after.ru_majflt == before.ru_majflt:
        return done
    busy_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Attribute waiting to the disk by the share of voluntary context switches: a wait for a disk is
    # a voluntary one, sharing a processor causes involuntary ones.
    gave_up, was_made = after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw
    waited_s = (time.monotonic() - began - busy_s) * gave_up / max(gave_up + was_made, 1)
    most_s = (after.ru_majflt - before.ru_majflt) * _FAULT_S_MAX
    return replace(done, disk=round(min(max(waited_s, 0.0), most_s) * 1e6))


@cache
def _waits(pid: int) -> Callable[[], float]:
    """Return a function that reads how long this process has waited for a processor; its tasks run
    in its main thread.
    """
    return ProcessorWaits(pid).seconds


_ARROWS_OWN_BYTES_MAX = 4 << 30
"""Above this memory limit, Arrow allocates from the system allocator, which gives freed memory
back. Arrow's own allocator keeps the addresses, which count towards the limit, too: a block of 2
GiB needed more than three times its size."""


class _State(Struct):
    """Everything that a worker remembers between two tasks; `tell` reports its progress."""

    memory_bytes: int
    tell: Callable[[tasks.Reading], None]
    arenas: dict[int, Arena] = field(default_factory=dict)
    datasets: dict[int, ReadDataset] = field(default_factory=dict)
    schema_parts: dict[int, bytes] = field(default_factory=dict)
    blocks: dict[int, OpenBlock] = field(default_factory=dict)
    shards: MappedShards = field(default_factory=MappedShards)
    packs: KnownPacks = field(default_factory=KnownPacks)
    outgrown: _Outgrown | None = None


class _Outgrown(NamedTuple):
    """A decoded block that was larger than its region: the next task may store it in another."""

    dataset_id: int
    raw: tasks.RawBlockRef
    batch: pa.RecordBatch
    places: Ints | None

    def is_of(self, body: tasks.Decode) -> bool:
        """Whether this task decodes the same block; its raw bytes may have moved in the arena."""
        mine, its = self.raw, body.raw
        same = (mine.url, mine.index, mine.etag) == (its.url, its.index, its.etag)
        return same and self.dataset_id == body.dataset_id


def run(sock: socket.socket, memory_bytes: int) -> None:
    """Answer tasks until the node goes away, with this memory limit for the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    limit_memory(memory_bytes)
    collect_rarely()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    # Raise the limit of open files: every mapped shard takes two descriptors, and blocks may lie in
    # thousands of shards.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    state = _State(memory_bytes, lambda told: local.send(sock, tasks.Result(told)))
    indexing: Indexing | None = None
    while True:
        try:
            task, descriptors = local.receive(sock, tasks.Task)
            if isinstance(task.body, tasks.IndexingTask):
                indexing = indexing or Indexing(sock)
                indexing.accept(task.number, task.body)
                continue
            result = _answer(state, task.body, descriptors)
            try:
                local.send(sock, tasks.Result(result))
            except ConfigError as error:
                local.send(sock, tasks.Result(error))
        except PeerLost:
            return


def _answer(state: _State, body: tasks.TaskBody, descriptors: tuple[int, ...]) -> tasks.ResultBody:
    try:
        if isinstance(body, tasks.Assemble | tasks.Decode | tasks.Extract):
            return timed(lambda: _done(state, body))
        if isinstance(body, tasks.CopySlab):
            return _copy_slab(state, body)
        if isinstance(body, tasks.OpenBlocks):
            return _open_blocks(state, body)
        if isinstance(body, tasks.OpenDataset):
            return _open_dataset(state, body)
        if isinstance(body, tasks.AttachArena):
            fd = descriptors[0]
            size = os.fstat(fd).st_size
            state.arenas[body.arena_id] = Arena.attach(fd, size)
            return tasks.Done()
        arena = state.arenas.pop(body.arena_id, None)
        if arena is not None:
            arena.close()
        return tasks.Done()
    except PeerLost:
        raise
    except DataplaneError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a worker answers, whatever went wrong
        return tasks.OutOfMemory() if is_out_of_memory(error) else _unexpected(body, error)


def _done(
    state: _State, body: tasks.Assemble | tasks.Decode | tasks.Extract
) -> tasks.Assembled | tasks.Decoded | tasks.Extracted:
    if isinstance(body, tasks.Decode):
        return _decode(state, body)
    state.outgrown = None  # free the memory of the kept block
    return _assemble(state, body) if isinstance(body, tasks.Assemble) else _extract(state, body)


def _unexpected(body: tasks.TaskBody, error: Exception) -> DataplaneError:
    what = type(error).__name__
    shard = body.raw.url if isinstance(body, tasks.Decode) else None
    if shard is not None:
        return CorruptShard(f"{shard}: cannot be decoded: {what}: {error}", shard=shard)
    return DataplaneError(f"a worker failed at {type(body).__name__}: {what}: {error}")


def _open_dataset(state: _State, body: tasks.OpenDataset) -> tasks.Done:
    schema_bytes = state.schema_parts.pop(body.dataset_id, b"") + body.schema
    if body.more:
        state.schema_parts[body.dataset_id] = schema_bytes
        return tasks.Done()
    if body.memory_bytes > state.memory_bytes:
        state.memory_bytes = body.memory_bytes
        limit_memory(body.memory_bytes)
        if body.memory_bytes > _ARROWS_OWN_BYTES_MAX:
            pa.set_memory_pool(pa.system_memory_pool())
    schema = pa.ipc.read_schema(pa.py_buffer(schema_bytes))
    state.datasets[body.dataset_id] = read_dataset(body, schema)
    return tasks.Done()


def _decode(state: _State, body: tasks.Decode) -> tasks.Decoded:
    dataset, kept = state.datasets[body.dataset_id], state.outgrown
    state.outgrown = None
    if kept is not None and kept.is_of(body):
        batch, places = kept.batch, kept.places
    else:
        del kept  # free the former block first: two decoded blocks may exceed the limit
        batch, places = _canonical_of(state, dataset, body)
    size = row_layout.stored_bytes(batch, dataset.row_layout)
    if size > body.into.length:
        state.outgrown = _Outgrown(body.dataset_id, body.raw, batch, places)
        return tasks.Decoded(size, stored=False)
    into = state.arenas[0].view(body.into.offset, size)
    state.arenas[0].prepare(body.into.offset, size)
    row_layout.store(batch, dataset.plan.specs, dataset.row_layout, into, places=places)
    if body.bad is None and body.raw.path is not None:
        state.shards.of(body.raw)  # check the file: it may have changed while it was read
    return tasks.Decoded(size, stored=True)


def _canonical_of(
    state: _State, dataset: ReadDataset, body: tasks.Decode
) -> tuple[pa.RecordBatch, Ints | None]:
    if body.bad is None:
        batch, places = canonical_batch(dataset, body.raw, state.arenas, state.shards)
    else:
        batch, places = other_batch(dataset, body.raw, body.bad)
    if dataset.images and batch.num_rows:
        check_images(dataset, body.raw, batch)
    return batch, places


def _open_blocks(state: _State, body: tasks.OpenBlocks) -> tasks.Done:
    for key in body.forget:
        state.blocks.pop(key, None)
        state.packs.forget(key)
    dataset = state.datasets[body.dataset_id] if body.blocks else None
    for source in body.blocks:
        assert dataset is not None
        columns, numbers = _columns_of(state, dataset, source)
        in_file = source.raw is not None and source.raw.path is not None
        shard = state.shards.of(source.raw) if in_file and source.raw is not None else None
        restart_indexes = _restart_indexes_of(state, source)
        state.blocks[source.key] = OpenBlock(
            columns, shard, source.origin, restart_indexes, numbers, replaced_of(columns.batch)
        )
    return tasks.Done()


def _columns_of(
    state: _State, dataset: ReadDataset, source: tasks.BlockSource
) -> tuple[BlockColumns, Ints | None]:
    specs = dataset.plan.specs
    if source.raw is not None:
        batch, _ = canonical_batch(dataset, source.raw, state.arenas, state.shards)
        columns = open_block(batch, specs)
        if source.raw.path is not None and not dataset.is_whole:
            state.shards.of(source.raw).populate(columns)
        return columns, None
    assert source.decoded is not None
    region = source.decoded
    view = state.arenas[0].view(region.offset, region.length).toreadonly()
    if source.row_count and dataset.packs is not None:
        return open_excerpt(view, dataset.packs.specs, None, source.row_count)
    if source.row_count:
        return open_excerpt(view, specs, dataset.row_layout, source.row_count)
    return row_layout.open_stored(view, specs, dataset.row_layout), None


def _restart_indexes_of(state: _State, source: tasks.BlockSource) -> Bytes | None:
    if source.restart_indexes is None:
        return None
    return np.frombuffer(
        state.arenas[0].view(source.restart_indexes.offset, source.restart_indexes.length), np.uint8
    )


def _assemble(state: _State, body: tasks.Assemble) -> tasks.Assembled:
    dataset = state.datasets[body.dataset_id]
    blocks = [state.blocks[key] for key in body.block_keys]
    arena = state.arenas[body.arena_id]
    index = arena.view(body.row_index.offset, body.row_index.length)
    rows = np.frombuffer(index, np.int32).reshape(-1, 2)
    try:
        if body.say_where:
            _read_one_by_one(state, dataset, body, rows)
        told = _replaced_in(blocks, rows[body.part], of_samples=not dataset.makes_samples)
        gathers = partial(_gather_of, state, dataset, told)
        others = partial(stand_ins, body, blocks, told)
        gather = slab_gather(dataset, body, rows, gathers, state.tell, others)
        slab = arena.view(body.slab.offset, body.slab.length)
        made = gather.into(slab, partial(arena.prepare, body.slab.offset))
        _keep(state, arena, body, made.bytes_used)
        layout = encode(Layout(made.columns)) if made.batch_count else b""
        return tasks.Assembled(
            made.batch_count, made.bytes_needed, made.bytes_used, layout,
            replaced=tuple(told.values()),
        )  # fmt: skip
    finally:
        # Check the files after reading: a change during the read may have spoilt rows, or may have
        # caused the error.
        for shard in {block.shard for block in blocks if block.shard is not None}:
            shard.check()


def _replaced_in(
    blocks: Sequence[OpenBlock], rows: RowIndex, *, of_samples: bool
) -> dict[tuple[str, int], ReplacedRow]:
    """Return the rows of a slab whose content comes from other rows of their blocks. Unless these
    are samples themselves, return all such rows of the blocks, since a sample may be made of any.
    """
    replaced: dict[tuple[str, int], ReplacedRow] = {}
    for at, block in enumerate(blocks):
        if block.replaced:
            own = set(rows[rows[:, 0] == at, 1].tolist())
            used = own if of_samples else block.replaced.keys()
            some = (row for place, row in block.replaced.items() if place in used)
            replaced |= {(row.url, row.row): row for row in some}
    return replaced


def _gather_of(
    state: _State,
    dataset: ReadDataset,
    told: dict[tuple[str, int], ReplacedRow],
    body: tasks.Assemble,
    rows: RowIndex,
) -> Gathers:
    """Return the object that gathers a task's rows. `told` gets the rows that are replaced by
    others.
    """
    blocks = [state.blocks[key] for key in body.block_keys]
    if dataset.packs is not None:
        places = places_of(rows, [block.numbers for block in blocks])
        named = tuple(zip(body.block_keys, AskedPacks.of_blocks(body), strict=True))
        return _pack_gather(state, dataset.packs, named, places, body.batches, part=body.part)
    gather = partial(_row_gather, dataset, body, blocks)
    if body.render is None or not body.render.replaces:
        return gather(rows)
    check = partial(image_fault, dataset, body.render)
    return ReplacingGather(body, blocks, rows, gather, check, told)


def _row_gather(
    dataset: ReadDataset,
    body: tasks.Assemble,
    blocks: Sequence[OpenBlock],
    rows: RowIndex,
    tried: TriedImages | None = None,
) -> Gather:
    places = places_of(rows, [block.numbers for block in blocks])
    slab_images = slab_images_of(dataset, blocks, body.render, rows[body.part], tried)
    specs = dataset.plan.specs if slab_images is None else slab_images.specs
    columns, lists = [block.columns for block in blocks], dataset.plan.lists
    return Gather(
        specs, columns, places, body.batches, slab_images=slab_images, lists=lists, part=body.part
    )


def _pack_gather(
    state: _State,
    form: PackForm,
    blocks: Sequence[tuple[int, AskedPacks]],
    places: RowIndex,
    batches: Sequence[Batch],
    *,
    as_rows: bool = False,
    part: slice = slice(None),
) -> PackGather | CountGather:
    """Return the object that gathers the packs `part`. `blocks` has the key of each block, and the
    packs that are requested of it.
    """
    if form.counts:
        opened = [state.blocks[key] for key, _ in blocks]
        named = [(one.columns, one.origin) for one in opened]
        return CountGather(form, named, places, batches, part)
    used = set(places[part, 0].tolist())
    packed = [
        _packed(state, form, key, asked if at in used else AskedPacks((), ()))
        for at, (key, asked) in enumerate(blocks)
    ]
    return PackGather(form, packed, places, batches, as_rows=as_rows, part=part)


def _packed(state: _State, form: PackForm, block_key: int, asked: AskedPacks) -> PackBlock:
    """Return a block with the requested packs."""
    block = state.blocks[block_key]
    if block.numbers is not None:
        return PackBlock(block.columns, None)
    packs = (
        state.packs.of(block_key, block.columns, form, keyed, block.origin, asked.taken_out)
        for keyed in asked.keys
    )
    return PackBlock(block.columns, tuple(packs))


def _extract(state: _State, body: tasks.Extract) -> tasks.Extracted:
    dataset, block = state.datasets[body.dataset_id], state.blocks[body.block_key]
    sizes: list[int] = []
    try:
        for place in body.places:
            into = state.arenas[0].view(place.into.offset, place.into.length)
            state.arenas[0].prepare(place.into.offset, place.into.length)
            if dataset.packs is not None:
                asked = AskedPacks.of_excerpt(place)
                packed = _packed(state, dataset.packs, body.block_key, asked)
                sizes.append(write_packs(dataset.packs, packed, into, place.row_count))
                continue
            sizes.append(write_excerpt(block.columns, dataset.plan.specs, into, place.row_count))
        return tasks.Extracted(tuple(sizes))
    finally:
        if block.shard is not None:
            block.shard.check()


def _read_one_by_one(
    state: _State, dataset: ReadDataset, body: tasks.Assemble, rows: RowIndex
) -> None:
    """Run the task's reads once in advance, block by block and image by image, and report each
    before it begins, so that the node knows which one crashes the worker. A task that writes only a
    part of the slab reads the lengths of all rows, but images and packs of its own rows only.
    """
    is_own = np.zeros(len(rows), np.bool_)
    is_own[body.part] = True
    for at, key in enumerate(body.block_keys):
        block, is_here = state.blocks[key], rows[:, 0] == at
        mine = rows[is_here & is_own, 1].tolist()
        if dataset.packs is not None and not mine:
            continue
        state.tell(tasks.Reading(key))
        if dataset.packs is not None:
            index = places_of(np.array([(0, row) for row in mine], np.int32), [block.numbers])
            named = ((key, AskedPacks.of_blocks(body)[at]),)
            batches = (Batch(0, len(mine), len(mine)),)
            scratch(_pack_gather(state, dataset.packs, named, index, batches, as_rows=True))
            continue
        gather_apart(dataset, block, rows[is_here, 1].tolist(), None)
        if body.render is None:
            continue
        for image in body.render.images:
            render = replace(body.render, images=(image,))
            for row in mine:
                state.tell(tasks.Reading(key, row, image.column))
                fault = image_fault(dataset, render, block, row)
                if fault is not None and not image.replaces:
                    raise fault


def _keep(state: _State, arena: Arena, body: tasks.Assemble, length: int) -> None:
    """Copy the slab to `keep` before the trainer gets it and may write into it."""
    if body.keep is not None and length <= body.keep.length:
        made = Region(body.slab.offset, length)
        _copy(arena, made, state.arenas[0], Region(body.keep.offset, length))


def _copy_slab(state: _State, body: tasks.CopySlab) -> tasks.Done:
    kept, slab = (state.arenas[0], body.kept), (state.arenas[body.arena_id], body.slab)
    source, target = (slab, kept) if body.keep else (kept, slab)
    _copy(*source, *target)
    return tasks.Done()


def _copy(source: Arena, at: Region, target: Arena, to: Region) -> None:
    into = np.frombuffer(target.view(to.offset, to.length), np.uint8)
    target.prepare(to.offset, to.length)
    into[:] = np.frombuffer(source.view(at.offset, at.length), np.uint8)


def main(descriptor: int, memory_bytes: int) -> None:
    """Run the process: its socket is an inherited descriptor."""
    sock = socket.socket(fileno=descriptor)
    try:
        run(sock, memory_bytes)
    finally:
        # Leave the socket open until the process has ended: if it closed earlier, the node would
        # kill the worker, and could not tell how the worker would have ended by itself.
        sock.detach()
