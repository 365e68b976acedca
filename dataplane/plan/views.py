"""Count the rows of each block in a view, where that needs no bytes of the dataset."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from dataplane.errors import ConfigError
from dataplane.model import View
from dataplane.plan.manifest import Manifest
from dataplane.plan.shards import spread, starts_of
from dataplane.plan.subsets import WHOLE, chosen_counts, has_shares, shard_words
from dataplane.plan.texts import Int64

LIMIT_MAX = (1 << 62) - 1


def rows_only(view: View) -> View:
    """Return the part of the view that decides which rows there are."""
    return replace(view, map="", collate="", pack=None)


def samples_of(view: View, seed: int) -> tuple[View, int]:
    """Return the part of the view that decides how many samples there are, and the seed of its map
    if it matters: the number of packs depends on what the map makes.
    """
    if view.pack is None:
        return rows_only(view), 0
    return replace(view, collate=""), seed if view.map else 0


def check_shares(view: View) -> None:
    """Raises:  ConfigError: its shares or its limit are no such numbers."""
    split = (view.split_from, view.split_to)
    is_split = 0 <= view.split_from < view.split_to <= WHOLE or split == (0, 0)
    if not (0 <= view.sample <= WHOLE and is_split and 0 <= view.limit <= LIMIT_MAX):
        raise ConfigError(f"these are no shares of rows: {view}", field="view")


def filters(view: View) -> bool:
    """Whether rows of each block are chosen; a limit alone takes the first ones."""
    return bool(view.where) or has_shares(view)


def first_rows(manifest: Manifest) -> Int64:
    """Return where each block of a whole dataset begins in its shard.

    Shapes:  result: int64[K], rows.
    """
    starts, blocks = starts_of(manifest.block_rows), manifest.shards.block_starts
    first: Int64 = starts[:-1] - spread(starts[blocks[:-1]], blocks)
    return first


def shared_counts(manifest: Manifest, view: View) -> Int64:
    """The rows of each block in the shares of a view.

    Shapes:  result: int64[K].
    """
    if not has_shares(view):
        return manifest.block_rows
    words = shard_words(manifest.shards.urls)[manifest.block_shard]
    return chosen_counts(view, words, first_rows(manifest), manifest.block_rows)


def limited(counts: Int64, limit: int) -> Int64:
    """The same rows up to a limit, in the dataset's order; 0 is no limit.

    Shapes:  counts, result: int64[K].
    """
    if not limit:
        return counts
    before = starts_of(counts)[:-1]
    return np.clip(limit - before, 0, counts)
