"""Drop the rows of a decoded block that do not belong to a view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.formats.arrays import take_rows
from dataplane.model.records import View
from dataplane.plan.permute import Words
from dataplane.plan.views import chosen, file_words, has_shares

if TYPE_CHECKING:
    from dataplane.transforms.condition import Bounds, Condition

Bools = NDArray[np.bool_]


class BlockRows(Struct, frozen=True):
    """The rows that a block stores: `count` rows of its shard from row `first` on. `word`
    represents the shard in the keys of its rows; or there is one for each row, which is a file.
    """

    count: int
    first: int = 0
    word: int | Words = 0

    def part(self, first: int, stop: int) -> BlockRows:
        """Return some of these rows."""
        word = self.word if isinstance(self.word, int) else self.word[first:stop]
        return BlockRows(stop - first, self.first + first, word)


class RowFilter(Struct, frozen=True):
    """The conditions of a view on single rows, for the blocks of one dataset."""

    view: View
    condition: Condition | None

    @classmethod
    def of(cls, view: View, schema: pa.Schema) -> Self | None:
        """Return the filter of a view; None if the view restricts rows only by a limit, or not at
        all.

        Raises:  ConfigError: the view's condition does not suit the schema.
        """
        if not view.where:
            return cls(view, None) if has_shares(view) else None
        # Import this module late: most views have no condition, and a node starts faster without
        # it.
        from dataplane.transforms.condition import Condition

        return cls(view, Condition.of(view.where, schema))

    @property
    def columns(self) -> tuple[str, ...]:
        """The top-level columns that the filter reads."""
        return () if self.condition is None else self.condition.columns

    def stored(self, shard: tuple[str, str, str], count: int, first: int, word: int) -> BlockRows:
        """Return the stored rows of a block. `shard` is its format, url and etag."""
        words = file_words(*shard) if has_shares(self.view) else None
        return BlockRows(count, first, word if words is None else words[first : first + count])

    def mask(self, batch: pa.RecordBatch, rows: BlockRows) -> Bools:
        """Return which rows of a whole block the view keeps.

        Shapes:  result: bool[rows].
        Raises:  ConfigError: a number that the condition computes exceeds its type.
        """
        mask = chosen(self.view, rows.word, rows.first, rows.count)
        if self.condition is not None:
            found = self.condition.values(batch).fill_null(fill_value=False)
            mask &= found.to_numpy(zero_copy_only=False)
        return mask

    def count_known(self, bounds: Bounds, rows: BlockRows) -> int | None:
        """Return how many rows of a block with these column bounds the view keeps; None if that
        depends on the values.
        """
        from dataplane.transforms.condition import Outcomes

        outcomes = Outcomes.TRUE
        if self.condition is not None:
            outcomes = self.condition.outcomes(bounds)
        if Outcomes.TRUE not in outcomes:
            return 0
        if outcomes is not Outcomes.TRUE:
            return None
        return int(np.count_nonzero(chosen(self.view, rows.word, rows.first, rows.count)))

    def left(self, batch: pa.RecordBatch, rows: BlockRows) -> pa.RecordBatch:
        """Return the rows of a whole block that the view keeps."""
        mask = self.mask(batch, rows)
        return batch if mask.all() else filtered(batch, mask)


def reads_columns(view: View, schema: pa.Schema, columns: Sequence[str]) -> tuple[str, ...]:
    """Return these columns, followed by other columns that the view reads.

    Raises:  ConfigError: as `RowFilter.of`.
    """
    found = RowFilter.of(view, schema)
    return tuple(dict.fromkeys((*columns, *(() if found is None else found.columns))))


def filtered(batch: pa.RecordBatch, mask: Bools) -> pa.RecordBatch:
    """Return the rows of a batch for which the mask is true.

    Shapes:  mask: bool[rows].
    """
    if not batch.num_columns:
        return batch.slice(0, int(np.count_nonzero(mask)))
    rows = np.flatnonzero(mask)
    arrays = [take_rows(array, rows) for array in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)
