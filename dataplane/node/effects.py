"""Carry out the scheduler's decisions that involve other processes and nodes: blocks from and for
neighbours, blocks on disk, blocks for workers, and slabs that other nodes make.

The first section is about blocks that come from neighbours, or that neighbours request.

Invariants:
1. A block that is being fetched from a neighbour is refused to others, and a block that is read for
   a neighbour is read from the store: so no two nodes wait for each other.
2. If a neighbour is gone before it has sent a decoded block, the block is read from the store.
3. The blocks of a request are decided one by one. The request is answered once, when all of its
   blocks are decided, and all blocks sent for it are freed at the same time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial

from msgspec import Raw, Struct, field
from msgspec.structs import replace

from dataplane.formats.faults import reason_of
from dataplane.model.errors import (
    ConfigError,
    CorruptShard,
    DataplaneError,
    FunctionError,
    NeighbourGone,
    NotKept,
    ShardNotFound,
)
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours import wire
from dataplane.node.dataset import Dataset
from dataplane.node.delivery import DeliveryArena
from dataplane.node.fetch import Fetcher
from dataplane.node.fetchers import Fetchers
from dataplane.node.neighbours import KnownNeighbours, Lending
from dataplane.plan.tombstones import substitute, substitute_key
from dataplane.rpc import fetches, tasks
from dataplane.rpc.codec import decode, encode
from dataplane.rpc.fetches import Neighbour, Outcome
from dataplane.rpc.lending import Asked, MakeSlab
from dataplane.rpc.messages import FromNode, Layout, Slab, Working
from dataplane.scheduler import events
from dataplane.scheduler.dataset import BlockName
from dataplane.scheduler.events import (
    DiskEvent,
    DiskFound,
    DiskMissed,
    DiskScanned,
    GiveUpSlab,
    KeepBlock,
    KeepingEnded,
    ScanDisk,
)
from dataplane.scheduler.records import CachedBlock, Excerpt
from dataplane.store.base import Store
from dataplane.worker.death import WorkerPlace


class _Run(Struct, eq=False):
    """The requested blocks, one or more: the number of the request, how each block has ended, how
    many are left to decide, and the regions to send, by the number of their block.
    """

    number: int
    ends: list[int]
    left: int
    regions: dict[int, Region]


class LentBlocks:
    """The lent blocks of one node. `tell` passes an event to the scheduler."""

    def __init__(self, neighbours: KnownNeighbours, tell: Callable[[events.Event], None]) -> None:
        self._neighbours, self._tell = neighbours, tell
        self._expected: set[BlockName] = set()
        """Blocks that are on their way here from neighbours."""
        self._left_alone: set[BlockName] = set()
        """Blocks that a neighbour could not send: the next read is from the store."""
        self._runs: dict[int, _Run] = {}
        """The unanswered requests, by the number of each block that is not decided yet."""

    @property
    def _lending(self) -> Lending:
        lending = self._neighbours.lending
        assert lending is not None  # without a lender, no neighbour could send a request
        return lending

    def source_of(
        self, dataset: Dataset, effect: events.Fetch, jobs: Iterable[str]
    ) -> Neighbour | None:
        """Return the neighbour from which to request a block that these jobs read; None for the
        store.
        """
        name = BlockName(effect.dataset_id, effect.block)
        if effect.is_lent or name in self._left_alone:
            return None
        neighbour = self._neighbours.owner_of(dataset, effect.block, jobs)
        if neighbour is None:
            return None
        self._expected.add(name)
        return replace(neighbour, form=BlockForm.DECODED) if effect.is_decoded else neighbour

    def fetched(self, name: BlockName, outcome: Outcome) -> bool:
        """Note the end of a read of this block; return whether a neighbour owns the block."""
        is_guest = name in self._expected
        self._expected.discard(name)
        self._left_alone.discard(name)
        if isinstance(outcome, NeighbourGone):
            self._left_alone.add(name)
        return is_guest

    def asked(self, ask: Asked, dataset: Dataset | None) -> None:
        """Handle a neighbour's request for part of a block of a dataset, or for several blocks."""
        request, first = ask.request, ask.number
        blocks = range(request.block, request.block + request.count)
        if dataset is None or blocks[-1] >= dataset.manifest.block_count:
            self._lending.refuse(first)
            return
        parts = [Region(request.offset, request.length)]
        if len(blocks) > 1:
            parts = [Region(0, dataset.blocks.read_bytes(block)) for block in blocks]
            shards = dataset.manifest.block_shard
            # Refuse runs over several shards: permission was checked for the first block's only.
            is_one_shard = shards.item(blocks[0]) == shards.item(blocks[-1])
            if not is_one_shard or sum(part.length for part in parts) != request.length:
                self._lending.refuse(first)
                return
        run = _Run(first, [wire.NOT_GIVEN] * len(blocks), len(blocks), {})
        numbers = range(first, first + len(blocks))
        self._runs.update(dict.fromkeys(numbers, run))
        is_decoded, is_run = request.form is BlockForm.DECODED, len(blocks) > 1
        for number, block, part in zip(numbers, blocks, parts, strict=True):
            if not is_decoded and BlockName(dataset.dataset_id, block) in self._expected:
                self._end(number, wire.NOT_GIVEN)
            else:
                of = dataset.blocks
                self._tell(events.NeighbourAsked(number, of, block, part, is_decoded, is_run))

    def lend(self, effect: events.LendBlock) -> None:
        """Send a block to the neighbour that requested it, with the other blocks of its request."""
        self._runs[effect.number].regions[effect.number] = effect.region
        self._end(effect.number, wire.GIVEN_WHOLE)

    def say_decoded(self, effect: events.OnlyDecoded) -> None:
        """Answer that only the decoded block is here, and how large it is."""
        self._end(effect.number, effect.length)

    def say_no(self, effect: events.RefuseAsk) -> None:
        """Refuse a block."""
        self._end(effect.number, wire.NOT_GIVEN)

    def _end(self, number: int, end: int) -> None:
        """Note how a requested block has ended; answer the request after its last block."""
        run = self._runs.pop(number)
        run.ends[number - run.number] = end
        run.left -= 1
        if run.left:
            return
        if all(end == wire.NOT_GIVEN for end in run.ends):
            self._lending.refuse(run.number)
            return
        given = sorted(run.regions)
        first, *more = [run.regions[block_number] for block_number in given] or [Region(0, 0)]
        after, ends = partial(self._sent, given), tuple(run.ends)
        self._lending.give(run.number, first, more=tuple(more), ends=ends, after=after)

    def _sent(self, numbers: Iterable[int]) -> None:
        """Note that the blocks with these numbers are no longer read."""
        for number in numbers:
            self._tell(events.SendingEnded(number))


