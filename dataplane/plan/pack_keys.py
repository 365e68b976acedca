"""The keys with which the packs of a block are drawn: one for each pass over its dataset."""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.errors import ConfigError
from dataplane.plan.packs import PACK_BITS
from dataplane.plan.permute import Words

Int64 = NDArray[np.int64]
KEYS_MAX = 1 << (31 - PACK_BITS)


class DrawsPacks(Protocol):
    """An order of samples that may be packs."""

    def pack_keys(self, positions: Int64, blocks: Int64) -> Words:
        """Return the key with which the packs of the block at each position are drawn.

        Shapes:  positions, blocks: int64[n].   result: uint64[n].
        """


class DrawnRows(Struct, frozen=True, eq=False):
    """Rows of blocks that are packs, and the keys with which those of each block are drawn. A row
    holds its pack, and, above PACK_BITS, the index of the key among its block's keys.

    Shapes:  rows: int64[n].
    """

    rows: Int64
    keys: tuple[tuple[int, ...], ...]


def drawn_rows(
    order: DrawsPacks, positions: Int64, blocks: Int64, rows: Int64, index: Int64
) -> DrawnRows:
    """The rows of these positions. `index` is that of each block among those of the slab.

    Shapes:  positions, blocks, rows, index: int64[n].
    Raises:  ConfigError: a source of a mixture is so small that these positions read it too often.
    """
    words = order.pack_keys(positions, blocks)
    by_key = np.lexsort((words, index))
    sorted_index, sorted_words = index[by_key], words[by_key]
    is_block = np.ones(len(rows), np.bool_)
    is_block[1:] = sorted_index[1:] != sorted_index[:-1]
    is_new = is_block.copy()
    is_new[1:] |= sorted_words[1:] != sorted_words[:-1]
    number = np.cumsum(is_new) - 1
    firsts = number[is_block]
    ordinal = np.empty_like(rows)
    ordinal[by_key] = number - firsts[sorted_index]
    if len(rows) and ordinal.max() >= KEYS_MAX:
        raise ConfigError(
            f"a source of the mixture has so few packs that one batch reads it {KEYS_MAX} times:"
            " give it a smaller share, or more documents",
            field="weight",
        )
    found, ends = sorted_words[is_new].tolist(), [*firsts.tolist(), int(is_new.sum())]
    keys = tuple(tuple(found[a:b]) for a, b in itertools.pairwise(ends))
    return DrawnRows(rows | (ordinal << PACK_BITS), keys)
