"""The cost of opening a dataset: lists, shards, manifests, and tables with very many columns.

    python benchmarks/indexing.py listing | shards | manifests | wide [--json]

Exit status 1: a bar was missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from bisect import bisect_right
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from dataplane_bench.scripts import Row, line_of, row, rows_of_json, run, serve, shard, started
from msgspec import structs
from nodes import ticking
from reading import stored

from dataplane.index.indexing import index_dataset, open_manifest
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import ClosedError
from dataplane.model.records import End, ObjectInfo, Region
from dataplane.node.dataset import Dataset, dataset_of
from dataplane.node.datasets import Datasets
from dataplane.plan.defaults import BlockSizes, shuffle_of
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane.plan.shards import Shard, ShardTable
from dataplane.plan.views import identity_of
from dataplane.rpc.messages import DatasetSource
from dataplane.settings import default_node_config
from dataplane.store.connect import Stores, open_store
from dataplane.store.retry import Retrying

PROCESSES = {
    "dp-fetcher": "fetchers",
    "dp-worker": "workers",
}


class Watched(threading.Thread):
    """CPU seconds of a process and of all below it, by part, sampled often, since a process that
    indexes ends as soon as it is done.
    """

    def __init__(self, root: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._root, self._is_over = root, threading.Event()
        self._seen: dict[int, tuple[str, float, float]] = {}
        self._sample()
        self.start()

    def run(self) -> None:
        while not self._is_over.wait(0.02):
            self._sample()

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds since the start, by part: node, fetchers, workers."""
        self._is_over.set()
        self.join()
        self._sample()
        spent = dict.fromkeys(("node", "fetchers", "workers"), 0.0)
        for part, first, last in self._seen.values():
            spent[part] += last - first
        return spent

    def _sample(self) -> None:
        is_first = not self._seen
        for process in (self._root, *self._root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                cpu_s = sum(process.cpu_times()[:2])
                part = PROCESSES.get(process.name(), "node")
                before = self._seen.get(process.pid) or (part, cpu_s if is_first else 0.0, 0.0)
                self._seen[process.pid] = (*before[:2], cpu_s)


PAGE = 1000
BUCKET, FOLDER = "s3://bucket", "train/"


def listing(*, objects: int = 200_000, delay_ms: float = 50.0, rounds: int = 2) -> Iterator[Row]:
    """How long a list of many objects takes, one request after the other, and as a node makes it.

    A server on this machine gives lists as S3 does, a thousand keys a page, and waits before each.
    CPU is that of this process; the server has one of its own.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(
        target=serve_lists, args=(there, objects, delay_ms / 1000), daemon=True
    )
    server.start()
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{here.recv()}",
        "AWS_REGION": "us-east-1",
    }
    for _ in range(rounds):
        store = open_store(BUCKET)
        ways = {"one after the other": store.list, "as a node": Retrying(store, BUCKET).list}
        for way, listed in ways.items():
            began, cpu_s = time.perf_counter(), time.process_time()
            urls = {listed_object.url for listed_object in listed(f"{BUCKET}/{FOLDER}")}
            took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
            assert len(urls) == objects
            here.send("")
            yield Row(
                f"{objects:,} objects, {way}", {"s": took_s, "pages": here.recv(), "CPU s": cpu_s}
            )
    server.kill()


def serve_lists(caller: Connection, count: int, delay_s: float) -> None:
    """Tells its port, and for each message how many pages it has given since the one before."""
    keys = [f"{FOLDER}shard-{i:07d}.tar" for i in range(count)]
    requests: list[str] = []

    class ListAnswer(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
            time.sleep(delay_s)
            after = query.get("continuation-token") or query.get("start-after", "")
            requests.append(after)
            first = bisect_right(keys, after)
            page = keys[first : first + PAGE]
            text = "".join(_entry(key) for key in page)
            more = first + PAGE < count
            if more:
                text += f"<NextContinuationToken>{page[-1]}</NextContinuationToken>"
            ended = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
            body = f"<ListBucketResult>{ended}{text}</ListBucketResult>".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ListAnswer)
    caller.send(server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        caller.recv()
        caller.send(len(requests))
        requests.clear()


def _entry(key: str) -> str:
    return (
        f"<Contents><Key>{key}</Key><LastModified>2026-10-21T07:28:00.000Z</LastModified>"
        f'<ETag>"{hash(key)}"</ETag><Size>100</Size></Contents>'
    )


SHARD_ROWS, SHARD_COLUMNS = 64, 12


def shards(
    *, count: int = 2000, delay_ms: float = 20.0, form: str = "parquet", rounds: int = 2
) -> Iterator[Row]:
    """How fast shards in object storage are indexed, and what a shard costs.

    A real S3 server on this machine, made to seem far away, holds small shards. They are indexed as
    a node does it. CPU is that of this process (the node's part) and of those that it has started
    for this, in milliseconds a shard; the server's is left out.
    """

    def write(folder: Path) -> None:
        numbers = pa.array(range(SHARD_ROWS), pa.int64())
        body = shard(pa.table({f"c{at}": numbers for at in range(SHARD_COLUMNS)}), form, 1 << 20)
        for number in range(count):
            (folder / f"{number:07}.{form}").write_bytes(body)

    with stored(write, delay_ms) as (url, _):
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="indexes-") as cache:
                settings = structs.replace(default_node_config(), cache_dir=cache)
                watched, began = Watched(psutil.Process()), time.monotonic()
                source = DatasetSource((f"{url}/",))
                manifest = open_manifest(settings, Stores(is_settled=True), source)
                took_s, cpu_s = time.monotonic() - began, watched.cpu_s()
            assert len(manifest.shards) == count
            ms = {f"CPU ms a shard {part}": 1e3 * s / count for part, s in cpu_s.items() if s}
            yield Row("index", {"shards/s": count / took_s, **ms})


MANIFEST_FOLDER = "s3://training-data/corpus/v3"
_SIZES = (1_000, 300_000, 3_000_000)
_BLOCKS_A_SHARD = 3
_SAMPLE_BYTES = 8192
_ROWS = 1000
_STEP = 1024
_CALLS = 300
_TICK_S = 0.001
_OTHER_BYTES = 64 << 20
_CONFIG = NodeConfig("", 4 << 30, 1 << 30, 16 << 20, 2, 16, 30.0, 60.0, 30.0)
_SCHEMA = pa.schema([("tokens", pa.list_(pa.int32(), 2048)), ("id", pa.int64())])


def manifest_of(shards: int, blocks: int) -> Manifest:
    """Shards like those of training data: numbered names, ETags, blocks of different sizes."""
    random = np.random.default_rng(7)
    etags = random.bytes(16 * shards).hex()
    block_shard = (np.arange(blocks) * shards // blocks).astype(np.int32)
    rows = random.integers(_ROWS // 2, 3 * _ROWS // 2, blocks)
    length = rows * _SAMPLE_BYTES
    offset = np.cumsum(length) - length
    offset -= offset[np.searchsorted(block_shard, block_shard)]
    counts = np.bincount(block_shard, minlength=shards).tolist()
    footer = Region((1 << 30) - 4096, 4096)
    made = ShardTable.of(
        Shard(
            f"{MANIFEST_FOLDER}/{number % 1000:04d}/part-{number:08d}.parquet",
            1 << 30,
            f'"{etags[32 * number : 32 * number + 32]}"',
            count,
            footer,
            zero_copy=False,
        )
        for number, count in enumerate(counts)
    )
    schema = _SCHEMA.serialize().to_pybytes()
    return Manifest(
        (f"{MANIFEST_FOLDER}/",), "parquet", schema, made, block_shard, rows, offset,
        length, length,
    )  # fmt: skip


def spec_of(manifest: Manifest) -> JobSpec:
    shuffle = shuffle_of(BlockSizes.of(manifest.block_rows, manifest.block_decoded))
    return JobSpec(
        manifest.fingerprint, 7, True, shuffle.lanes, shuffle.window, _STEP, End.RAGGED,
        ramp=shuffle.ramp,
    )  # fmt: skip


def loaded(path: Path) -> Iterator[Row]:
    before = _rss_mb()
    began, cpu = time.perf_counter(), time.process_time()
    manifest = Manifest.from_bytes(path.read_bytes(), str(path))
    took, used = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    yield row("manifest, size of its file", path.stat().st_size / 1e6, "MB")
    yield row("manifest, loaded", took, "s")
    yield row("manifest, loaded, CPU", used, "s")
    yield row("the process before", before, "MB")
    yield row("the process at its peak", peak, "MB")
    yield row("the process with the manifest", _rss_mb(), "MB")
    began, cpu = time.perf_counter(), time.process_time()
    identity_of(manifest)
    yield row("identity of the dataset", time.perf_counter() - began, "s")
    yield row("identity of the dataset, CPU", time.process_time() - cpu, "s")


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def opened(path: Path) -> Iterator[Row]:
    yield from asyncio.run(_opened(path))


async def _opened(path: Path) -> list[Row]:
    async with ticking() as ticks:
        began, cpu = time.perf_counter(), time.process_time()
        manifest = await asyncio.to_thread(lambda: Manifest.from_bytes(path.read_bytes()))
        await asyncio.to_thread(identity_of, manifest)
        spec = await asyncio.to_thread(spec_of, manifest)
        dataset = await Datasets(_CONFIG).open(manifest, spec, {})
        rows = dataset.manifest.block_rows
        order = await asyncio.to_thread(
            Order, rows, spec.seed, spec.shuffle, spec.lanes, spec.window, 0, spec.ramp
        )
        order.block_span(np.arange(10))
        took, used = time.perf_counter() - began, time.process_time() - cpu
    return [
        row("dataset, opened", took, "s"),
        row("dataset, opened, CPU", used, "s"),
        row("event loop, longest hold meanwhile", 1e3 * max(own_s for _, own_s in ticks), "ms"),
        row(
            "the process at its peak, opened",
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "MB",
        ),
    ]


class _Listing:
    """A store that only lists."""

    def __init__(self, manifest: Manifest) -> None:
        self._facts = [(some.url, some.size_bytes, some.etag) for some in manifest.shards]

    def list(self, _prefix: str) -> Iterator[ObjectInfo]:
        return (ObjectInfo(*fact) for fact in self._facts)

    def head(self, _url: str) -> NoReturn:
        raise AssertionError("this store only lists")

    def read(self, _url: str, _offset: int, _length: int, _etag: str) -> NoReturn:
        raise AssertionError("this store only lists")

    def stream(self, _url: str, _etag: str) -> NoReturn:
        raise AssertionError("this store only lists")


def listed(path: Path) -> Iterator[Row]:
    """The work before the first shard is indexed, or the manifest is found in the cache."""
    store = _Listing(Manifest.from_bytes(path.read_bytes()))
    began = time.process_time()
    with contextlib.suppress(ClosedError):
        index_dataset([f"{MANIFEST_FOLDER}/"], connect=lambda _url: store, index_shard=_refuse)
    yield row("shards listed and looked up, CPU", time.process_time() - began, "s")


def _refuse(_format: object, _shard: object) -> NoReturn:
    raise ClosedError("enough")


def called(path: Path) -> Iterator[Row]:
    manifest = Manifest.from_bytes(path.read_bytes())
    spec = spec_of(manifest)
    dataset = dataset_of(1, manifest, spec)
    # With windows this long, nearly every row of a step is in a different block.
    order = Order(manifest.block_rows, 7, True, 64, 1 << 16, 0)
    random = np.random.default_rng(1)
    blocks = random.integers(0, manifest.block_count, _CALLS).tolist()
    other = np.zeros(_OTHER_BYTES, np.uint8)
    for name, between in (("", lambda: None), (", cold", lambda: other.fill(1))):
        yield row(f"locate of {_STEP:,} rows{name}", _locate_us(order, between), "us")
    for name, call in _calls(dataset):
        yield row(name, _cpu_us(call, blocks), "us")


def _calls(dataset: Dataset) -> list[tuple[str, Callable[[int], object]]]:
    return [
        ("block_in_shard", dataset.manifest.block_in_shard),
        ("raw_block", lambda block: dataset.raw_block(block, Region(0, 1))),
        ("place", dataset.place),
    ]


def _cpu_us(call: Callable[[int], object], blocks: list[int]) -> float:
    call(blocks[0])
    began = time.thread_time()
    for block in blocks:
        call(block)
    return (time.thread_time() - began) / len(blocks) * 1e6


def _locate_us(order: Order, between: Callable[[], None]) -> float:
    """The median time of steps whose windows are already open."""
    spent = []
    count = order.sample_count // _STEP
    for step in range(_CALLS // 3):
        begin = step * (count // _CALLS) * _STEP
        positions = np.arange(begin, begin + _STEP)
        order.locate(positions)
        between()
        began = time.thread_time()
        order.locate(positions)
        spent.append(time.thread_time() - began)
    return float(np.median(spent)) * 1e6


def written(path: Path, shards: int, blocks: int) -> Iterator[Row]:
    manifest = manifest_of(shards, blocks)
    began = time.perf_counter()
    path.write_bytes(manifest.to_bytes())
    yield row("manifest, written", time.perf_counter() - began, "s")


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    part.__name__: part for part in (written, loaded, listed, opened, called)
}


def manifests(*, blocks: tuple[int, ...] = _SIZES) -> Iterator[Row]:
    """How costs grow with a dataset: a manifest of a million shards and three million blocks.

    How long it takes to load and open the manifest, the peak memory of a process that does nothing
    else, and the longest time for which its event loop could not run; then CPU per call with
    manifests of several sizes. Each part has its own process. "cold" means after writing 64 MiB of
    other memory, as a node does between two plans.
    """
    with tempfile.TemporaryDirectory() as folder:
        for size in blocks:
            path = str(Path(folder) / f"{size}.manifest")
            made = in_process("written", path, str(max(size // _BLOCKS_A_SHARD, 1)), str(size))
            if size == max(blocks):
                yield from made
                for part in ("loaded", "listed", "opened"):
                    yield from in_process(part, path)
            for line in in_process("called", path):
                yield Row(f"{line.name}, of {size:,} blocks", line.values)


def in_process(*arguments: str) -> list[Row]:
    command = [sys.executable, __file__, "part", "--json", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return rows_of_json(done.stdout)


def _part(part: str, path: Path, *numbers: str) -> Iterator[Row]:
    yield from PARTS[part](path, *map(int, numbers))


WIDE_SHARDS, WIDE_ROWS, STEP_S = 2, 64, 0.005
CPU_S_MAX, WAIT_MS_MAX = 10.0, 50.0
LOOP = """
import sys, threading, time
from dataplane_torch import DataLoader
waits, pause = [], threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), pause.set()), daemon=True).start()
loader = DataLoader(sys.argv[1], batch_size=8, service=sys.argv[2])
while not pause.is_set():
    batches = iter(loader)
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        waits.append((time.time(), time.perf_counter() - began))
        if len(waits) == 200:
            print("ready", flush=True)
        if batch is None or pause.wait(float(sys.argv[3])):
            break
