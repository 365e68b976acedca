"""A table of 40 columns, as click logs and sensor readings are: measurements, prices, shares,
categories, times and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataplane_bench.model import ColumnType, WorkloadColumn
from dataplane_bench.workloads.recipe import Recipe, shards

_CATEGORY_COUNTS = (2, 10, 100, 1_000, 10_000, 100_000)
_TIME_START_MS, _TIME_SPAN_MS = 1_700_000_000_000, 90 * 24 * 3600 * 1000
_GROUP_ROWS = 65_536
_DTYPES = (
    *((f"f{index:02d}", "float32") for index in range(29)),
    *((f"f{index:02d}", "float64") for index in range(29, 31)),
    *((f"i{index:02d}", "int32") for index in range(6)),
    *((f"i{index:02d}", "int64") for index in range(6, 8)),
)
_OF_FEW_VALUES = [*(f"f{index:02d}" for index in range(24, 29)), *(f"i{i:02d}" for i in range(5))]
"""Columns that are worth a dictionary in Parquet."""


def _write(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    for path, ids in shards(folder, count):
        columns = {"id": ids}
        for (name, dtype), values in zip(_DTYPES, _columns(random, len(ids)), strict=True):
            columns[name] = values.astype(dtype)
        pq.write_table(
            pa.table(columns),
            path,
            row_group_size=_GROUP_ROWS,
            compression="snappy",
            use_dictionary=_OF_FEW_VALUES,
        )


def _columns(random: np.random.Generator, count: int) -> Iterator[NDArray[Any]]:
    """In the order of _DTYPES.   Shapes:  result: [count] each."""
    for index in range(16):  # measurements
        yield random.standard_normal(count, np.float32) * np.float32(10.0 ** (index % 4))
    for _ in range(8):  # prices, in cents
        yield np.round(np.exp(random.normal(3.0, 1.0, count)), 2)
    for _ in range(5):  # shares
        yield np.round(random.random(count, np.float32), 3)
    for edge in (90.0, 180.0):  # latitude, longitude
        yield random.uniform(-edge, edge, count)
    for categories in _CATEGORY_COUNTS:
        yield random.random(count) ** 2 * categories
    yield _TIME_START_MS + np.sort(random.integers(0, _TIME_SPAN_MS, count))
    yield random.integers(0, 1 << 62, count)


RECIPE = Recipe(
    name="tabular",
    version=1,
    columns=(
        WorkloadColumn("id", ColumnType.FIXED, "int64"),
        *(WorkloadColumn(name, ColumnType.FIXED, dtype) for name, dtype in _DTYPES),
    ),
    sample_count=1_000_000,
    batch_size=8192,
    step_ms=5.0,
    write=_write,
    s3_scale=10,
)
