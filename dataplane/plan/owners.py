"""Which node of several owns a block: the one that others ask for it. Pure.

Weighted rendezvous hashing: every node gets a score for a block from a hash of both, and the
highest score wins. Each process finds the same owner without asking anybody. If a node comes or
goes, only the blocks that it owns change hands, and each node owns a part of the blocks in
proportion to its weight.

Source: D. G. Thaler and C. V. Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Transactions on Networking 6(1), 1998; weights as in J. Resch, "New hashing algorithms for
data storage", SNIA Storage Developer Conference, 2015: weight / -ln(hash).

Invariants:
1. The owner depends only on the set of nodes and weights, and on what is owned.
2. Finding an owner takes a step for each node, however many blocks there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dataplane.plan.permute import GAMMA, mix, mix_in_place

RUN_BYTES = 16 << 20
"""Blocks that begin in the same so many bytes of a shard have one owner, so that small neighbours
can be read in one request."""

_MASK = (1 << 64) - 1
_FRACTION_BITS = 53


class Weighed(NamedTuple):
    """A node and its weight, more than 0."""

    name: str
    weight: float


class Owners:
    """The owners among these nodes, each named once."""

    def __init__(self, nodes: Sequence[Weighed]) -> None:
        self.names = tuple(node.name for node in nodes)
        self._seeds = np.array([_word(node.name.encode()) for node in nodes], np.uint64)
        self._weights = np.array([node.weight for node in nodes], np.float64)

    def of(self, dataset: bytes, shard: int, offset: int) -> int:
        """Return the index of the node that owns the block at this offset of a shard of the dataset
        with this digest. There is at least one node.
        """
        run = mix(_word(dataset) ^ mix((shard * GAMMA + offset // RUN_BYTES) & _MASK))
        hashed = mix_in_place(self._seeds ^ np.uint64(run)) >> np.uint64(64 - _FRACTION_BITS)
        # In (0, 1): neither logarithm nor quotient can be infinite.
        fraction = (hashed.astype(np.float64) + 0.5) / (1 << _FRACTION_BITS)
        return int((self._weights / -np.log(fraction)).argmax())


def _word(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
