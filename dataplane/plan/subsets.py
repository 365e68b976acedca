"""Choose the rows in a keyed share of a dataset, such as a split: "Shares of rows" in
docs/order.md.

1. Whether a row is in a share depends only on the name of its shard and on its number there: adding
   shards changes nothing, and neither do seeds, epochs or ranks.
2. Shares of one kind whose ranges are disjoint have no row in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataplane.model import View
from dataplane.plan.identity import relative_names
from dataplane.plan.permute import Domain, Words, extended, key
from dataplane.plan.shards import spread, starts_of
from dataplane.plan.texts import Bools, Int64, Texts

WHOLE = 1 << 32
"""All rows, in units of a share."""
_SPLIT, _SAMPLE = range(2)
_TOGETHER = 1 << 15
_HALF = np.uint64(32)


class _Share(NamedTuple):
    """The rows whose hash, for this use, lies in [lower, upper), in units of 2**-32."""

    use: int
    lower: int
    upper: int


def has_shares(view: View) -> bool:
    """Whether the view has only a keyed share of the rows."""
    return bool(_shares(view))


def shard_words(urls: Texts) -> Words:
    """The word that stands for each shard in the keys of its rows.

    Shapes:  result: uint64[shards].
    """
    names = relative_names(urls)
    content = names.content.tobytes()
    found = [
        hashlib.blake2b(content[start:stop], digest_size=8).digest()
        for start, stop in zip(names.starts.tolist(), names.stops.tolist(), strict=True)
    ]
    return np.frombuffer(b"".join(found), "<u8").astype(np.uint64)


def chosen(view: View, word: int, first_row: int, count: int) -> Bools:
    """Return which of `count` consecutive rows of a shard, from `first_row` on, are in the view's
    shares.

    Shapes:  result: bool[count].
    """
    rows = np.arange(first_row, first_row + count, dtype=np.uint64)
    found = np.ones(count, np.bool_)
    for share in _shares(view):
        found &= _within(share, extended(key(0, Domain.SHARE, share.use, word), rows))
    return found


def chosen_counts(view: View, words: Words, first_rows: Int64, rows: Int64) -> Int64:
    """How many rows of each block are in the view's shares.

    Shapes:  words: uint64[K], of the shard of each block.   first_rows, rows: int64[K], where the
    block begins in its shard, and its rows.   result: int64[K].
    """
    starts, counts = starts_of(rows), np.zeros(len(rows), np.int64)
    shares = _shares(view)
    keys = [extended(key(0, Domain.SHARE, share.use), words) for share in shares]
    begin = 0
    while begin < len(rows):
        # Some blocks together; a long one by itself.
        end = max(int(starts.searchsorted(starts[begin] + _TOGETHER, side="right")) - 1, begin + 1)
        some = slice(begin, end)
        counts[some] = _counts(shares, [one[some] for one in keys], first_rows[some], rows[some])
        begin = end
    return counts


def _counts(
    shares: Sequence[_Share], keys: Sequence[Words], first_rows: Int64, rows: Int64
) -> Int64:
    if len(rows) == 1:
        return np.array([_count_alone(shares, keys, int(first_rows[0]), int(rows[0]))])
    starts = starts_of(rows)
    block = spread(np.arange(len(rows)), starts)
    number = np.arange(starts[-1]) - (starts[:-1] - first_rows)[block]
    found = np.ones(len(block), np.bool_)
    for share, own in zip(shares, keys, strict=True):
        found &= _within(share, extended(own[block], number))
    return np.bincount(block, found, len(rows)).astype(np.int64)


def _count_alone(shares: Sequence[_Share], keys: Sequence[Words], first: int, count: int) -> int:
    total = 0
    for begin in range(first, first + count, _TOGETHER):
        number = np.arange(begin, min(begin + _TOGETHER, first + count), dtype=np.uint64)
        found = np.ones(len(number), np.bool_)
        for share, own in zip(shares, keys, strict=True):
            found &= _within(share, extended(own, number))
        total += int(np.count_nonzero(found))
    return total


def _within(share: _Share, words: Words) -> Bools:
    # Below the range, the difference wraps to a large number.
    found: NDArray[np.bool_] = (words >> _HALF) - np.uint64(share.lower) < np.uint64(
        share.upper - share.lower
    )
    return found


def _shares(view: View) -> tuple[_Share, ...]:
    found = []
    if view.split_to:
        found.append(_Share(_SPLIT, view.split_from, view.split_to))
    if view.sample:
        found.append(_Share(_SAMPLE, 0, view.sample))
    return tuple(found)
