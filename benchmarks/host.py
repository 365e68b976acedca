"""How a loader uses a whole host, with or without a GPU: at most eight minutes.

    python benchmarks/host.py measure [PART ...] | waits | store [--json]

`measure` runs each part in processes of its own; a part has a time limit, and fails alone:

    workers   images a second by the number of workers: 1, 4, 16, … and all cores
    waits     functions and image steps that only wait, with 4 and 16 workers
    store     an S3 server that answers each request after 50 ms
    local     images and tokens from local disk, torch beside (`dataplane bench`)
    s3        tokens from S3, 20 ms away, with the server on cores of its own if there are eight
    copies    stalls of device= and pin_memory=; needs a GPU (benchmarks/device.py)
    training  ResNet-50 and a transformer, as shares of the GPU's rate; needs one (the same)
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from dataplane_bench.machine import bench_folder, machine_facts
from dataplane_bench.processes import pause, running, tail
from dataplane_bench.report import results
from dataplane_bench.report.cells import median
from dataplane_bench.report.figures import case_figures
from dataplane_bench.scripts import Row, family_cpu_s, lists, rows_of_json, run, shard
from dataplane_bench.workloads.generate import generated
from msgspec import Struct

if TYPE_CHECKING:
    from numpy.typing import NDArray

HERE = Path(__file__).parent
NO_GPU = "there is no CUDA device"
LARGE_HOST = 8
"""Cores from which on samples are large: a small host would need minutes to make them."""
GRACE_S = 15.0
CROP = 224


class Given(Struct, frozen=True):
    """How a part is to run: where it may write, how long, and how much."""

    folder: Path
    limit_s: float
    is_quick: bool

    @property
    def scale(self) -> float:
        return 0.01 if self.is_quick else 1.0

    def output_of(self, *command: str) -> str:
        """The stdout of a command of Python.

        Raises:  RuntimeError: it failed, or took too long; has the end of its output.
        """
        log, out = self.folder / "log", self.folder / "out"
        shell = ("sh", "-c", 'exec "$@" > "$0"', str(out), sys.executable)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with running([*shell, *command], environment, log) as process:
            try:
                process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                # `dataplane bench` reports what is complete.
                os.killpg(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
        if process.returncode and not out.stat().st_size:
            why = f"exit status {process.returncode}"
            raise RuntimeError(f"{why} within {self.limit_s:.0f} s; {tail(log)[-800:]}")
        return out.read_text()

    def rows_of(self, script: str, command: str, *arguments: str) -> list[Row]:
        """The rows of a command of a script beside this one."""
        written = self.output_of(str(HERE / script), command, "--json", *arguments)
        return rows_of_json(written)


Part = Callable[[Given], Iterator[Row]]


def _workers(given: Given) -> Iterator[Row]:
    """Images a second by the number of workers."""
    cores = len(os.sched_getaffinity(0))
    powers = itertools.takewhile(lambda count: count < cores, (4**n for n in range(6)))
    url = str(generated("images", bench_folder() / "source", given.scale).source)
    deadline, first = time.monotonic() + given.limit_s, 0.0
    for count in (*powers, cores):
        left = Given(given.folder, max(1.0, deadline - time.monotonic()), given.is_quick)
        seconds = "0.1" if given.is_quick else "3.0"
        arguments = ("--workers", str(count), "--seconds", seconds)
        (line,) = left.rows_of("host.py", "read", *arguments, url)
        first = first or line.value / count
        yield Row(f"{count} workers", {**line.values, "times one": line.value / first})


def _read(url: str, *, workers: int = 1, seconds: float = 3.0) -> Iterator[Row]:
    """Images a second of a loader that is warm, and how many cores were busy."""
    os.environ["DATAPLANE_WORKER_COUNT"] = str(workers)
    from dataplane_torch import DataLoader, RandomHorizontalFlip, RandomResizedCrop

    steps: list[Any] = [RandomResizedCrop(CROP), RandomHorizontalFlip()]
    with DataLoader(url, 64, shuffle=True, seed=1, transforms={"image": steps}) as loader:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        next(batches)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds / 2:  # what was made ahead is used up
            next(batches)
        count, began, busy_s = 0, time.perf_counter(), family_cpu_s()
        while time.perf_counter() - began < seconds:
            count += len(next(batches)["image"])
        took_s = time.perf_counter() - began
        busy = (family_cpu_s() - busy_s) / took_s
    yield Row("read", {"images/s": count / took_s, "cores busy": busy})


def _local(given: Given) -> Iterator[Row]:
    """From local disk, torch beside."""
    return _bench(given, ["images/local", "tokens/local"], given.scale)


def _s3(given: Given) -> Iterator[Row]:
    """From a server with cores of its own, where there are enough."""
    is_large = len(os.sched_getaffinity(0)) >= LARGE_HOST and not given.is_quick
    return _bench(given, ["tokens/s3-cold"], 4.0 if is_large else given.scale)


def _bench(given: Given, scenarios: list[str], scale: float) -> Iterator[Row]:
    command = ["-m", "dataplane", "bench", "--json", "--scale", str(scale), "--rounds", "1"]
    command += ["--peers", "none" if given.is_quick else "torch"]
    command += ["--window", "0.3" if given.is_quick else "3"]
    command += [f"--scenario={scenario}" for scenario in scenarios]
    path = given.folder / "report.json"
    path.write_text(given.output_of(*command))
    for case in case_figures(results.read(path)):
        ours, torch = case.ours, case.best_peer
        if ours is None or ours.samples_per_s is None:
            continue
        values = {
            "samples/s": median(ours.samples_per_s) or 0.0,
            "CPU s a million": ours.middle("cpu_s_per_million") or 0.0,
        }
        if ours.of_bound is not None:
            values["of the bound"] = ours.of_bound
        if torch is not None:
            values["samples/s of torch"] = median(torch.samples_per_s) or 0.0
            values["CPU s a million of torch"] = torch.middle("cpu_s_per_million") or 0.0
        if torch is not None and torch.ratio is not None:
            values["times torch"] = torch.ratio.median
        yield Row(f"{case.scenario}, {case.case.label}", values)


def _script(script: str, command: str, usual: str = "", quick: str = "") -> Part:
    """A part that is a command of a script, with its arguments for a usual and a quick run."""
    return lambda given: iter(
        given.rows_of(script, command, *(quick if given.is_quick else usual).split())
    )


PARTS: Mapping[str, tuple[Part, float]] = {
    "workers": (_workers, 50.0),
    "waits": (_script("host.py", "waits", quick="--workers 2 --kinds collate --seconds 0.5"), 45.0),
    "store": (_script("host.py", "store", quick="--mib 64 --seconds 0.5"), 20.0),
    "local": (_local, 85.0),
    "s3": (_s3, 160.0),
    "copies": (_script("device.py", "copies", *2 * ["--seconds 4 --batches 16"]), 35.0),
    "training": (_script("device.py", "training", *2 * ["--seconds 7"]), 90.0),
}
"""Each with its limit in seconds: eight minutes in all."""
NEEDS_GPU = ("copies", "training")


def measure(*parts: str, quick: bool = False) -> Iterator[Row]:
    """Every part, or those that are named; --quick is to see that they run.

    Exit status 1: a part failed; its row says why.
    """
    facts, began = machine_facts(bench_folder()), time.monotonic()
    about = ", ".join((facts["cpu"], f"{facts['cores']} cores", f"Python {facts['python']}"))
    print(about, file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        for name in parts or PARTS:
            part, limit_s = PARTS[name]
            own = Path(folder) / name
            own.mkdir()
            print(f"{name}, at most {limit_s:.0f} s", file=sys.stderr, flush=True)
            if name in NEEDS_GPU and not _has_gpu():
                yield Row(f"{name}: {NO_GPU}", {})
                continue
            try:
                for line in part(Given(own, limit_s, quick)):
                    yield Row(f"{name}: {line.name}", line.values)
            except Exception as error:  # noqa: BLE001 - a part that fails does not stop the others
                failure = f"{name}: failed: {type(error).__name__}: {error}"
                yield Row(failure, {"failed": 1}, most=0)
    print(f"{(time.monotonic() - began) / 60:.1f} min", file=sys.stderr)


def _has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or find_spec("torch") is None:
        return False  # without the two seconds that the import takes
    import torch

    return torch.cuda.is_available()


COLLATE_S, MAP_S, IMAGE_S = 0.1, 0.25, 0.05
IMAGES, IMAGE_BATCH, SIDE = 2048, 64, 96
BATCH_BYTES, BLOCK_BYTES, ROW_BYTES = 4 << 20, 1 << 20, 8 << 10
SHARDS = 8
SETTLED_S = 1.0
START_TIMEOUT_S = 120.0
LOG = "SCALING_LOG"
EVENT = np.dtype([("at", np.float64), ("size", np.int64)])


def collate(batch: dict[str, Any]) -> dict[str, Any]:
    """A collate that waits."""
    wait(COLLATE_S)
    return batch


def block_map(columns: dict[str, Any]) -> dict[str, Any]:
    """A map that waits. The call over 64 rows, which finds the types, does not count."""
    if len(columns["row"]) == BLOCK_BYTES // ROW_BYTES:
        wait(MAP_S)
    return columns


# Image steps are our own code, so all processes get one that waits when they start.
_SITE = f"""
import host
from dataplane.transforms import pixels
render = pixels.render
def waiting(places, *given, **named):
    for _ in range(len(places)):
        host.wait({IMAGE_S})
    return render(places, *given, **named)
