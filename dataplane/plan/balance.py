"""Order packs so that packs of similar cost are at similar positions of all lanes: all ranks then
read packs of similar cost at the same step. docs/order.md specifies this order.

The plan does not know costs. Instead, the packs of a block are numbered so that a pack's number
says which share of the block's packs is cheaper, and so that consecutive numbers have evenly
distributed shares. Windows are sorted by this share.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataplane.plan.loops import sort_rows
from dataplane.plan.permute import GAMMA, Domain, Words, key, mix_in_place

Int64 = NDArray[np.int64]

POSITIONS = 512
"""About this many consecutive positions of an epoch have packs of about the same cost."""
_HIGH = np.uint64(0xFFFFFFFF00000000)


class Turns:
    """The rank by cost (as a share of all packs) of the pack that is due at each lane offset of an
    epoch. The rank is the same in all lanes, and evenly distributed over any range of offsets.
    """

    def __init__(self, seed: int, epoch: int, lanes: int) -> None:
        self._key = np.uint64(key(seed, Domain.BALANCE, epoch))
        self._together = -(-POSITIONS // lanes)

    def permutations(self, keys: Words, offsets: Int64, numbers: Int64) -> Words:
        """Return the permutation of each window: which of its samples is at each of its offsets.
        `numbers` are the packs at these offsets before the permutation.

        Shapes:  keys: uint64[m].   offsets, numbers: int64[m, length].   result: uint64[m, length].
        """
        index = np.arange(offsets.shape[1], dtype=np.uint64)
        words = index * np.uint64(GAMMA) + keys[:, None]
        mix_in_place(words)
        words >>= np.uint64(32)
        turns = (offsets // self._together).astype(np.uint64) * np.uint64(GAMMA) + self._key
        words |= turns & _HIGH
        found = np.empty_like(words)
        np.put_along_axis(found, _sorted(words).astype(np.int64), _sorted(_shares(numbers)), axis=1)
        return found


def numbered(costs: Int64) -> Int64:
    """Number a block's packs: return the index of the pack that gets each number.

    Shapes:  costs, result: int64[packs], in the same order of packs.
    """
    found = np.empty(len(costs), np.int64)
    by_share = np.argsort(_shares(np.arange(len(costs))), kind="stable")
    found[by_share] = np.argsort(costs, kind="stable")
    return found


def _shares(numbers: Int64) -> Words:
    """Return the share of a block's packs that is cheaper than the pack with each number, in units
    of 2**-64.
    """
    return numbers.astype(np.uint64) * np.uint64(GAMMA)


def _sorted(words: Words) -> Words:
    """Return the stable argsort of each row by the leading bits of its words, and overwrite them.

    Shapes:  words: uint64[m, length].   result: the same.
    """
    length = words.shape[1]
    mask = np.uint64((1 << (length - 1).bit_length()) - 1)
    words &= ~mask
    words |= np.arange(length, dtype=np.uint64)
    sort_rows(words)
    words &= mask
    return words
