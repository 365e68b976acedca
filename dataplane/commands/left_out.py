"""What `trace`, `where` and `replay` know of the steps and rows that are left out of a job."""

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
    """Of one job."""

    def __init__(self, job: Traced) -> None:
        self._job, self._ledger = job, job.ledger
        self._substitutes = functools.lru_cache(maxsize=16)(self._made)

    def changes(self, epoch: int, position: int) -> Changes:
        """What is left out, as the launch knows it that read this position last, or will."""
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
        """Which rows stand in the places of those that were taken out; None if none were."""
        return self._substitutes(changes.tombstones).of if changes.tombstones else None

    def documents(self, changes: Changes, block: int) -> tuple[TakenDocument, ...]:
        """The documents that were taken out of a block, as the order numbers it, if samples are
        packs.
        """
        return self._substitutes(changes.tombstones).documents(block)

    def taken_rows(self, block: int) -> tuple[int, ...]:
        """The rows of a block, as the order numbers it, that were taken out of it at any time."""
        ledger = self._ledger
        if ledger is None:
            return ()
        entries = in_force(ledger.entries, ledger.spec, dataset_of(ledger.spec, ledger.dataset))
        return self._substitutes(changes_of(entries).tombstones).gone.get(block, ())

    def given(self, epoch: int, position: int, block: int, stood: int) -> int:
        """The row of a block, as the order numbers it, that is given where this one stood."""
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
