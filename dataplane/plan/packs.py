"""Sequence packing: which documents of a block are in each of its packs. docs/order.md specifies
it. A pack may also be a padded batch, in which each document is a row.

A pack has documents of one block only, so the number of packs depends only on the documents'
lengths: lengths of epochs, plans and resuming are as for rows, although documents are combined
differently in each epoch. The price is that small blocks waste tokens; plan/advice.py warns of it.

1. The number of packs does not depend on the order of the lengths, so it is the same in every
   epoch.
2. Every token is in at most one pack; without `drop`, `truncate` and `wrap`, in exactly one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.model.changes import TakenDocument
from dataplane.model.errors import ConfigError, RowOutOfBounds
from dataplane.model.records import LongPolicy, PackPolicy, PackSpec
from dataplane.plan.balance import numbered
from dataplane.plan.loops import best_fit, best_fit_count
from dataplane.plan.permute import GAMMA, Words, mix_in_place, permutation

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_DOCUMENTS_MIN = 8
_TOKENS_A_DOCUMENT = 8
"""By default, a pack has room for this number of documents, or for documents of this mean length.
"""


PACK_BITS = 24
"""The width of the number of a pack within its block, as plans store it. The bits above it are the
index of the key from which the block's packs are drawn."""


class Packs(Struct, frozen=True, eq=False):
    """The packs of a block, each a sequence of pieces of documents.

    Shapes:  starts: int32[packs + 1], the first piece of each pack, and the end of the last.
    pieces: int32[4, pieces]: the document of each piece, where the piece begins in the document,
    how many tokens it has, and where it is in its pack.
    """

    starts: Int32
    pieces: Int32

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def nbytes(self) -> int:
        """The memory that the packs take."""
        return self.starts.nbytes + self.pieces.nbytes


class Packing(Struct, frozen=True):
    """The use of a dataset's tokens: their number, the number of packs, the tokens in packs,
    the documents that are cut or left out, and the tokens for which packs have room.
    """

    tokens: int
    packs: int
    packed_tokens: int
    short_documents: int
    room_tokens: int

    @property
    def padding(self) -> float:
        """The share of the packs' room that no document fills."""
        return 1 - self.packed_tokens / self.room_tokens


