"""What does an epoch of many small blocks cost, read in order? Requests, seconds and CPU.

    python benchmarks/small_blocks.py [--latency-ms 20] [--kib 128] [--mib 512] [--only arrow]

One real server (SeaweedFS, on this machine) has the same rows as Parquet and as Arrow, in blocks of
`--kib`. Each line is the first epoch of a job in a process of its own with an embedded node: the
shards are indexed, nothing else is cached, and the time is from the loader's construction. "MB" is
what was read. `--latency-ms` puts the proxy of benchmarks/delayed.py before the server.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import remote_epoch
from dataplane_bench import s3
from delayed import Delayed, delayed

if TYPE_CHECKING:
    from dataplane_torch import DataLoader

BUCKET = "small-blocks"
FORMS = ("parquet", "arrow")
ROW_BYTES, BATCH_ROWS, SHARD_BYTES = 2048, 64, 64 << 20


def _upload(server: s3.S3Server, forms: list[str], block_rows: int, shards: int) -> None:
    random = np.random.default_rng(0)
    with contextlib.closing(server.client()) as client:
        client.create_bucket(Bucket=BUCKET)
        for number in range(shards):
            values = pa.py_buffer(random.bytes(SHARD_BYTES))
            kind = pa.binary(ROW_BYTES)
            rows = pa.Array.from_buffers(kind, SHARD_BYTES // ROW_BYTES, [None, values])
            table = pa.table({"tokens": rows})
            for form in forms:
                body = _shard(table, form, block_rows)
                client.put_object(Bucket=BUCKET, Key=f"{form}/{number:03}.{form}", Body=body)


def _shard(table: pa.Table, form: str, block_rows: int) -> bytes:
    out = io.BytesIO()
    if form == "parquet":
        pq.write_table(
            table,
            out,
            row_group_size=block_rows,
            compression="NONE",
            use_dictionary=False,
            write_statistics=False,
        )
        return out.getvalue()
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=block_rows)
    return out.getvalue()


def _read(form: str, order: str) -> None:
    def loader() -> DataLoader:
        from dataplane_torch import DataLoader  # what it takes to import counts, too

        url = f"s3://{BUCKET}/{form}/"
        return DataLoader(url, BATCH_ROWS, shuffle=order == "shuffled", seed=1)

    remote_epoch.read(loader, "tokens")


def _measured(
    server: s3.S3Server, proxy: Delayed, form: str, order: str, rounds: int
) -> dict[str, float]:
    endpoint = f"http://127.0.0.1:{proxy.port}"
    environment = {**os.environ, **server.environment(), "AWS_ENDPOINT_URL": endpoint}
    command, runs = [sys.executable, __file__, "--read", form, order], []
    with tempfile.TemporaryDirectory() as cache:
        environment["DATAPLANE_CACHE_DIR"] = cache
        for _ in range(1 + rounds):
            before = proxy.request_count()
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            count = proxy.request_count() - before
            runs.append({**json.loads(done.stdout), "requests": count})
    return {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--kib", type=int, default=128)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--only", default=",".join(FORMS), help="formats, with commas between")
    parser.add_argument("--orders", default="in-order,shuffled", help="with commas between")
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        _read(*given.read)
    forms = given.only.split(",")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(s3.s3_server(folder, dict(os.environ)))
        block_rows = max(1, (given.kib << 10) // ROW_BYTES)
        _upload(server, forms, block_rows, max(1, (given.mib << 20) // SHARD_BYTES))
        proxy = stack.enter_context(delayed(server.port, given.latency_ms / 1000))
        print(f"{'':20s}{'requests':>9s}{'MB read':>9s}{'s':>7s}{'first batch':>13s}"
              f"{'samples/s':>11s}{'CPU s':>7s}")  # fmt: skip
        for form in forms:
            for order in given.orders.split(","):
                one = _measured(server, proxy, form, order, given.rounds)
                print(f"{form:10s}{order:10s}{one['requests']:9.0f}{one['bytes'] / 1e6:9.1f}"
                      f"{one['seconds']:7.2f}{one['first']:13.2f}"
                      f"{one['rows'] / one['seconds']:11.0f}{one['cpu_s']:7.2f}",
                      flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
