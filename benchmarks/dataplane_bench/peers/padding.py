"""Lists of different lengths as one padded batch, for loaders that have no padding of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def padded(rows: Sequence[NDArray[Any]]) -> tuple[Any, Any]:
    """One tensor of these rows, each padded with 0, and their lengths.

    Shapes:  rows: [T_i] of one dtype, at least one.
             result: dtype[B, max(T_i)] and int64[B], torch tensors.
    """
    import torch

    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    whole = np.zeros((len(rows), int(lengths.max())), rows[0].dtype)
    for index, row in enumerate(rows):
        whole[index, : len(row)] = row
    return torch.from_numpy(whole), torch.from_numpy(lengths)
