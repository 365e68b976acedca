"""Documents of the web as lists of tokens, to be packed into rows of one length."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataplane_bench.model import BatchKind, ColumnType, WorkloadColumn
from dataplane_bench.workloads.recipe import Recipe, shards

LENGTH_MEAN = 616
PACK_LENGTH = 2048
_SIGMA = 1.0
"""Of the lengths' logarithms: half of the documents are shorter than 374 tokens, and one in 22 is
longer than a pack."""
VOCABULARY = 50_000
_GROUP_ROWS = 2048


def _write(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    mean_of_log = math.log(LENGTH_MEAN) - _SIGMA**2 / 2
    for path, ids in shards(folder, count):
        lengths = np.exp(random.normal(mean_of_log, _SIGMA, len(ids))).astype(np.int32)
        offsets = np.zeros(len(ids) + 1, np.int32)
        np.cumsum(np.maximum(lengths, 1), out=offsets[1:])
        # 0 is left to padding.
        tokens = random.integers(1, VOCABULARY, offsets[-1], dtype=np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
        table = pa.table({"id": pa.array(ids), "tokens": lists})
        pq.write_table(table, path, row_group_size=_GROUP_ROWS, compression="NONE")


RECIPE = Recipe(
    name="packed",
    version=1,
    columns=(
        WorkloadColumn("id", ColumnType.FIXED, "int64"),
        WorkloadColumn("tokens", ColumnType.RAGGED, "int32"),
    ),
    sample_count=131_072,
    batch_size=32,
    step_ms=2.0,
    write=_write,
    delivery=BatchKind.PACKED,
    length=PACK_LENGTH,
)