# -- blocks on disk -------------------------------------------------------------------------------
#
# Blocks on the node's disk: carry out the scheduler's decisions about them.


class KeptBlocks:
    """The blocks on one node's disk. `tell` passes an event to the scheduler."""

    def __init__(self, fetcher: Fetcher, tell: Callable[[DiskEvent], None]) -> None:
        self._fetcher, self._tell = fetcher, tell
        self._asked: set[BlockName] = set()
        """Blocks that were requested from the disk, and not found missing there."""

    def asked(self, dataset: Dataset, effect: events.Fetch) -> Callable[[Outcome], None] | None:
        """Return the function to call if the disk lacks a block; None if the disk is not tried."""
        if not effect.is_on_disk or effect.is_decoded:
            return None
        self._asked.add(BlockName(effect.dataset_id, effect.block))
        return partial(self._missed, dataset, effect.block)

    def has_read(self, name: BlockName) -> bool:
        """Note the end of a read of this block; return whether its bytes came from the disk."""
        is_read = name in self._asked
        self._asked.discard(name)
        return is_read

    def keep(self, effect: KeepBlock) -> None:
        """Write a block to the disk, and remove others."""
        going = tuple(fetches.KeptName(block.digest, block.block) for block in effect.instead_of)
        name, number = effect.name, effect.number
        order = fetches.WriteKept(0, name.digest, name.block, effect.region, going)
        self._fetcher.origin.read(
            order, lambda outcome: self._tell(KeepingEnded(number, _trouble(outcome)))
        )

    def scan(self, _effect: ScanDisk) -> None:
        """List the blocks on the disk."""
        self._fetcher.origin.read(fetches.ScanKept(0), self._scanned, self._found)

    def _missed(self, dataset: Dataset, block: int, outcome: Outcome) -> None:
        self._asked.discard(BlockName(dataset.dataset_id, block))
        self._tell(DiskMissed(dataset.blocks, block, _trouble(outcome)))

    def _found(self, kept: fetches.KeptFound) -> None:
        self._tell(DiskFound(kept.dataset, kept.blocks, kept.disk_bytes))

    def _scanned(self, outcome: Outcome) -> None:
        self._tell(DiskScanned(_trouble(outcome)))


