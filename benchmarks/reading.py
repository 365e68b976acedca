"""The cost of reading: seconds, CPU and bytes, from an S3 server of this machine and by process.

    python benchmarks/reading.py readers | columns | small-blocks | cpu URL ... | peers [--json]

The server (SeaweedFS) shares the cores. `--latency-ms` delays each request.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from dataplane_bench.model import BenchCase
from dataplane_bench.s3 import REGION, Storage, s3_storage
from dataplane_bench.scripts import (
    Row,
    exit_with,
    family_cpu_s,
    line_of,
    run,
    send,
    shard,
    started,
    tokens_table,
)
from nodes import rows_of

from dataplane.store.connect import connect


@contextlib.contextmanager
def stored(write: Callable[[Path], None], latency_ms: float) -> Iterator[tuple[str, Storage]]:
    """A url with what `write` puts into a folder, and its server, as the environment says."""
    with tempfile.TemporaryDirectory() as name, s3_storage(Path(name)) as storage:
        shards = Path(name) / "shards"
        shards.mkdir()
        write(shards)
        place = storage.place(shards, BenchCase("reading", "tokens", delay_ms=latency_ms))
        os.environ |= {
            "AWS_ACCESS_KEY_ID": place.access_key,
            "AWS_SECRET_ACCESS_KEY": place.secret_key,
            "AWS_ENDPOINT_URL": place.endpoint,
            "AWS_REGION": REGION,
        }
        yield place.url, storage


def measured(storage: Storage, cache: str, *arguments: str) -> dict[str, float]:
    """The output of a hidden command of this script, and the server's CPU seconds meanwhile."""
    environment = {**os.environ, "DATAPLANE_CACHE_DIR": cache}
    before = storage.cpu_s()
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env=environment, stdout=subprocess.PIPE, check=True
    )
    return {**json.loads(done.stdout), "server_cpu_s": storage.cpu_s() - before}


def median_epoch(runs: list[dict[str, float]]) -> dict[str, float]:
    """The row of an epoch: medians of its runs."""
    took = {name: statistics.median(some[name] for some in runs) for name in runs[0]}
    return {
        "samples/s": took["rows"] / took["seconds"],
        "s": took["seconds"],
        "s until the first batch": took["first"],
        "MB read": took["bytes"] / 1e6,
        "CPU s": took["cpu_s"],
    }


def _epoch(options: str) -> None:
    """The first epoch of a job, imports and the loader's construction included."""
    began = time.perf_counter()
    from dataplane_torch import DataLoader

    loader: Any = DataLoader(**json.loads(options))
    rows, first = 0, 0.0
    for batch in loader:
        rows += len(next(iter(batch.values())))
        first = first or time.perf_counter() - began
    took = {
        "rows": rows,
        "bytes": loader.statistics().read_bytes,
        "seconds": time.perf_counter() - began,
        "first": first,
        "cpu_s": family_cpu_s(),
    }
    print(json.dumps(took))
    exit_with(0)


TABLE_SHARDS, TABLE_ROWS, TABLE_COLUMNS, TABLE_BATCH = 8, 301_056, 40, 8_192


def columns(
    *,
    rounds: int = 3,
    latency_ms: float = 20.0,
    rows_per_block: int = 65_536,
    forms: tuple[str, ...] = ("parquet", "arrow", "arrow-lz4", "arrow-zstd"),
) -> Iterator[Row]:
    """Two of 40 columns of remote shards, and all: bytes, seconds and CPU of the first epoch.

    The same 2.4 million rows (8 shards, 402 MiB uncompressed) as Parquet and as Arrow, plain and
    with compressed buffers. Nothing is indexed or cached before.
    """

    def write(folder: Path) -> None:
        for form in forms:
            (folder / form).mkdir()
        for number in range(TABLE_SHARDS):
            table = numbers_table(np.random.default_rng(number))
            for form in forms:
                path = folder / form / f"{number:03}.{form.partition('-')[0]}"
                path.write_bytes(shard(table, form, rows_per_block))

    with stored(write, latency_ms) as (url, storage):
        for form, names in itertools.product(forms, (("c3", "c30"), None)):
            options = {"dataset": f"{url}/{form}/", "batch_size": TABLE_BATCH, "seed": 1}
            runs = []
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as cache:
                    given = json.dumps(options | {"columns": names})
                    runs.append(measured(storage, cache, "epoch", given))
            yield Row(f"{form}, {len(names or ()) or TABLE_COLUMNS} columns", median_epoch(runs))


