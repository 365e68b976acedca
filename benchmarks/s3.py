"""How fast does each reader read from an S3 server, and at what cost in CPU time?

    python benchmarks/s3.py [--mib 512] [--rounds 3] [--latency-ms 50] [--only obstore,arrow]

One real server (SeaweedFS, on this machine) has the same rows as Arrow and as Parquet shards. Each
round runs every reader once, in its own process: "obstore", "boto3" and "s3fs" read ranges of
8 MiB, 8 at a time, and drop them; "store" does the same through Dataplane's store, and "arena" also
writes them to the block arena; "arrow" and "parquet" read a shuffled epoch of a Dataplane job, with
nothing cached, from a running node; "arrow-in-order" is the same without a shuffle, and
"arrow-again" its second epoch, with an arena that is already mapped and holds a fifth of 512 MiB;
"torch" is DataLoader with two workers that read Arrow with s3fs, in order.

MiB/s are measured from the start of reading (of jobs: the construction of the loader) to its end.
CPU seconds per GiB are shown for all processes of the reader, and for the server. `--latency-ms`
adds a proxy before the server, which delays each request by that time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from dataplane_bench import s3
from delayed import delayed

RANGE_BYTES = 8 << 20
RANGES_AT_ONCE = 8
ROW_TOKENS = 2048
BLOCK_ROWS = 512
SHARD_ROWS = 8 * BLOCK_ROWS
BATCH_ROWS = 32
SMALL_ARENA_BYTES = 96 << 20
BUCKET = "speed"
SMALL = "small"

Ranges = list[tuple[str, int, int]]


def _upload(server: s3.S3Server, mib: int) -> None:
    """Shards "arrow/…" and "parquet/…" with equal rows, and one small shard for a warm start."""
    random = np.random.default_rng(0)
    row_count = (mib << 20) // (ROW_TOKENS * 4)
    with contextlib.closing(server.client()) as client:
        client.create_bucket(Bucket=BUCKET)
        for number in range(-(-row_count // SHARD_ROWS)):
            table = _table(random, SHARD_ROWS)
            client.put_object(Bucket=BUCKET, Key=f"arrow/{number:03}.arrow", Body=_arrow(table))
            out = io.BytesIO()
            pq.write_table(
                table, out, row_group_size=BLOCK_ROWS, compression="NONE", use_dictionary=False
            )
            client.put_object(
                Bucket=BUCKET, Key=f"parquet/{number:03}.parquet", Body=out.getvalue()
            )
        small = _arrow(_table(random, BATCH_ROWS))
        client.put_object(Bucket=BUCKET, Key=f"{SMALL}/0.arrow", Body=small)


def _table(random: np.random.Generator, row_count: int) -> pa.Table:
    values = random.integers(0, 50_000, row_count * ROW_TOKENS, dtype=np.int32)
    return pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(values), ROW_TOKENS)})


def _arrow(table: pa.Table) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=BLOCK_ROWS)
    return out.getvalue()


def _shards() -> list[Any]:
    from dataplane.store.connect import connect

    return [*connect(f"s3://{BUCKET}/").list(f"s3://{BUCKET}/arrow/")]


def _ranges() -> Ranges:
    return [
        (shard.url, at, min(RANGE_BYTES, shard.size_bytes - at))
        for shard in _shards()
        for at in range(0, shard.size_bytes, RANGE_BYTES)
    ]


def _in_threads(read: Callable[[str, int, int], int]) -> Callable[[], int]:
    """Read all ranges, RANGES_AT_ONCE at a time; `read` returns how many bytes it received."""
    ranges = _ranges()
    threads = ThreadPoolExecutor(RANGES_AT_ONCE)
    return lambda: sum(threads.map(lambda one: read(*one), ranges))


def _obstore() -> Callable[[], int]:
    import obstore
    from obstore.store import S3Store

    options: Any = {"allow_http": True}
    store = S3Store(BUCKET, client_options=options)
    cut = len(f"s3://{BUCKET}/")
    return _in_threads(
        lambda url, at, length: len(obstore.get_range(store, url[cut:], start=at, end=at + length))
    )


def _boto3() -> Callable[[], int]:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=os.environ["AWS_ENDPOINT_URL"],
        config=Config(max_pool_connections=RANGES_AT_ONCE, s3={"addressing_style": "path"}),
    )
    cut = len(f"s3://{BUCKET}/")

    def read(url: str, at: int, length: int) -> int:
        span = f"bytes={at}-{at + length - 1}"
        return len(client.get_object(Bucket=BUCKET, Key=url[cut:], Range=span)["Body"].read())

    return _in_threads(read)


def _s3fs() -> Callable[[], int]:
    import s3fs

    files = s3fs.S3FileSystem()
    return _in_threads(lambda url, at, length: len(files.cat_file(url, start=at, end=at + length)))


def _store() -> Callable[[], int]:
    from dataplane.store.connect import connect

    etags = {shard.url: shard.etag for shard in _shards()}
    return _in_threads(
        lambda url, at, length: len(memoryview(connect(url).read(url, at, length, etags[url])))
    )


def _arena() -> Callable[[], int]:
    """Read blocks into a warm arena, as a node does. The first fetcher runs already."""
    import asyncio

    from dataplane.arena.memfd import Arena
    from dataplane.model import Region
    from dataplane.node.block_read import BlockRead
    from dataplane.node.fetch import Fetcher
    from dataplane.rpc.tasks import RawBlockRef
    from dataplane.settings import default_node_config
    from dataplane.store.outage import Outages
    from dataplane.trace import Trace

    etags, ranges = {each.url: each.etag for each in _shards()}, _ranges()
    arena = Arena.create("s3-speed", 2 * RANGES_AT_ONCE * RANGE_BYTES)
    arena.reserve(0, arena.size_bytes)
    fetcher = Fetcher.of(default_node_config(), arena, Trace("s3"), Outages())
    loop = asyncio.new_event_loop()

    async def read_all(ranges: Ranges) -> int:
        free = asyncio.Queue[int]()

        def ended(slot: int, bad: object) -> None:
            if bad:
                sys.exit(1)
            free.put_nowait(slot)

        for slot in range(RANGES_AT_ONCE):
            free.put_nowait(slot)
        for url, at, length in ranges:
            slot = await free.get()
            raw = RawBlockRef(url, 0, 0, Region(at, length), Region(0, 0), at + length, etags[url])
            read = BlockRead(
                at, raw, Region(slot * RANGE_BYTES, length), copied_to=None,
                report=partial(ended, slot),
            )  # fmt: skip
            fetcher.fetch([read])
        for _ in range(RANGES_AT_ONCE):
            await free.get()
        return sum(length for _, _, length in ranges)

    loop.run_until_complete(read_all(ranges[:1]))
    return lambda: loop.run_until_complete(read_all(ranges))


def _job(folder: str, *, shuffle: bool = True, again: bool = False) -> Callable[[], int]:
    """An epoch of a Dataplane job. The node is already running, with another dataset."""
    from dataplane_torch import DataLoader

    if again:
        os.environ["DATAPLANE_BLOCK_ARENA_BYTES"] = str(SMALL_ARENA_BYTES)
    list(DataLoader(f"s3://{BUCKET}/{SMALL}/", BATCH_ROWS))

    def epochs() -> Iterator[int]:
        loader = DataLoader(f"s3://{BUCKET}/{folder}/", BATCH_ROWS, shuffle=shuffle)
        while True:
            yield sum(batch["tokens"].nbytes for batch in loader)

    run = epochs()
    if again:
        next(run)
    return lambda: next(run)


def _torch() -> Callable[[], int]:
    import s3fs
    import torch
    from torch.utils.data import IterableDataset, get_worker_info

    names = sorted({url for url, _, _ in _ranges()})

    class RowStream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            worker = get_worker_info()
            files = s3fs.S3FileSystem(skip_instance_cache=True)
            for name in names[worker.id :: worker.num_workers]:  # type: ignore[union-attr]
                with files.open(name, "rb", block_size=RANGE_BYTES) as file:
                    shard = pa.ipc.open_file(file)
                    for number in range(shard.num_record_batches):
                        rows = shard.get_batch(number)["tokens"].flatten().to_numpy()
                        rows = torch.from_numpy(rows.reshape(-1, ROW_TOKENS).copy())
                        yield from torch.split(rows, BATCH_ROWS)

    def epoch() -> int:
        loader = torch.utils.data.DataLoader(RowStream(), batch_size=None, num_workers=2)
        return sum(batch.nbytes for batch in loader)

    return epoch


WAYS: dict[str, Callable[[], Callable[[], int]]] = {
    "obstore": _obstore,
    "boto3": _boto3,
    "s3fs": _s3fs,
    "store": _store,
    "arena": _arena,
    "arrow": lambda: _job("arrow"),
    "arrow-in-order": lambda: _job("arrow", shuffle=False),
    "arrow-again": lambda: _job("arrow", shuffle=False, again=True),
    "parquet": lambda: _job("parquet"),
    "torch": _torch,
}


def _read(way: str) -> None:
    """Run one reader: get ready, read everything once, and print what it took."""
    read = WAYS[way]()
    server = int(os.environ["S3_SERVER_PID"])
    before, served, began = _cpu_s(), _family_cpu_s(server), time.perf_counter()
    size = read()
    took = {"bytes": size, "seconds": time.perf_counter() - began, "cpu_s": _cpu_s() - before}
    took["server_cpu_s"] = _family_cpu_s(server) - served
    print(json.dumps(took), flush=True)
    os._exit(0)


def _cpu_s() -> float:
    """CPU seconds of this process and its descendants, including those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + _family_cpu_s(os.getpid())


