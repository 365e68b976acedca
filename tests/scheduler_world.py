"""The scheduler's surroundings in its tests: a dataset, and a store and workers that complete their
work in any order.

They write to memory: a fetch marks its region, a decoding reads that mark and sets its own, and at
the end of an assembly the marks of all its blocks must still be there: none was freed too early.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property

import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from scheduler_joined import drawn_places
from scheduler_neighbours import bytes_of, elsewhere, given

from dataplane.arena.allocator import rounded
from dataplane.model.config import JobSpec
from dataplane.model.errors import BudgetTooSmall, DataplaneError, StoreDenied, StoreUnavailable
from dataplane.model.records import End, Region
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order, SampleOrder
from dataplane.plan.shards import Shard
from dataplane.rpc import messages, tasks
from dataplane.scheduler import events
from dataplane.scheduler.dataset import BlockName, DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.records import CachedBlock, Excerpt
from dataplane.scheduler.walk import Plan
from dataplane.transforms.restart_indexes import restart_index_bytes

PAGE = 4096
BATCH_MAX = 8
# (url scheme, zero copy): fetched and decoded, fetched, decoded, neither.
KINDS = (("s3", False), ("s3", True), ("file", False), ("file", True))


class Unplanned(DataplaneError):
    """The plan of a stream could not be made."""


class World:
    """A dataset of blocks of known sizes, and a job over it, all drawn from one seed. `is_large`:
    its blocks are much larger than their rows.
    """

    def __init__(
        self, chance: random.Random, dataset_id: int = 1, *, is_large: bool = False
    ) -> None:
        self.chance, self.dataset_id, self.is_large = chance, dataset_id, is_large
        count = chance.choice([8, 12] if is_large else [1, 2, 3, 4, 6, 9])
        pages, rows = (8, (12, 24)) if is_large else (1, (1, 6))
        self.kinds = sorted(chance.randrange(len(KINDS)) for _ in range(count))
        self.rows = np.array([chance.randint(*rows) for _ in range(count)], np.int64)
        shortest, longest = (3 * pages * PAGE // 2 if is_large else 64), 3 * pages * PAGE
        self.lengths = np.array([chance.randint(shortest, longest) for _ in range(count)], np.int64)
        self.sizes = [chance.randint(shortest, 4 * pages * PAGE) for _ in range(count)]
        # The index estimates decoded sizes: often too low, sometimes too high.
        most = [size * chance.choice([1, 1, 1, 2]) for size in self.sizes]
        self.low = np.array([chance.randint(1, size) for size in most], np.int64)
        self.sample_count = int(self.rows.sum())
        self.spec = self.job()
        schemes = [KINDS[kind] for kind in self.kinds]
        is_remote = np.array([scheme == "s3" for scheme, _ in schemes])
        is_decoded = np.array([not zero_copy for _, zero_copy in schemes])
        raw, decoded = np.where(is_remote, self.lengths, 0), np.where(is_decoded, self.low, 0)
        marks, places = Marks.of(raw, decoded, is_remote), drawn_places(self.kinds, self.lengths)
        self.blocks = DatasetBlocks(
            dataset_id, f"dataset-{dataset_id}", marks, self.lengths, self.rows, "{}".format,
            places=places, digest=bytes([dataset_id] * 16),
        )  # fmt: skip
        self.broken: set[int] = set()
        self._orders: dict[tuple[JobSpec, int], tuple[SampleOrder, list[list[int]]]] = {}

    @property
    def datasets(self) -> DatasetLookup:
        """The blocks that an order over this dataset covers."""
        return DatasetLookup(self.blocks)

    def job(self) -> JobSpec:
        """How one of the jobs over it reads it."""
        chance = self.chance
        return JobSpec(
            f"fingerprint-{self.dataset_id}",
            seed=chance.randrange(100),
            shuffle=chance.random() < 0.8,
            lanes=chance.randint(4, 8) if self.is_large else chance.randint(1, 3),
            window=chance.choice([1, 3, 1000]),
            global_batch=chance.randint(1, BATCH_MAX),
            end=chance.choice([End.RAGGED, End.PAD]),
        )

    @cached_property
    def manifest(self) -> Manifest:
        """The same, as a node would read it."""
        schema = pa.schema([("x", pa.int32())])
        used = sorted(set(self.kinds))
        shards = tuple(
            Shard(
                f"{KINDS[k][0]}:///shard-{k}",
                1 << 40,
                f"e{self.dataset_id}",
                self.kinds.count(k),
                Region(0, 0),
                KINDS[k][1],
            )
            for k in used
        )
        return Manifest(
            ("all",),
            "arrow",
            schema.serialize().to_pybytes(),
            shards,
            np.array([used.index(k) for k in self.kinds], np.int32),
            self.rows,
            np.arange(len(self.kinds), dtype=np.int64) << 20,
            self.lengths,
            self.low,
        )

    def order(self, spec: JobSpec, epoch: int) -> tuple[SampleOrder, list[list[int]]]:
        """An order, and (block, row) of each of its positions."""
        found = self._orders.get((spec, epoch))
        if found is None:
            order = self._order(spec, epoch)
            samples = np.stack(order.locate(np.arange(self.sample_count)), 1).tolist()
            found = self._orders[spec, epoch] = order, samples
        return found

    def _order(self, spec: JobSpec, epoch: int) -> SampleOrder:
        return Order(self.rows, spec.seed, spec.shuffle, spec.lanes, spec.window, epoch)

    def keep_restart_indexes(self, arena_bytes: int) -> None:
        """Its images are worth restart indexes as node/dataset.py has it, and now and then: nine tenths of
        the arena have room for them and for all blocks, as far as the index knows.
        """
        marks = self.blocks.marks
        kept = np.where(marks.decoded > 0, marks.decoded, marks.raw)
        restart_indexes = restart_index_bytes(int(np.where(kept > 0, kept, self.lengths).sum()))
        is_worth = (
            int(kept.sum()) + restart_indexes <= arena_bytes * 0.9 and self.chance.random() < 0.5
        )
        self.blocks = replace(self.blocks, keeps_restart_indexes=is_worth)

    def cost_of(self, block: int) -> int:
        """An upper bound of what the block may take of the arena while it is loaded."""
        marks = self.blocks.marks
        parts = (int(marks.raw[block]), int(marks.decoded[block]), self.true_bytes(block))
        return sum(rounded(part) for part in parts if part)

    def excerpts_of(self, block: int) -> int:
        """An upper bound of what the excerpts of a batch may take that has rows of no other block."""
        whole = max(self.true_bytes(block), int(self.lengths[block]))
        return BATCH_MAX * rounded(128 + whole * 3 // 2 // int(self.rows[block]))

    def true_bytes(self, block: int) -> int:
        return self.sizes[block] + 64 if self.blocks.needs_decode(block) else 0


def _mark(into: memoryview, name: BlockName) -> None:
    mark = ((name.dataset_id << 32) + name.block + 1).to_bytes(8, "little")
    into[:8] = into[-8:] = mark


def _check_mark(view: memoryview, name: BlockName) -> None:
    mark = ((name.dataset_id << 32) + name.block + 1).to_bytes(8, "little")
    assert view[:8] == view[-8:] == mark, "another block's memory"


class Outside:
    """The store and the workers: their work ends when the test says so, by an event."""

    def __init__(self, arena_bytes: int, worlds: dict[int, World], row_bytes: int) -> None:
        self.arena = memoryview(bytearray(arena_bytes))
        self.worlds = worlds
        self.row_bytes = row_bytes
        self.now = 0.0
        self.pending: list[tuple[float, Callable[[], events.Event]]] = []
        """The time and the result of the end of each running effect."""
        self.pace: dict[type, tuple[float, float]] = {}
        """Seconds that each kind of them takes, at least and at most."""
        self.known: dict[int, tuple[World, int, Region | None]] = {}
        """The place of each block that was read or decoded; None if it is in a local file."""
        self.dropped: set[int] = set()
        self.deliveries: dict[int, memoryview] = {}
        self.lookups: dict[int, DatasetLookup] = {}
        """For each delivery arena, the blocks that its orders cover."""
        self.loads = 0
        self.assembled: list[bytes] = []
        self.copied = 0
        self.extracted = 0
        self.excerpts: dict[int, set[int]] = {}
        """The rows of each excerpt, by where it lies."""
        self.find: Callable[[int], CachedBlock | Excerpt]  # by key
        self.chance = random.Random(0)
        self.done = np.zeros(3, np.int64)
        """Bytes read, microseconds of disk time and bytes of neighbours, as reported."""
        self.away = 0.0
        """How many of the reads end with the store still away."""
        self.refused = 0.0
        """The share of requests for which the machine has no memory."""
        self.elsewhere = 0.0
        self.unplanned = 0.0
        """The share of plans that fail."""

    def part(self, region: Region) -> memoryview:
        assert region.offset + region.length <= len(self.arena)
        return self.arena[region.offset : region.offset + region.length]

    def later(self, effect: events.Effect, end: Callable[[], events.Event]) -> None:
        took = self.chance.uniform(*self.pace.get(type(effect), (0.0, 1.0)))
        # One in many takes much longer.
        took *= 20.0 if self.chance.random() < 0.05 else 1.0
        asked = self.now

        def ended() -> events.Event:
            event = end()
            if not isinstance(event, events.BlockDecoded | events.SlabAssembled):
                return event
            # A worker that has failed may not tell when it began.
            is_told = self.chance.random() < 0.9
            return replace(event, started=self.chance.uniform(asked, self.now) if is_told else 0.0)

        self.pending.append((self.now + took, ended))

    def ask(self, effect: events.Effect) -> None:
        """Have an effect carried out, now or later."""
        match effect:
            case events.PlanSteps():
                self.later(effect, lambda: self._planned(effect))
            case events.Fetch():
                self.loads += 1
                self.later(effect, lambda: self._fetched(effect))
            case events.DecodeBlock():
                self.later(effect, lambda: self._decoded(effect))
            case events.AssembleSlab():
                self.later(effect, lambda: self._assembled(effect))
            case events.ExtractRows():
                self.extracted += 1
                self.later(effect, lambda: self._extracted(effect))
            case events.CopyKept():
                self.copied += 1
                self.later(effect, lambda: self._copied(effect))
            case events.ForgetBlock():
                self.known.pop(effect.key, None)
            case events.DropDelivery():
                assert effect.delivery_id not in self.dropped
                self.dropped.add(effect.delivery_id)
            case _:
                raise AssertionError(effect)

    def _disk(self) -> int:
        """Microseconds that a worker waited for the disk."""
        disk = self.chance.choice([0, 0, 7])
        self.done += [0, disk, 0]
        return disk

    def _no_memory(self) -> BudgetTooSmall | None:
        is_refused = self.chance.random() < self.refused
        return BudgetTooSmall("the machine has no memory") if is_refused else None

    def _planned(self, effect: events.PlanSteps) -> events.Planned:
        if self.chance.random() < self.unplanned:
            return events.Planned(effect.stream_id, error=Unplanned("no plan"))
        return events.Planned(effect.stream_id, effect.walk.next_plans(effect.count))

    def _fetched(self, effect: events.Fetch) -> events.BlockFetched:
        world = self.worlds[effect.dataset_id]
        if (ended := elsewhere(self, effect)) is not None:
            return ended
        self.done += [bytes_of(world, effect), 0, 0]
        if error := self._no_memory():
            return events.BlockFetched(effect.key, error)
        if effect.block in world.broken:
            return events.BlockFetched(effect.key, StoreDenied(f"block {effect.block}"))
        if self.chance.random() < self.away:
            return events.BlockFetched(effect.key, StoreUnavailable("it is away"), is_away=True)
        _mark(self.part(effect.into), BlockName(effect.dataset_id, effect.block))
        self.known[effect.key] = (world, effect.block, effect.into)
        return given(self, effect)

    def _decoded(self, effect: events.DecodeBlock) -> events.BlockDecoded:
        world, block = self.worlds[effect.dataset_id], effect.block
        if effect.raw is None:
            self.loads += 1
            if block in world.broken:
                return events.BlockDecoded(effect.key, StoreDenied(f"block {block}"), 0.0)
        else:
            _check_mark(self.part(effect.raw), BlockName(effect.dataset_id, block))
        if error := self._no_memory():
            return events.BlockDecoded(effect.key, error, 0.0)
        size = world.true_bytes(block)
        if size > effect.into.length:
            return events.BlockDecoded(effect.key, tasks.Decoded(size, stored=False), 0.0)
        into = Region(effect.into.offset, size)
        _mark(self.part(into), BlockName(effect.dataset_id, block))
        self.known[effect.key] = (world, block, into)
        disk = self._disk()
        return events.BlockDecoded(effect.key, tasks.Decoded(size, stored=True, disk=disk), 0.0)

    def _copied(self, effect: events.CopyKept) -> events.SlabAssembled:
        assert effect.delivery_id not in self.dropped
        assert effect.kept.length == effect.slab.length
        if error := self._no_memory():
            return events.SlabAssembled(effect.number, error, 0.0)
        slab = effect.slab
        into = self.deliveries[effect.delivery_id][slab.offset : slab.offset + slab.length]
        into[:] = self.part(effect.kept)
        return events.SlabAssembled(effect.number, tasks.Done(), 0.0)

    def _extracted(self, effect: events.ExtractRows) -> events.RowsExtracted:
        dataset, block = self._block_of(effect.key)
        world = self.worlds[dataset.dataset_id]
        if error := self._no_memory():
            return events.RowsExtracted(effect.number, error, 0.0)
        sizes = []
        for excerpt in effect.excerpts:
            rows, into = excerpt.rows.tolist(), excerpt.into
            assert rows == sorted(set(rows))
            assert 0 <= rows[0] <= rows[-1] < world.rows[block]
            # Some rows are much larger than others.
            whole = world.true_bytes(block) or int(world.lengths[block])
            size = 64 + sum(whole * (1 + r % 3) // 2 // int(world.rows[block]) for r in rows)
            sizes.append(size)
            if size <= into.length:
                _mark(self.part(Region(into.offset, size)), BlockName(dataset.dataset_id, block))
                self.excerpts[into.offset] = set(rows)
        result = tasks.Extracted(tuple(sizes), disk=self._disk())
        return events.RowsExtracted(effect.number, result, 0.0)

    def _assembled(self, effect: events.AssembleSlab) -> events.SlabAssembled:
        assert effect.delivery_id not in self.dropped
        plan, slab = effect.plan, effect.slab
        assert effect.row_index.length >= 8 * len(plan.row_index)
        assert effect.row_index.offset >= slab.offset + slab.length
        if error := self._no_memory():
            return events.SlabAssembled(effect.number, error, 0.0, is_kept=False)
        self.assembled.append(repr((plan.batches, effect.keys)).encode() + plan.row_index.tobytes())
        lookup = self.lookups[effect.delivery_id]
        numbers = [lookup.number(*self._block_of(key)) for key in effect.keys]
        for number, key in zip(numbers, effect.keys, strict=True):
            excerpt = self.find(key)
            if isinstance(excerpt, Excerpt):
                rows = set(plan.rows_of(number).tolist())
                assert rows <= self.excerpts[excerpt.decoded.offset], "excerpts 1"
        for key in effect.keys:
            restart_indexes = getattr(self.find(key), "restart_indexes", None)
            assert restart_indexes is None or not any(self.part(restart_indexes)), (
                "blocks 5: restart indexes of others"
            )
        assert numbers == plan.blocks.tolist()
        assert effect.first == (lookup.name(numbers[0]) if numbers else None)
        arena = self.deliveries[effect.delivery_id]
        used, count, needed = self._write(plan, numbers, arena[slab.offset :], slab.length)
        is_kept = effect.keep is not None and self._no_memory() is None
        if effect.keep is not None and is_kept and used <= effect.keep.length:
            self.part(effect.keep)[:used] = arena[slab.offset : slab.offset + used]
        result = tasks.Assembled(count, 0 if count else needed, used, disk=self._disk())
        return events.SlabAssembled(effect.number, result, 0.0, is_kept)

    def _write(
        self, plan: Plan, numbers: list[int], into: memoryview, room: int
    ) -> tuple[int, int, int]:
        used, count, first, needed = 0, 0, 0, 0
        for batch in plan.batches:
            size = slab_bytes(batch, self.row_bytes)
            needed = needed or size
            if used + size > room:
                break
            values = np.frombuffer(into[used : used + 16 * batch.rows + 16], np.int64)
            values[0] = batch.step
            mine = plan.row_index[first : first + batch.rows]
            values[2:] = [x for b, r in mine.tolist() for x in (numbers[b], r)]
            first, used, count = first + batch.rows, used + size, count + 1
        return used, count, needed

    def _block_of(self, key: int) -> tuple[DatasetBlocks, int]:
        found = self.known.get(key)
        excerpt = self.find(key)
        if isinstance(excerpt, Excerpt):
            name = BlockName(excerpt.dataset.dataset_id, excerpt.index)
            _check_mark(self.part(excerpt.decoded), name)
            return excerpt.dataset, excerpt.index
        if found is None:  # nothing to fetch and nothing to decode, or it was forgotten
            dataset, block = excerpt.dataset, excerpt.index
            assert not dataset.needs_fetch(block), "a block was forgotten while it was in use"
            assert not dataset.needs_decode(block), "a block was forgotten while it was in use"
            return dataset, block
        world, block, place = found
        assert place is not None
        _check_mark(self.part(place), BlockName(world.dataset_id, block))
        return world.blocks, block


def slab_bytes(batch: messages.Batch, row_bytes: int) -> int:
    """The size of a batch: some are much larger than others."""
    swollen = 6 if batch.step % 7 == 3 else 1
    return 16 + batch.rows * (16 + row_bytes * swollen) // 16 * 16