def _trouble(outcome: Outcome) -> str:
    """Return why the disk failed; "" if it did not fail, even if it lacks the block."""
    if isinstance(outcome, NotKept):
        return str(outcome.trouble or "")
    return "" if outcome is None else str(outcome)


# -- memory of blocks -----------------------------------------------------------------------------
#
# Describe blocks and excerpts to workers: where their rows are, and their names in errors.


class BlockSources:
    """The ready blocks and excerpts of a node, by key. `find` returns a block or excerpt by
    its key, `dataset_of` a dataset by its number.
    """

    def __init__(
        self, find: Callable[[int], CachedBlock | Excerpt], dataset_of: Callable[[int], Dataset]
    ) -> None:
        self._find, self._dataset_of = find, dataset_of
        self._sources: dict[int, tasks.BlockSource] = {}
        self._without_restart_indexes: set[int] = set()

    def leave_out_restart_indexes(self, key: int) -> None:
        """Drop this block's restart indexes, for which the machine had no memory."""
        self._without_restart_indexes.add(key)

    def forget(self, key: int) -> None:
        """Forget a key whose memory is about to be reused."""
        self._sources.pop(key, None)
        self._without_restart_indexes.discard(key)

    def source(self, key: int) -> tasks.BlockSource:
        """Return the facts that a worker needs to gather from a block."""
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = self._new(key)
        return source

    def _new(self, key: int) -> tasks.BlockSource:
        block = self._find(key)
        dataset = self._dataset_of(block.dataset.dataset_id)
        origin = dataset.origin(block.index)
        if isinstance(block, Excerpt):
            rows = block.row_count
            return tasks.BlockSource(key, decoded=block.decoded, origin=origin, row_count=rows)
        raw = dataset.raw_block(block.index, block.raw) if block.decoded is None else None
        noted = None if key in self._without_restart_indexes else block.restart_indexes
        return tasks.BlockSource(key, raw, block.decoded, origin, noted)

    def message_of(self, key: int) -> tasks.OpenDataset:
        """Return the description of the block's dataset for workers."""
        return self._dataset_of(self._find(key).dataset.dataset_id).message

    def place_of(self, key: int) -> WorkerPlace:
        """Return the block's place for error messages."""
        block = self._find(key)
        return self.place(BlockName(block.dataset.dataset_id, block.index))

    def place(self, first: BlockName | None) -> WorkerPlace:
        """Return the place of this block for error messages; `first` is None for a batch without
        rows.
        """
        if first is None:
            return WorkerPlace("a batch without rows")
        return self._dataset_of(first.dataset_id).place(first.block)


