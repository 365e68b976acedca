"""Where the columns of each block lie within it, as far as its shard's index knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dataplane.errors import ConfigError

Int64 = NDArray[np.int64]

PLACES_MAX = 1 << 25
"""If there are more columns than this in total (0.75 GiB), nothing is stored, and blocks are read
whole."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnPlaces:
    """Places of the F top-level columns of the dataset's schema, in its order, in each of K blocks.
    If a block's places are unknown, all of its columns have (0, 0). The arrays are read-only.

    Shapes:  offset, length: int64[K, F], bytes in the block.
             decoded: int64[K, F], bytes, an estimate.
    """

    offset: Int64
    length: Int64
    decoded: Int64

    @classmethod
    def of(cls, blocks: Sequence[Sequence[int]]) -> Self | None:
        """From the places that formats report for each block (formats.base.Block.columns); None if
        they report none.

        Raises:  ConfigError: blocks of different numbers of columns, or impossible numbers.
        """
        width = max(map(len, blocks), default=0)
        if not width or len(blocks) * width // 3 > PLACES_MAX:
            return None
        table = np.zeros((len(blocks), width), np.int64)
        for row, columns in zip(table, blocks, strict=True):
            if columns:
                if len(columns) != width:
                    raise ConfigError("blocks of one dataset have different numbers of columns")
                row[:] = columns
        return cls(*(_fixed(table[:, at::3]) for at in range(3)))

    @property
    def column_count(self) -> int:
        """F."""
        return int(self.offset.shape[1])

    def check(self, block_length: Int64) -> None:
        """Raises:  ConfigError: columns do not lie in these blocks."""
        shape = (len(block_length), self.column_count)
        columns = (self.offset, self.length, self.decoded)
        if any(each.shape != shape for each in columns):
            raise ConfigError("the places of columns are not those of the blocks")
        lowest = min(each.min(initial=0) for each in columns)
        if lowest < 0 or (self.offset > block_length[:, None] - self.length).any():
            raise ConfigError("a column lies outside of its block")

    def to_lists(self) -> tuple[Int64, Int64, Int64]:
        """(gap, length, decoded), each int64[K * F]: the gap between a column and the one before it
        is mostly 0, which compresses well.
        """
        gap = self.offset.copy()
        gap[:, 1:] -= self.offset[:, :-1] + self.length[:, :-1]
        return gap.reshape(-1), self.length.reshape(-1), self.decoded.reshape(-1)

    @classmethod
    def from_lists(
        cls, gap: NDArray[Any], length: NDArray[Any], decoded: NDArray[Any], block_count: int
    ) -> Self | None:
        """The inverse of `to_lists`; None for empty lists.

        Raises:  ValueError: they do not match the number of blocks.
        """
        if not len(gap) + len(length) + len(decoded):
            return None
        shape = (block_count, len(gap) // block_count)
        lengths = length.reshape(shape)
        # Wrapping arithmetic undoes itself.
        stops = np.cumsum(gap.reshape(shape) + lengths, axis=1)
        return cls(_fixed(stops - lengths), _fixed(lengths), _fixed(decoded.reshape(shape)))


def _fixed(values: NDArray[Any]) -> Int64:
    found = np.array(values, np.int64)
    found.flags.writeable = False
    return found