def _family_cpu_s(pid: int) -> float:
    process, total = psutil.Process(pid), 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def _measured(ways: list[str], rounds: int, server: s3.S3Server, port: int) -> dict[str, Any]:
    environment = {
        **os.environ,
        **server.environment(),
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "S3_SERVER_PID": str(server.pid),
    }
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            with tempfile.TemporaryDirectory() as cache:
                done = subprocess.run(
                    [sys.executable, __file__, "--read", way],
                    env={**environment, "DATAPLANE_CACHE_DIR": cache},
                    stdout=subprocess.PIPE,
                    check=True,
                )
                runs[way].append(json.loads(done.stdout))
    return {way: _summary(found) for way, found in runs.items()}


def _summary(runs: list[dict[str, float]]) -> dict[str, float]:
    middle = statistics.median
    return {
        "mib_per_s": middle(run["bytes"] / run["seconds"] for run in runs) / (1 << 20),
        "mib_per_s_best": max(run["bytes"] / run["seconds"] for run in runs) / (1 << 20),
        "client_cpu_s_per_gib": middle(run["cpu_s"] / run["bytes"] for run in runs) * (1 << 30),
        "server_cpu_s_per_gib": middle(run["server_cpu_s"] / run["bytes"] for run in runs)
        * (1 << 30),
    }


def _shown(found: dict[str, Any]) -> Iterator[str]:
    first = next(iter(found.values()))["mib_per_s"]
    yield f"{'':16s}{'MiB/s':>8s}{'best':>8s}{'ratio':>8s}{'client CPU s/GiB':>18s}{'server':>9s}"
    for way, one in found.items():
        yield (
            f"{way:16s}{one['mib_per_s']:8.0f}{one['mib_per_s_best']:8.0f}"
            f"{one['mib_per_s'] / first:8.2f}{one['client_cpu_s_per_gib']:18.2f}"
            f"{one['server_cpu_s_per_gib']:9.2f}"
        )


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="of rows, in either format")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--only", default=",".join(WAYS), help="ways, with commas between")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        _read(given.read)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(s3.s3_server(folder, dict(os.environ)))
        _upload(server, given.mib)
        port = server.port
        if given.latency_ms:
            port = stack.enter_context(delayed(port, given.latency_ms / 1000)).port
        found = _measured(given.only.split(","), given.rounds, server, port)
    print(json.dumps(found) if given.json else "\n".join(_shown(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
