"""A dataset as the scheduler knows it: what each block costs, and how far each has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from dataplane.scheduler.account import Account

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """What is known of each block, where hundreds of them are asked about for every slab.

    Shapes:  all: int64[blocks], but fetched: float64[blocks], is_remote: bool[blocks].   keys: the
    key of the block while rows can be gathered from it, or 0.   pins: how many need it to stay.
    touched: when it was needed last.   raw: bytes as fetched, 0 for a block of a local file.
    decoded: bytes once decoded, as far as is known, 0 for a block that needs no decoding.
    fetched: when it was read from storage last.   is_remote: it must be fetched into the arena.
    """

    keys: Ints
    pins: Ints
    touched: Ints
    raw: Ints
    decoded: Ints
    fetched: npt.NDArray[np.float64]
    is_remote: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, raw: Ints, decoded: Ints, is_remote: npt.NDArray[np.bool_]) -> Self:
        """Of blocks that are not in memory yet."""
        keys, pins, touched = np.zeros((3, len(raw)), np.int64)
        return cls(keys, pins, touched, raw, decoded, np.zeros(len(raw)), is_remote)


@dataclass(frozen=True, slots=True, eq=False)
class DatasetBlocks:
    """The blocks of one dataset, read in one way.

    `name` and `url` are for errors and logs. `keeps_trails`: its images are worth trails, since all
    blocks and their trails fit into the block arena together.

    Shapes:  stored: int64[blocks], bytes of each block in its shard.
    """

    dataset_id: int
    name: str
    marks: Marks
    stored: Ints
    url: Callable[[int], str]
    keeps_trails: bool = False
    account: Account = field(default_factory=Account)

    def needs_fetch(self, block: int) -> bool:
        """Whether the bytes of the block must be read from a store into the arena."""
        return bool(self.marks.is_remote[block])

    def needs_decode(self, block: int) -> bool:
        """Whether a worker must decode the block before rows can be gathered from it."""
        return bool(self.marks.decoded[block])