# -- slabs that other nodes make ------------------------------------------------------------------
#
# Have other nodes make slabs of this node's trainers, and check the results.
#
# Invariants:
# 1. Each MakeElsewhere is answered by one SlabAssembled, once the slab's memory is no longer
#    written.
# 2. A maker proves that it knows the key of the job, so its slabs come from a node of the same
#    cluster, and are as trustworthy as those of own workers. Their descriptions are checked:
#    nothing may point outside of the slab.


class _Delegated(Struct, eq=False):
    """A delivery that other nodes may make slabs of. `opening` is an encoded OpenJob,
    which may name many urls: it is encoded once.
    """

    delivery: DeliveryArena
    opening: Raw
    makers: dict[str, fetches.Peer] = field(default_factory=dict)


class Delegating:
    """The delegated slabs of one node. `tell` passes an event to the scheduler; `checked` gets each
    result before that, and returns it or an error.
    """

    def __init__(
        self,
        reads: Fetchers,
        neighbours: KnownNeighbours,
        tell: Callable[[events.Event], None],
        checked: Callable[[DeliveryArena, tasks.ResultBody], tasks.ResultBody],
    ) -> None:
        self._reads, self._neighbours, self._tell, self._checked = reads, neighbours, tell, checked
        self._deliveries: dict[int, _Delegated] = {}
        self._orders: dict[int, int] = {}
        """The number of each order, by the number of its slab task."""

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
        """Note that the nodes that make slabs of this job have changed, or their keys have."""
        for known in self._deliveries.values():
            job = known.delivery.job
            if job is not None and job.opening.job_id == job_id:
                self._learn(known)

    def make(self, effect: events.MakeElsewhere) -> None:
        """Send the order to the maker; report an error if the maker is gone."""
        known = self._deliveries[effect.delivery_id]
        job, maker = known.delivery.job, known.makers.get(effect.maker)
        assert job is not None
        if maker is None:
            gone = NeighbourGone(f"the node {effect.maker} makes no slabs any more")
            self._tell(events.SlabAssembled(effect.number, gone, 0.0))
            return
        steps, slot_bytes, opening = effect.steps, effect.slot_bytes, known.opening
        of_job = opening, job.software, effect.coming
        wanted = MakeSlab(job.digest, effect.stream, steps, slot_bytes, *of_job)
        order = fetches.ReadSlab(0, maker, encode(wanted), effect.delivery_id, effect.slab)
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
        makers = {maker.node_id: maker for maker in self._neighbours.makers(job.opening.job_id)}
        has_changed = makers.keys() != known.makers.keys()
        known.makers = makers
        if has_changed:
            self._tell(events.MakersKnown(known.delivery.delivery_id, tuple(makers)))

    def _read(
        self, effect: events.MakeElsewhere, known: _Delegated, read: fetches.ReadEnded
    ) -> None:
        del self._orders[effect.number]
        made = _result(effect, known.delivery.column_count, read)
        result = self._checked(known.delivery, made)
        started = time.monotonic() - read.took_s
        self._tell(events.SlabAssembled(effect.number, result, started, is_kept=False))


def _result(
    effect: events.MakeElsewhere, column_count: int, read: fetches.ReadEnded
) -> tasks.Assembled | DataplaneError:
    if read.error is not None:
        return read.error
    try:
        body = decode(FromNode, read.note).body
        if isinstance(body, Slab):
            return _assembled(effect, column_count, read.neighbour_bytes, body)
    except ConfigError as error:
        return NeighbourGone(f"the node {effect.maker} sent what is no slab: {error}")
    if isinstance(body, Working):
        return NeighbourGone(f"the node {effect.maker} is still making the slab", working=1)
    if isinstance(body, DataplaneError):
        return body
    return NeighbourGone(f"the node {effect.maker} answered with {type(body).__name__}")