for at, wait in waits:
    print(at, wait)
"""
OPEN = """
import resource, sys, time
import torch
from dataplane_torch import DataLoader
began, before = time.time(), time.process_time()
loader = DataLoader(sys.argv[1], batch_size=8, shuffle=True, service=sys.argv[2])
batch = next(iter(loader))
print(len(batch), began, time.time(), time.process_time() - before, flush=True)
"""


def wide(
    *,
    columns: tuple[int, ...] = (2000, 8000, 100_000),
    forms: tuple[str, ...] = ("arrow", "parquet"),
) -> Iterator[Row]:
    """The cost of opening a table with very many columns, and how long other trainers wait.

    A node serves a trainer that takes a step every 5 ms. A second trainer opens a table with this
    many float columns, in two shards, and takes its first batch. CPU seconds of the node, of
    fetchers, of the workers and of the second trainer, from its start to its first batch;
    and the first trainer's waits meanwhile. Bars: 10 s of CPU without the trainer's, and 50 ms at
    the 99th percentile.
    """
    for form in forms:
        for count in columns:
            with tempfile.TemporaryDirectory() as folder:
                yield from opened_wide(Path(folder), count, form)


def opened_wide(folder: Path, columns: int, form: str) -> Iterator[Row]:
    """Measure one table, on its own node."""
    (folder / "wide").mkdir()
    values = pa.array(np.arange(WIDE_ROWS, dtype=np.float32))
    table = pa.Table.from_arrays([values] * columns, [f"feature_{i}" for i in range(columns)])
    for number in range(WIDE_SHARDS):
        (folder / "wide" / f"{number}.{form}").write_bytes(shard(table, form, WIDE_ROWS))
    narrow = folder / "narrow.parquet"
    pq.write_table(pa.table({"x": np.arange(100_000)}), narrow, row_group_size=10_000)
    arguments = ("--cache-dir", folder / "cache", "--state-dir", folder / "state")
    with contextlib.ExitStack() as stack:
        loud = ("--log-level", "error")
        node, address = serve(stack, "--listen", "127.0.0.1:0", *map(str, arguments), *loud)
        stepping = started(stack, sys.executable, "-c", LOOP, str(narrow), address, str(STEP_S))
        line_of(stepping.stdout)
        watched = Watched(psutil.Process(node))
        command = [sys.executable, "-c", OPEN, str(folder / "wide"), address]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        count, began, ended, own_s = map(float, done.stdout.split())
        assert count == columns
        cpu_s = watched.cpu_s()
        lines = stepping.communicate()[0].splitlines()
    steps = np.array([line.split() for line in lines if line != "ready"], np.float64)
    waits_ms = 1e3 * steps[(steps[:, 0] >= began) & (steps[:, 0] - steps[:, 1] <= ended), 1]
    name = f"{form}, {columns:,} columns"
    spent = {"CPU s": sum(cpu_s.values()), **cpu_s, "trainer": own_s, "s": ended - began}
    yield Row(f"{name}: first batch", spent, most=CPU_S_MAX)
    p99_ms = float(np.quantile(waits_ms, 0.99))
    waited = {"ms p99": p99_ms, "ms at most": float(waits_ms.max()), "steps": len(waits_ms)}
    yield Row(f"{name}: the other trainer waited", waited, most=WAIT_MS_MAX)


if __name__ == "__main__":
    sys.exit(run(__doc__, listing, shards, manifests, wide, _part))
