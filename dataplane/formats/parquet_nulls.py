"""The nulls of a Parquet shard, as far as its footer tells.

The footer counts, for each column of each row group, the entries without a value. Where there are
no lists these are the nulls. A list that is empty or null is an entry without a value, too, so that
of lists only a count of 0 says anything, unless the writer added the histogram of definition levels
(most have since 2024), which tells exactly what is null: the list or its item.

Source:  https://github.com/apache/parquet-format (Statistics and SizeStatistics in parquet.thrift)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dataplane.formats.nulls import children
from dataplane.formats.thrift import Shape
from dataplane.plan.null_counts import NEVER, UNKNOWN

# Of what a column's pages hold: its statistics' count of nulls, and its histogram of levels.
NULL_COUNT: Shape = {3: None}
HISTOGRAM: Shape = {3: None}
_REQUIRED = 0


@dataclass(slots=True)
class _Leaf:
    """One Parquet column. `level_max` is the definition level of a value. `empty` counts the
    entries without one, in all row groups; `levels` the entries of each level. None is what the
    footer does not tell.
    """

    level_max: int
    empty: int | None
    levels: list[int] | None


@dataclass(frozen=True, slots=True)
class _Nullable:
    """A field node that may be null, and the definition level of an entry where it is."""

    node: int
    null_level: int
    is_struct: bool


class NullCounter:
    """Adds up what the row groups of one footer tell. `elements` are the schema's: groups come
    before their children.
    """

    def __init__(self, elements: Sequence[dict[int, Any]]) -> None:
        self._leaves = [_Leaf(most, 0, [0] * (most + 1)) for most in _level_maxima(elements)]

    def add(self, columns: Sequence[dict[int, Any]]) -> None:
        """What one row group tells of its columns. Numbers that cannot be are not believed."""
        for leaf, column in zip(self._leaves, columns, strict=True):
            facts = column[3]
            entries = facts[5]
            empty = facts.get(12, {}).get(3, -1)
            if leaf.empty is not None:
                leaf.empty = leaf.empty + empty if 0 <= empty <= entries else None
            if leaf.levels is not None:
                levels = facts.get(16, {}).get(3, ())
                is_whole = len(levels) == len(leaf.levels) and sum(levels) == entries
                leaf.levels = (
                    [a + b for a, b in zip(leaf.levels, levels, strict=True)]
                    if is_whole and min(levels) >= 0
                    else None
                )

    def counts(self, schema: pa.Schema) -> list[int]:
        """Of each field node of the shard's own Arrow schema: its nulls, UNKNOWN or NEVER."""
        walk = _Walk(self._leaves)
        for field in schema:
            walk.visit(field, (), 0)
        return walk.counts


class _Walk:
    """Along the Arrow schema and the Parquet columns together."""

    def __init__(self, leaves: Sequence[_Leaf]) -> None:
        self.counts: list[int] = []
        self._leaves = iter(leaves)

    def visit(self, field: pa.Field, above: tuple[_Nullable, ...], level: int) -> None:
        """`above` are the nullable nodes above this one; `level` is the definition level of an
        entry where all of them have values.
        """
        kind = field.type
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        node, is_struct = len(self.counts), pa.types.is_struct(kind)
        self.counts.append(NEVER)
        if field.nullable:
            above = (*above, _Nullable(node, level, is_struct))
            self.counts[node] = 0  # where only the leaves are told, a struct's nulls are theirs
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
        elif leaf.empty is not None and level == len(path):  # in no list
            self.counts[node] = leaf.empty
        else:
            for at in path:
                if not at.is_struct:
                    self.counts[at.node] = UNKNOWN
            self.counts[node] = UNKNOWN


def _level_maxima(elements: Sequence[dict[int, Any]]) -> list[int]:
    """The highest definition level of each Parquet column: how many groups on the way to it, and
    itself, may have no value.
    """
    found = []
    open_groups: list[tuple[int, int]] = []  # children to come, and the level within
    for at, element in enumerate(elements):
        while open_groups and open_groups[-1][0] == 0:
            open_groups.pop()
        level = 0
        if open_groups:
            left, level = open_groups[-1]
            open_groups[-1] = (left - 1, level)
        level += at > 0 and element.get(3, _REQUIRED) != _REQUIRED
        if element.get(5):
            open_groups.append((element[5], level))
        else:
            found.append(level)
    return found
