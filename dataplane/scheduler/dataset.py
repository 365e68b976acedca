"""Datasets in the scheduler: the cost, size, place and progress of each block, the blocks behind an
order's numbers, and the time that is spent for each dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from dataplane.rpc.messages import StageTimes

# -- block sizes -------------------------------------------------------------------------------
#
# Predict the decoded sizes of blocks from those decoded so far. Pure.
#
# The sizes in the index are too large: by a quarter for much Parquet, by far more for compressed
# text. Memory that is reserved in vain is lost to other blocks, too: the gap that remains when a
# block turns out shorter is too short for the next block.
#
# Invariants:
# 1. The predicted share of the indexed size is the largest share so far, and slightly more if
#    shares differ, but at most 1. So one odd block does not make other blocks seem too large for
#    the arena.
# 2. A block that is larger than predicted is decoded twice. Since shares then differ more, a second
#    decoding becomes ever less likely: only a few blocks are decoded twice, however many there are.

_Ints = npt.NDArray[np.int64]

_SPREAD_PARTS = 8
_MARGIN_BYTES = 64


class DecodedParts(Struct, eq=False):
    """The smallest and the largest ratio of decoded to indexed size among the blocks of a dataset:
    0 if none was decoded.
    """

    smallest: float = 0.0
    largest: float = 0.0

    def seen(self, indexed: int, decoded: int) -> None:
        """Note the size of a decoded block."""
        part = decoded / max(indexed, 1)
        self.smallest = min(self.smallest or part, part)
        self.largest = max(self.largest, part)

    def expected(self, indexed: int) -> int:
        """Predict the bytes of a block that was not decoded yet; 0 if it needs no decoding."""
        return min(indexed, int(indexed * self._likely) + _MARGIN_BYTES)

    def all_expected(self, indexed: _Ints) -> _Ints:
        """Predict the bytes of many blocks.

        Shapes:  indexed, result: int64[n].
        """
        return np.minimum(indexed, (indexed * self._likely).astype(np.int64) + _MARGIN_BYTES)

    @property
    def _likely(self) -> float:
        """Return the largest ratio that a block is likely to have."""
        if not self.largest:
            return 1.0
        return self.largest + (self.largest - self.smallest) / _SPREAD_PARTS


# -- joined ------------------------------------------------------------------------------------
#
# Choose the blocks of a shard that are read in one request. Pure.
#
# Each request costs one round trip, and as much processor time as reading three quarters of a MiB.
# So small blocks that lie next to each other, and are wanted at the same time, are read together.
#
# Invariants:
# 1. The blocks of a request lie in one shard, in the order of their bytes, and are neighbours in
#    the dataset.
# 2. A request of several blocks has at most JOINED_BYTES_MAX, gaps included. Gaps between its
#    blocks are shorter than those that are skipped within a block.
# 3. Finding each next block takes constant time.

JOINED_BYTES_MAX = 2 << 20
GAP_BYTES_MIN = 256 << 10
"""Skipping a gap costs one more request; smaller gaps are cheaper to read."""


class BlockPlaces(Struct, frozen=True, eq=False):
    """The places of the needed bytes of each block, from the first to the last one. `holes` are
    unread parts in between; each needs one more request. None: there are no holes.

    Shapes:  shard: int32[blocks].   offset, length: int64[blocks], bytes in the shard.
             hole_count, hole_bytes: int64[blocks].
    """

    shard: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    hole_count: npt.NDArray[np.int64] | None = None
    hole_bytes: npt.NDArray[np.int64] | None = None

    def read_bytes(self, block: int) -> int:
        """Return how many bytes of a block are read."""
        return self.length.item(block) - _number_of(self.hole_bytes, block)

    def all_read_bytes(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return `read_bytes` of each of these blocks."""
        length = self.length[blocks]
        return length if self.hole_bytes is None else length - self.hole_bytes[blocks]

    def read_count(self, block: int) -> int:
        """Return how many requests a block takes by itself, if no request is too long."""
        return 1 + _number_of(self.hole_count, block)

    def following(self, block: int) -> Iterator[int]:
        """Yield the next blocks that may be read in one request with all before them."""
        shard, size = self.shard.item(block), self.read_bytes(block)
        end = self.offset.item(block) + self.length.item(block)
        for after in range(block + 1, len(self.shard)):
            start = self.offset.item(after)
            gap = start - end
            size += gap + self.read_bytes(after)
            end = start + self.length.item(after)
            if self.shard.item(after) != shard or size > JOINED_BYTES_MAX:
                return
            if not 0 <= gap < GAP_BYTES_MIN:
                return
            yield after


