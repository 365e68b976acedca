"""Datasets in the scheduler: the cost and progress of each block, and the blocks behind an order's
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from dataplane.scheduler.account import Account
from dataplane.scheduler.block_sizes import DecodedParts
from dataplane.scheduler.joined import BlockPlaces

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
    fetched: when it was last read from storage.   used: when a stream last needed it for the first
    time, -1 if none has.   is_remote: it must be fetched into the arena.
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
        """The marks of blocks that are not in memory yet."""
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
    first those of the first dataset, then those of the next.

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
        """The name of a block of the order."""
        dataset, block = self.find(number)
        return BlockName(dataset.dataset_id, block)

    def parts(self, numbers: Ints) -> Sequence[DatasetPart]:
        """Blocks of the order, grouped by dataset, without empty groups.

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
        """The key of each of these blocks while rows can be gathered from it, or 0.

        Shapes:  numbers: int64[n], rising.   result: int64[n].
        """
        found = [part.dataset.marks.keys[part.blocks] for part in self.parts(numbers)]
        return found[0] if len(found) == 1 else np.concatenate([_NONE, *found])
