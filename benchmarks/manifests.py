"""How do costs grow with a dataset? A manifest of a million shards and three million blocks.

    python benchmarks/manifests.py [--json]

Measures how long it takes to load and open the manifest, the peak memory of a process that does
nothing else, and the longest time for which its event loop could not run; then CPU per call with
manifests of several sizes. Each part has its own process. "cold" means after writing 64 MiB of
other memory, as a node does between two plans.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa

from dataplane.config import JobSpec, NodeConfig
from dataplane.errors import ClosedError
from dataplane.index.indexing import index_dataset
from dataplane.model import End, ObjectInfo, Region
from dataplane.node.dataset import Dataset, dataset_of
from dataplane.node.datasets import Datasets
from dataplane.plan.defaults import BlockSizes, shuffle_of
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane.plan.shards import Shard, ShardTable
from dataplane.plan.views import identity_of

_FOLDER = "s3://training-data/corpus/v3"
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


@dataclass(frozen=True, slots=True)
class ManifestFigure:
    """One line of the table."""

    name: str
    value: float
    unit: str


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
            f"{_FOLDER}/{each % 1000:04d}/part-{each:08d}.parquet",
            1 << 30,
            f'"{etags[32 * each : 32 * each + 32]}"',
            count,
            footer,
            zero_copy=False,
        )
        for each, count in enumerate(counts)
    )
    schema = _SCHEMA.serialize().to_pybytes()
    return Manifest(
        (f"{_FOLDER}/",), "parquet", schema, made, block_shard, rows, offset,
        length, length,
    )  # fmt: skip


def spec_of(manifest: Manifest) -> JobSpec:
    shuffle = shuffle_of(BlockSizes.of(manifest.block_rows, manifest.block_decoded))
    return JobSpec(
        manifest.fingerprint, 7, True, shuffle.lanes, shuffle.window, _STEP, End.RAGGED,
        ramp=shuffle.ramp,
    )  # fmt: skip


def loaded(path: Path) -> Iterator[ManifestFigure]:
    before = _rss_mb()
    began, cpu = time.perf_counter(), time.process_time()
    manifest = Manifest.from_bytes(path.read_bytes(), str(path))
    took, used = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    yield ManifestFigure("manifest, size of its file", path.stat().st_size / 1e6, "MB")
    yield ManifestFigure("manifest, loaded", took, "s")
    yield ManifestFigure("manifest, loaded, CPU", used, "s")
    yield ManifestFigure("the process before", before, "MB")
    yield ManifestFigure("the process at its peak", peak, "MB")
    yield ManifestFigure("the process with the manifest", _rss_mb(), "MB")
    began, cpu = time.perf_counter(), time.process_time()
    identity_of(manifest)
    yield ManifestFigure("identity of the dataset", time.perf_counter() - began, "s")
    yield ManifestFigure("identity of the dataset, CPU", time.process_time() - cpu, "s")


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def opened(path: Path) -> Iterator[ManifestFigure]:
    yield from asyncio.run(_opened(path))


async def _opened(path: Path) -> list[ManifestFigure]:
    ticking = asyncio.create_task(_longest_gap())
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
    ticking.cancel()
    gap = await ticking
    return [
        ManifestFigure("dataset, opened", took, "s"),
        ManifestFigure("dataset, opened, CPU", used, "s"),
        ManifestFigure("event loop, longest hold meanwhile", gap * 1e3, "ms"),
        ManifestFigure(
            "the process at its peak, opened",
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "MB",
        ),
    ]


async def _longest_gap() -> float:
    """Until cancelled, record the longest time between two turns of the loop, less its sleep and
    the time that this thread waited for a CPU.
    """
    longest, before = 0.0, _running_s()
    try:
        while True:
            await asyncio.sleep(_TICK_S)
            now = _running_s()
            longest, before = max(longest, now - before - _TICK_S), now
    except asyncio.CancelledError:
        return longest


def _running_s() -> float:
    """A clock that stands still while this thread waits for a CPU."""
    waited_ns = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]
    return time.perf_counter() - int(waited_ns) / 1e9


class _Listing:
    """A store that only lists."""

    def __init__(self, manifest: Manifest) -> None:
        self._facts = [(one.url, one.size_bytes, one.etag) for one in manifest.shards]

    def list(self, _prefix: str) -> Iterator[ObjectInfo]:
        return (ObjectInfo(*each) for each in self._facts)

    def head(self, _url: str) -> NoReturn:
        raise AssertionError("this store only lists")

    def read(self, _url: str, _offset: int, _length: int, _etag: str) -> NoReturn:
        raise AssertionError("this store only lists")

    def stream(self, _url: str, _etag: str) -> NoReturn:
        raise AssertionError("this store only lists")


def listed(path: Path) -> Iterator[ManifestFigure]:
    """The work before the first shard is indexed, or the manifest is found in the cache."""
    store = _Listing(Manifest.from_bytes(path.read_bytes()))
    began = time.process_time()
    with contextlib.suppress(ClosedError):
        index_dataset([f"{_FOLDER}/"], connect=lambda _url: store, index_shard=_refuse)
    yield ManifestFigure("shards listed and looked up, CPU", time.process_time() - began, "s")


def _refuse(_format: object, _shard: object) -> NoReturn:
    raise ClosedError("enough")


def called(path: Path) -> Iterator[ManifestFigure]:
    manifest = Manifest.from_bytes(path.read_bytes())
    spec = spec_of(manifest)
    dataset = dataset_of(1, manifest, spec)
    # With windows this long, nearly every row of a step is in a different block.
    order = Order(manifest.block_rows, 7, True, 64, 1 << 16, 0)
    random = np.random.default_rng(1)
    blocks = random.integers(0, manifest.block_count, _CALLS).tolist()
    other = np.zeros(_OTHER_BYTES, np.uint8)
    for name, between in (("", lambda: None), (", cold", lambda: other.fill(1))):
        yield ManifestFigure(f"locate of {_STEP:,} rows{name}", _locate_us(order, between), "us")
    for name, call in _calls(dataset):
        yield ManifestFigure(name, _cpu_us(call, blocks), "us")


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
    found = []
    count = order.sample_count // _STEP
    for each in range(_CALLS // 3):
        begin = each * (count // _CALLS) * _STEP
        positions = np.arange(begin, begin + _STEP)
        order.locate(positions)
        between()
        began = time.thread_time()
        order.locate(positions)
        found.append(time.thread_time() - began)
    return float(np.median(found)) * 1e6


def written(path: Path, shards: int, blocks: int) -> Iterator[ManifestFigure]:
    manifest = manifest_of(shards, blocks)
    began = time.perf_counter()
    path.write_bytes(manifest.to_bytes())
    yield ManifestFigure("manifest, written", time.perf_counter() - began, "s")


def in_process(part: str, path: Path, *numbers: int) -> list[ManifestFigure]:
    command = [sys.executable, __file__, "--part", part, "--path", str(path), *map(str, numbers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return [ManifestFigure(**each) for each in json.loads(done.stdout)]


def measure(sizes: list[int]) -> list[ManifestFigure]:
    found: list[ManifestFigure] = []
    largest: list[ManifestFigure] = []
    with tempfile.TemporaryDirectory() as folder:
        for blocks in sizes:
            path = Path(folder) / f"{blocks}.manifest"
            shards = max(blocks // _BLOCKS_A_SHARD, 1)
            made = in_process("written", path, shards, blocks)
            if blocks == max(sizes):
                for part in ("loaded", "listed", "opened"):
                    made += in_process(part, path)
                largest = made
            found += [
                ManifestFigure(f"{each.name}, of {blocks:,} blocks", each.value, each.unit)
                for each in in_process("called", path)
            ]
    return largest + found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, nargs="+", default=list(_SIZES))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("numbers", type=int, nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        parts: dict[str, Callable[..., Iterator[ManifestFigure]]] = {
            "written": written,
            "loaded": loaded,
            "opened": opened,
            "listed": listed,
            "called": called,
        }
        print(json.dumps([asdict(each) for each in parts[asked.part](asked.path, *asked.numbers)]))
        return 0
    measures = measure(asked.blocks)
    if asked.json:
        print(json.dumps({"measures": [asdict(each) for each in measures]}))
    else:
        for each in measures:
            print(f"{each.name:<60}{each.value:>12,.3f} {each.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
