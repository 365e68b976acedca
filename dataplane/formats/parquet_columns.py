"""Facts about the columns of a Parquet shard, from its footer: schema, null counts, and bounds.

Source:  https://github.com/apache/parquet-format (parquet.thrift)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct
from numpy.typing import NDArray

from dataplane.formats.base import ColumnBounds
from dataplane.formats.nulls import children, is_flat
from dataplane.formats.parquet_footers import (
    CHILDREN,
    LENGTH,
    LEVELS,
    NULLS,
    REPETITION,
    TYPE,
    VALUES,
    Int64,
    ParquetFooter,
)
from dataplane.plan.columns import NEVER, UNKNOWN

# The tree of the schema: which Parquet columns (its leaves) make up each top-level column.

_DEPTH_MAX = 256
_REQUIRED = 0
# Bytes of a decoded value, by physical type: BOOLEAN, INT32, INT64, INT96, FLOAT, DOUBLE and
# BYTE_ARRAY. The schema has the size of a FIXED_LEN_BYTE_ARRAY.
_WIDTHS = np.array([1, 4, 8, 8, 4, 8, 0])


class SchemaTree(Struct, frozen=True, eq=False):
    """The columns of a schema. For each leaf: the bytes of a decoded value (0 if they vary), and
    the definition level of a value. For each top-level column: its first leaf, and the one after
    its last.

    Shapes:  widths, level_max: int64[leaves].   first, last: int64[top-level columns].
    """

    widths: Int64
    level_max: Int64
    first: Int64
    last: Int64


def schema_tree(elements: Int64) -> SchemaTree:
    """Build the tree from FooterFacts.elements.

    Raises:  ValueError: the schema is empty, or nested too deeply.
    """
    if not len(elements):
        raise ValueError("the schema has no elements")
    children = elements[:, CHILDREN]
    if len(elements) == 1:
        none = np.empty(0, np.int64)
        return SchemaTree(none, none, none, none)
    leaves = elements[children == 0]
    kinds = leaves[:, TYPE]
    is_known = (kinds >= 0) & (kinds < len(_WIDTHS))
    widths = np.where(is_known, _WIDTHS[np.where(is_known, kinds, 0)], leaves[:, LENGTH])
    if children[0] == len(elements) - 1 > 0 and not children[1:].any():
        places = np.arange(len(leaves), dtype=np.int64)
        level_max = (leaves[:, REPETITION] != _REQUIRED).astype(np.int64)
        return SchemaTree(widths, level_max, places, places + 1)
    counts = children.tolist()
    _check_depth(counts)
    spans = np.array(_top_level(counts), np.int64).reshape(-1, 2)
    maxima = _level_maxima(counts, elements[:, REPETITION].tolist())
    return SchemaTree(widths, np.array(maxima, np.int64), spans[:, 0], spans[:, 1])


def _check_depth(children: Sequence[int]) -> None:
    """Refuse schemas that are nested so deep that recursive readers would fail."""
    open_groups: list[int] = []
    for count in children:
        while open_groups and open_groups[-1] == 0:
            open_groups.pop()
        if open_groups:
            open_groups[-1] -= 1
        open_groups.append(count)
        if len(open_groups) > _DEPTH_MAX:
            raise ValueError(f"columns are nested deeper than {_DEPTH_MAX} levels")


def _top_level(children: Sequence[int]) -> list[list[int]]:
    """Return the leaves of each top-level column; a schema lists groups before their children."""
    spans: list[list[int]] = []
    leaf, open_groups = 0, [children[0]]
    for count in children[1:]:
        if len(open_groups) == 1:
            spans.append([leaf, leaf])
        open_groups[-1] -= 1
        if count:
            open_groups.append(count)
        else:
            leaf += 1
            spans[-1][1] = leaf
        while len(open_groups) > 1 and open_groups[-1] == 0:
            open_groups.pop()
    return spans


def _level_maxima(children: Sequence[int], repetitions: Sequence[int]) -> list[int]:
    """Return the highest definition level of each leaf: the number of nullable groups above it,
    plus one if the leaf is nullable itself.
    """
    maxima = []
    open_groups: list[tuple[int, int]] = []  # how many children are left, and the level inside
    for at, (count, repetition) in enumerate(zip(children, repetitions, strict=True)):
        while open_groups and open_groups[-1][0] == 0:
            open_groups.pop()
        level = 0
        if open_groups:
            left, level = open_groups[-1]
            open_groups[-1] = (left - 1, level)
        level += at > 0 and repetition != _REQUIRED
        if count:
            open_groups.append((count, level))
        else:
            maxima.append(level)
    return maxima


# The null counts of a Parquet shard, as far as its footer states them.
#
# The footer counts, for each column of each row group, the entries without a value. Without lists,
# these are the nulls. An empty list and a null list are also entries without a value, so for lists
# only a count of 0 is useful, unless the writer added the histogram of definition levels (most do
# since 2024), which shows exactly whether the list or its item is null.
#
# Source:  parquet.thrift, Statistics and SizeStatistics.

_ENTRIES_MAX = 1 << 48
"""No column has more entries, and sums of such numbers do not overflow."""


class _Leaf(Struct):
    """One Parquet column. `level_max` is the definition level of a value. `empty` counts entries
    without a value in all row groups, and `levels` counts entries by level; None if the footer does
    not state them.
    """

    level_max: int
    empty: int | None
    levels: Sequence[int] | None


class _Nullable(Struct, frozen=True):
    """A field node that may be null, and the definition level of an entry in which it is null."""

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
        """Add the levels of columns for which every row group had the complete histogram."""
        is_chosen = np.repeat(self._has_levels, counts)
        chosen, columns = levels[is_chosen], np.flatnonzero(self._has_levels)
        lengths = counts[columns]
        starts = np.cumsum(lengths) - lengths
        entry_counts = np.repeat(entries[columns], lengths)
        is_sane = np.logical_and.reduceat((chosen >= 0) & (chosen <= entry_counts), starts)
        is_whole = (
            np.add.reduceat(np.where(chosen > entry_counts, 0, chosen), starts) == entries[columns]
        )
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
        """Compute what _Walk computes, for all fields at once, if no field is nested."""
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
        of an entry in which none of them is null.
        """
        kind = field.type
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        node, is_struct = len(self.counts), pa.types.is_struct(kind)
        self.counts.append(NEVER)
        if field.nullable:
            above = (*above, _Nullable(node, level, is_struct))
            # Without a histogram of levels, a struct keeps 0: the counts of its leaves include the
            # struct's nulls.
            self.counts[node] = 0
            level += 1
        below = children(kind)
        for child in below:
            self.visit(child, above, level if is_struct else level + 1)
        if not below and not is_struct:
            self._settle(next(self._leaves, None), node, above, level)

    def _settle(
        self, leaf: _Leaf | None, node: int, path: tuple[_Nullable, ...], level: int
    ) -> None:
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


