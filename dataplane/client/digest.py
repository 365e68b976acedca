"""The digest of the rows that a run was given: one value, by which two runs are compared.

1. It depends only on the input of the plan: per epoch the range of positions, and everything that
   decides which rows stand there, in which global batches. The rows follow from these and are not
   computed, so a state costs the same after any number of steps.
2. It is the same on every rank and for any number of ranks, and does not depend on where a run was
   interrupted: a pass that continues another one extends its range.
3. Skipped positions are in no range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from dataplane.changes import NO_GAPS, Gaps
from dataplane.errors import ConfigError
from dataplane.units import whole

_HEX_DIGITS = 16


class RowsDigest(Struct, frozen=True):
    """The digest so far. `base` covers all ranges before the present one, the positions from
    `begin` to `end` of an epoch. `order` identifies everything that decides their rows. All three
    are 16 hex digits, or "".
    """

    order: str = ""
    epoch: int = 0
    begin: int = 0
    end: int = 0
    base: str = ""

    @property
    def value(self) -> str:
        """The digest: 16 hex digits, or "" if there were no steps."""
        if self.begin == self.end:
            return self.base
        text = f"{self.base}:{self.order}:{self.epoch}:{self.begin}:{self.end}"
        return hashlib.blake2b(text.encode(), digest_size=_HEX_DIGITS // 2).hexdigest()

    def continued(self, order: str, epoch: int, cursor: int) -> RowsDigest:
        """Return the digest of a pass that begins here."""
        if (self.order, self.epoch, self.end) == (order, epoch, cursor):
            return self
        return RowsDigest(order, epoch, cursor, cursor, self.value)

    def reached(self, cursor: int, gaps: Gaps = NO_GAPS) -> RowsDigest:
        """Return the digest when everything up to this cursor of the epoch, except `gaps`, is
        consumed.
        """
        found = self
        for begin, end in gaps.pieces(gaps.live(self.end), gaps.live(cursor)):
            found = found.continued(self.order, self.epoch, begin)
            found = structs.replace(found, end=end)
        return found

    def to_dict(self, epoch: int, cursor: int) -> dict[str, Any]:
        """Return the form for a state at this place: at the start of an epoch, the previous one is
        over.
        """
        at = self.continued(self.order, epoch, cursor)
        order = "" if at.begin == at.end else at.order
        return {"value": at.value, "order": order, "begin": at.begin, "base": at.base}

    @classmethod
    def from_dict(cls, saved: object, epoch: int, cursor: int) -> RowsDigest:
        """Invert `to_dict`.

        Raises:  ConfigError: it is no digest.
        """
        if isinstance(saved, Mapping):
            texts = [saved.get(name) for name in ("order", "base", "value")]
            begin = whole(saved.get("begin"))
            match texts:
                case [str(order), str(base), str(value)] if begin is not None:
                    found = cls(order, epoch, begin, cursor, base)
                    # In a state whose position was changed by hand, another range begins.
                    return found if found.value == value else cls("", epoch, cursor, cursor, value)
        raise ConfigError(f"this state is damaged: its digest is {saved!r:.160}", key="digest")
