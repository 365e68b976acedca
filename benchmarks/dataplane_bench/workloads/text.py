"""Texts as lists of tokens of very different lengths, with a label each."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataplane_bench.model import ColumnType, WorkloadColumn
from dataplane_bench.workloads.recipe import Recipe, shards

LENGTH_MEAN = 200
LENGTH_MAX = 2048
LABEL_COUNT = 20
VOCABULARY = 50_000
_SIGMA = 0.8
"""Of the lengths' logarithms: half of the texts are shorter than 145 tokens, one in 20 has 540."""
_GROUP_ROWS = 2048


def _write(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    mean_of_log = math.log(LENGTH_MEAN) - _SIGMA**2 / 2
    for path, ids in shards(folder, count):
        lengths = np.exp(random.normal(mean_of_log, _SIGMA, len(ids))).astype(np.int32)
        offsets = np.zeros(len(ids) + 1, np.int32)
        np.cumsum(np.clip(lengths, 1, LENGTH_MAX), out=offsets[1:])
        # Few tokens are frequent and most are rare, as in any language.
        tokens = (random.random(offsets[-1], np.float32) ** 3 * VOCABULARY).astype(np.int32)
        labels = random.integers(0, LABEL_COUNT, len(ids), dtype=np.int32)
        table = pa.table(
            {
                "id": pa.array(ids),
                "label": pa.array(labels),
                "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
            }
        )
        pq.write_table(table, path, row_group_size=_GROUP_ROWS)


RECIPE = Recipe(
    name="text",
    version=1,
    columns=(
        WorkloadColumn("id", ColumnType.FIXED, "int64"),
        WorkloadColumn("label", ColumnType.FIXED, "int32"),
        WorkloadColumn("tokens", ColumnType.RAGGED, "int32"),
    ),
    sample_count=100_000,
    batch_size=64,
    step_ms=5.0,
    write=_write,
    s3_scale=20,
)
