"""Two whole nodes that lend each other half of a dataset: how late are their event loops meanwhile?

    python benchmarks/whole_nodes.py [--mib 512] [--block-kib 4096] [--epochs 4] [--arena 0.75]

A coordinator, two nodes with a trainer each, and an S3 server run on this machine, over loopback.
Each node has memory for the blocks that it owns and a few more, so from the second epoch on it gets
the other half from its neighbour, for every epoch. A ticker in the event loop of each node measures
how late it is: in all, and without the time for which the loop's thread waited for a processor,
since all of these processes share the machine. A ticker is up to 1 ms late by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
from dataplane_bench import s3
from neighbours import GIB, p99, ticking

ROW_BYTES = 8192
SHARD_BLOCKS = 4
BATCH_ROWS = 64
BUCKET = "lent"
AS_NODE = "--as-node"
TRAINER = """
import json, sys, time
from dataplane_torch import DataLoader
given = json.loads(sys.argv[1])
with DataLoader(given.pop("url"), **given) as loader:
    len(loader)
    print("open", flush=True)
    for _ in sys.stdin:
        began, before = time.perf_counter(), loader.statistics()
        rows = sum(len(batch["tokens"]) for batch in loader)
        took, found = time.perf_counter() - began, loader.statistics().since(before)
        told = [rows, took, found.origin_bytes, found.neighbour_bytes, found.memory_bytes]
        print(json.dumps(told), flush=True)
"""


class TickingLoop(asyncio.SelectorEventLoop):
    """An event loop that prints how late its ticks were since the last time, at each SIGUSR1."""

    def run_forever(self) -> None:
        """Tick while it runs."""
        self.create_task(self._tick())
        super().run_forever()

    async def _tick(self) -> None:
        async with ticking() as ticks:

            def tell() -> None:
                sys.stderr.write(f"ticks: {p99(ticks)}\n")
                sys.stderr.flush()
                ticks.clear()

            self.add_signal_handler(signal.SIGUSR1, tell)
            await asyncio.Event().wait()


def as_node(arguments: list[str]) -> None:
    """Run this command of dataplane in a ticking loop."""
    from dataplane.cli import main as dataplane

    class Policy(asyncio.DefaultEventLoopPolicy):
        _loop_factory = TickingLoop

    asyncio.set_event_loop_policy(Policy())
    sys.argv = ["dataplane", *arguments]
    dataplane()


def shards(mib: int, block_bytes: int) -> dict[str, bytes]:
    """Uncompressed Arrow, whose rows are gathered as they are."""
    rows, found = block_bytes // ROW_BYTES, dict[str, bytes]()
    random = np.random.default_rng(0)
    for number in range((mib << 20) // (block_bytes * SHARD_BLOCKS)):
        values = random.integers(0, 50_000, rows * SHARD_BLOCKS * ROW_BYTES // 4, dtype=np.int32)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(values), ROW_BYTES // 4)
        table, out = pa.table({"tokens": lists}), io.BytesIO()
        with pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
        found[f"{number:04}.arrow"] = out.getvalue()
    return found


def started(
    stack: contextlib.ExitStack, *command: str, stderr: int | None = None
) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = stack.enter_context(
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True)
    )
    stack.callback(process.kill)
    return process


def line_of(out: IO[str] | None) -> str:
    assert out is not None
    line = out.readline()
    assert line, "a process has ended"
    return line


def told_by(node: subprocess.Popen[str]) -> str:
    """How late its loop was since this was asked last; other lines of its log are shown."""
    node.send_signal(signal.SIGUSR1)
    while not (line := line_of(node.stderr)).startswith("ticks: "):
        sys.stderr.write(line)
    return line.removeprefix("ticks: ").strip()


def play(given: argparse.Namespace, stack: contextlib.ExitStack, folder: Path) -> None:
    """Run all of it, and print a line for each epoch."""
    server = stack.enter_context(s3.s3_server(folder, os.environ))
    server.upload(BUCKET, shards(given.mib, given.block_kib << 10))
    os.environ |= {
        **server.environment(),
        "DATAPLANE_STATE_DIR": f"{folder}/state",
        "DATAPLANE_CACHE_DIR": f"{folder}/cache",
        "DATAPLANE_BLOCK_ARENA_BYTES": f"{int(given.mib * given.arena)}MiB",
        "DATAPLANE_WORKER_COUNT": "1",
        "DATAPLANE_LOG_LEVEL": "warning",
        "OMP_NUM_THREADS": "1",
    }
    serve = (sys.executable, "-m", "dataplane", "serve")
    coordinator = started(stack, *serve, "--coordinator", "--listen", "127.0.0.1:0")
    address = line_of(coordinator.stdout).split()[-1]
    nodes, trainers = [], []
    for number in range(2):
        service = f"bench-{number}-{os.getpid()}:1"
        command = (sys.executable, __file__, AS_NODE, "serve", "--node", "--join", address)
        nodes.append(started(stack, *command, "--service", service, stderr=subprocess.PIPE))
        line_of(nodes[-1].stdout)
        asked = {
            "url": f"s3://{BUCKET}/", "batch_size": BATCH_ROWS, "service": service, "name": "bench",
            "dp_rank": number, "dp_size": 2, "shuffle": True, "lanes": 1,
        }  # fmt: skip
        trainers.append(started(stack, sys.executable, "-c", TRAINER, json.dumps(asked)))
    for trainer in trainers:
        assert line_of(trainer.stdout) == "open\n"
    for epoch in range(given.epochs):
        for node in nodes:
            told_by(node)
        for trainer in trainers:
            assert trainer.stdin is not None
            trainer.stdin.write("go\n")
            trainer.stdin.flush()
        told = [json.loads(line_of(trainer.stdout)) for trainer in trainers]
        counts, times, *places = zip(*told, strict=True)
        rows, took_s, (origin, lent, memory) = sum(counts), max(times), map(sum, places)
        amounts = f"{lent / GIB:.2f} GiB; origin {origin / GIB:.2f}, memory {memory / GIB:.2f}"
        print(
            f"epoch {epoch}: {rows:,} rows in {took_s:.2f} s, {lent / took_s / 1e9:.2f} GB/s "
            f"between nodes ({amounts}); "
            f"p99 of the loops: {told_by(nodes[0])} and {told_by(nodes[1])}; "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--block-kib", type=int, default=4096)
    parser.add_argument("--arena", type=float, default=0.75, help="of the dataset, for each node")
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        play(given, stack, Path(folder))


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_NODE]:
        as_node(sys.argv[2:])
    else:
        main()
