"""Rows whose images cannot be decoded, or at which a collate function fails, and the rows that
replace them.

1. A row is replaced by another row of its block, so that no other block is read, and by the same
   row on all nodes: docs/order.md specifies which.
2. A row that was removed from the job replaces no other row.
3. A decoded image is not decoded again because other images of the slab cannot be decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dataplane.base.units import clipped
from dataplane.model.changes import ReplacedRow
from dataplane.model.errors import DataplaneError, FunctionError, ImageError
from dataplane.model.joined import KEY
from dataplane.plan.tombstones import substitute, substitute_key
from dataplane.rpc.tasks import Assemble, Origin
from dataplane.worker.apart import OpenBlock
from dataplane.worker.collating import FaultOf
from dataplane.worker.columns import RowIndex, by_block
from dataplane.worker.gather import Gathered, Gathers
from dataplane.worker.rows import TriedImages

Check = Callable[[OpenBlock, int], DataplaneError | None]
"""Returns the error of this row of a block; None if it is good."""
_REASON_MAX = 300


class ReplacingGather:
    """The rows that another object gathers, with other rows in place of those whose images cannot
    be decoded. `told` gets the replaced rows, by shard and row.

    Shapes:  row_index: int32[rows, 2].
    """

    def __init__(
        self,
        body: Assemble,
        blocks: Sequence[OpenBlock],
        row_index: RowIndex,
        gather: Callable[[RowIndex, TriedImages], Gathers],
        check: Check,
        told: dict[tuple[str, int], ReplacedRow],
    ) -> None:
        assert body.render is not None
        self._seed, self._unfit = body.render.seed, rows_taken_out(body)
        self._blocks, self._gather, self._check, self._told = blocks, gather, check, told
        # Copy the index: it lies in memory that the trainer can write to.
        self._index = np.array(row_index, np.int32, order="C")

    def into(self, slab: memoryview, expect: Callable[[int], None] | None = None) -> Gathered:
        """Implement `Gathers.into`.

        Raises:  ImageError: a block has no row that can be decoded, or is not in memory as a whole.
        """
        tried = TriedImages()
        while True:
            made = self._gather(self._index, tried).into(slab, expect)
            if not tried.faults:
                return made
            before = self._index
            self._index, told = with_replaced(
                self._seed, self._blocks, before, tried.faults, self._unfit, self._check
            )
            self._told.update(((one.url, one.row), one) for one in told)
            tried.begin_again(before[:, 1])


def stand_ins(
    body: Assemble,
    blocks: Sequence[OpenBlock],
    told: dict[tuple[str, int], ReplacedRow],
    row_index: RowIndex,
    faults: Mapping[int, FunctionError],
    fault_of: FaultOf,
) -> RowIndex:
    """Implement `collating.StandIns`; `told` gets the replaced rows, by shard and row."""
    assert body.collate is not None
    numbers = {id(block): at for at, block in enumerate(blocks)}

    def check(block: OpenBlock, row: int) -> FunctionError | None:
        return fault_of(np.array([(numbers[id(block)], row)], np.int32))

    unfit = rows_taken_out(body)
    index, rows = with_replaced(body.collate.seed, blocks, row_index, faults, unfit, check)
    told.update(((row.url, row.row), row) for row in rows)
    return index


def with_replaced(
    seed: int,
    blocks: Sequence[OpenBlock],
    row_index: RowIndex,
    faults: Mapping[int, DataplaneError],
    unfit: Sequence[set[int]],
    check: Check,
) -> tuple[RowIndex, list[ReplacedRow]]:
    """Replace the rows with faults in the row index; return the new index, and the replaced rows.
    `unfit` rows of each block cannot take the place of others; rows that prove unfit are added.

    Shapes:  row_index, result: int32[rows, 2].
    Raises:  as the faults: a block has no good row, or is not in memory as a whole.
    """
    found, told = row_index.copy(), list[ReplacedRow]()
    bad = np.array(sorted(faults), np.int64)
    for at, rows, places in by_block(row_index[bad]):
        block = blocks[at]
        faulty = dict(zip(rows.tolist(), bad[places].tolist(), strict=True))
        unfit[at].update(faulty)
        for row, place in faulty.items():
            fault = faults[place]
            instead = _stand_in(block, row, fault, unfit[at], seed, check)
            found[(row_index == (at, row)).all(axis=1), 1] = instead
            told.append(_told(block.origin, row, instead, fault))
    return found, told


def _stand_in(
    block: OpenBlock, row: int, fault: DataplaneError, unfit: set[int], seed: int, check: Check
) -> int:
    """Return the row that replaces this one. `unfit` rows cannot take its place; rows that prove
    unfit are added.
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
    done = "be decoded" if isinstance(fault, ImageError) else "take it"
    raise _failed(fault, f"none of the {block.columns.rows} rows of its block can {done}")


def _failed(fault: DataplaneError, why: str) -> DataplaneError:
    return type(fault)(f"{fault}; no other row can take its place: {why}", **fault.nouns)


def rows_taken_out(body: Assemble) -> list[set[int]]:
    """Return the removed rows of each block of the task."""
    if not body.taken_out_counts:
        return [set() for _ in body.block_keys]
    rows = iter(one.row for one in body.taken_out)
    return [set(itertools.islice(rows, count)) for count in body.taken_out_counts]


def _told(origin: Origin | None, row: int, instead: int, fault: DataplaneError) -> ReplacedRow:
    assert origin is not None
    first, reason = origin.first_row, str(fault.nouns.get("reason", fault)).partition("\n")[0]
    column = f"column {fault.nouns['column']!r}: " if "column" in fault.nouns else ""
    key = fault.nouns.get("key")
    named = f"{KEY} {key!r}: {column}" if key else column
    return ReplacedRow(
        origin.url, origin.shard, first + row, first + instead,
        clipped(f"{named}{reason}", _REASON_MAX),
    )  # fmt: skip
