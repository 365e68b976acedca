"""Sequence packing: which documents of a block are in each of its packs, as docs/order.md has it.

1. How many packs there are follows from the multiset of lengths alone, so that it is the same in
   every epoch, while the packs differ.
2. Every token is in at most one pack; without `drop`, `truncate` and `wrap`, in exactly one.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.model import LongPolicy, PackPolicy, PackSpec
from dataplane.plan.loops import best_fit, best_fit_count, loops
from dataplane.plan.permute import permutation

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_DOCUMENTS_MIN = 8
_TOKENS_A_DOCUMENT = 8
"""A pack has room for documents of this mean length, unless the user says more."""


PACK_BITS = 24
"""The number of a pack, as plans have it: these bits say which pack of its block it is, those above
with which of the block's keys it is drawn."""


class Packs(Struct, frozen=True, eq=False):
    """The packs of a block, each one a sequence of pieces of documents.

    Shapes:  starts: int32[packs + 1], the first piece of each pack, and the end of the last.
    pieces: int32[4, pieces]: the document of each piece, where in the document the piece begins,
    how many tokens it has, and where in its pack it lies.
    """

    starts: Int32
    pieces: Int32

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return self.starts.nbytes + self.pieces.nbytes


class Packing(Struct, frozen=True):
    """What becomes of tokens: how many there are, how many packs are made of them, how many tokens
    these hold, and how many documents are cut short or left out.
    """

    tokens: int
    packs: int
    packed_tokens: int
    short_documents: int


def documents_max(pack: PackSpec) -> int:
    """How many documents a pack has at most."""
    if pack.policy is PackPolicy.WRAP:
        return pack.length
    return pack.documents or max(_DOCUMENTS_MIN, pack.length // _TOKENS_A_DOCUMENT)


def pack_count(lengths: Int64, pack: PackSpec) -> int:
    """How many packs documents of these lengths make, in any order.

    Shapes:  lengths: int64[documents], in tokens.
    """
    kept = _kept(lengths, pack)
    if pack.policy is PackPolicy.WRAP:
        return int(_padded(kept, pack).sum()) // pack.length
    whole, rest = np.divmod(kept, pack.length)
    fitted = best_fit_count(_padded(rest, pack), pack.length, documents_max(pack), loops().library)
    return int(whole.sum()) + fitted


def packs_of(lengths: Int64, pack: PackSpec, keyed: int | None) -> Packs:
    """The packs of a block for this key; documents of equal length stay in order without one.

    Shapes:  lengths: int64[documents], in tokens.
    """
    count = len(lengths)
    ranked = np.arange(count) if keyed is None else permutation(keyed, count).astype(np.int64)
    make = _wrapped if pack.policy is PackPolicy.WRAP else _fitted
    return make(_kept(lengths, pack), ranked, pack)


def packing_of(lengths: Int64, pack: PackSpec) -> Packing:
    """What becomes of documents of these lengths.

    Shapes:  lengths: int64[documents], in tokens.
    """
    kept, count = _kept(lengths, pack), pack_count(lengths, pack)
    packed = int(kept.sum())
    if pack.policy is PackPolicy.WRAP:
        packed = min(packed, count * pack.length)
    return Packing(int(lengths.sum()), count, packed, int((kept < lengths).sum()))


def _kept(lengths: Int64, pack: PackSpec) -> Int64:
    """How many tokens of each document are packed."""
    if pack.long is LongPolicy.TRUNCATE:
        return np.minimum(lengths, pack.length)
    if pack.long is LongPolicy.DROP:
        return np.where(lengths > pack.length, 0, lengths)
    return lengths


def _padded(lengths: Int64, pack: PackSpec) -> Int64:
    """The lengths, rounded up to what documents take of their packs."""
    if pack.multiple == 1:
        return lengths
    padded: Int64 = -(-lengths // pack.multiple) * pack.multiple
    return padded


def _fitted(kept: Int64, ranked: Int64, pack: PackSpec) -> Packs:
    whole, rest = np.divmod(kept, pack.length)
    taken = _padded(rest, pack)
    placed, fitted = best_fit(taken, ranked, pack.length, documents_max(pack), loops().library)
    # Whole packs of long documents come first.
    full = np.repeat(ranked, whole[ranked])
    parts = np.arange(len(full)) - np.repeat(np.cumsum(whole[ranked]), whole[ranked])
    parts += whole[full]
    before = np.cumsum(taken[placed]) - taken[placed]
    before -= np.repeat(before[fitted[:-1]], np.diff(fitted))
    return _packs(
        np.concatenate([np.arange(len(full)), len(full) + fitted]),
        np.concatenate([full, placed]),
        np.concatenate([parts, whole[placed]]) * pack.length,
        np.concatenate([np.full(len(full), pack.length), rest[placed]]),
        np.concatenate([np.zeros(len(full), np.int64), before]),
    )


def _wrapped(kept: Int64, ranked: Int64, pack: PackSpec) -> Packs:
    some = ranked[kept[ranked] > 0]
    ends = np.cumsum(_padded(kept[some], pack))
    count = int(ends[-1]) // pack.length if len(ends) else 0
    first = np.concatenate([np.zeros(1, np.int64), ends])
    cuts = np.union1d(first, np.arange(count + 1) * pack.length)
    cuts = cuts[: int(cuts.searchsorted(count * pack.length)) + 1]
    starts, stops = cuts[:-1], cuts[1:]
    of = ends.searchsorted(starts, side="right")
    begins = starts - first[of]
    return _packs(
        starts.searchsorted(np.arange(count + 1) * pack.length),
        some[of],
        begins,
        np.minimum(stops - starts, kept[some[of]] - begins),
        starts % pack.length,
    )


def _packs(starts: Int64, *pieces: Int64) -> Packs:
    return Packs(starts.astype(np.int32), np.stack(pieces).astype(np.int32))
