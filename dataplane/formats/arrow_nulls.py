"""The null counts of an Arrow IPC shard: each record batch states the count of each of its arrays.

Values below a null are undefined and may count as null or not. So if a list column has nulls, the
number of nulls among its items is unknown. The same holds for items of list views, since some of
their values may belong to no list.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dataplane.formats import nulls
from dataplane.formats.flatbuf import DICTIONARY, RECORDS, Head
from dataplane.plan.null_counts import NEVER, UNKNOWN

_LIST_VIEWS = frozenset({pa.list_view(pa.null()).id, pa.large_list_view(pa.null()).id})


def null_counts(schema: pa.Schema, heads: Sequence[Head]) -> array[int]:
    """Return the null count of each field node of the shard's own schema, UNKNOWN, or NEVER."""
    declared = np.array(nulls.declared(schema, otherwise=0), np.int64)
    totals = np.zeros(len(declared), np.int64)
    for head in heads:
        if head.kind == RECORDS:
            if not _is_possible(head, len(totals)):
                return array("q", nulls.declared(schema))
            totals += np.array(head.nulls, np.int64)
    counts = np.where(totals > 0, totals, declared).tolist()
    if nulls.is_flat(schema):
        return array("q", counts)
    # A dictionary may hold nulls that its indices do not show.
    of_values = any(head.kind == DICTIONARY and any(head.nulls) for head in heads)
    _settle(schema, counts, 0, of_values=of_values)
    return array("q", counts)


def _is_possible(head: Head, node_count: int) -> bool:
    found, lengths = np.array(head.nulls, np.int64), np.array(head.nodes, np.int64)
    return len(found) == node_count and bool(((found >= 0) & (found <= lengths)).all())


def _settle(
    fields: Sequence[pa.Field] | pa.Schema,
    counts: list[int],
    at: int,
    *,
    of_values: bool,
    below_null: bool = False,
    in_list: bool = False,
) -> int:
    """Replace counts that mean nothing by UNKNOWN; return the index of the node after
    these fields.
    """
    for field in fields:
        node, at = at, at + 1
        is_struct = pa.types.is_struct(field.type)
        if in_list and below_null and counts[node] > 0:
            counts[node] = UNKNOWN
        if of_values and counts[node] == 0 and pa.types.is_dictionary(field.type):
            counts[node] = UNKNOWN
        at = _settle(
            nulls.children(field.type),
            counts,
            at,
            of_values=of_values,
            below_null=below_null or counts[node] not in {0, NEVER} or field.type.id in _LIST_VIEWS,
            in_list=in_list or not is_struct,
        )
    return at
