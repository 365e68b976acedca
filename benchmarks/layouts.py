"""What tensor-parallel peers cost a node: processor time for ranks that read the same batches.

    python benchmarks/layouts.py [PHOTOGRAPHS] [--tp 4] [--size 224] [--batch 64] [--rounds 3]

Reads two epochs of a shard of photographs with random resized crops, or without a folder of
photographs of zstd-compressed token lists: by one rank, and by `--tp` processes that are ranks of
one dp rank. Counts the processor time of the node and of its workers (user and system) in each
epoch, and that of the trainers in the second. The first epoch allocates the memory of every rank.
Both ways take turns in rounds, and the median round of each counts.

"decode" is the part of the node's one worker that decodes: blocks, and with photographs also the
slabs whose images it makes, without the slabs that it copies from these for the other peers. It is
the worker's processor time, divided as the time of its tasks is. Blocks of token lists are decoded
in the first epoch alone, since they stay in memory.
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
WHAT = (
    "node, first epoch", "node, second epoch", "decode, first epoch", "decode, second epoch",
    "all trainers",
)  # fmt: skip
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
        began = before = loader.statistics()
        rows, slabs = 0, []
        for batch in loader:
            rows += len(next(iter(batch.values())))
            if (now := loader.statistics()).slabs > before.slabs:
                slabs.append(now.since(before).assembling_s)
                before = now
        now = loader.statistics()
        slabs.append(now.since(before).assembling_s)
        print(json.dumps([rows, now.since(began).decoding_s, slabs]), flush=True)
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


def decode_share(told: list[tuple[int, float, list[float]]], *, images: bool) -> float:
    """Of the time of the worker's tasks, the part in which it decoded blocks and made images, from
    what the ranks tell: rows, time for blocks, and time for each slab. Of equal slabs, one is made.
    """
    decoding_s = sum(one for _, one, _ in told)
    slabs = list(zip(*(slabs for _, _, slabs in told), strict=True))
    made_s = sum(map(max, slabs)) if images else 0.0
    return (decoding_s + made_s) / (decoding_s + sum(map(sum, slabs)))


def trial(given: argparse.Namespace, url: Path, tp: int) -> tuple[float, ...]:
    """CPU seconds: of the node in the first and the second epoch, of decoding in both, and of all
    trainers in the second.
    """
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
    (worker,) = [one for one in node.children(recursive=True) if one.name() == "dp-worker"]
    spent, decoding = [], []
    for _ in range(2):
        before, own = cpu_s(node), [sum(one.cpu_times()[:2]) for one in trainers]
        of_worker = cpu_s(worker)
        for rank in ranks:
            tell(rank, "go\n")
        told = [json.loads(heard(rank)) for rank in ranks]
        assert [rows for rows, _, _ in told] == [given.samples] * tp
        spent.append(cpu_s(node) - before)
        share = decode_share(told, images=given.photographs is not None)
        decoding.append(share * (cpu_s(worker) - of_worker))
    of_trainers = sum(sum(one.cpu_times()[:2]) for one in trainers) - sum(own)
    for rank in ranks:
        rank.communicate("done\n")
    return (*spent, *decoding, of_trainers)


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
        found: dict[int, list[tuple[float, ...]]] = {1: [], given.tp: []}
        for _ in range(given.rounds):
            for tp, trials in found.items():
                trials.append(trial(given, url, tp))
                times = zip(WHAT, trials[-1], strict=True)
                print(f"tp={tp}: " + ", ".join(f"{what} {one:.2f}" for what, one in times))
    medians = {
        tp: [statistics.median(one) for one in zip(*t, strict=True)] for tp, t in found.items()
    }
    for at, what in enumerate(WHAT):
        one, many = medians[1][at], medians[given.tp][at]
        ratio = f"{many / one:.3f} times" if one > 0.01 else "hardly any"
        print(f"{what}: {one:.2f} and {many:.2f} CPU s, {ratio}")


if __name__ == "__main__":
    main()
