"""A sample's columns as byte strings, for formats whose records are bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataplane_bench.model import ColumnType, WorkloadColumn


def encoded(column: WorkloadColumn, value: Any) -> bytes:
    """One value: an image as it is, text in UTF-8, numbers as they lie in memory."""
    match column.kind:
        case ColumnType.IMAGE:
            return bytes(value)
        case ColumnType.STRING:
            return str(value).encode()
        case _:
            return np.asarray(value, column.dtype).tobytes()
