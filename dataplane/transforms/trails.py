"""Where the trails of images lie: memory beside a block in which whoever crops an image notes where
in its bytes other crops of it can start (transforms/csrc/trail.c). Pure.

A block's trails take a part of what the block takes, and each image has its own part of them: the
part that it has of the block's bytes. So whoever has opened the block knows where it is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

PARTS = 16
"""There is room for a mark about every 32 pixels of each row of MCUs, which gains all there is to
gain, from 50 KB on for a photograph of 500 x 375 pixels; smaller ones have fewer marks."""
_ALIGN_BYTES = 8


def trail_bytes(block_bytes: int) -> int:
    """What the trails of a block take."""
    return -(-block_bytes // PARTS)


def places(regions: Ints, blocks: Ints, starts: Ints, lengths: Ints) -> Ints:
    """Address and length of the trail of each image; 0 and 0 where it has none.

    Shapes:  regions: int64[blocks, 2], address and length of each block's trails.
             blocks, starts, lengths: int64[n], the block of an image, where it starts among the
             bytes of that block, and its size.   result: int64[n, 2].
    """
    step = PARTS * _ALIGN_BYTES
    first = -(-starts // step) * _ALIGN_BYTES
    size = np.maximum((starts + lengths) // step * _ALIGN_BYTES - first, 0)
    address, room = regions[blocks].T
    found = np.stack([address + first, size], axis=1)
    found[(address == 0) | (first + size > room)] = 0
    return found
