"""The rows that the blocks of a dataset store, of which a view may have only some."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from msgspec import Struct

from dataplane.index.projection import Projection
from dataplane.model.records import View
from dataplane.plan.manifest import Manifest
from dataplane.plan.permute import Words
from dataplane.plan.views import first_rows, has_shares, shard_words
from dataplane.worker.columns import Ints


class StoredRows(Struct, frozen=True, eq=False):
    """The rows that each block stores, if a view has only some of them.

    Shapes:  rows, first: int64[K], of the block, and where they begin in its shard.
             words: uint64[K], the shard in the keys of its rows; None if no view needs them.
    """

    rows: Ints | None = None
    first: Ints | None = None
    words: Words | None = None

    @classmethod
    def of(cls, manifest: Manifest, view: View) -> Self:
        """Return the stored rows of a manifest; empty unless it is the manifest of a view."""
        if manifest.whole is None or manifest.kept is None:
            return cls()
        words = shard_words(manifest.shards.urls) if has_shares(view) else None
        return cls(
            stored_rows(manifest),
            first_rows(manifest.whole)[manifest.kept],
            None if words is None else words[manifest.block_shard],
        )

    def of_block(self, block: int) -> dict[str, Any]:
        """Return the rows as fields of a RawBlockRef."""
        if self.rows is None or self.first is None:
            return {}
        word = 0 if self.words is None else self.words.item(block)
        return {
            "stored_rows": self.rows.item(block),
            "first_row": self.first.item(block),
            "shard_word": word,
        }


def stored_rows(manifest: Manifest) -> Ints:
    """Return the rows of each block before the view.

    Shapes:  result: int64[K].
    """
    whole, kept = manifest.whole, manifest.kept
    return manifest.block_rows if whole is None or kept is None else whole.block_rows[kept]


def largest_stored(manifest: Manifest, projection: Projection | None) -> int:
    """Return the size of the largest block, decoded before its rows are chosen; 0 if none are."""
    whole, kept = manifest.whole, manifest.kept
    if whole is None or kept is None:
        return 0
    decoded = whole.block_decoded[kept] if projection is None else projection.decoded
    return int(np.max(decoded, initial=0))
