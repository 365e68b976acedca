"""What is outside of the engine in its tests: a dataset, and a store and workers that end in any
order.

They touch the real memory: a fetch marks the region it was given, a decoding reads that mark and
sets its own, and an assembly, when it ends, must still find the mark of each of its blocks. So
memory that was given away too early is seen as a wrong batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from dataplane.arena.allocator import rounded
from dataplane.arena.memfd import Arena
from dataplane.config import JobSpec
from dataplane.errors import StoreDenied, StoreError, StoreUnavailable
from dataplane.model import End, Region
from dataplane.node.dataset import dataset_of
from dataplane.node.fetch import Report
from dataplane.node.pool_worker import Job
from dataplane.plan.manifest import Manifest
from dataplane.plan.shard import Shard
from dataplane.rpc import messages, tasks

PAGE = 4096
# (url scheme, zero copy): fetched and decoded, fetched, decoded, neither.
KINDS = (("s3", False), ("s3", True), ("file", False), ("file", True))


@dataclass
class World:
    """A dataset of blocks of known sizes, drawn from one seed."""

    chance: random.Random
    dataset_id: int = 1
    estimates_are_right: bool = False
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = self.chance
        count = chance.randint(1, 14)
        kinds = [chance.randrange(len(KINDS)) for _ in range(count)]
        kinds.sort()
        used = sorted(set(kinds))
        rows = np.array([chance.randint(1, 9) for _ in kinds], np.int64)
        lengths = np.array([chance.randint(64, 3 * PAGE) for _ in kinds], np.int64)
        self.sizes = [chance.randint(64, 4 * PAGE) for _ in kinds]
        low = [size if self.estimates_are_right else chance.randint(1, size) for size in self.sizes]
        schema = pa.schema([("x", pa.int32())])
        shards = tuple(
            Shard(
                f"{KINDS[k][0]}:///shard-{k}",
                1 << 40,
                f"e{self.dataset_id}",
                kinds.count(k),
                Region(0, 0),
                KINDS[k][1],
            )
            for k in used
        )
        manifest = Manifest(
            ("all",),
            "arrow",
            schema.serialize().to_pybytes(),
            shards,
            np.array([used.index(k) for k in kinds], np.int32),
            rows,
            np.arange(count, dtype=np.int64) << 20,
            lengths,
            np.array(low, np.int64),
        )
        self.spec = JobSpec(
            manifest.fingerprint,
            seed=chance.randrange(100),
            shuffle=chance.random() < 0.8,
            lanes=chance.randint(1, 3),
            window=chance.choice([1, 3, 1000]),
            global_batch=chance.randint(1, 8),
            end=chance.choice([End.RAGGED, End.PAD]),
        )
        self.dataset = dataset_of(self.dataset_id, manifest, self.spec)
        self.broken: set[int] = set()

    def cost_of(self, block: int) -> int:
        """An upper bound of what the block may take of the arena while it is loaded."""
        marks = self.dataset.marks
        parts = (int(marks.raw[block]), int(marks.decoded[block]), self.true_bytes(block))
        return sum(rounded(part) for part in parts if part)

    def true_bytes(self, block: int) -> int:
        return self.sizes[block] + 64 if self.dataset.needs_decode(block) else 0


def _mark(into: memoryview, block: int) -> None:
    into[:8] = int(block + 1).to_bytes(8, "little")
    into[-8:] = int(block + 1).to_bytes(8, "little")


def _check_mark(view: memoryview, block: int) -> None:
    assert int.from_bytes(view[:8], "little") == block + 1, "another block's memory"
    assert int.from_bytes(view[-8:], "little") == block + 1, "another block's memory"


class Outside:
    """The store and the workers: what they were asked ends when the test says so."""

    def __init__(self, arena: Arena, worlds: dict[int, World], row_bytes: int) -> None:
        self.arena = arena
        self.worlds = worlds
        self.row_bytes = row_bytes
        self.pending: list[Callable[[], None]] = []
        self.forgotten: set[int] = set()
        self.detached: set[int] = set()
        self.worker_count = 2
        self.arenas: dict[int, Arena] = {}
        self.loads = 0
        self.assembled: list[bytes] = []
        self.copied = 0
        self.chance = random.Random(0)
        self.away = 0.0
        """How many of the reads end with the store still away."""
        self.troubles: dict[str, StoreError] = {}

    # -- as Fetcher --------------------------------------------------------------------------

    def fetch(
        self,
        url: str,
        etag: str,
        preamble: Region,
        pieces: Sequence[Region],
        into: memoryview,
        report: Report,
    ) -> None:
        self.loads += 1
        dataset_id = int(etag.removeprefix("e"))
        block = pieces[0].offset >> 20
        assert len(into) == preamble.length + sum(piece.length for piece in pieces)

        def end() -> None:
            if block in self.worlds[dataset_id].broken:
                report(StoreDenied(f"block {block}", shard=url))
                return
            if self.chance.random() < self.away:
                report(StoreUnavailable(f"block {block}", shard=url))
                return
            _mark(into, block)
            report(None)

        self.pending.append(end)

    def trouble(self, url: str) -> StoreError | None:
        return self.troubles.get(url)

    # -- as WorkerPool -----------------------------------------------------------------------

    def submit(self, job: Job, urgency: int) -> None:
        body = job.body
        if isinstance(body, tasks.Decode):
            self.pending.append(lambda: job.report(self._decoded(body)))
        elif isinstance(body, tasks.CopySlab):
            self.copied += 1
            self.pending.append(lambda: job.report(self._copied(body)))
        else:
            self.pending.append(lambda: job.report(self._assembled(job, body)))

    def forget_block(self, key: int) -> None:
        self.forgotten.add(key)

    def detach_arena(self, arena_id: int) -> None:
        assert arena_id not in self.detached
        self.detached.add(arena_id)

    def _decoded(self, body: tasks.Decode) -> tasks.ResultBody:
        block = body.raw.place.offset >> 20
        world = self.worlds[body.dataset_id]
        if body.raw.arena is None:
            self.loads += 1
            if block in world.broken:
                return StoreDenied(f"block {block}", shard=body.raw.url)
        else:
            _check_mark(self.arena.view(body.raw.arena.offset, body.raw.arena.length), block)
        size = world.true_bytes(block)
        if size > body.into.length:
            return tasks.Decoded(size, stored=False)
        _mark(self.arena.view(body.into.offset, size), block)
        return tasks.Decoded(size, stored=True)

    def _copied(self, body: tasks.CopySlab) -> tasks.ResultBody:
        assert body.arena_id not in self.detached
        assert body.kept.length == body.slab.length
        into = self.arenas[body.arena_id].view(body.slab.offset, body.slab.length)
        into[:] = self.arena.view(body.kept.offset, body.kept.length)
        return tasks.Done()

    def _assembled(self, job: Job, body: tasks.Assemble) -> tasks.ResultBody:
        assert body.arena_id not in self.detached
        arena = self.arenas[body.arena_id]
        index = np.frombuffer(arena.view(body.row_index.offset, body.row_index.length), np.int32)
        rows = index.reshape(-1, 2)
        self.assembled.append(repr((body.batches, body.block_keys)).encode() + rows.tobytes())
        numbers = []
        for source in map(job.source, body.block_keys):
            assert source.key not in self.forgotten, "a block was forgotten while it was in use"
            numbers.append(self._block_of(source, rows, job))
        used, count, first = 0, 0, 0
        needed = 0
        for batch in body.batches:
            size = slab_bytes(batch, self.row_bytes)
            needed = needed or size
            if used + size > body.slab.length:
                break
            into = np.frombuffer(
                arena.view(body.slab.offset + used, 16 * batch.rows + 16), np.int64
            )
            into[0] = batch.step
            mine = rows[first : first + batch.rows]
            into[2:] = [x for b, r in mine.tolist() for x in (numbers[b], r)]
            first, used, count = first + batch.rows, used + size, count + 1
        if body.keep is not None and used <= body.keep.length:
            kept = self.arena.view(body.keep.offset, used)
            kept[:] = arena.view(body.slab.offset, used)
        return tasks.Assembled(count, bytes_needed=0 if count else needed, bytes_used=used)

    def _block_of(self, source: tasks.BlockSource, rows: np.ndarray, job: Job) -> int:
        if source.decoded is not None:
            view = self.arena.view(source.decoded.offset, source.decoded.length)
            block = int.from_bytes(view[:8], "little") - 1
        elif source.raw is not None and source.raw.arena is not None:
            block = source.raw.place.offset >> 20
            view = self.arena.view(source.raw.arena.offset, source.raw.arena.length)
        else:
            assert source.raw is not None
            return source.raw.place.offset >> 20
        _check_mark(view, block)
        return block


def slab_bytes(batch: messages.Batch, row_bytes: int) -> int:
    """What a batch takes: some are much larger than others."""
    swollen = 6 if batch.step % 7 == 3 else 1
    return 16 + batch.rows * (16 + row_bytes * swollen) // 16 * 16