# Bounds of the values of a column in a row group.


def bounds_of(
    footer: ParquetFooter, blocks: Sequence[int], names: Sequence[str]
) -> list[Mapping[str, ColumnBounds]]:
    """Return, for each of these blocks, the bounds of the columns with these dotted names. Columns
    of lists, and columns with ambiguous names, are left out.
    """
    schema, wanted = footer.metadata.schema, set(names)
    places: dict[str, list[int]] = {}
    for at in range(len(schema)):
        path = schema.column(at).path
        if path in wanted:
            places.setdefault(path, []).append(at)
    plain = {
        name: leaves[0]
        for name, leaves in places.items()
        if len(leaves) == 1 and not schema.column(leaves[0]).max_repetition_level
    }
    groups = [footer.metadata.row_group(footer.groups[block]) for block in blocks]
    return [
        {name: _bounds(group.column(at), group.num_rows) for name, at in plain.items()}
        for group in groups
    ]


def _bounds(column: pq.ColumnChunkMetaData, rows: int) -> ColumnBounds:
    statistics = column.statistics
    if statistics is None:
        return ColumnBounds(rows)
    nulls = statistics.null_count if statistics.has_null_count else None
    try:
        ends = (statistics.min, statistics.max) if statistics.has_min_max else (None, None)
    except (ValueError, OverflowError):  # Python has no type for nanoseconds, for example
        ends = None, None
    lowest, highest = ends
    if lowest is None or highest is None or lowest != lowest or highest != highest:  # noqa: PLR0124
        return ColumnBounds(rows, nulls)
    # Bounds of floats do not cover NaN, which writers ignore. Bounds of texts and bytes are not
    # exact, since writers may shorten long values.
    is_float = isinstance(lowest, float)
    is_exact = not isinstance(lowest, str | bytes)
    return ColumnBounds(rows, nulls, lowest, highest, is_exact, is_float)
