"""Samples that look like what people train on, made from a seed: Parquet shards of each workload.

The same name and scale give the same rows on every machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataplane_bench.model import Column, Kind, Workload


def generated(name: str, root: Path, scale: float = 1.0) -> Workload:
    """A workload of this name, its shards under `root`; written if they are not there yet."""
    assert name == "tokens"
    count = int(65536 * scale)
    fingerprint = f"tokens-{count}"
    folder = root / fingerprint
    if not folder.exists():
        new = folder.with_name(folder.name + ".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        random = np.random.default_rng(0)
        for shard, ids in enumerate(np.array_split(np.arange(count), 8)):
            values = random.integers(0, 50_000, (len(ids), 2048), dtype=np.int32)
            column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 2048)
            table = pa.table({"id": pa.array(ids, pa.int64()), "tokens": column})
            pq.write_table(
                table, new / f"shard-{shard:05d}.parquet", row_group_size=512, compression="NONE"
            )
        new.rename(folder)
    columns = (Column("id", Kind.FIXED, "int64"), Column("tokens", Kind.FIXED, "int32", (2048,)))
    return Workload("tokens", columns, 32, count, folder, fingerprint, 2.0)