def _number_of(values: npt.NDArray[np.int64] | None, block: int) -> int:
    return 0 if values is None else values.item(block)


# -- account -----------------------------------------------------------------------------------
#
# Record how time is spent: for each slab in progress, and for each dataset.

_US_A_S = 1e6


class Stamps(Struct, eq=False):
    """The times at which a slab reached each stage, by the node's clock; 0.0: not yet. A slab that
    is made again gets new stamps.
    """

    planned: float
    fetched: float = 0.0
    gathered_from: float = 0.0
    """When all of its blocks were ready."""
    wanted: float = 0.0
    """When another node was to make the slab, even if no node could."""
    slotted: float = 0.0
    started: float = 0.0
    made: float = 0.0

    def slotted_for_copy(self, made: float, now: float) -> None:
        """Note that the slab got a slot for a copy of a slab that was `made` for another consumer.
        The wait for that slab counts as waiting for a worker, the rest as waiting for room.
        """
        since = max(self.planned, self.gathered_from)
        self.slotted = since + min(now - made, now - since)

    def stages(self, now: float) -> tuple[int, ...]:
        """Return (fetch, decode, room, queue, assemble, ready) as in StageTimes. Their sum is the
        time from plan to `now`, even if some times are missing or out of order. The wait for a node
        that makes the slab counts as `queue`.
        """
        room = min(self.wanted, self.slotted) if self.wanted else self.slotted
        ends = (self.fetched, self.gathered_from, room, self.started, self.made, now)
        found, at = [], self.planned
        for end in ends:
            until = min(max(end, at), now)
            found.append(round((until - at) * _US_A_S))
            at = until
        return tuple(found)


class Account(Struct, eq=False):
    """The work done for a dataset, for all consumers, since the last `take`."""

    read_bytes: int = 0
    decoding_s: float = 0.0
    disk_us: int = 0
    disk_bytes: int = 0
    """The bytes that were read from the node's own disk."""
    neighbour_bytes: int = 0
    """The bytes that were read from neighbours."""
    memory_bytes: int = 0
    """The bytes that were needed but not read, since they were in memory."""
    advanced_at: float = 0.0
    """When something was last done for the dataset."""
    _reading_s: float = 0.0
    _reads: int = 0
    _reading_since: float = 0.0

    def advanced(self, now: float) -> None:
        """Note progress: a block was read or decoded, or a worker is at work on one."""
        self.advanced_at = now

    def read_began(self, now: float) -> None:
        """Note that one more read from storage has begun."""
        if not self._reads:
            self._reading_since = now
        self._reads += 1

    def read_ended(self, now: float, read_bytes: int) -> None:
        """Note that a read has ended, and has read this many bytes, useful or not."""
        self._reads -= 1
        self.read_bytes += read_bytes
        if not self._reads:
            self._reading_s += now - self._reading_since

    def take(self, now: float) -> tuple[int, ...]:
        """Return (bytes read, reading, decoding, waiting for disks, bytes from the node's disk,
        from neighbours, from memory), times in microseconds, and restart from zero.
        """
        if self._reads:
            self._reading_s += now - self._reading_since
            self._reading_since = now
        found = (
            self.read_bytes, round(self._reading_s * _US_A_S),
            round(self.decoding_s * _US_A_S), self.disk_us, self.disk_bytes,
            self.neighbour_bytes, self.memory_bytes,
        )  # fmt: skip
        self.read_bytes, self._reading_s, self.decoding_s, self.disk_us = 0, 0.0, 0.0, 0
        self.disk_bytes = self.neighbour_bytes = self.memory_bytes = 0
        return found


