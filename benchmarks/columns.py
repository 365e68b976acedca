"""What do two of 40 columns of remote shards cost? Bytes and requests, seconds and CPU.

    python benchmarks/columns.py [--latency-ms 20] [--rows-per-block 65536] [--only arrow,parquet]

One real server (SeaweedFS, on this machine) has the same 2.4 million rows of 40 columns (8 shards,
402 MiB uncompressed) as Parquet and as Arrow, plain and with compressed buffers. Each line is the
first epoch of a job in a process of its own with an embedded node: nothing is indexed or cached,
and the time is from the loader's construction. `--latency-ms` puts a proxy (delayed.py) before the
server.
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
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import remote_epoch
from dataplane_bench import s3
from delayed import delayed

if TYPE_CHECKING:
    from dataplane_torch import DataLoader

BUCKET = "columns"
FORMS = {"parquet": None, "arrow": None, "arrow-lz4": "lz4", "arrow-zstd": "zstd"}
SHARDS, SHARD_ROWS, COLUMNS, BATCH_ROWS = 8, 301_056, 40, 8_192
ASKED = ("c3", "c30")


def _upload(server: s3.S3Server, forms: list[str], block_rows: int) -> None:
    with contextlib.closing(server.client()) as client:
        client.create_bucket(Bucket=BUCKET)
        for number in range(SHARDS):
            table = _table(np.random.default_rng(number))
            for form in forms:
                key = f"{form}/{number:03}.{form.split('-')[0]}"
                client.put_object(Bucket=BUCKET, Key=key, Body=_shard(table, form, block_rows))


def _table(random: np.random.Generator) -> pa.Table:
    """Half of the columns are whole numbers below a million, the others fractions of few digits."""
    columns: dict[str, Any] = {}
    for at in range(COLUMNS):
        whole = random.integers(0, 1_000_000, SHARD_ROWS, np.int32)
        columns[f"c{at}"] = whole if at % 2 else (whole / 64).astype(np.float32)
    return pa.table(columns)


def _shard(table: pa.Table, form: str, block_rows: int) -> bytes:
    out = io.BytesIO()
    if form == "parquet":
        pq.write_table(table, out, row_group_size=block_rows, use_dictionary=False)
        return out.getvalue()
    options = pa.ipc.IpcWriteOptions(compression=FORMS[form])
    with pa.ipc.new_file(out, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=block_rows)
    return out.getvalue()


def _read(form: str, columns: list[str]) -> None:
    def loader() -> DataLoader:
        from dataplane_torch import DataLoader  # what it takes to import counts, too

        return DataLoader(f"s3://{BUCKET}/{form}/", BATCH_ROWS, columns=columns or None, seed=1)

    remote_epoch.read(loader, ASKED[0])


def _measured(server: s3.S3Server, port: int, form: str, columns: tuple[str, ...]) -> Any:
    endpoint = f"http://127.0.0.1:{port}"
    environment = {**os.environ, **server.environment(), "AWS_ENDPOINT_URL": endpoint}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--read", form, *columns],
            env={**environment, "DATAPLANE_CACHE_DIR": cache},
            stdout=subprocess.PIPE,
            check=True,
        )
    return json.loads(done.stdout)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--rows-per-block", type=int, default=65_536)
    parser.add_argument("--only", default=",".join(FORMS), help="formats, with commas between")
    parser.add_argument("--read", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        _read(given.read[0], given.read[1:])
    forms = given.only.split(",")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(s3.s3_server(folder, dict(os.environ)))
        _upload(server, forms, given.rows_per_block)
        port = stack.enter_context(delayed(server.port, given.latency_ms / 1000)).port
        print(f"{'':12s}{'columns':>8s}{'MB read':>9s}{'s':>7s}{'first batch':>13s}"
              f"{'samples/s':>11s}{'CPU s':>7s}")  # fmt: skip
        for form in forms:
            for columns in (ASKED, ()):
                runs = [_measured(server, port, form, columns) for _ in range(given.rounds)]
                one = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                print(f"{form:12s}{len(columns) or COLUMNS:8d}{one['bytes'] / 1e6:9.1f}"
                      f"{one['seconds']:7.2f}{one['first']:13.2f}"
                      f"{one['rows'] / one['seconds']:11.0f}{one['cpu_s']:7.2f}",
                      flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
