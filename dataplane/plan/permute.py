"""The keyed hash and the keyed permutation: 64-bit arithmetic that never changes.

Orders and augmentations never use a library's random generator: if its stream changed with a
version, a resumed run would silently lose or repeat data. docs/order.md specifies this file for
reimplementations, and golden vectors pin it.

Source:  Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014
(SplitMix64), with David Stafford's mix 13 as the finaliser.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataplane.model.errors import ConfigError
from dataplane.plan.loops import sort_rows

Words = NDArray[np.uint64]

_MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

# This many words of one permutation are computed together, so that they stay in the first-level
# cache.
_TOGETHER = 1 << 14


class Domain(enum.IntEnum):
    """The purpose of a key: its first part, so that no two purposes use the same numbers."""

    BLOCKS = 1
    WINDOW = 2
    AUGMENT = 3
    PROBE = 4
    ROUND = 5
    ROUND_LANES = 6
    SOURCE = 7
    PACK = 8
    TOMBSTONE = 9
    BALANCE = 10
    SHARE = 11
    MAP = 15
    COLLATE = 16


def mix(word: int) -> int:
    """Mix one word: a bijection of 64-bit words in which each input bit affects all."""
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def mix_in_place(words: Words) -> Words:
    """Replace every word by `mix` of it.

    Shapes:  words: uint64[...], contiguous or not.
    """
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= np.uint64(_FIRST)
    np.right_shift(words, np.uint64(27), out=shifted)
    words ^= shifted
    words *= np.uint64(_SECOND)
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted
    return words


def checked_word(value: int, name: str) -> int:
    """Return `value` if it is an unsigned 64-bit number.

    Raises:  ConfigError: `value` is not such a number; names the field.
    """
    if not 0 <= value <= _MASK:
        raise ConfigError(
            f"{name} is {value}: choose a whole number from 0 to 2**64 - 1", field=name
        )
    return int(value)


def key(seed: int, *parts: int) -> int:
    """Compute a 64-bit key for (seed, *parts), each of them in [0, 2**64).

    Raises:  ConfigError: the seed or a part is out of range.
    """
    word = mix((checked_word(seed, "seed") + GAMMA) & _MASK)
    for part in parts:
        word = mix(((word ^ checked_word(part, "key part")) + GAMMA) & _MASK)
    return word


def extended(keys: int | Words, parts: NDArray[np.integer]) -> Words:
    """Extend keys by one more part each: `key(…, part)` for many parts at once.

    Shapes:  keys: one, or uint64[n].   parts: integer[n], none negative.   result: uint64[n].
    """
    words = parts.astype(np.uint64)
    words ^= np.uint64(keys) if isinstance(keys, int) else keys
    words += np.uint64(GAMMA)
    return mix_in_place(words)


def sample_keys(
    seed: int, epoch: int, shards: NDArray[np.integer], rows: NDArray[np.integer], op: str
) -> Words:
    """Compute the seed of augmentation `op` for each sample; it depends on nothing else.

    Shapes:  shards, rows: integer[n] (sample id).   result: uint64[n].
    """
    named = int.from_bytes(hashlib.blake2b(op.encode(), digest_size=8).digest(), "little")
    start = key(seed, Domain.AUGMENT, epoch, named)
    return extended(extended(start, shards), rows)


def permutations(keys: Sequence[int] | Words, length: int) -> Words:
    """Compute one permutation of [0, length) for each key: the stable argsort of the leading bits
    of the keyed hash.

    The index replaces as many low bits of each hash as it needs, so that sorting these words in
    place gives the argsort in half the time and a third of the memory of `np.argsort`. Every
    sorting algorithm gives the same result, since no two words are equal.

    Shapes:  keys: uint64[m].   result: uint64[m, length].
    """
    index_mask = np.uint64((1 << (length - 1).bit_length()) - 1 if length else 0)
    starts = np.asarray(keys, np.uint64)[:, None]
    words = np.empty((len(starts), length), np.uint64)
    for begin in range(0, length, _TOGETHER):
        some = words[:, begin : begin + _TOGETHER]
        index = np.arange(begin, begin + some.shape[1], dtype=np.uint64)
        np.add(index * np.uint64(GAMMA), starts, out=some)
        mix_in_place(some)
        some &= ~index_mask
        some |= index
    sort_rows(words)
    words &= index_mask
    return words


def permutation(keyed: int, length: int) -> Words:
    """Compute the permutation of [0, length) for this key.

    Shapes:  result: uint64[length].
    """
    only: Words = permutations([keyed], length)[0]
    return only
