"""Packs of a block from which documents were removed.

1. The assignment of pieces to packs, and the place of each, is as if no document had been removed.
   So all other documents, and the number of packs, stay the same.
2. The pieces of a removed document get tokens of a remaining one, the same in every epoch: the
   first of its sequence that has as many tokens, or else the one with the most. docs/order.md
   specifies it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.changes import TakenDocument
from dataplane.errors import ConfigError, RowOutOfBounds
from dataplane.model import PackPolicy, PackSpec
from dataplane.plan.packs import Int32, Int64, Packs, kept_tokens, room_of
from dataplane.plan.permute import GAMMA, mix_in_place

_DRAWN = 1 << 12
_WORD = (1 << 64) - 1


def without(
    packs: Packs, lengths: Int64, pack: PackSpec, taken_out: Sequence[TakenDocument]
) -> Packs:
    """Return packs of a block, whose documents have these lengths, without some of these documents.

    Shapes:  lengths: int64[documents], in tokens.
    Raises:  ConfigError: no document with tokens is left.  RowOutOfBounds: there is no such one.
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
    """Return the document that replaces each of these, by row; documents without tokens need none.

    Shapes:  kept: int64[documents], the tokens of each that are packed.
    Raises:  ConfigError: no document with tokens is left.  RowOutOfBounds: there is no such one.
    """
    left = kept.copy()
    for one in taken_out:
        if one.row >= len(kept):
            raise RowOutOfBounds("a document that was taken out is not in its block", row=one.row)
        left[one.row] = 0
    most, found = int(left.max(initial=0)), dict[int, int]()
    for one in taken_out:
        if not kept[one.row]:
            continue
        if not most:
            raise ConfigError(
                "all documents with tokens of a block were taken out, and none is left to stand "
                "for them: in a job of another name, leave them out with where= on a "
                "column that names them, or write the shard anew",
                field="tombstones",
            )
        found[one.row] = _first(one.key, left >= min(int(kept[one.row]), most))
    return found


def _first(keyed: int, is_able: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Return the first number of a key's sequence that is able; at least one must be."""
    while True:
        words = np.arange(_DRAWN, dtype=np.uint64) * np.uint64(GAMMA) + np.uint64(keyed)
        drawn = mix_in_place(words) % np.uint64(len(is_able))
        found = np.flatnonzero(is_able[drawn])
        if len(found):
            return int(drawn[found[0]])
        keyed = (keyed + _DRAWN * GAMMA) & _WORD


def _narrow(packs: Packs, pieces: Int32, pack: PackSpec) -> None:
    """Move the rows of padded batches whose widest row has become shorter, since these are less
    wide.
    """
    changed = np.flatnonzero(pieces[2] != packs.pieces[2])
    for number in np.unique(packs.starts.searchsorted(changed, side="right") - 1).tolist():
        own = slice(*packs.starts[number : number + 2].tolist())
        widths = room_of(pieces[2, own].astype(np.int64), pack)
        pieces[3, own] = np.arange(len(widths)) * widths.max()
