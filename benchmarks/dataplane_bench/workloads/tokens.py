"""Rows of tokens, all of one length, as a language model is trained on them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataplane_bench.model import ColumnType, WorkloadColumn
from dataplane_bench.workloads.recipe import Recipe, shards

ROW_TOKENS = 2048
VOCABULARY = 50_000
_GROUP_ROWS = 512


def _write(folder: Path, count: int) -> None:
    write(shards(folder, count))


def write(files: Iterable[tuple[Path, NDArray[np.int64]]], seed: int = 0) -> None:
    """Write rows of random tokens, for these ids, to each of these files."""
    random = np.random.default_rng(seed)
    for path, ids in files:
        values = random.integers(0, VOCABULARY, (len(ids), ROW_TOKENS), dtype=np.int32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), ROW_TOKENS)
        table = pa.table({"id": pa.array(ids), "tokens": column})
        pq.write_table(table, path, row_group_size=_GROUP_ROWS, compression="NONE")


COLUMNS = (
    WorkloadColumn("id", ColumnType.FIXED, "int64"),
    WorkloadColumn("tokens", ColumnType.FIXED, "int32", (ROW_TOKENS,)),
)

RECIPE = Recipe(
    name="tokens",
    version=1,
    columns=COLUMNS,
    sample_count=65_536,
    batch_size=32,
    step_ms=2.0,
    write=_write,
    s3_scale=8,
)
