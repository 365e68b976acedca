"""How fast shards in object storage are indexed, and what a shard costs.

    python benchmarks/indexing.py [--shards 2000] [--delay 20] [--format parquet]

A real S3 server on this machine, made to seem far away, holds small shards. They are indexed as a
node does it: in batches, by processes that read and processes that parse; few shards one by one, by
processes for which the node reads. CPU is that of this process (the node's part) and of those that
it has started for this, in milliseconds a shard; the server's is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from dataplane_bench.model import BenchCase
from dataplane_bench.s3 import REGION
from dataplane_bench.workloads.storage import s3_storage
from msgspec import structs

from dataplane.index.processes import open_manifest
from dataplane.rpc.messages import DatasetSource
from dataplane.settings import default_node_config
from dataplane.store.connect import Stores

ROWS = 64
COLUMNS = 12
_LOOK_S = 0.05
_NAMES = ("dp-indexer", "dp-index_reader", "dp-index_parser")


def main() -> None:
    """Print one line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", type=int, default=2000)
    parser.add_argument("--delay", type=float, default=20.0, help="milliseconds a request")
    parser.add_argument("--format", choices=("parquet", "arrow"), default="parquet")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="indexing-") as name,
        s3_storage(Path(name)) as storage,
    ):
        folder = Path(name) / "shards"
        _write(folder, given.shards, given.format)
        place = storage.place(folder, BenchCase("indexing", "tokens", delay_ms=given.delay))
        os.environ.update(
            AWS_ACCESS_KEY_ID=place.access_key,
            AWS_SECRET_ACCESS_KEY=place.secret_key,
            AWS_ENDPOINT_URL=place.endpoint,
            AWS_REGION=REGION,
        )
        for _ in range(given.rounds):
            _index(place.url, given.shards)


def _write(folder: Path, shard_count: int, format_name: str) -> None:
    table = pa.table({f"c{at}": pa.array(range(ROWS), pa.int64()) for at in range(COLUMNS)})
    out = io.BytesIO()
    if format_name == "parquet":
        pq.write_table(table, out)
    else:
        with pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    folder.mkdir()
    for number in range(shard_count):
        (folder / f"{number:07}.{format_name}").write_bytes(out.getvalue())


def _index(url: str, shard_count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="indexes-") as cache, _Children() as children:
        settings = structs.replace(default_node_config(), cache_dir=cache)
        wall_s, own_s = time.monotonic(), time.process_time()
        manifest = open_manifest(settings, Stores(is_settled=True), DatasetSource((f"{url}/",)))
    wall_s, own_s = time.monotonic() - wall_s, time.process_time() - own_s
    assert len(manifest.shards) == shard_count
    print(
        f"{shard_count / wall_s:7.0f} shards/s; CPU a shard: {1e3 * own_s / shard_count:.2f} ms"
        f" here, {1e3 * children.cpu_s / shard_count:.2f} ms in indexing processes",
        flush=True,
    )


class _Children:
    """The CPU seconds of this process's descendants, looked at now and then."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._seen: dict[int, float] = {}
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        return sum(self._seen.values())

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_S):
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    used = child.cpu_times()
                    if child.name() in _NAMES:
                        self._seen[child.pid] = used.user + used.system


if __name__ == "__main__":
    main()
