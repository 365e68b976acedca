"""How large blocks are once decoded, as expected from those that were. Pure.

The index errs on the large side, of Parquet often by a quarter, of compressed text by much more.
Memory that is reserved in vain is of no use to others either: the gap that a block leaves when it
turns out shorter is too short for the next one.

Invariants:
1. A block is expected to become at most as large a part of what the index expects as the largest
   one so far, and a bit more if parts differ, but never more than the index expects: one odd block
   does not make others seem too large for the arena.
2. A block that is larger than expected is decoded twice. That the parts then differ more makes it
   ever less likely, so only a few are, however many blocks there are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

_Ints = npt.NDArray[np.int64]

_SPREAD_PARTS = 8
_MARGIN_BYTES = 64


class DecodedParts(Struct, eq=False):
    """The smallest and the largest part of what the index expects that blocks of a dataset have
    become: 0 if none was decoded.
    """

    smallest: float = 0.0
    largest: float = 0.0

    def seen(self, indexed: int, decoded: int) -> None:
        """A block was decoded."""
        part = decoded / max(indexed, 1)
        self.smallest = min(self.smallest or part, part)
        self.largest = max(self.largest, part)

    def expected(self, indexed: int) -> int:
        """The bytes of a block that was not decoded yet; 0 if it needs no decoding."""
        return min(indexed, int(indexed * self._likely) + _MARGIN_BYTES)

    def all_expected(self, indexed: _Ints) -> _Ints:
        """As `expected`, of many blocks.

        Shapes:  indexed, result: int64[n].
        """
        return np.minimum(indexed, (indexed * self._likely).astype(np.int64) + _MARGIN_BYTES)

    @property
    def _likely(self) -> float:
        """The largest part that a block is likely to become."""
        if not self.largest:
            return 1.0
        return self.largest + (self.largest - self.smallest) / _SPREAD_PARTS