def documents_max(pack: PackSpec) -> int:
    """Return how many documents a pack may have."""
    if pack.policy is PackPolicy.WRAP:
        return pack.length
    return pack.documents or max(_DOCUMENTS_MIN, pack.length // _TOKENS_A_DOCUMENT)


def pack_count(lengths: Int64, pack: PackSpec) -> int:
    """Return how many packs documents of these lengths make, in any order.

    Shapes:  lengths: int64[documents], in tokens.
    """
    kept = kept_tokens(lengths, pack)
    if pack.policy is PackPolicy.WRAP:
        return int(room_of(kept, pack).sum()) // pack.length
    whole, rest = np.divmod(kept, pack.length)
    taken, most = room_of(rest, pack), documents_max(pack)
    if pack.policy is PackPolicy.PAD:
        fitted = len(_batch_starts(_falling(taken), pack.length, most)) - 1
    else:
        fitted = best_fit_count(taken, pack.length, most)
    return int(whole.sum()) + fitted


def packs_of(lengths: Int64, pack: PackSpec, keyed: int | None) -> Packs:
    """Compute the packs of a block for this key. Without a key, documents of equal length stay in
    order.

    Shapes:  lengths: int64[documents], in tokens.
    """
    count = len(lengths)
    ranked = np.arange(count) if keyed is None else permutation(keyed, count).astype(np.int64)
    make = _wrapped if pack.policy is PackPolicy.WRAP else _fitted
    made = make(kept_tokens(lengths, pack), ranked, pack)
    return _reordered(made, numbered(costs(made, pack))) if pack.balanced else made


def costs(packs: Packs, pack: PackSpec) -> Int64:
    """Return the cost of attention over each pack: the sum of the squares of its documents'
    lengths. In a padded batch, each document counts with the width of the batch.

    Shapes:  result: int64[packs].
    """
    if not len(packs):
        return np.zeros(0, np.int64)
    lengths, first = packs.pieces[2].astype(np.int64), packs.starts[:-1]
    if pack.policy is PackPolicy.PAD:
        widths = np.maximum.reduceat(room_of(lengths, pack), first)
        return widths**2 * np.diff(packs.starts)
    found: Int64 = np.add.reduceat(lengths**2, first)
    return found


def packing_of(lengths: Int64, pack: PackSpec) -> Packing:
    """Compute the Packing of documents of these lengths. If documents are wrapped, and their
    lengths are rounded up to a multiple, the number of tokens that do not fit into the last pack
    depends on the order of the documents: this function computes it for the given order.

    Shapes:  lengths: int64[documents], in tokens.
    """
    kept, count = kept_tokens(lengths, pack), pack_count(lengths, pack)
    packed, room = int(kept.sum()), count * pack.length
    if pack.policy is PackPolicy.WRAP:
        rooms = room_of(kept, pack)
        packed = int(np.clip(room - np.cumsum(rooms) + rooms, 0, kept).sum())
    elif pack.policy is PackPolicy.PAD:
        widths = _falling(room_of(kept % pack.length, pack))
        starts = _batch_starts(widths, pack.length, documents_max(pack))
        room = int((kept // pack.length).sum()) * pack.length
        room += int((widths[starts[:-1]] * np.diff(starts)).sum())
    return Packing(int(lengths.sum()), count, packed, int((kept < lengths).sum()), room)


def kept_tokens(lengths: Int64, pack: PackSpec) -> Int64:
    """Return how many tokens of each document are packed."""
    if pack.long is LongPolicy.TRUNCATE:
        return np.minimum(lengths, pack.length)
    if pack.long is LongPolicy.DROP:
        return np.where(lengths > pack.length, 0, lengths)
    return lengths


def room_of(lengths: Int64, pack: PackSpec) -> Int64:
    """Return the room that each document takes in its packs: its length, rounded up."""
    if pack.multiple == 1:
        return lengths
    padded: Int64 = -(-lengths // pack.multiple) * pack.multiple
    return padded


def _fitted(kept: Int64, ranked: Int64, pack: PackSpec) -> Packs:
    whole, rest = np.divmod(kept, pack.length)
    taken, most = room_of(rest, pack), documents_max(pack)
    if pack.policy is PackPolicy.PAD:
        placed, fitted = _batched(taken, ranked, pack.length, most)
        rooms = np.repeat(taken[placed[fitted[:-1]]], np.diff(fitted))
    else:
        placed, fitted = best_fit(taken, ranked, pack.length, most)
        rooms = taken[placed]
    # Whole packs of long documents come first.
    full = np.repeat(ranked, whole[ranked])
    parts = np.arange(len(full)) - np.repeat(np.cumsum(whole[ranked]), whole[ranked])
    parts += whole[full]
    before = np.cumsum(rooms) - rooms
    before -= np.repeat(before[fitted[:-1]], np.diff(fitted))
    return _packs(
        np.concatenate([np.arange(len(full)), len(full) + fitted]),
        np.concatenate([full, placed]),
        np.concatenate([parts, whole[placed]]) * pack.length,
        np.concatenate([np.full(len(full), pack.length), rest[placed]]),
        np.concatenate([np.zeros(len(full), np.int64), before]),
    )


def _batched(widths: Int64, ranked: Int64, budget: int, most: int) -> tuple[Int64, Int64]:
    """Group rows into padded batches: rows of similar width together, widest first, rows of equal
    width in the order `ranked`.

    Shapes:  widths, ranked: int64[n].   result: the rows, batch after batch, int64[m], without
    those of width 0, and where each batch begins, int64[batches + 1].
    """
    placed = ranked[np.argsort(-widths[ranked], kind="stable")]
    starts = _batch_starts(widths[placed], budget, most)
    return placed[: starts[-1]], starts


def _batch_starts(widths: Int64, budget: int, most: int) -> Int64:
    """Return where each padded batch of these rows begins, and where the last one ends. A batch has
    as many rows as fit into the budget.

    Shapes:  widths: int64[n], falling.   result: int64[batches + 1].
    """
    count = int(np.searchsorted(-widths, 0))  # rows without tokens are left out
    starts = [0]
    while starts[-1] < count:
        rows = min(budget // int(widths[starts[-1]]), most)
        starts.append(min(starts[-1] + rows, count))
    return np.array(starts, np.int64)


def _falling(widths: Int64) -> Int64:
    return -np.sort(-widths)


def _wrapped(kept: Int64, ranked: Int64, pack: PackSpec) -> Packs:
    some = ranked[kept[ranked] > 0]
    ends = np.cumsum(room_of(kept[some], pack))
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


def _reordered(packs: Packs, order: Int64) -> Packs:
    """Return the same packs in another order.

    Shapes:  order: int64[packs].
    """
    sizes = np.diff(packs.starts)[order].astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    taken = np.repeat(packs.starts[:-1][order] - starts[:-1], sizes) + np.arange(starts[-1])
    return Packs(starts.astype(np.int32), np.ascontiguousarray(packs.pieces[:, taken]))


def _packs(starts: Int64, *pieces: Int64) -> Packs:
    return Packs(starts.astype(np.int32), np.stack(pieces).astype(np.int32))


# -- pack keys ---------------------------------------------------------------------------------
#
# The keys from which the packs of a block are drawn: one for each pass over its dataset.

KEYS_MAX = 1 << (31 - PACK_BITS)


class DrawsPacks(Protocol):
    """An order of samples that may be packs."""

    def pack_keys(self, positions: Int64, blocks: Int64) -> Words:
        """Return the key from which the packs of the block at each position are drawn.

        Shapes:  positions, blocks: int64[n].   result: uint64[n].
        """


class DrawnRows(Struct, frozen=True, eq=False):
    """Packs of blocks, and the keys from which the packs of each block are drawn. A row contains
    the number of its pack, and above PACK_BITS the index of the key among its block's keys.

    Shapes:  rows: int64[n].
    """

    rows: Int64
    keys: tuple[tuple[int, ...], ...]


def drawn_rows(
    order: DrawsPacks, positions: Int64, blocks: Int64, rows: Int64, index: Int64
) -> DrawnRows:
    """Return the packs at these positions. `index` is the index of each position's block among the
    blocks of the slab.

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


# -- taken documents ---------------------------------------------------------------------------
#
# Packs of a block from which documents were removed.
#
# 1. Pieces are assigned to packs as if no document had been removed, so all other documents stay
#    where they are, and the number of packs stays the same.
# 2. The pieces of a removed document contain tokens of another document of the block instead, the
#    same in every epoch: the first one in a keyed sequence that has at least as many tokens, or if
#    there is none, the longest. docs/order.md specifies the sequence.

_DRAWN = 1 << 12
_WORD = (1 << 64) - 1


def without(
    packs: Packs, lengths: Int64, pack: PackSpec, taken_out: Sequence[TakenDocument]
) -> Packs:
    """Return the packs of a block with tokens of other documents in place of the removed documents.

    Shapes:  lengths: int64[documents], in tokens.
    Raises:  ConfigError: no document with tokens is left.  RowOutOfBounds: a removed document is
    not in the block.
    """
    if not taken_out:
        return packs
    kept = kept_tokens(lengths, pack)
    others = stand_ins(kept, taken_out)
    pieces = packs.pieces.copy()
    for row, other in others.items():
        own = np.flatnonzero(packs.pieces[0] == row)
        pieces[0, own] = other
        if kept[other] < kept[row]:
            pieces[1, own] = 0
            pieces[2, own] = np.minimum(pieces[2, own], kept[other])
    if pack.policy is PackPolicy.PAD:
        _narrow(packs, pieces, pack)
    return Packs(packs.starts, pieces)


def stand_ins(kept: Int64, taken_out: Sequence[TakenDocument]) -> dict[int, int]:
    """Return the document that replaces each removed one, by row; empty documents need none.

    Shapes:  kept: int64[documents], how many tokens of each are packed.
    Raises:  ConfigError: no document with tokens is left.  RowOutOfBounds: a removed document is
    not in the block.
    """
    left = kept.copy()
    for one in taken_out:
        if one.row >= len(kept):
            raise RowOutOfBounds("a removed document is not in its block", row=one.row)
        left[one.row] = 0
    most, found = int(left.max(initial=0)), dict[int, int]()
    for one in taken_out:
        if not kept[one.row]:
            continue
        if not most:
            raise ConfigError(
                "all documents with tokens of a block were taken out, and none is left to replace "
                "them: start a job with another name that leaves them out with where= on a column "
                "that names them, or write the shard again without them",
                field="tombstones",
            )
        found[one.row] = _first(one.key, left >= min(int(kept[one.row]), most))
    return found


def _first(keyed: int, is_able: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Return the first number of a key's sequence for which `is_able` is true."""
    while True:
        words = np.arange(_DRAWN, dtype=np.uint64) * np.uint64(GAMMA) + np.uint64(keyed)
        drawn = mix_in_place(words) % np.uint64(len(is_able))
        found = np.flatnonzero(is_able[drawn])
        if len(found):
            return int(drawn[found[0]])
        keyed = (keyed + _DRAWN * GAMMA) & _WORD


def _narrow(packs: Packs, pieces: Int32, pack: PackSpec) -> None:
    """Reduce the width of padded batches whose widest row has become shorter, and move their rows
    accordingly.
    """
    changed = np.flatnonzero(pieces[2] != packs.pieces[2])
    for number in np.unique(packs.starts.searchsorted(changed, side="right") - 1).tolist():
        own = slice(*packs.starts[number : number + 2].tolist())
        widths = room_of(pieces[2, own].astype(np.int64), pack)
        pieces[3, own] = np.arange(len(widths)) * widths.max()
