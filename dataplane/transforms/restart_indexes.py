"""Compute where the restart indexes of images are stored. Pure.

The worker that first crops an image records, in memory beside the image's block, where in its bytes
later crops can start decoding (transforms/csrc/restart_index.c). All workers record the same marks,
so they share the memory without locks; the count of marks is written last.

The restart indexes of a block take a fixed share of its size. Each image gets the same share of
them as of the block's bytes, so its place is computed from the place of its bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

PARTS = 16
"""The size of a block divided by that of its restart indexes. For photographs of 500 x 375 pixels
and 50 KB or more, this leaves room for a mark about every 32 pixels; more marks gain nothing."""
_ALIGN_BYTES = 8


def restart_index_bytes(block_bytes: int) -> int:
    """Return the size of the restart indexes of a block."""
    return -(-block_bytes // PARTS)


def places(regions: Ints, blocks: Ints, starts: Ints, lengths: Ints) -> Ints:
    """Return address and length of each image's restart index; 0 and 0 for images without one.

    Shapes:  regions: int64[blocks, 2], address and length of each block's restart indexes.
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
