"""Predict the decoded sizes of blocks from those decoded so far. Pure.

The index errs on the large side, by a quarter for much Parquet, and by much more for compressed
text. Memory reserved in vain is of no use to others either: the gap that a block leaves when it
turns out shorter is too short for the next one.

Invariants:
1. The predicted share of the indexed size is the largest share so far, and slightly more if shares
   differ, but at most 1. So one odd block does not make others seem too large for the arena.
2. A block that is larger than predicted is decoded twice. Since shares then differ more, this
   becomes ever less likely: only a few blocks are decoded twice, however many there are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

_Ints = npt.NDArray[np.int64]

_SPREAD_PARTS = 8
_MARGIN_BYTES = 64


class DecodedParts(Struct, eq=False):
    """The smallest and the largest ratio of decoded to indexed size among the blocks of a dataset:
    0 if none was decoded.
    """

    smallest: float = 0.0
    largest: float = 0.0

    def seen(self, indexed: int, decoded: int) -> None:
        """Note the size of a decoded block."""
        part = decoded / max(indexed, 1)
        self.smallest = min(self.smallest or part, part)
        self.largest = max(self.largest, part)

    def expected(self, indexed: int) -> int:
        """Predict the bytes of a block that was not decoded yet; 0 if it needs no decoding."""
        return min(indexed, int(indexed * self._likely) + _MARGIN_BYTES)

    def all_expected(self, indexed: _Ints) -> _Ints:
        """Predict the bytes of many blocks.

        Shapes:  indexed, result: int64[n].
        """
        return np.minimum(indexed, (indexed * self._likely).astype(np.int64) + _MARGIN_BYTES)

    @property
    def _likely(self) -> float:
        """Return the largest ratio that a block is likely to have."""
        if not self.largest:
            return 1.0
        return self.largest + (self.largest - self.smallest) / _SPREAD_PARTS
