"""How much a mixture reads of each source, and from which position on.

A position is a place in one epoch; see docs/order.md. Shares are in units of 2**-32.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from msgspec import Meta, Struct

Unsigned = Annotated[int, Meta(ge=0)]
"""A number in a message, in which no smaller one is read."""
_Place = tuple[int, int]


class ScheduledShares(Struct, frozen=True):
    """Shares that a schedule gives in advance, from this step on. Steps count from the first one of
    the job, through all of its epochs.
    """

    step: Unsigned
    shares: tuple[Unsigned, ...]


class ShareChange(Struct, frozen=True):
    """From the first round on that begins at this position of an epoch or later, other shares."""

    epoch: Unsigned
    position: Unsigned
    shares: tuple[Unsigned, ...]

    @property
    def place(self) -> _Place:
        """Epoch and position."""
        return self.epoch, self.position


class MixHistory(Struct, frozen=True):
    """All shares of a job in order, past and planned ones, each with the place where it takes
    effect; the first takes effect at the start. `length` is that of an epoch in samples, 0 for
    none.
    """

    changes: tuple[ShareChange, ...]
    length: Unsigned = 0

    @property
    def digest(self) -> str:
        """16 hex digits over all of it."""
        return _digest(self.length, self.changes)

    def digest_at(self, epoch: int, position: int) -> str:
        """16 hex digits over what decides the samples from this place on, up to the next change."""
        return _digest(self.length, self.until(epoch, position))

    def until(self, epoch: int, position: int) -> tuple[ShareChange, ...]:
        """The changes up to this place, and there."""
        return tuple(change for change in self.changes if change.place <= (epoch, position))

    def between(self, epoch: int, begin: int, end: int) -> tuple[int, ...]:
        """The positions of an epoch behind `begin` and before `end` at which shares change."""
        return tuple(
            change.position
            for change in self.changes
            if change.epoch == epoch and begin < change.position < end
        )

    def last_change(self, epoch: int) -> int:
        """The last position of an epoch at which shares change; 0 if they stay the same."""
        return max((one.position for one in self.changes if one.epoch == epoch), default=0)


def _digest(length: int, changes: tuple[ShareChange, ...]) -> str:
    told = [length, [[change.epoch, change.position, *change.shares] for change in changes]]
    text = json.dumps(told, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
