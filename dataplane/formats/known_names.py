"""Find unknown names in a shard, many places at a time.

Indexing must check the name of every field of every sample. Nearly all names are known, and numpy
recognizes them in a few nanoseconds each; only unknown names are parsed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 8
"""Names are compared in words of this many bytes. Before every place there must be one word of
data, and after it two."""
_FEW = 16
"""Up to this many names are compared one after the other; more names are found by binary search."""


class KnownNames:
    """Known names, encoded as a writer encodes them. A name must begin with bytes that occur in no
    other name, such as its opening quote or its length; otherwise it would also match the end of a
    longer name.
    """

    def __init__(self, names: Sequence[bytes]) -> None:
        self._sizes = np.array([len(name) for name in names], np.int64)
        # For each length below a word: the shift that leaves the last bytes of this length, the
        # values of the names of this length, sorted, and their numbers.
        self._short = [
            (np.uint64(8 * (WORD_BYTES - size)), *_sorted(names, self._sizes == size))
            for size in range(1, WORD_BYTES)
            if (self._sizes == size).any()
        ]
        self._tails, self._long = _sorted(names, self._sizes >= WORD_BYTES)
        alike = np.unique(self._tails, return_counts=True)[1]
        self._alike_max = int(alike.max(initial=0))
        words = -(-int(self._sizes.max(initial=0)) // WORD_BYTES)
        self._words = np.zeros((len(names), words), "<u8")
        for at in self._long.tolist():
            name = names[at]
            for word in range(words):
                start = min(WORD_BYTES * word, len(name) - WORD_BYTES)
                self._words[at, word] = int.from_bytes(name[start : start + WORD_BYTES], "little")

    def match(self, codes: NDArray[np.uint8], ends: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return which name ends before each place; -1 for no name.

        Shapes:  codes: uint8[bytes].   ends: int64[places], one word before and two after each.
                 result: int32[places].
        """
        words = codes[: len(codes) // WORD_BYTES * WORD_BYTES].view("<u8")
        last = _word_at(words, ends - WORD_BYTES)
        names = np.full(len(ends), -1, np.int32)
        for shift, values, numbers in self._short:
            part = last >> shift
            if len(values) <= _FEW:
                for value, number in zip(values, numbers, strict=True):
                    np.putmask(names, part == value, number)
                continue
            at = np.minimum(np.searchsorted(values, part), len(values) - 1)
            np.copyto(names, numbers[at], where=values[at] == part)
        rest = np.flatnonzero(names < 0)
        at = np.searchsorted(self._tails, last[rest])
        for _ in range(self._alike_max):
            is_same = self._tails[np.minimum(at, len(self._tails) - 1)] == last[rest]
            is_same &= at < len(self._tails)
            rest, at = rest[is_same], at[is_same]
            numbers = self._long[at]
            is_same = self._are_whole(words, ends[rest], numbers)
            names[rest[is_same]] = numbers[is_same]
            rest, at = rest[~is_same], at[~is_same] + 1
        return names

    def _are_whole(
        self, words: NDArray[np.uint64], ends: NDArray[np.int64], names: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return whether all bytes of these names are before these places. Their last words are
        known to match.
        """
        sizes = self._sizes[names]
        starts = ends - sizes
        are_same = starts >= 0
        for word in range(self._words.shape[1]):
            offsets = np.minimum(WORD_BYTES * word, sizes - WORD_BYTES)
            stored = _word_at(words, np.maximum(starts + offsets, 0))
            are_same &= stored == self._words[names, word]
        return are_same


def _word_at(words: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Read the words at these places. numpy takes five times as long to read unaligned words, so
    each word is combined from two aligned ones.
    """
    at, shift = places >> 3, ((places & 7) << 3).astype(np.uint64)
    # Shift in two steps, since C does not define a shift by all 64 bits.
    above = words.take(at + 1) << (np.uint64(63) - shift) << np.uint64(1)
    return (words.take(at) >> shift) | above


def _sorted(
    names: Sequence[bytes], are_chosen: NDArray[np.bool_]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the last bytes of the chosen names as sorted numbers, and the name of each."""
    chosen = np.flatnonzero(are_chosen)
    tails = [int.from_bytes(names[at][-WORD_BYTES:], "little") for at in chosen.tolist()]
    values = np.array(tails, np.uint64)
    order = np.argsort(values, kind="stable")
    return values[order], chosen[order]
