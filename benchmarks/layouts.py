"""What tensor-parallel peers cost a node: processor time for ranks that read the same batches.

    python benchmarks/layouts.py [PHOTOGRAPHS] [--tp 4] [--size 224] [--batch 64] [--rounds 3]

Reads two epochs of a shard of photographs with random resized crops, or without a folder of
photographs of zstd-compressed token lists: by one rank, and by `--tp` processes that are ranks of
one dp rank. Counts the processor time of the node and of its workers (user and system) in each
epoch, and that of the trainers in the second. The first epoch allocates the memory of every rank.
Both ways take turns in rounds, and the median round of each counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

BLOCK_ROWS = 64
TOKENS = 2048
RANK = """
import json, resource, sys
from dataplane_torch import DataLoader, RandomResizedCrop, Topology
given = json.loads(sys.argv[1])
place = Topology(0, 1, given["rank"], given["tp"], given["rank"], given["tp"])
crops = {"transforms": {"jpg": [RandomResizedCrop(given["size"])]}} if given["crops"] else {}
with DataLoader(
    given["url"], given["batch"], shuffle=True, seed=1, topology=place, name="layouts", **crops
) as loader:
    len(loader)
    print("open", flush=True)
    for _ in range(2):
        sys.stdin.readline()
        rows = sum(len(next(iter(batch.values()))) for batch in loader)
        print(rows, flush=True)
    sys.stdin.readline()
"""


def photographs(folder: Path, count: int, path: Path) -> None:
    """A shard of the photographs in a folder, repeated."""
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    jpegs = [found[i % len(found)].read_bytes() for i in range(count)]
    table = pa.table({"jpg": pa.array(jpegs, pa.large_binary()), "label": range(count)})
    pq.write_table(table, path, row_group_size=BLOCK_ROWS, compression="none", use_dictionary=False)


def tokens(count: int, path: Path) -> None:
    """A shard of compressed lists."""
    chance = np.random.default_rng(1)
    values = np.minimum(chance.zipf(1.3, count * TOKENS), 50_000).astype(np.int32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values), TOKENS)
    table = pa.table({"tokens": lists})
    pq.write_table(table, path, row_group_size=8 * BLOCK_ROWS, compression="zstd")


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process and of its descendants."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        times = one.cpu_times()
        total += times.user + times.system
    return total


def heard(rank: subprocess.Popen[str]) -> str:
    """The next line that this process prints."""
    assert rank.stdout is not None
    return rank.stdout.readline()


def tell(rank: subprocess.Popen[str], line: str) -> None:
    assert rank.stdin is not None
    rank.stdin.write(line)
    rank.stdin.flush()


def trial(given: argparse.Namespace, url: Path, tp: int) -> tuple[float, float, float]:
    """CPU seconds of the node in the first and the second epoch, and of all trainers there."""
    environ = {**os.environ, "DATAPLANE_WORKER_COUNT": "1", "OMP_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[str]] = []
    for tp_rank in range(tp):
        asked = {"url": str(url), "batch": given.batch, "rank": tp_rank, "tp": tp}
        asked["size"] = given.size
        asked["crops"] = given.photographs is not None
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK, json.dumps(asked)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
            )
        )  # fmt: skip
    for rank in ranks:
        assert heard(rank) == "open\n"
    trainers = [psutil.Process(rank.pid) for rank in ranks]
    (node,) = [
        child
        for trainer in trainers
        for child in trainer.children()
        if "dataplane.node" in child.cmdline()
    ]
    spent = []
    for _ in range(2):
        before, own = cpu_s(node), [sum(one.cpu_times()[:2]) for one in trainers]
        for rank in ranks:
            tell(rank, "go\n")
        for rank in ranks:
            assert int(heard(rank)) == given.samples
        spent.append(cpu_s(node) - before)
    of_trainers = sum(sum(one.cpu_times()[:2]) for one in trainers) - sum(own)
    for rank in ranks:
        rank.communicate("done\n")
    return spent[0], spent[1], of_trainers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("photographs", type=Path, nargs="?")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DATAPLANE_CACHE_DIR"] = f"{folder}/cache"
        url = Path(folder) / "rows.parquet"
        if given.photographs is None:
            tokens(given.samples, url)
        else:
            photographs(given.photographs, given.samples, url)
        found: dict[int, list[tuple[float, float, float]]] = {1: [], given.tp: []}
        for _ in range(given.rounds):
            for tp, trials in found.items():
                trials.append(trial(given, url, tp))
                print(f"tp={tp}: " + ", ".join(f"{one:.2f}" for one in trials[-1]))
    medians = {
        tp: [statistics.median(one) for one in zip(*t, strict=True)] for tp, t in found.items()
    }
    for at, what in enumerate(("node, first epoch", "node, second epoch", "all trainers")):
        one, many = medians[1][at], medians[given.tp][at]
        print(f"{what}: {one:.2f} and {many:.2f} CPU s, {many / one:.3f} times")


if __name__ == "__main__":
    main()
