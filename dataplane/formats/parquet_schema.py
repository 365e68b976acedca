"""The tree of a Parquet schema: which Parquet columns (its leaves) make up each top-level column.

Source:  https://github.com/apache/parquet-format (SchemaElement in parquet.thrift)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from dataplane.formats.parquet_facts import CHILDREN, LENGTH, REPETITION, TYPE, Int64

_DEPTH_MAX = 256
_REQUIRED = 0
# Bytes of a decoded value, by physical type: BOOLEAN, INT32, INT64, INT96, FLOAT, DOUBLE and
# BYTE_ARRAY. The schema has the size of a FIXED_LEN_BYTE_ARRAY.
_WIDTHS = np.array([1, 4, 8, 8, 4, 8, 0])


class SchemaTree(Struct, frozen=True, eq=False):
    """For each leaf: the bytes of a decoded value (0 if they vary), and the definition level of a
    value. For each top-level column: its first leaf, and the one after its last.

    Shapes:  widths, level_max: int64[leaves].   first, last: int64[top-level columns].
    """

    widths: Int64
    level_max: Int64
    first: Int64
    last: Int64


def schema_tree(elements: Int64) -> SchemaTree:
    """Build the tree from FooterFacts.elements.

    Raises:  ValueError: it is empty, or too deep.
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
    found: list[list[int]] = []
    leaf, open_groups = 0, [children[0]]
    for count in children[1:]:
        if len(open_groups) == 1:
            found.append([leaf, leaf])
        open_groups[-1] -= 1
        if count:
            open_groups.append(count)
        else:
            leaf += 1
            found[-1][1] = leaf
        while len(open_groups) > 1 and open_groups[-1] == 0:
            open_groups.pop()
    return found


def _level_maxima(children: Sequence[int], repetitions: Sequence[int]) -> list[int]:
    """Return the highest definition level of each leaf: the number of nullable groups above it,
    plus one if the leaf is nullable itself.
    """
    found = []
    open_groups: list[tuple[int, int]] = []  # children left, and the level inside
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
            found.append(level)
    return found
