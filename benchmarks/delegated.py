"""A host without workers, fed by two others, against what these two reach for their own trainers.

    python benchmarks/delegated.py [PHOTOGRAPHS] [--makers 2] [--size 224] [--batch 64] [--rounds 3]

Reads three epochs of a shard of photographs with random resized crops, or without a folder of
photographs of zstd-compressed token lists: as `--makers` ranks, each from a node with one worker,
and as one rank, from a node without any beside these. The rate is that of the second and third
epoch. All of it runs on this machine, so moving the slabs takes processor time from making them;
on hosts of their own it would not. Both ways take turns, and the best round of each counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import psutil
from layouts import cpu_s, photographs, tokens
from msgspec import Struct

EPOCHS = 3
TRAINER = """
import json, sys, time, resource
from dataplane_torch import DataLoader, RandomResizedCrop
given = json.loads(sys.argv[1])
crops = {"transforms": {"jpg": [RandomResizedCrop(given["size"])]}} if given["crops"] else {}
with DataLoader(
    given["url"], given["batch"], shuffle=True, seed=1, service=given["service"], name="job",
    dp_rank=given["rank"], dp_size=given["size_of_job"], **crops
) as loader:
    for _ in range(given["epochs"]):
        began, cpu = time.perf_counter(), time.process_time()
        rows = sum(len(next(iter(batch.values()))) for batch in loader)
        took = time.perf_counter() - began
        print(json.dumps([rows, took, time.process_time() - cpu]), flush=True)
"""


class Rate(Struct, frozen=True):
    """Samples a second, and CPU seconds of the nodes and of the trainer for 1,000 samples."""

    samples_per_s: float
    nodes_cpu_s: float
    trainer_cpu_s: float


def serve(stack: contextlib.ExitStack, *arguments: str) -> tuple[psutil.Process, str]:
    """Start a part of a service. Returns its process, and its address if it is a coordinator."""
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "dataplane", "serve", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    return psutil.Process(process.pid), process.stdout.readline().split()[-1]


def trial(given: argparse.Namespace, url: Path, *, is_delegated: bool) -> Rate:
    """One round of one way."""
    with contextlib.ExitStack() as stack:
        _, address = serve(stack, "--coordinator", "--listen", "127.0.0.1:0")
        names = [f"maker-{number}-{os.getpid()}-{is_delegated}:1" for number in range(given.makers)]
        join = ("--node", "--join", address)
        nodes = [serve(stack, *join, "--service", name, "--worker-count", "1")[0] for name in names]
        if is_delegated:
            names = [f"trainers-{os.getpid()}:1"]
            nodes.append(serve(stack, *join, "--service", names[0], "--worker-count", "0")[0])
        trainers = [trainer(stack, given, url, rank, names) for rank in range(len(names))]
        told = [[json.loads(out.readline())] for out in trainers]
        before = sum(map(cpu_s, nodes))
        for out, lines in zip(trainers, told, strict=True):
            lines += [json.loads(line) for line in out]
        spent = sum(map(cpu_s, nodes)) - before
    each = [sum(rows for rows, _, _ in epoch) for epoch in zip(*told, strict=True)]
    assert each == [given.samples] * EPOCHS
    later = [epoch for lines in told for epoch in lines[1:]]
    thousands = sum(rows for rows, _, _ in later) / 1000
    took_s = max(sum(took for _, took, _ in lines[1:]) for lines in told)
    return Rate(
        1000 * thousands / took_s, spent / thousands, sum(cpu for _, _, cpu in later) / thousands
    )


def trainer(
    stack: contextlib.ExitStack, given: argparse.Namespace, url: Path, rank: int, names: list[str]
) -> IO[str]:
    """Start a rank. Returns its output: a line an epoch."""
    asked = {
        "url": str(url), "batch": given.batch, "size": given.size, "service": names[rank],
        "rank": rank, "size_of_job": len(names), "crops": given.photographs is not None,
        "epochs": EPOCHS,
    }  # fmt: skip
    command = [sys.executable, "-c", TRAINER, json.dumps(asked)]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    assert process.stdout is not None
    return process.stdout


def main() -> None:
    """Print one line a round, and the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("photographs", type=Path, nargs="?")
    parser.add_argument("--makers", type=int, default=2)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found: dict[bool, list[Rate]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "DATAPLANE_CACHE_DIR": f"{folder}/cache",
            "DATAPLANE_STATE_DIR": f"{folder}/state",
            "OMP_NUM_THREADS": "1",
        }
        url = Path(folder) / "rows.parquet"
        if given.photographs is None:
            tokens(given.samples, url)
        else:
            photographs(given.photographs, given.samples, url)
        for _ in range(given.rounds):
            for is_delegated, rates in found.items():
                rates.append(trial(given, url, is_delegated=is_delegated))
                rate, name = rates[-1], "delegated" if is_delegated else "local"
                print(
                    f"{name}: {rate.samples_per_s:,.0f} samples/s, {rate.nodes_cpu_s:.2f} CPU s of "
                    f"nodes and {rate.trainer_cpu_s:.3f} of the trainer for 1,000 samples",
                    flush=True,
                )
    own, delegated = (max(rates, key=lambda one: one.samples_per_s) for rates in found.values())
    print(
        f"delegated / local: {delegated.samples_per_s / own.samples_per_s:.3f} of the rate, "
        f"{delegated.nodes_cpu_s / own.nodes_cpu_s:.3f} x the nodes' CPU, "
        f"{delegated.trainer_cpu_s / own.trainer_cpu_s:.3f} x the trainer's CPU"
    )


if __name__ == "__main__":
    main()
