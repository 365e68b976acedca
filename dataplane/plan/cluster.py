"""Compute which hosts read which lanes, and which of several nodes owns a block."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from dataplane.model.errors import ConfigError
from dataplane.plan.permute import GAMMA, mix, mix_in_place

# Estimates are computed over this many lanes.
_LANES_SEEN = 64


class Cluster(Struct, frozen=True):
    """The data-parallel ranks in host order: rank r is on host r // ranks_per_host."""

    dp_size: int = 1
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1 or self.dp_size < 1:
            raise ConfigError(
                f"dp_size is {self.dp_size} and ranks_per_host is {self.ranks_per_host}: both must"
                " be 1 or more",
                field="dp_size" if self.dp_size < 1 else "ranks_per_host",
            )

    @property
    def host_count(self) -> int:
        return -(-self.dp_size // self.ranks_per_host)

    def meeting(self, lanes: int) -> int:
        """Return the modulus m such that rank r reads lane l if and only if l % m == r % m."""
        return math.gcd(lanes, self.dp_size)

    def lanes_per_rank(self, lanes: int) -> int:
        """Return how many lanes each rank reads."""
        return lanes // self.meeting(lanes)

    def lanes_per_host(self, lanes: int) -> int:
        """Return how many lanes each host reads."""
        return self.lanes_per_rank(lanes) * min(self.meeting(lanes), self.ranks_per_host)

    def hosts_of(self, first: int, more: int, lanes: int) -> int:
        """Return how many hosts read at least one of the lanes from `first` to `first + more`."""
        meeting = self.meeting(lanes)
        first, more = first % meeting, min(more, meeting - 1)
        if meeting <= self.ranks_per_host or more == meeting - 1:
            full = self.dp_size // self.ranks_per_host
        else:
            full = 0
        start = np.arange(full, self.host_count) * self.ranks_per_host
        stop = np.minimum(start + self.ranks_per_host, self.dp_size)
        behind = (start - first) % meeting
        # A host reads one of the lanes if its first rank does, or if the next rank that reads lane
        # `first` is on the host, too.
        reached = (behind <= more) | (start + meeting - behind < stop)
        return full + int(reached.sum())

    def hosts_per_block(self, lanes: int, blocks: float) -> float:
        """Estimate how many hosts read a block, for blocks of equal size: the hosts of its lane; if
        it lies on a border, the hosts of both lanes.
        """
        step = -(-lanes // _LANES_SEEN)
        seen = range(0, lanes, step)
        alone, both = (sum(self.hosts_of(lane, more, lanes) for lane in seen) for more in (0, 1))
        on_border = min(lanes / blocks, 1.0) if lanes > 1 else 0.0
        return (alone + (both - alone) * on_border) / len(seen)


# -- owners ------------------------------------------------------------------------------------
#
# Which of several nodes owns a block: other nodes request the block from its owner. Pure.
#
# Weighted rendezvous hashing: every node gets a score for a block from a hash of both, and the
# highest score wins. Each process computes the same owner without communication. If a node joins or
# leaves, only blocks that it owns get another owner. Each node owns a share of the blocks in
# proportion to its weight.
#
# Source: D. G. Thaler and C. V. Ravishankar, "Using name-based mappings to increase hit rates",
# IEEE/ACM Transactions on Networking 6(1), 1998; weights as in J. Resch, "New hashing algorithms
# for data storage", SNIA Storage Developer Conference, 2015: weight / -ln(hash).
#
# Invariants:
# 1. The owner depends only on the set of nodes and weights, and on the block's place.
# 2. Finding an owner takes a step for each node, however many blocks there are.

RUN_BYTES = 16 << 20
"""Blocks that begin in the same range of this many bytes of a shard have one owner, so that
adjacent small blocks can be read in one request."""

_MASK = (1 << 64) - 1
_FRACTION_BITS = 53


class Weighed(NamedTuple):
    """A node and its weight, which is greater than 0."""

    name: str
    weight: float


class Owners:
    """Computes which of these nodes owns a block. No node is listed twice."""

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
        # The fraction is within (0, 1), so neither the logarithm nor the quotient is infinite.
        fraction = (hashed.astype(np.float64) + 0.5) / (1 << _FRACTION_BITS)
        return int((self._weights / -np.log(fraction)).argmax())


def _word(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
