"""The skipped steps and removed rows of a job, for `trace`, `where` and `replay`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from dataplane.changes import (
    Changes,
    TakenDocument,
    Tombstone,
    changes_at,
    changes_of,
    dataset_of,
    in_force,
)
from dataplane.ledger import LedgerPosition
from dataplane.plan.tombstones import Substitutes

if TYPE_CHECKING:
    from dataplane.commands.traced import Traced
    from dataplane.plan.trail import RowsFor

_NOTHING = Changes()


class LeftOut:
    """The skipped steps and removed rows of one job."""

    def __init__(self, job: Traced) -> None:
        self._job, self._ledger = job, job.ledger
        self._substitutes = functools.lru_cache(maxsize=16)(self._made)

    def changes(self, epoch: int, position: int) -> Changes:
        """Return the changes that apply to this position: those known to the launch that read it
        last, or that will read it.
        """
        ledger = self._ledger
        if ledger is None:
            return _NOTHING
        reached, place = (
            LedgerPosition(ledger.epoch, ledger.cursor),
            LedgerPosition(epoch, position),
        )
        dataset = dataset_of(ledger.spec, ledger.dataset)
        return changes_at(ledger.entries, ledger.spec, dataset, reached, place)

    def rows_for(self, changes: Changes) -> RowsFor | None:
        """Return the rows that replace removed ones; None if no rows were removed."""
        return self._substitutes(changes.tombstones).of if changes.tombstones else None

    def documents(self, changes: Changes, block: int) -> tuple[TakenDocument, ...]:
        """Return the documents that were removed from a block, numbered as in the order, if samples
        are packs.
        """
        return self._substitutes(changes.tombstones).documents(block)

    def taken_rows(self, block: int) -> tuple[int, ...]:
        """Return the rows that were removed from a block at any time; the block is numbered as in
        the order.
        """
        ledger = self._ledger
        if ledger is None:
            return ()
        entries = in_force(ledger.entries, ledger.spec, dataset_of(ledger.spec, ledger.dataset))
        return self._substitutes(changes_of(entries).tombstones).gone.get(block, ())

    def given(self, epoch: int, position: int, block: int, stood: int) -> int:
        """Return the row of a block that is delivered in the place of the row `stood`."""
        rows_for = self.rows_for(self.changes(epoch, position))
        if rows_for is None:
            return stood
        return int(rows_for(np.array([block]), np.array([stood]))[0])

    def is_skipped(self, epoch: int, position: int) -> bool:
        """Whether the job skips this position."""
        gaps = self.changes(epoch, position).gaps(epoch).ranges
        return any(begin <= position < end for begin, end in gaps)

    def _made(self, tombstones: tuple[Tombstone, ...]) -> Substitutes:
        manifests = [source.manifest for source in self._job.sources]
        return Substitutes(self._job.spec, manifests, tombstones)
