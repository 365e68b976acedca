"""Read the bounds of column values in a row group from a Parquet footer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow.parquet as pq

from dataplane.formats.base import ColumnBounds
from dataplane.formats.parquet_footers import ParquetFooter


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
        name: found[0]
        for name, found in places.items()
        if len(found) == 1 and not schema.column(found[0]).max_repetition_level
    }
    groups = [footer.metadata.row_group(footer.groups[block]) for block in blocks]
    return [
        {name: _bounds(group.column(at), group.num_rows) for name, at in plain.items()}
        for group in groups
    ]


def _bounds(column: pq.ColumnChunkMetaData, rows: int) -> ColumnBounds:
    told = column.statistics
    if told is None:
        return ColumnBounds(rows)
    nulls = told.null_count if told.has_null_count else None
    try:
        ends = (told.min, told.max) if told.has_min_max else (None, None)
    except (ValueError, OverflowError):  # nanoseconds, for one, have no type in Python
        ends = None, None
    lowest, highest = ends
    if lowest is None or highest is None or lowest != lowest or highest != highest:  # noqa: PLR0124
        return ColumnBounds(rows, nulls)
    # Writers may cut long texts, and leave out NaN.
    is_float = isinstance(lowest, float)
    is_exact = not isinstance(lowest, str | bytes)
    return ColumnBounds(rows, nulls, lowest, highest, is_exact, is_float)
