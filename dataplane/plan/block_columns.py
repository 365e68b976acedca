"""Numbers of the blocks of a manifest, as columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane.errors import ConfigError

Int64 = NDArray[np.int64]


def scaled(decoded: Int64, rows: Int64, stored: Int64) -> Int64:
    """The size of some rows of each block, if all that are stored have this size.

    Shapes:  decoded: int64[K], bytes.   rows, stored: int64[K].   result: int64[K], bytes.
    """
    return np.ceil(decoded * (rows / stored)).astype(np.int64)


def block_column(values: NDArray[Any], dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """One column of a manifest's blocks, read-only.

    Raises:  ConfigError: it is not one array of numbers that can be in it; names the column.
    """
    values = np.asarray(values)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ConfigError(f"{name} must be one array of whole numbers", field=name)
    if len(values) and (values.min() < 0 or values.max() > np.iinfo(dtype).max):
        raise ConfigError(f"{name} has a number that is negative or too large", field=name)
    column = np.ascontiguousarray(values, dtype).view()
    column.flags.writeable = False
    return column
