"""A host without workers, fed by two others, against a host with as many workers of its own.

    python benchmarks/delegated.py [PHOTOGRAPHS] [--makers 2] [--size 224] [--batch 64] [--rounds 3]

Reads three epochs of a shard of photographs with random resized crops, or without a folder of
photographs of zstd-compressed token lists: from a node with `--makers` workers, and from a node
without any beside `--makers` nodes with one worker each. The rate is that of the second and third
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
    given["url"], given["batch"], shuffle=True, seed=1, service=given["service"], **crops
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
        service = f"trainers-{os.getpid()}-{is_delegated}:1"
        join = ("--node", "--join", address)
        workers = 0 if is_delegated else given.makers
        own, _ = serve(stack, *join, "--service", service, "--worker-count", str(workers))
        nodes = [own]
        for number in range(given.makers if is_delegated else 0):
            name = f"maker-{number}-{os.getpid()}:1"
            nodes.append(serve(stack, *join, "--service", name, "--worker-count", "1")[0])
        asked = {
            "url": str(url), "batch": given.batch, "size": given.size, "service": service,
            "crops": given.photographs is not None, "epochs": EPOCHS,
        }  # fmt: skip
        trainer = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", TRAINER, json.dumps(asked)],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert trainer.stdout is not None
        told = [json.loads(trainer.stdout.readline())]
        before = sum(map(cpu_s, nodes))
        told += [json.loads(line) for line in trainer.stdout]
        spent = sum(map(cpu_s, nodes)) - before
    assert [rows for rows, _, _ in told] == [given.samples] * EPOCHS
    later = told[1:]
    thousands = sum(rows for rows, _, _ in later) / 1000
    return Rate(
        1000 * thousands / sum(took for _, took, _ in later),
        spent / thousands,
        sum(cpu for _, _, cpu in later) / thousands,
    )


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
                rate, name = rates[-1], "delegated" if is_delegated else "own workers"
                print(
                    f"{name}: {rate.samples_per_s:,.0f} samples/s, {rate.nodes_cpu_s:.2f} CPU s of "
                    f"nodes and {rate.trainer_cpu_s:.3f} of the trainer for 1,000 samples",
                    flush=True,
                )
    own, delegated = (max(rates, key=lambda one: one.samples_per_s) for rates in found.values())
    print(
        f"delegated / own workers: {delegated.samples_per_s / own.samples_per_s:.3f} of the rate, "
        f"{delegated.nodes_cpu_s / own.nodes_cpu_s:.3f} x the nodes' CPU, "
        f"{delegated.trainer_cpu_s / own.trainer_cpu_s:.3f} x the trainer's CPU"
    )


if __name__ == "__main__":
    main()
