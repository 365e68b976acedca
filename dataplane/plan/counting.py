"""Count how many of the first k slots of a mixture belong to each source, from the sources' shares.
docs/order.md specifies it.

A source with the share a_i of a sum A has F_i(k) of the first k slots, which differs from k*a_i/A
by 3.36 at most, for any number of sources. A tree over the sources gives F_i and its inverse in
closed form.

1. F_i(0) = 0; F_i grows by 0 or 1 with each slot; the sum of F_i(k) over all sources is k.
2. All arithmetic is exact: the sum of shares is 2**32 at most, and products are less than 2**64.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.model.errors import ConfigError

Int64 = NDArray[np.int64]
Words = NDArray[np.uint64]

SHARES_SUM = 1 << 32
SLOTS_MAX = 1 << 62


class _Level(Struct, frozen=True):
    """The inner nodes at one depth: their numbers, and those of their children."""

    nodes: Int64
    left: Int64
    right: Int64


class CountingTree:
    """The counts of sources with these shares; a source with share 0 never has a slot."""

    __slots__ = ("_is_left", "_levels", "_parent", "_root", "_weight", "source_count")

    def __init__(self, shares: Sequence[int]) -> None:
        """Shapes:  shares: whole numbers, at least one above 0, with a sum of 2**32 at most."""
        count = self.source_count = len(shares)
        heap = [(share, source) for source, share in enumerate(shares) if share]
        weight = [*shares, *[0] * (len(heap) - 1)]
        parent, is_left = list(range(len(weight))), [False] * len(weight)
        children: dict[int, tuple[int, int]] = {}
        heapq.heapify(heap)
        for node in range(count, count + len(heap) - 1):
            small, large = heapq.heappop(heap), heapq.heappop(heap)
            # Put the larger share on the left; of two equal shares, the node with the smaller
            # number.
            left, right = (small, large) if small[0] == large[0] else (large, small)
            weight[node] = small[0] + large[0]
            children[node] = left[1], right[1]
            for child in children[node]:
                parent[child], is_left[child] = node, child == left[1]
            heapq.heappush(heap, (weight[node], node))
        self._root = heap[0][1]
        self._weight = np.array(weight, np.uint64)
        self._parent = np.array(parent, np.int64)
        self._is_left = np.array(is_left)
        self._levels: list[_Level] = []
        some = [self._root] if children else []
        while some:
            both = [children[node] for node in some]
            left_right = np.array(both, np.int64)
            self._levels.append(_Level(np.array(some), left_right[:, 0], left_right[:, 1]))
            some = [child for pair in both for child in pair if child in children]

    def counts(self, slots: Int64) -> Int64:
        """Return F_i(k): how many of the first k slots belong to each source.

        Shapes:  slots: int64[m], k below 2**62.   result: int64[m, sources].
        """
        found = np.zeros((len(slots), len(self._weight)), np.uint64)
        found[:, self._root] = slots
        for level in self._levels:
            whole = found[:, level.nodes]
            left = _share(whole, self._weight[level.left], self._weight[level.nodes])
            found[:, level.left] = left
            found[:, level.right] = whole - left
        return found[:, : self.source_count].astype(np.int64)

    def slots_for(self, sources: Int64, counts: Int64) -> Int64:
        """Return the smallest k with F_i(k) >= count, but at most 2**62: the inverse of `counts`.

        Shapes:  sources: int64[m], each with a share.   counts: int64[m].   result: int64[m].
        """
        slots: Words = counts.astype(np.uint64)
        node = sources.astype(np.int64)
        below = np.flatnonzero(node != self._root)
        while len(below):
            child = node[below]
            node[below] = above = self._parent[child]
            some = slots[below], self._weight[child], self._weight[above]
            slots[below] = np.where(self._is_left[child], _before_left(*some), _before_right(*some))
            below = below[above != self._root]
        slots[counts <= 0] = 0
        return slots.astype(np.int64)


def _share(count: Words, part: Words, whole: Words) -> Words:
    """Return ceil(count * part / whole), for a part smaller than the whole."""
    times, rest = count // whole, count % whole
    rest *= part
    rest += whole - np.uint64(1)
    return times * part + rest // whole


def _before_left(count: Words, part: Words, whole: Words) -> Words:
    """Return the smallest k with ceil(k * part / whole) >= count."""
    times, rest = np.divmod(count - np.uint64(1), part)
    return _bounded(times, whole, rest * whole // part + np.uint64(1))


def _before_right(count: Words, part: Words, whole: Words) -> Words:
    """Return the smallest k with floor(k * part / whole) >= count."""
    times, rest = np.divmod(count, part)
    return _bounded(times, whole, (rest * whole + (part - np.uint64(1))) // part)


def _bounded(times: Words, whole: Words, rest: Words) -> Words:
    most = np.uint64(SLOTS_MAX)
    times = np.minimum(times, most // whole)
    result: Words = np.minimum(times * whole + rest, most)
    return result


# -- shares ------------------------------------------------------------------------------------
#
# Convert the weights of a mixture's sources, as the user gives them, to shares in whole numbers.


def quantised(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Return shares in proportion to these weights, with a sum of 2**32, by the largest-remainder
    method; of equal remainders, the first one wins. A weight above 0 becomes at least 1.

    Raises:  ConfigError: a weight is negative or not finite, or all are 0.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"a weight is {weight}: choose a number, 0 or more", field="weight")
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    if not total:
        raise ConfigError(
            "no source has a weight above 0, so there is nothing to read", field="weight"
        )
    wanted = [weight * SHARES_SUM / total for weight in exact]
    shares = [max(math.floor(share), 1) if share else 0 for share in wanted]
    left = SHARES_SUM - sum(shares)
    by_rest = sorted(range(len(shares)), key=lambda at: (shares[at] - wanted[at], at))
    for at in [at for at in by_rest if shares[at]][: max(left, 0)]:
        shares[at] += 1
    # Raising shares to 1 may make the sum too large: reduce the largest share.
    shares[max(range(len(shares)), key=shares.__getitem__)] += min(left, 0)
    return tuple(shares)


def of_tokens(weights: Sequence[float], lengths: Sequence[float]) -> list[Fraction]:
    """Convert weights of tokens to weights of samples, given the average number of tokens in a
    sample of each source.

    Raises:  ConfigError: a length is not above 0.
    """
    for length in lengths:
        if not (math.isfinite(length) and length > 0):
            raise ConfigError(
                f"the mean length of a source's samples is {length} tokens: give a number above 0"
                " as mean_length",
                field="mean_length",
            )
    pairs = zip(weights, lengths, strict=True)
    return [Fraction(weight) / Fraction(length) for weight, length in pairs]


def by_temperature(counts: Sequence[int], temperature: float) -> list[float]:
    """Return weights n**(1/T) for sources with n samples. T=1 weighs sources in proportion to their
    sizes; a larger T makes the weights more equal.

    Raises:  ConfigError: the temperature is not above 0, or so small that a weight becomes 0.
    """
    if not temperature > 0:
        raise ConfigError(
            f"temperature is {temperature}: choose a number above 0; 1 weighs sources by their"
            " sizes, and math.inf weighs them equally",
            field="temperature",
        )
    largest = max(counts)
    # Round the weights, since the last digits of a power depend on the platform's math library.
    found = [float(f"{(count / largest) ** (1 / temperature):.9g}") for count in counts]
    if not all(found):
        raise ConfigError(
            f"temperature is {temperature}: a source of {min(counts)} samples would get weight 0"
            f" beside one of {largest}. Choose a larger temperature, or leave the source out",
            field="temperature",
        )
    return found