def _assembled(
    effect: events.MakeElsewhere, column_count: int, length: int, slab: Slab
) -> tasks.Assembled:
    """Return the facts about a slab of this many bytes, or how many it needs if it has no room.

    Raises:  ConfigError: these are not the requested batches, or are not within the slab.
    """
    first, count, stride = effect.steps.first, len(slab.batches), effect.stream.step_stride
    steps = [first + i * stride for i in range(min(count, effect.steps.count))]
    if not count or [batch.step for batch in slab.batches] != steps:
        raise ConfigError(f"its {count} batches are not those that begin with step {first}")
    if not length and slab.bytes_used > effect.slab.length:
        return tasks.Assembled(0, bytes_needed=slab.bytes_used)
    if slab.bytes_used != length:
        raise ConfigError(f"{slab.bytes_used} bytes were announced, but {length} were sent")
    columns = decode(Layout, slab.layout).columns
    ends = [max(at, default=0) for column in columns for at in (column.values, column.lengths)]
    if len(columns) != column_count or max(ends, default=0) > length:
        raise ConfigError(f"{len(columns)} columns, up to byte {max(ends, default=0)} of {length}")
    return tasks.Assembled(count, 0, length, slab.layout, replaced=slab.replaced)


# -- blocks that cannot be decoded ----------------------------------------------------------------


_OTHERS_TRIED, _OTHER_BYTES_MAX = 32, 256 << 20


class OtherBlocks:
    """Reads the blocks whose rows replace those of blocks that cannot be decoded at all, in jobs
    that request this; docs/order.md specifies which blocks. This is rare, so each block is read
    whole, in a thread.
    """

    def __init__(self, connect: Callable[[str], Store] | None) -> None:
        self._connect = connect
        self._tried: dict[int, tuple[set[int], str]] = {}

    def may_replace(self, dataset: Dataset, error: object) -> bool:
        """Whether rows of other blocks replace those of a block with this error."""
        if not isinstance(error, CorruptShard | FunctionError | ShardNotFound):
            return False
        is_allowed = bool(dataset.message.view.bad_max) and self._connect is not None
        return is_allowed and error.nouns.get("shard") is not None

    def read(
        self,
        dataset: Dataset,
        effect: events.DecodeBlock,
        error: object,
        decode: Callable[[tasks.BadBlock], None],
        fail: Callable[[DataplaneError], None],
    ) -> bool:
        """Begin to read another block in place of one that failed with this error. Call `decode`
        with the other block or, if it cannot be read, `fail`. Return False if the error needs no
        other block, or all blocks that may be tried were tried.
        """
        tried, reason = self._tried.pop(effect.key, ({effect.block}, ""))
        if not self.may_replace(dataset, error):
            return False
        assert isinstance(error, DataplaneError)
        assert self._connect is not None
        raw, of = dataset.raw_block(effect.block, None), dataset.manifest
        keyed = substitute_key(dataset.message.seed, raw.shard, raw.first_row)
        while len(tried) < min(of.block_count, _OTHERS_TRIED):
            number = substitute(keyed, of.block_count, tried)
            tried.add(number)
            other = replace(dataset.raw_block(number, None), path=None, pieces=())
            if other.rows and other.place.length <= _OTHER_BYTES_MAX:
                break
        else:
            return False
        # A later error may be of a block that was tried: the first is that of the block itself.
        reason = reason or reason_of(error, raw.url)
        self._tried[effect.key] = tried, reason

        connect, head, place = self._connect, other.preamble_place, other.place

        def read() -> tasks.BadBlock:
            store, url, etag = connect(other.url), other.url, other.etag
            first = store.read(url, head.offset, head.length, etag) if head.length else b""
            content = store.read(url, place.offset, place.length, etag)
            parts = [bytes(memoryview(part)) for part in (first, content)]
            return tasks.BadBlock(reason, other, *parts)

        def end(done: asyncio.Future[tasks.BadBlock]) -> None:
            failed = done.exception()
            if failed is None:
                decode(done.result())
            else:
                fail(failed if isinstance(failed, DataplaneError) else DataplaneError(str(failed)))

        asyncio.get_running_loop().run_in_executor(None, read).add_done_callback(end)
        return True