pixels.render = waiting
"""


def wait(seconds: float) -> None:
    """Wait, and note that one more is at it."""
    with Path(os.environ[LOG]).open("ab", buffering=0) as log:
        log.write(_event(1))
        pause(seconds)
        log.write(_event(-1))


def _event(size: int) -> bytes:
    return np.array((time.monotonic(), size), EVENT).tobytes()


def _write(folder: Path, mib: int, block_bytes: int) -> None:
    """Parquet shards of rows of numbers, `mib` in all, in row groups of `block_bytes`."""
    rows = (mib << 20) // ROW_BYTES // SHARDS
    for number in range(SHARDS):
        values = np.random.default_rng(number).integers(0, 1 << 30, rows * ROW_BYTES // 4, np.int32)
        table = pa.table({"row": lists(values, ROW_BYTES // 4)})
        body = shard(table, "parquet", block_bytes // ROW_BYTES)
        (folder / f"{number:03}.parquet").write_bytes(body)


def _write_images(folder: Path) -> None:
    """One shard of JPEGs, in row groups of 64."""
    from PIL import Image

    random = np.random.default_rng(0)
    encoded = []
    for _ in range(IMAGES):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 255, (SIDE, SIDE, 3), np.uint8)).save(file, "JPEG")
        encoded.append(file.getvalue())
    pq.write_table(pa.table({"image": encoded}), folder / "000.parquet", row_group_size=64)
    (folder / "sitecustomize.py").write_text(_SITE)


class Counted:
    """The events of a log, each a change of how many calls, reads or bytes are under way."""

    def __init__(self, events: NDArray[Any], begin: float, seconds: float) -> None:
        events = np.sort(events, order="at")
        self._at, self._level = events["at"] - begin, np.cumsum(events["size"])
        self._sizes, self._seconds = events["size"], seconds

    def done(self, since: float) -> float:
        """How much ended, a second."""
        is_counted = (self._at >= since) & (self._at < self._seconds) & (self._sizes < 0)
        return -float(self._sizes[is_counted].sum()) / (self._seconds - since)

    def mean(self, since: float, until: float) -> float:
        """How much was under way on average."""
        edges = np.concatenate([[since], self._at.clip(since, until), [until]])
        return float(np.dot(np.concatenate([[0], self._level]), np.diff(edges))) / (until - since)

    def reached_s(self, level: float) -> float:
        """After how many seconds this much was under way for the first time."""
        is_reached = self._level >= level
        return float(self._at[is_reached][0]) if is_reached.any() else float("nan")


def _events(path: Path) -> NDArray[Any]:
    written = path.read_bytes() if path.exists() else b""
    return np.frombuffer(written[: len(written) // EVENT.itemsize * EVENT.itemsize], EVENT)


def _measured(
    folder: Path, kind: str, environment: Mapping[str, str], url: str, seconds: float
) -> NDArray[Any]:
    """Read in a process of its own until `seconds` after the first event. Returns the events.

    Raises:  RuntimeError: the reader ended, or none came in time; has the end of its output.
    """
    log, out = folder / "events", folder / "reader.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, __file__, "reader", kind, url]
    paths = os.pathsep.join([str(Path(__file__).parent), environment.get("PYTHONPATH", "")])
    environment = {**environment, LOG: str(log), "PYTHONPATH": paths}
    deadline = time.monotonic() + START_TIMEOUT_S
    with running(command, environment, out) as reader:
        while not len(events := _events(log)):
            if reader.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{kind}: nothing was read:\n{tail(out)}")
            pause(0.02)
        pause(events["at"][0] + seconds - time.monotonic())
        events = _events(log)
        if reader.poll() is not None:
            raise RuntimeError(f"{kind}: the reader ended early:\n{tail(out)}")
    return events


def _reader(kind: str, url: str) -> None:
    """Read for ever, as a trainer that never computes."""
    import dataplane_torch
    import host  # functions are found by module and name in the node's workers

    count = IMAGE_BATCH if kind == "images" else BATCH_BYTES // ROW_BYTES
    options: dict[str, dict[str, Any]] = {
        "map": {"map": host.block_map},
        "collate": {"collate": host.collate},
        "images": {"transforms": {"image": [dataplane_torch.CenterCrop(SIDE)]}},
    }
    given = options.get(kind, {})
    with dataplane_torch.DataLoader(url, count, shuffle=True, seed=1, **given) as loader:
        while True:
            for _ in loader:
                pass


def waits(
    *,
    workers: tuple[int, ...] = (4, 16),
    kinds: tuple[str, ...] = ("collate", "map", "images"),
    seconds: float = 5.0,
) -> Iterator[Row]:
    """Whether workers add up, with functions that only wait: two cores are enough to see it.

    `collate` waits 0.1 s for each batch of 4 MiB, `map` 0.25 s for each block of 1 MiB, and
    `images` 50 ms for each small JPEG, in batches of 64: each runs once with each number of
    workers, in a process of its own with an embedded node. A row has the calls a second, how many
    ran at the same time on average, and after how many seconds nine tenths of that ran at once. On
    a busy machine trust "at once", since calls take longer there. The first second after the first
    call is left out.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ["DATAPLANE_STATE_DIR"] = str(folder / "state")
        for kind in kinds:
            (folder / kind).mkdir()
            if kind == "map":
                # Each block is mapped once, so there must be enough for all workers until the end.
                count = 1.2 * max(workers) * seconds / MAP_S
                _write(folder / kind, int(count * BLOCK_BYTES) >> 20, BLOCK_BYTES)
            elif kind == "images":
                _write_images(folder / kind)
            else:
                _write(folder / kind, 64, 1 << 20)
            first: dict[str, float] = {}
            for worker_count in workers:
                values = _calls(folder, kind, worker_count, seconds)
                yield Row(f"{kind}, {worker_count} workers", values)
                first = first or values
            ratios = {name: values[name] / max(first[name], 1e-9) for name in RATIOS}
            yield Row(f"{kind}, {workers[-1]} / {workers[0]} workers", ratios)


