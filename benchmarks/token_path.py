"""How fast do fixed rows reach a rank? Batches of 32 x 2048 int32, shuffled, from local disk.

    python benchmarks/token_path.py [--format arrow|parquet] [--ranks N] [--json]

Every rank is a process of its own with an embedded node shared by all; the page cache is warm. The
bound is one core's np.take of the same rows into a warm buffer, measured in the same run. Exit
status 1 says that a rank got less than 1 GB/s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROW = 2048
ROW_BYTES = ROW * 4
BATCH = 32
BLOCK_ROWS = 512
SHARDS = 8
BLOCKS_A_SHARD = 16
EPOCHS = 4
BAR_GB_S = 1.0


def write_shards(folder: Path, kind: str) -> None:
    """65,536 rows, 512 MiB: row i begins with its number."""
    schema = pa.schema([("tokens", pa.list_(pa.int32(), ROW))])
    random = np.random.default_rng(0)
    for shard in range(SHARDS):
        rows = random.integers(0, 50_000, (BLOCKS_A_SHARD * BLOCK_ROWS, ROW), dtype=np.int32)
        rows[:, 0] = np.arange(len(rows)) + shard * len(rows)
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), ROW)
        table = pa.table([column], schema=schema)
        path = folder / f"{shard:03d}.{kind}"
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=BLOCK_ROWS, compression="NONE")
        else:
            with pa.ipc.new_file(path, schema) as writer:
                writer.write_table(table, max_chunksize=BLOCK_ROWS)


def gather_bound() -> float:
    """GB/s of one core gathering random rows into a warm slab."""
    source = np.random.default_rng(0).integers(0, 9, (BLOCK_ROWS * 64, ROW), dtype=np.int32)
    slab = np.empty((512, ROW), np.int32)
    picks = np.random.default_rng(1).integers(0, len(source), (64, len(slab)))
    began = time.perf_counter()
    for pick in picks:
        np.take(source, pick, axis=0, out=slab, mode="clip")
    return picks.size * ROW_BYTES / (time.perf_counter() - began) / 1e9


def run_rank(folder: str, kind: str, rank: int, ranks: int) -> dict[str, float]:
    """One rank's epochs; the first warms caches and mappings and does not count."""
    from dataplane_torch import DataLoader

    from dataplane.model import Topology

    place = Topology(rank, ranks, rank, ranks, rank, ranks)
    began = time.perf_counter()
    with DataLoader(
        f"{folder}/*.{kind}", batch_size=BATCH, shuffle=True, seed=1, topology=place,
        name=f"token-path-{folder}",
    ) as loader:  # fmt: skip
        first_batch_s = 0.0
        seconds: list[float] = []
        cpu_s = 0.0
        for _ in range(EPOCHS):
            start, cpu = time.perf_counter(), time.thread_time()
            rows = 0
            for batch in loader:
                first_batch_s = first_batch_s or time.perf_counter() - began
                rows += len(batch["tokens"])
            seconds.append(time.perf_counter() - start)
            cpu_s = time.thread_time() - cpu
            total = rows * ROW_BYTES / 1e9
    best = min(seconds[1:])
    return {
        "gb_per_s": total * (EPOCHS - 1) / sum(seconds[1:]),
        "gb_per_s_best_epoch": total / best,
        "trainer_cpu_us_per_batch": cpu_s / (rows / BATCH) * 1e6,
        "first_batch_s": first_batch_s,
    }


def measure(kind: str, ranks: int) -> dict[str, object]:
    """All ranks at once."""
    with tempfile.TemporaryDirectory(prefix="dataplane-token-path-") as folder:
        write_shards(Path(folder), kind)
        command = [sys.executable, __file__, "--format", kind, "--ranks", str(ranks)]
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--folder", folder], stdout=subprocess.PIPE
            )
            for rank in range(ranks)
        ]
        told = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    return {"format": kind, "ranks": told, "one_core_gather_gb_per_s": gather_bound()}


def main() -> int:
    """Exit status 1: a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--format", choices=["arrow", "parquet"], default="arrow")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        print(json.dumps(run_rank(given.folder, given.format, given.rank, given.ranks)))
        return 0
    told = measure(given.format, given.ranks)
    ranks = told["ranks"]
    assert isinstance(ranks, list)
    if given.json:
        print(json.dumps(told))
    else:
        for rank, line in enumerate(ranks):
            print(f"rank {rank}: " + ", ".join(f"{k} {v:.3g}" for k, v in line.items()))
        print(f"one core's gather: {told['one_core_gather_gb_per_s']:.3g} GB/s")
    return 0 if all(line["gb_per_s"] >= BAR_GB_S for line in ranks) else 1


if __name__ == "__main__":
    sys.exit(main())
