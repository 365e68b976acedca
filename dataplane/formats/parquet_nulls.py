"""The null counts of a Parquet shard, as far as its footer states them.

The footer counts, for each column of each row group, the entries without a value. Without lists
these are the nulls. An empty list and a null list are also entries without a value, so for lists
only a count of 0 is useful, unless the writer added the histogram of definition levels (most have
since 2024), which shows exactly whether the list or its item is null.

Source:  https://github.com/apache/parquet-format (Statistics and SizeStatistics in parquet.thrift)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.formats.nulls import children, is_flat
from dataplane.formats.parquet_facts import LEVELS, NULLS, VALUES, Int64
from dataplane.plan.null_counts import NEVER, UNKNOWN

_ENTRIES_MAX = 1 << 48
"""No column has more entries, and sums of fewer do not overflow."""


class _Leaf(Struct):
    """One Parquet column. `level_max` is the definition level of a value. `empty` counts entries
    without a value, in all row groups; `levels` counts entries by level. None: the footer does not
    say.
    """

    level_max: int
    empty: int | None
    levels: Sequence[int] | None


class _Nullable(Struct, frozen=True):
    """A field node that may be null, and the definition level of an entry where it is."""

    node: int
    null_level: int
    is_struct: bool


class NullCounter:
    """Adds up the null counts in the row groups of one footer, for all columns at once.
    `level_max` is that of SchemaTree.

    Shapes:  level_max: int64[leaves].
    """

    def __init__(self, level_max: Int64) -> None:
        self._level_max = level_max
        self._starts = np.cumsum(level_max + 1) - (level_max + 1)
        self._empty = np.zeros(len(level_max), np.int64)
        self._levels = np.zeros(int((level_max + 1).sum()), np.int64)
        self._has_empty = np.ones(len(level_max), np.bool_)
        self._has_levels = np.ones(len(level_max), np.bool_)

    def add(self, columns: Int64, levels: Int64) -> None:
        """Add one row group's columns, laid out as in FooterFacts. Impossible numbers are ignored.

        Shapes:  columns: int64[leaves, 9].   levels: int64[sum of their LEVELS].
        """
        entries, empty = columns[:, VALUES], columns[:, NULLS]
        is_sane = (entries >= 0) & (entries < _ENTRIES_MAX)
        self._has_empty &= is_sane & (empty >= 0) & (empty <= entries)
        self._empty += np.where(self._has_empty, empty, 0)
        self._has_empty &= self._empty >= 0
        self._has_levels &= is_sane & (columns[:, LEVELS] == self._level_max + 1)
        if self._has_levels.any():
            self._add_levels(entries, columns[:, LEVELS], levels)

    def _add_levels(self, entries: Int64, counts: Int64, levels: Int64) -> None:
        """Add levels of columns that always had as many levels as their schema has."""
        is_chosen = np.repeat(self._has_levels, counts)
        chosen, columns = levels[is_chosen], np.flatnonzero(self._has_levels)
        lengths = counts[columns]
        starts = np.cumsum(lengths) - lengths
        each = np.repeat(entries[columns], lengths)
        is_sane = np.logical_and.reduceat((chosen >= 0) & (chosen <= each), starts)
        is_whole = np.add.reduceat(np.where(chosen > each, 0, chosen), starts) == entries[columns]
        places = np.repeat(self._starts[columns] - starts, lengths) + np.arange(len(chosen))
        self._levels[places] += chosen
        is_sane &= np.logical_and.reduceat(self._levels[places] >= 0, starts)
        self._has_levels[columns] = is_sane & is_whole

    def counts(self, schema: pa.Schema) -> Int64:
        """Return the nulls of each field node of the shard's own Arrow schema, UNKNOWN, or
        NEVER.
        """
        if is_flat(schema) and len(schema) == len(self._level_max):
            is_nullable = np.array([field.nullable for field in schema], np.bool_)
            return self._flat_counts(is_nullable)
        walk = _Walk(self._leaves())
        for field in schema:
            walk.visit(field, (), 0)
        return np.array(walk.counts, np.int64)

    def _flat_counts(self, is_nullable: NDArray[np.bool_]) -> Int64:
        """Compute the result of _Walk for all fields at once, if each is one leaf and not
        nested.
        """
        is_as_declared = self._level_max == is_nullable
        nulls = np.where(self._has_levels, self._levels[self._starts], self._empty)
        is_told = is_as_declared & (self._has_levels | self._has_empty)
        return np.where(is_nullable, np.where(is_told, nulls, UNKNOWN), NEVER)

    def _leaves(self) -> Iterable[_Leaf]:
        levels, starts = self._levels.tolist(), self._starts.tolist()
        for leaf, level_max in enumerate(self._level_max.tolist()):
            start = starts[leaf]
            yield _Leaf(
                level_max,
                int(self._empty[leaf]) if self._has_empty[leaf] else None,
                levels[start : start + level_max + 1] if self._has_levels[leaf] else None,
            )


class _Walk:
    """Walks the Arrow schema and the Parquet columns together."""

    def __init__(self, leaves: Iterable[_Leaf]) -> None:
        self.counts: list[int] = []
        self._leaves = iter(leaves)

    def visit(self, field: pa.Field, above: tuple[_Nullable, ...], level: int) -> None:
        """Visit a field. `above` are the nullable nodes above it; `level` is the definition level
        of an entry if all of them have values.
        """
        kind = field.type
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        node, is_struct = len(self.counts), pa.types.is_struct(kind)
        self.counts.append(NEVER)
        if field.nullable:
            above = (*above, _Nullable(node, level, is_struct))
            self.counts[node] = 0  # with counts of leaves only, they have a struct's nulls
            level += 1
        below = children(kind)
        for child in below:
            self.visit(child, above, level if is_struct else level + 1)
        if not below and not is_struct:
            self._tell(next(self._leaves, None), node, above, level)

    def _tell(self, leaf: _Leaf | None, node: int, path: tuple[_Nullable, ...], level: int) -> None:
        if leaf is None or leaf.level_max != level:
            leaf = _Leaf(level, None, None)
        if leaf.levels is not None:
            for at in path:
                self.counts[at.node] = leaf.levels[at.null_level]
        elif not path or leaf.empty == 0:
            return
        elif leaf.empty is not None and level == len(path):  # not in a list
            self.counts[node] = leaf.empty
        else:
            for at in path:
                if not at.is_struct:
                    self.counts[at.node] = UNKNOWN
            self.counts[node] = UNKNOWN