RATIOS = ("calls/s", "at once")


def _calls(folder: Path, kind: str, workers: int, seconds: float) -> dict[str, float]:
    environment = {**os.environ, "DATAPLANE_WORKER_COUNT": str(workers)}
    if kind == "images":
        paths = [str(folder / kind), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    events = _measured(folder, kind, environment, f"{folder / kind}/*.parquet", seconds)
    counted = Counted(events, events["at"][0], seconds)
    busy = counted.mean(SETTLED_S if seconds > SETTLED_S else 0.0, seconds)
    done = counted.done(SETTLED_S if seconds > SETTLED_S else 0.0)
    return {"calls/s": done, "at once": busy, "s until then": counted.reached_s(0.9 * busy)}


class WaitingStore:
    """A server with the part of S3 that a reader needs, over files. It answers after a delay."""

    def __init__(self, folder: Path, delay_s: float, log: Path) -> None:
        self._paths = {path.name: path for path in sorted(folder.iterdir())}
        self._delay_s, self._log = delay_s, log

    async def serve(self) -> None:
        """Print the port, and answer until killed."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                await self._answer(text, writer)

    async def _answer(self, text: str, writer: asyncio.StreamWriter) -> None:
        method, target, _ = text.split(" ", 2)
        split = urlsplit(target)
        if "list-type" in parse_qs(split.query, keep_blank_values=True):
            await asyncio.sleep(self._delay_s)
            body = self._listing()
            writer.write(_head(200, len(body), "Content-Type: application/xml") + body)
            return
        path = self._paths.get(unquote(split.path).rsplit("/", 1)[-1])
        if path is None:
            writer.write(_head(404, 0))
            return
        size, begin, end = path.stat().st_size, 0, path.stat().st_size
        ranged = re.search(r"(?im)^range: bytes=(\d*)-(\d*)", text)
        if ranged is not None:
            first, last = ranged.groups()
            begin = int(first) if first else size - int(last)
            end = min(int(last) + 1, size) if first and last else size
        head = [f"Content-Range: bytes {begin}-{end - 1}/{size}"] if ranged else []
        head += [f'ETag: "{path.name}"', "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT"]
        is_read = method == "GET" and end - begin > 1 << 18  # the shards' ends are smaller
        if is_read:
            self._note(end - begin)
        await asyncio.sleep(self._delay_s)
        writer.write(_head(206 if ranged else 200, end - begin, *head))
        if method == "GET":
            with path.open("rb") as file:
                await asyncio.get_running_loop().sendfile(
                    writer.transport, file, begin, end - begin
                )
        if is_read:
            self._note(begin - end)

    def _note(self, size: int) -> None:
        with self._log.open("ab", buffering=0) as log:
            log.write(_event(size))

    def _listing(self) -> bytes:
        contents = "".join(
            f"<Contents><Key>shards/{name}</Key><Size>{path.stat().st_size}</Size>"
            f'<ETag>"{name}"</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>'
            for name, path in self._paths.items()
        )
        body = f"<IsTruncated>false</IsTruncated>{contents}"
        return f"<ListBucketResult>{body}</ListBucketResult>".encode()


def _head(status: int, size: int, *lines: str) -> bytes:
    head = [f"HTTP/1.1 {status} OK", f"Content-Length: {size}", "Accept-Ranges: bytes", *lines]
    return "\r\n".join([*head, "", ""]).encode()


def _serve(folder: Path, delay_s: float) -> None:
    asyncio.run(WaitingStore(folder, delay_s, Path(os.environ[LOG])).serve())


@contextlib.contextmanager
def _serving(folder: Path, delay_s: float) -> Iterator[int]:
    command = [sys.executable, __file__, "serve", str(folder / "store"), str(delay_s)]
    environment = {**os.environ, LOG: str(folder / "events")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


def store(*, latency_ms: float = 50.0, mib: int = 1024, seconds: float = 5.0) -> Iterator[Row]:
    """An S3 server that answers each request after a delay, at the speed of memory: GB/s, and the
    reads and MB that were asked for and not answered, in the first second after the first read of
    samples and in the seconds after that.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "store").mkdir()
        _write(folder / "store", mib, BATCH_BYTES)
        with _serving(folder, latency_ms / 1000) as port:
            environment = {
                **os.environ,
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": "host",
                "AWS_SECRET_ACCESS_KEY": "host",
                "AWS_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
                "DATAPLANE_CACHE_DIR": str(folder / "cache"),
                "DATAPLANE_STATE_DIR": str(folder / "state"),
            }
            events = _measured(folder, "store", environment, "s3://host/shards/", seconds)
    begin = events["at"].min()
    seconds = min(seconds, events["at"].max() - begin)  # small samples are read before
    size, reads = Counted(events, begin, seconds), events.copy()
    reads["size"] = np.sign(reads["size"])
    counts = Counted(reads, begin, seconds)
    yield Row(f"{latency_ms:g} ms", {"GB/s": size.done(0.0) / 1e9, "s": seconds})
    edges = [edge for edge in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0) if edge < seconds]
    for since, until in pairwise([*edges, seconds]):
        under_way = {"reads": counts.mean(since, until), "MB": size.mean(since, until) / 1e6}
        yield Row(f"under way from {since:.1f} to {until:.1f} s", under_way)


if __name__ == "__main__":
    sys.exit(run(__doc__, measure, waits, store, _read, _reader, _serve))