def stage_times(
    stages: tuple[int, ...], accounts: Sequence[Account], worker_count: int, now: float
) -> StageTimes:
    """Return the times of a slab that is handed over. The work done for its datasets is attributed
    to it.
    """
    fetch, decode, room, queue, assemble, ready = stages
    done = [account.take(now) for account in accounts]
    read_bytes, reading, decoding, disk, *by_place = map(sum, zip(*done, strict=True))
    return StageTimes(
        fetch, decode, room, queue, assemble, ready,
        read_bytes, reading, decoding, disk, worker_count, *by_place,
    )  # fmt: skip


Ints = npt.NDArray[np.int64]
_NONE = np.empty(0, np.int64)


class Marks(Struct, frozen=True, eq=False):
    """The state of all blocks, as arrays, since every slab needs hundreds of them.

    Shapes:  all: int64[blocks], but fetched, used: float64[blocks], is_remote, is_exact:
    bool[blocks].
    keys: the key of the block while rows can be gathered from it, or 0.   pins: number of pins.
    touched: when it was last needed.   raw: bytes as fetched, 0 for a block of a local file.
    decoded: bytes once decoded, 0 for a block that needs no decoding.   is_exact: whether it was
    decoded before; until then, `decoded` is the index's estimate.
    fetched: when it was last read from storage.   used: when a stream last gathered its first
    rows from it, -1 if none has.   is_remote: it must be fetched into the arena.
    wanted: number of waiting tasks that need its rows.   held: bytes of the arena that it takes.
    """

    keys: Ints
    pins: Ints
    touched: Ints
    raw: Ints
    decoded: Ints
    fetched: npt.NDArray[np.float64]
    used: npt.NDArray[np.float64]
    is_remote: npt.NDArray[np.bool_]
    wanted: Ints
    held: Ints
    is_exact: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, raw: Ints, decoded: Ints, is_remote: npt.NDArray[np.bool_]) -> Self:
        """Return the marks of blocks that are not in memory yet."""
        keys, pins, touched, wanted, held = np.zeros((5, len(raw)), np.int64)
        fetched, used = np.zeros(len(raw)), np.full(len(raw), -1.0)
        is_exact = np.zeros(len(raw), np.bool_)
        return cls(
            keys, pins, touched, raw, decoded, fetched, used, is_remote, wanted, held, is_exact
        )


class DatasetBlocks(Struct, frozen=True, eq=False):
    """The blocks of one dataset, for one set of reading options.

    `name` and `url` are for errors and logs. `keeps_restart_indexes`: record them for its images,
    since all blocks and their restart indexes fit into the block arena together. `stream_bytes` is
    the size of a decoded block apart from its rows. `places`: where blocks lie; None if each must
    be read by itself. `digest` identifies the dataset on disk in every run; without it, no block is
    kept there.

    Shapes:  stored: int64[blocks], bytes of each block in its shard.   rows: int64[blocks].
    """

    dataset_id: int
    name: str
    marks: Marks
    stored: Ints
    rows: Ints
    url: Callable[[int], str]
    keeps_restart_indexes: bool = False
    stream_bytes: int = 0
    places: BlockPlaces | None = None
    digest: bytes = b""
    account: Account = field(default_factory=Account)
    decoded_parts: DecodedParts = field(default_factory=DecodedParts)

    def cost(self, blocks: Ints) -> Ints:
        """Return the arena bytes that each block takes while it is decoded, as far as known."""
        return self.marks.raw[blocks] + self.decoded(blocks)

    def decoded(self, blocks: Ints) -> Ints:
        """Return the decoded bytes of each block, as far as known; 0 if it needs no decoding."""
        known = self.marks.decoded[blocks]
        return np.where(self.marks.is_exact[blocks], known, self.decoded_parts.all_expected(known))

    def kept(self, blocks: Ints) -> Ints:
        """Return the arena bytes that each block takes once rows can be gathered from it."""
        decoded = self.decoded(blocks)
        return np.where(decoded > 0, decoded, self.marks.raw[blocks])

    def decoded_bytes(self, block: int) -> int:
        """Return the decoded bytes of one block; see `decoded`."""
        known = self.marks.decoded.item(block)
        return known if self.marks.is_exact.item(block) else self.decoded_parts.expected(known)

    def was_decoded(self, block: int, decoded_bytes: int) -> None:
        """Note the true size of a decoded block."""
        if not self.marks.is_exact.item(block):
            self.decoded_parts.seen(self.marks.decoded.item(block), decoded_bytes)
            self.marks.is_exact[block] = True
        self.marks.decoded[block] = max(decoded_bytes, 1)

    def read_bytes(self, block: int) -> int:
        """Return the bytes that a fetch of the block reads. Its region also has room for the
        shard's preamble.
        """
        if self.places is None:
            return self.marks.raw.item(block)
        return self.places.read_bytes(block)

    def all_read_bytes(self, blocks: Ints) -> Ints:
        """Return `read_bytes` of each of these blocks."""
        if self.places is None:
            return self.marks.raw[blocks]
        return self.places.all_read_bytes(blocks)

    def read_count(self, block: int) -> int:
        """Return how many reads a fetch of the block takes if no range is too long for one."""
        return 1 if self.places is None else self.places.read_count(block)

    def needs_fetch(self, block: int) -> bool:
        """Whether the bytes of the block must be read from a store into the arena."""
        return bool(self.marks.is_remote[block])

    def needs_decode(self, block: int) -> bool:
        """Whether a worker must decode the block before rows can be gathered from it."""
        return bool(self.marks.decoded[block])


