"""Add a column that names the source of each sample in a slab of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from dataplane.arena.slab_layout import ALIGN_BYTES
from dataplane.rpc.messages import Batch, Column
from dataplane.worker.columns import RowIndex
from dataplane.worker.gather import Gathered

_DTYPE = np.dtype(np.int32)


class Gathers(Protocol):
    """The interface that assembles a slab."""

    def into(self, slab: memoryview, expect: Callable[[int], None] | None = None, /) -> Gathered:
        """Write as many whole batches as fit; `expect` is called first, with the number of
        bytes.
        """


class NamedSources:
    """The columns that another object gathers, followed by a column of int32 with the source of
    each row's block. Only the rows `part` are written.

    Shapes:  sources: one for each block.   row_index: int32[rows, 2], (index of the block, row).
    """

    def __init__(
        self,
        gather: Gathers,
        sources: Sequence[int],
        row_index: RowIndex,
        batches: Sequence[Batch],
        part: slice = slice(None),
    ) -> None:
        self._gather, self._part = gather, part
        self._values = np.array(sources, _DTYPE)[row_index[:, 0]]
        self._ends = np.cumsum([0, *(batch.rows for batch in batches)]) * _DTYPE.itemsize

    def into(self, slab: memoryview, expect: Callable[[int], None] | None = None) -> Gathered:
        """Implement `Gathers.into`."""
        own = ALIGN_BYTES + int(self._ends[-1])
        made = self._gather.into(slab[: max(len(slab) - own, 0)], expect)
        if not made.batch_count:
            return replace(made, bytes_needed=made.bytes_needed + own)
        begin = -(-made.bytes_used // ALIGN_BYTES) * ALIGN_BYTES
        length = int(self._ends[made.batch_count])
        if expect is not None:
            expect(begin + length)
        values = self._values[: length // _DTYPE.itemsize]
        np.frombuffer(slab[begin : begin + length], _DTYPE)[self._part] = values[self._part]
        column = Column(tuple((begin + self._ends[: made.batch_count]).tolist()), (), ())
        return replace(made, bytes_used=begin + length, columns=(*made.columns, column))
