"""The random numbers of image steps: pure, and the same on every machine.

Every number comes from a key that depends only on the seed, the epoch, the sample, the column and
the step: not on ranks, workers or batches. docs/images.md documents it. Each step's file in steps/
documents how the step uses its numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataplane.plan.permute import Words, extended, sample_keys

Floats = NDArray[np.float64]


def draw_keys(
    column: str,
    step: str,
    seed: int,
    epoch: int,
    shards: NDArray[np.integer],
    rows: NDArray[np.integer],
) -> Words:
    """Return the key of each sample for a step of a column, such as "jpg/RandomResizedCrop".

    Shapes:  shards, rows: integer[n], the sample ids.   result: uint64[n].
    """
    return sample_keys(seed, epoch, shards, rows, f"{column}/{step}")


def uniform(keys: Words, count: int) -> Floats:
    """Draw `count` numbers in [0, 1) for each key: number i comes from the key extended by i.

    Shapes:  keys: uint64[n].   result: float64[n, count].
    """
    places = np.broadcast_to(np.arange(count), (len(keys), count))
    return (extended(keys[:, None], places) >> np.uint64(11)).astype(np.float64) * 2.0**-53