class BlockName(NamedTuple):
    """Identifies a block: its dataset, and its number there."""

    dataset_id: int
    block: int


class DatasetPart(NamedTuple):
    """Some blocks of one dataset, by their numbers there, in rising order.

    Shapes:  blocks: int64[n].
    """

    dataset: DatasetBlocks
    blocks: Ints


class DatasetLookup:
    """The datasets that an order covers, each once. The order numbers their blocks consecutively:
    first the blocks of the first dataset, then the blocks of the next.

    Shapes:  starts: int64[datasets + 1], the number of the first block of each.
    """

    __slots__ = ("_start_of", "datasets", "starts")

    def __init__(self, *datasets: DatasetBlocks) -> None:
        self.datasets = datasets
        self.starts = np.cumsum([0, *(len(each.stored) for each in datasets)], dtype=np.int64)
        ids = [each.dataset_id for each in datasets]
        self._start_of = dict(zip(ids, self.starts.tolist(), strict=False))

    def __contains__(self, dataset: DatasetBlocks) -> bool:
        """Whether the order covers this dataset."""
        return dataset.dataset_id in self._start_of

    def number(self, dataset: DatasetBlocks, block: int) -> int:
        """Return the order's number of a block of one of these datasets."""
        start: int = self._start_of[dataset.dataset_id]
        return start + block

    def find(self, number: int) -> tuple[DatasetBlocks, int]:
        """Return the dataset of a block of the order, and its number there."""
        if len(self.datasets) == 1:
            return self.datasets[0], number
        at = int(self.starts.searchsorted(np.int64(number), side="right")) - 1
        return self.datasets[at], number - int(self.starts[at])

    def name(self, number: int) -> BlockName:
        """Return the name of a block of the order."""
        dataset, block = self.find(number)
        return BlockName(dataset.dataset_id, block)

    def parts(self, numbers: Ints) -> Sequence[DatasetPart]:
        """Group blocks of the order by dataset, without empty groups.

        Shapes:  numbers: int64[n], rising.
        """
        if len(self.datasets) == 1:
            return (DatasetPart(self.datasets[0], numbers),) if len(numbers) else ()
        cuts = numbers.searchsorted(self.starts).tolist()
        return [
            DatasetPart(dataset, numbers[cuts[at] : cuts[at + 1]] - self.starts[at])
            for at, dataset in enumerate(self.datasets)
            if cuts[at + 1] > cuts[at]
        ]

    def keys(self, numbers: Ints) -> Ints:
        """Return the key of each of these blocks while rows can be gathered from it, or 0.

        Shapes:  numbers: int64[n], rising.   result: int64[n].
        """
        found = [part.dataset.marks.keys[part.blocks] for part in self.parts(numbers)]
        return found[0] if len(found) == 1 else np.concatenate([_NONE, *found])
