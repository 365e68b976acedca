"""What `trace`, `where` and `replay` know of the steps and rows that are left out of a job."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from dataplane.changes import Changes, Tombstone, changes_at, changes_of, in_force, layout_of
from dataplane.ledger import LedgerPosition
from dataplane.plan.tombstones import Substitutes

if TYPE_CHECKING:
    from collections.abc import Callable

    from dataplane.commands.traced import Traced
    from dataplane.plan.trail import Place, RowsFor

    BlockNames = Callable[[int], int]

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
        layout = layout_of(ledger.spec, ledger.dataset)
        return changes_at(ledger.entries, ledger.spec, layout, reached, place)

    def rows_for(self, changes: Changes) -> RowsFor | None:
        """Which rows stand in the places of those that were taken out; None if none were."""
        return self._substitutes(changes.tombstones).of if changes.tombstones else None

    def taken_rows(self, block: int) -> tuple[int, ...]:
        """The rows of a block, as the order numbers it, that were taken out of it at any time."""
        ledger = self._ledger
        if ledger is None:
            return ()
        entries = in_force(ledger.entries, ledger.spec, layout_of(ledger.spec, ledger.dataset))
        return self._substitutes(changes_of(entries).tombstones).gone.get(block, ())

    def about(
        self, epoch: int, place: Place, block: int, stood: int, row: int, names: BlockNames
    ) -> dict[str, object] | None:
        """What is said of a row of a block, as the order numbers it, at the place of another one,
        `stood`, or at its own; None if it does not stand there. `names` says what they are called.
        """
        changes = self.changes(epoch, place.position)
        rows_for, given = self.rows_for(changes), stood
        if rows_for is not None:
            given = int(rows_for(np.array([block]), np.array([stood]))[0])
        if row not in (stood, given):
            return None
        gaps = changes.gaps(epoch).ranges
        return {
            "is_skipped": any(begin <= place.position < end for begin, end in gaps),
            "instead_of": None if stood == row else names(stood),
            "taken_out_for": None if given == row else names(given),
        }

    def _made(self, tombstones: tuple[Tombstone, ...]) -> Substitutes:
        manifests = [source.manifest for source in self._job.sources]
        return Substitutes(self._job.spec, manifests, tombstones)
