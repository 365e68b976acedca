"""Rows whose images cannot be decoded, and the rows that are gathered in their places.

1. A row gets the place of another one only within its block, so that no other block is read, and
   the same one on all nodes: docs/order.md specifies which.
2. A row that was taken out of the job takes no place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from dataplane.changes import ReplacedRow
from dataplane.errors import ImageError
from dataplane.plan.tombstones import substitute, substitute_key
from dataplane.rpc.tasks import Assemble, Origin
from dataplane.worker.apart import OpenBlock
from dataplane.worker.columns import RowIndex, by_block

Check = Callable[[OpenBlock, int], ImageError | None]
"""What is wrong with the images of this row of a block; None if they can be decoded."""
_REASON_MAX = 300


def with_replaced(
    body: Assemble, blocks: Sequence[OpenBlock], row_index: RowIndex, check: Check
) -> tuple[RowIndex, tuple[ReplacedRow, ...]]:
    """The row index with other rows in the places of those whose images cannot be decoded, and
    which rows these are.

    Shapes:  row_index, result: int32[rows, 2].
    Raises:  ImageError: no row of a block can be decoded, or not all of them are in memory.
    """
    assert body.render is not None
    # A copy, since the trainer can write to the memory of the index.
    found = np.array(row_index, np.int32, order="C")
    told: list[ReplacedRow] = []
    taken_out = _rows_taken_out(body)
    for at, rows, places in by_block(found):
        block = blocks[at]
        faults = {row: check(block, row) for row in dict.fromkeys(rows.tolist())}
        bad = {row: fault for row, fault in faults.items() if fault is not None}
        if not bad:
            continue
        unfit = {*taken_out[at], *bad}
        stand_in = {
            row: _stand_in(block, row, fault, unfit, body.render.seed, check)
            for row, fault in bad.items()
        }
        found[places, 1] = [stand_in.get(row, row) for row in rows.tolist()]
        told += (_told(block.origin, row, stand_in[row], fault) for row, fault in bad.items())
    return found, tuple(told)


def _stand_in(
    block: OpenBlock, row: int, fault: ImageError, unfit: set[int], seed: int, check: Check
) -> int:
    """The row that is gathered in the place of this one. `unfit` rows are known not to be able to;
    more are added.
    """
    origin = block.origin
    assert origin is not None
    if block.numbers is not None:
        raise _failed(fault, "its block was too large to stay in memory with the other blocks of "
                      "the batch: raise block_arena_bytes")  # fmt: skip
    keyed = substitute_key(seed, origin.shard, origin.first_row + row)
    while len(unfit) < block.columns.rows:
        other = substitute(keyed, block.columns.rows, unfit)
        if check(block, other) is None:
            return other
        unfit.add(other)
    raise _failed(fault, f"none of the {block.columns.rows} rows of its block can be decoded")


def _failed(fault: ImageError, why: str) -> ImageError:
    return ImageError(f"{fault}; no other row can take its place: {why}", **fault.nouns)


def _rows_taken_out(body: Assemble) -> list[frozenset[int]]:
    """Those of each block of the task."""
    if not body.taken_out_counts:
        return [frozenset()] * len(body.block_keys)
    rows = iter(one.row for one in body.taken_out)
    return [frozenset(itertools.islice(rows, count)) for count in body.taken_out_counts]


def _told(origin: Origin | None, row: int, instead: int, fault: ImageError) -> ReplacedRow:
    assert origin is not None
    first, reason = origin.first_row, str(fault.nouns.get("reason", fault))
    column = fault.nouns.get("column", "")
    return ReplacedRow(
        origin.url, origin.shard, first + row, first + instead,
        f"column {column!r}: {reason}"[:_REASON_MAX],
    )  # fmt: skip