def numbers_table(random: np.random.Generator) -> pa.Table:
    """Columns of whole numbers below a million, and of fractions of few digits, in turns."""
    made: dict[str, Any] = {}
    for at in range(TABLE_COLUMNS):
        whole = random.integers(0, 1_000_000, TABLE_ROWS, np.int32)
        made[f"c{at}"] = whole if at % 2 else (whole / 64).astype(np.float32)
    return pa.table(made)


SMALL_ROW_BYTES, SMALL_BATCH, SMALL_SHARD_BYTES = 2048, 64, 64 << 20


def small_blocks(
    *,
    rounds: int = 3,
    latency_ms: float = 20.0,
    kib: int = 128,
    mib: int = 512,
    forms: tuple[str, ...] = ("parquet", "arrow"),
    orders: tuple[str, ...] = ("in-order", "shuffled"),
) -> Iterator[Row]:
    """The first epoch of many small blocks, in order and shuffled, of shards that are indexed."""
    shard_bytes = min(SMALL_SHARD_BYTES, mib << 20)

    def write(folder: Path) -> None:
        random, kind = np.random.default_rng(0), pa.binary(SMALL_ROW_BYTES)
        for form in forms:
            (folder / form).mkdir()
        for number in range((mib << 20) // shard_bytes):
            values = [None, pa.py_buffer(random.bytes(shard_bytes))]
            rows = pa.Array.from_buffers(kind, shard_bytes // SMALL_ROW_BYTES, values)
            for form in forms:
                block_rows = max(1, (kib << 10) // SMALL_ROW_BYTES)
                body = shard(pa.table({"tokens": rows}), form, block_rows)
                (folder / form / f"{number:03}.{form}").write_bytes(body)

    with stored(write, latency_ms) as (url, storage):
        for form, order in itertools.product(forms, orders):
            shuffled = order == "shuffled"
            options = {"dataset": f"{url}/{form}/", "batch_size": SMALL_BATCH, "seed": 1}
            given = json.dumps(options | {"shuffle": shuffled})
            with tempfile.TemporaryDirectory() as cache:
                runs = [measured(storage, cache, "epoch", given) for _ in range(1 + rounds)]
            yield Row(f"{form}, {order}", median_epoch(runs[1:]))


RANGE_BYTES, RANGES_AT_ONCE = 8 << 20, 8
ROW_TOKENS, BLOCK_ROWS, BATCH_ROWS = 2048, 512, 32
SHARD_ROWS = 8 * BLOCK_ROWS
SMALL_ARENA_BYTES = 96 << 20

Ranges = list[tuple[str, int, int]]


def readers(
    *, mib: int = 512, rounds: int = 3, latency_ms: float = 0.0, ways: tuple[str, ...] = ("all",)
) -> Iterator[Row]:
    """How fast each reader reads from the server, and at what cost in CPU time.

    The same rows as Arrow and as Parquet shards. Each round runs every reader once, in its own
    process: "obstore", "boto3" and "s3fs" read ranges of 8 MiB, 8 at a time, and drop them; "store"
    does the same through Dataplane's store, and "arena" also writes them to the block arena;
    "arrow" and "parquet" read a shuffled epoch of a job, with nothing cached, from a running node;
    "arrow-in-order" is the same without a shuffle, and "arrow-again" its second epoch, with an
    arena that is already mapped and holds a fifth of 512 MiB; "torch" is DataLoader with two
    workers that read Arrow with s3fs, in order. MiB/s are measured from the start of reading to its
    end, CPU seconds per GiB for all processes of the reader, and for the server.
    """
    names = WAYS if ways == ("all",) else ways

    def write(folder: Path) -> None:
        random = np.random.default_rng(0)
        for name in ("arrow", "parquet", "small"):
            (folder / name).mkdir()
        for number in range(-(-(mib << 20) // (ROW_TOKENS * 4 * SHARD_ROWS))):
            table = tokens_table(random, SHARD_ROWS)
            for form in ("arrow", "parquet"):
                path = folder / form / f"{number:03}.{form}"
                path.write_bytes(shard(table, form, BLOCK_ROWS))
        small = shard(tokens_table(random, BATCH_ROWS), "arrow", BLOCK_ROWS)
        (folder / "small" / "0.arrow").write_bytes(small)

    runs: dict[str, list[dict[str, float]]] = {way: [] for way in names}
    with stored(write, latency_ms) as (url, storage):
        for _, way in itertools.product(range(rounds), names):
            with tempfile.TemporaryDirectory() as cache:
                runs[way].append(measured(storage, cache, "reader", url, way))
    gib = 1 << 30
    for way, some in runs.items():
        rates = [took["bytes"] / took["seconds"] / (1 << 20) for took in some]
        cpu = statistics.median(took["cpu_s"] / took["bytes"] for took in some) * gib
        server = statistics.median(took["server_cpu_s"] / took["bytes"] for took in some) * gib
        yield Row(way, {"MiB/s": statistics.median(rates), "best": max(rates),
                        "CPU s/GiB": cpu, "of the server": server})  # fmt: skip


def _ranges(url: str) -> Ranges:
    return [
        (listed.url, at, min(RANGE_BYTES, listed.size_bytes - at))
        for listed in connect(url).list(f"{url}/arrow/")
        for at in range(0, listed.size_bytes, RANGE_BYTES)
    ]


def _etags(url: str) -> dict[str, str]:
    return {listed.url: listed.etag for listed in connect(url).list(f"{url}/arrow/")}


def _in_threads(url: str, read: Callable[[str, int, int], int]) -> Callable[[], int]:
    """Read all ranges, RANGES_AT_ONCE at a time; `read` returns how many bytes it received."""
    ranges, threads = _ranges(url), ThreadPoolExecutor(RANGES_AT_ONCE)
    return lambda: sum(threads.map(lambda given: read(*given), ranges))


def _bucket_and_key(url: str) -> list[str]:
    return url.removeprefix("s3://").split("/", 1)


def _obstore(url: str) -> Callable[[], int]:
    import obstore
    from obstore.store import S3Store

    options: Any = {"allow_http": True}
    store = S3Store(_bucket_and_key(url)[0], client_options=options)
    return _in_threads(
        url,
        lambda at_url, at, length: len(
            obstore.get_range(store, _bucket_and_key(at_url)[1], start=at, end=at + length)
        ),
    )


def _boto3(url: str) -> Callable[[], int]:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=os.environ["AWS_ENDPOINT_URL"],
        config=Config(max_pool_connections=RANGES_AT_ONCE, s3={"addressing_style": "path"}),
    )

    def read(at_url: str, at: int, length: int) -> int:
        bucket, key = _bucket_and_key(at_url)
        span = f"bytes={at}-{at + length - 1}"
        return len(client.get_object(Bucket=bucket, Key=key, Range=span)["Body"].read())

    return _in_threads(url, read)


def _s3fs(url: str) -> Callable[[], int]:
    import s3fs

    files = s3fs.S3FileSystem()
    return _in_threads(
        url, lambda at_url, at, length: len(files.cat_file(at_url, start=at, end=at + length))
    )


def _store(url: str) -> Callable[[], int]:
    etags = _etags(url)
    return _in_threads(
        url,
        lambda at_url, at, length: len(
            memoryview(connect(at_url).read(at_url, at, length, etags[at_url]))
        ),
    )


def _arena(url: str) -> Callable[[], int]:
    """Read blocks into a warm arena, as a node does. The first fetcher runs already."""
    import asyncio

    from dataplane.arena.memfd import Arena
    from dataplane.base.trace import Trace
    from dataplane.model.records import Region
    from dataplane.node.fetch import BlockRead, Fetcher
    from dataplane.rpc.tasks import RawBlockRef
    from dataplane.settings import default_node_config
    from dataplane.store.outage import Outages

    etags, ranges = _etags(url), _ranges(url)
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
        for at_url, at, length in ranges:
            slot = await free.get()
            raw = RawBlockRef(
                at_url, 0, 0, Region(at, length), Region(0, 0), at + length, etags[at_url]
            )
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


def _job(url: str, folder: str, *, shuffle: bool = True, again: bool = False) -> Callable[[], int]:
    """An epoch of a Dataplane job. The node is already running, with another dataset."""
    from dataplane_torch import DataLoader

    if again:
        os.environ["DATAPLANE_BLOCK_ARENA_BYTES"] = str(SMALL_ARENA_BYTES)
    list(DataLoader(f"{url}/small/", BATCH_ROWS))

    def epochs() -> Iterator[int]:
        loader = DataLoader(f"{url}/{folder}/", BATCH_ROWS, shuffle=shuffle)
        while True:
            yield sum(batch["tokens"].nbytes for batch in loader)

    run = epochs()
    if again:
        next(run)
    return lambda: next(run)


def _torch(url: str) -> Callable[[], int]:
    import s3fs
    import torch
    from torch.utils.data import IterableDataset, get_worker_info

    names = sorted({at_url for at_url, _, _ in _ranges(url)})

    class RowStream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            worker = get_worker_info()
            files = s3fs.S3FileSystem(skip_instance_cache=True)
            for name in names[worker.id :: worker.num_workers]:  # type: ignore[union-attr]
                with files.open(name, "rb", block_size=RANGE_BYTES) as file:
                    opened = pa.ipc.open_file(file)
                    for number in range(opened.num_record_batches):
                        rows = opened.get_batch(number)["tokens"].flatten().to_numpy()
                        rows = torch.from_numpy(rows.reshape(-1, ROW_TOKENS).copy())
                        yield from torch.split(rows, BATCH_ROWS)

    def epoch() -> int:
        loader = torch.utils.data.DataLoader(RowStream(), batch_size=None, num_workers=2)
        return sum(batch.nbytes for batch in loader)

    return epoch


WAYS: dict[str, Callable[[str], Callable[[], int]]] = {
    "obstore": _obstore,
    "boto3": _boto3,
    "s3fs": _s3fs,
    "store": _store,
    "arena": _arena,
    "arrow": lambda url: _job(url, "arrow"),
    "arrow-in-order": lambda url: _job(url, "arrow", shuffle=False),
    "arrow-again": lambda url: _job(url, "arrow", shuffle=False, again=True),
    "parquet": lambda url: _job(url, "parquet"),
    "torch": _torch,
}


def _reader(url: str, way: str) -> None:
    """Get ready, read everything once, and print what it took."""
    read = WAYS[way](url)
    before, began = family_cpu_s(), time.perf_counter()
    size = read()
    took = {"bytes": size, "seconds": time.perf_counter() - began}
    print(json.dumps({**took, "cpu_s": family_cpu_s() - before}))
    exit_with(0)


def cpu(
    *urls: str,
    batch_size: int = 32,
    columns: str = "",
    in_order: bool = False,
    seconds: float = 3.0,
) -> Iterator[Row]:
    """The CPU seconds of a loader, by process, and in the trainer's own thread.

    A training loop that does nothing takes batches, epoch after epoch. After a few seconds of
    warm-up, the CPU times of the trainer, its node and its workers are read at both ends of a
    window. Settings come from the environment (DATAPLANE_SLAB_BYTES=…).
    """
    from dataplane_torch import DataLoader

    names = columns.split(",") if columns else None
    with DataLoader([*urls], batch_size, shuffle=not in_order, columns=names) as loader:
        batches, count = itertools.chain.from_iterable(itertools.repeat(loader)), 0
        began = time.perf_counter()
        while time.perf_counter() - began < 1.5:  # warm
            next(batches)
        began, thread_s, before = time.perf_counter(), time.thread_time(), cpu_by_process()
        while time.perf_counter() - began < seconds:
            next(batches)
            count += 1
        took_s, thread_s = time.perf_counter() - began, time.thread_time() - thread_s
        after = cpu_by_process()
    millions = count * batch_size / 1e6
    yield Row("loader", {"samples/s": count * batch_size / took_s})
    busy = {"of the time": thread_s / took_s, "us a batch": thread_s / count * 1e6}
    yield Row("trainer's own thread", busy)
    for name, cpu_s in after.items():
        per_million = (cpu_s - before.get(name, 0.0)) / millions
        yield Row(name, {"CPU s per million samples": per_million})


def cpu_by_process() -> dict[str, float]:
    """CPU seconds so far of this process, its node and the node's workers."""
    trainer, spent = psutil.Process(), dict[str, float]()
    for process in (trainer, *trainer.children(recursive=True)):
        name = "workers" if process.name() == "dp-worker" else "node"
        name = "trainer" if process == trainer else name
        spent[name] = spent.get(name, 0.0) + sum(process.cpu_times()[:2])
    return spent


PEER_COSTS = (
    "node, first epoch", "node, second epoch", "decode, first epoch", "decode, second epoch",
    "all trainers",
)  # fmt: skip
PEER = """
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


def decode_share(ends: list[tuple[int, float, list[float]]], *, images: bool) -> float:
    """The part of the worker's time in which it decoded blocks and made images, from
    what the ranks print: rows, time for blocks, and time for each slab. One of equal slabs is
    made.
    """
    decoding_s = sum(blocks_s for _, blocks_s, _ in ends)
    slabs = list(zip(*(slabs for _, _, slabs in ends), strict=True))
    made_s = sum(map(max, slabs)) if images else 0.0
    return (decoding_s + made_s) / (decoding_s + sum(map(sum, slabs)))


def peers(
    *,
    photographs: str = "",
    tp: int = 4,
    size: int = 224,
    batch: int = 64,
    samples: int = 4096,
    rounds: int = 3,
) -> Iterator[Row]:
    """The processor time that ranks cost a node which read the same batches: tensor-parallel peers.

    Two epochs of photographs with random resized crops, or of token lists: by one rank, and by --tp
    processes that are ranks of one dp rank. CPU seconds of the node and of its workers in each
    epoch, and of the trainers in the second. The first epoch allocates the memory of every rank.
    Both ways take turns in rounds, and the median round of each counts.

    "decode" is the part of the node's one worker that decodes: blocks, and with photographs also
    the slabs whose images it makes, without the slabs that it copies from these for the other
    peers. It is the worker's processor time, divided as the time of its tasks is. Blocks of token
    lists are decoded in the first epoch alone, since they stay in memory.
    """
    given = {"batch": batch, "size": size, "crops": bool(photographs), "samples": samples}
    trials: dict[int, list[tuple[float, ...]]] = {1: [], tp: []}
    with rows_of(photographs, samples) as url:
        for _, count in itertools.product(range(rounds), trials):
            trials[count].append(peers_cpu_s(given | {"url": url}, count))
    medians = {
        count: [statistics.median(costs) for costs in zip(*some, strict=True)]
        for count, some in trials.items()
    }
    for what, alone, together in zip(PEER_COSTS, medians[1], medians[tp], strict=True):
        ratio = together / alone if alone > 0.01 else float("nan")
        yield Row(what, {"times": ratio, "CPU s of one": alone, f"of {tp}": together})


def peers_cpu_s(given: Mapping[str, Any], tp: int) -> tuple[float, ...]:
    """CPU seconds: of the node in the first and the second epoch, of decoding in both, and of all
    trainers in the second.
    """
    os.environ["DATAPLANE_WORKER_COUNT"] = "1"
    with contextlib.ExitStack() as stack:
        ranks = [
            started(stack, sys.executable, "-c", PEER, json.dumps({**given, "rank": n, "tp": tp}))
            for n in range(tp)
        ]
        for rank in ranks:
            assert line_of(rank.stdout) == "open\n"
        trainers = [psutil.Process(rank.pid) for rank in ranks]
        children = [child for trainer in trainers for child in trainer.children()]
        (node,) = [child for child in children if "dataplane.node" in child.cmdline()]
        below = node.children(recursive=True)
        (worker,) = [process for process in below if process.name() == "dp-worker"]
        spent, decoding = [], []
        for _ in range(2):
            before, of_worker = family_cpu_s(node.pid), family_cpu_s(worker.pid)
            own = sum(sum(trainer.cpu_times()[:2]) for trainer in trainers)
            for rank in ranks:
                send(rank)
            ends = [json.loads(line_of(rank.stdout)) for rank in ranks]
            assert [rows for rows, _, _ in ends] == [given["samples"]] * tp
            spent.append(family_cpu_s(node.pid) - before)
            share = decode_share(ends, images=given["crops"])
            decoding.append(share * (family_cpu_s(worker.pid) - of_worker))
        own = sum(sum(trainer.cpu_times()[:2]) for trainer in trainers) - own
        for rank in ranks:
            rank.communicate("done\n")
    return (*spent, *decoding, own)


if __name__ == "__main__":
    sys.exit(run(__doc__, readers, columns, small_blocks, cpu, peers, _epoch, _reader))
