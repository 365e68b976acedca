"""Trains two ranks over text that a slow map makes tokens of, packed, on a busy machine.

    python tests/packed_text.py --mb 60 --load 20

Two ranks read an epoch at the default timeouts while `--load` processes compute. The map takes `--pace`
seconds of processor time a MB. Each block must be mapped once, to count packs and to use them; both
ranks must get all tokens between them, and no error. Prints how long it took, and exits with 1 if
anything else happened. With the defaults it takes five to ten minutes on two processors.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS, BLOCK_BYTES, LENGTH = 100, 1 << 20, 2048
_MAP = '''
import os, time
import numpy as np


class Tokenise:
    """A token for each byte, at a set pace. Notes each call."""

    reads = ("text",)

    def __call__(self, columns):
        texts = [text.encode() for text in columns["text"].to_pylist()]
        until = time.thread_time() + float(os.environ["PACE"]) * sum(map(len, texts)) / 1e6
        while time.thread_time() < until:
            pass
        with open(os.environ["CALLS"], "a") as calls:
            calls.write(f"{texts[0].split()[0].decode()} {len(texts)}\\n")
        return {"tokens": [np.frombuffer(text, np.uint8).astype(np.int32) for text in texts]}
'''
_RANK = """
import sys, time
from dataplane_torch import DataLoader, Pack

began = time.monotonic()
pack = Pack("tokens", int(sys.argv[2]))
tokens, first = 0, 0.0
with DataLoader(sys.argv[1], 8, shuffle=True, map="packed_text_map:Tokenise", pack=pack) as loader:
    steps, opened = len(loader), time.monotonic() - began
    for batch in loader:
        first = first or time.monotonic() - began
        tokens += int((batch["document_ids"] >= 0).sum())
print(steps, tokens, round(opened, 1), round(first, 1), round(time.monotonic() - began, 1))
"""


def written(folder: Path, megabytes: float) -> tuple[int, int]:
    """Text in two shards: how many blocks, and how many bytes of text they have."""
    rng, count, size = np.random.default_rng(0), max(round(megabytes * 1e6 / BLOCK_BYTES), 2), 0
    schema = pa.schema([("text", pa.string())])
    for shard in range(2):
        with pq.ParquetWriter(folder / f"{shard}.parquet", schema) as writer:
            for block in range(shard * count // 2, (shard + 1) * count // 2):
                lengths = rng.lognormal(0, 1, ROWS)
                lengths = np.ceil(lengths * BLOCK_BYTES / lengths.sum()).astype(int)
                texts = [f"{block}-{row} ".ljust(length, "x") for row, length in enumerate(lengths)]
                size += sum(map(len, texts))
                writer.write_table(pa.table({"text": texts}, schema))
    return count, size


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute."""
    loop = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def ranks(folder: Path, pace: float, limit_s: float) -> list[list[str]]:
    """The words that both ranks print.

    Raises:  CalledProcessError, TimeoutExpired.
    """
    (folder / "packed_text_map.py").write_text(_MAP)
    names = ("RANK", "LOCAL_RANK")
    own = {
        **os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29577", "TORCHELASTIC_RUN_ID": folder.name, "PYTHONPATH": str(folder),
        "DATAPLANE_CACHE_DIR": str(folder / "cache"), "CALLS": str(folder / "calls"),
        "PACE": str(pace), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", _RANK, f"{folder}/*.parquet", str(LENGTH)]
    until, said = time.monotonic() + limit_s, []
    started = [
        subprocess.Popen(
            command, env=own | dict.fromkeys(names, str(rank)), stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for each in started:
            out, _ = each.communicate(timeout=max(until - time.monotonic(), 1.0))
            if each.returncode:
                raise subprocess.CalledProcessError(each.returncode, command[:2])
            said.append(out.split())
    finally:
        for each in started:
            each.kill()
            each.wait()
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it, and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=60.0)
    parser.add_argument("--load", type=int, default=20)
    parser.add_argument("--pace", type=float, default=3.0, help="seconds of processor time a MB")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dp-") as name:
        folder = Path(name)
        blocks, size = written(folder, given.mb)
        with busy(given.load):
            said = ranks(folder, given.pace, given.limit)
            load = os.getloadavg()[0]
        notes = [line.split() for line in (folder / "calls").read_text().splitlines()]
    calls = Counter(first for first, rows in notes if int(rows) == ROWS)
    tokens = sum(int(words[1]) for words in said)
    for rank, (steps, _, opened_s, first_s, all_s) in enumerate(said):
        times = f"open {opened_s} s, first batch {first_s} s, all {all_s} s"
        sys.stdout.write(f"rank {rank}: {steps} steps; {times}\n")
    once = sum(count == 1 for count in calls.values())
    sys.stdout.write(
        f"{once} of {blocks} blocks mapped once, {tokens:,} of {size:,} tokens; load {load:.0f}\n"
    )
    return int((once, len(calls), tokens) != (blocks, blocks, size))


if __name__ == "__main__":
    sys.exit(main())
