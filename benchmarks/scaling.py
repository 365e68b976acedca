"""Do workers and reads add up? What each does here is to wait, so two cores are enough to see it.

    python benchmarks/scaling.py [--workers 4 16] [--only collate map images store] [--json FILE]

`collate` waits 0.1 s for each batch of 4 MiB, `map` 0.25 s for each block of 1 MiB, and `images`
50 ms for each small JPEG, in batches of 64: each runs once with each number of workers, in a
process of its own with an embedded node. A line has the calls a second, how many ran at the same
time on average, and after how many seconds nine tenths of that ran at once. The ratios are those of
the last number of workers to the first: on a busy machine trust "at once", since calls take longer
there. The first second after the first call is left out.

`store` is an S3 server that answers each request after `--latency-ms`, at the speed of memory. Its
line has the GB/s, and the reads and MB that were asked for and not answered, in the first second
after the first read of samples and in the seconds after that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from dataplane_bench.processes import pause, running, tail

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS = ("collate", "map", "images", "store")
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
import scaling
from dataplane.transforms import pixels
render = pixels.render
def waiting(places, *given, **named):
    for _ in range(len(places)):
        scaling.wait({IMAGE_S})
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
        table = pa.table({"row": pa.FixedSizeListArray.from_arrays(values, ROW_BYTES // 4)})
        path = folder / f"{number:03}.parquet"
        rows_a_group = block_bytes // ROW_BYTES
        pq.write_table(
            table, path, row_group_size=rows_a_group, compression="NONE", use_dictionary=False
        )


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
        """What ended, a second."""
        is_counted = (self._at >= since) & (self._at < self._seconds) & (self._sizes < 0)
        return -float(self._sizes[is_counted].sum()) / (self._seconds - since)

    def mean(self, since: float, until: float) -> float:
        """What was under way on average."""
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
    command = [sys.executable, __file__, "--read", kind, url]
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


def _read(kind: str, url: str) -> None:
    """Read for ever, as a trainer that never computes."""
    import dataplane_torch
    import scaling  # functions are found by module and name in the node's workers

    count = IMAGE_BATCH if kind == "images" else BATCH_BYTES // ROW_BYTES
    given: dict[str, Any] = {"map": scaling.block_map} if kind == "map" else {}
    if kind == "collate":
        given = {"collate": scaling.collate}
    if kind == "images":
        given = {"transforms": {"image": [dataplane_torch.CenterCrop(SIDE)]}}
    with dataplane_torch.DataLoader(url, count, shuffle=True, seed=1, **given) as loader:
        while True:
            for _ in loader:
                pass


def _calls(folder: Path, kind: str, workers: int, seconds: float) -> dict[str, Any]:
    environment = {**os.environ, "DATAPLANE_WORKER_COUNT": str(workers)}
    if kind == "images":
        paths = [str(folder / kind), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    events = _measured(folder, kind, environment, f"{folder / kind}/*.parquet", seconds)
    counted = Counted(events, events["at"][0], seconds)
    busy = counted.mean(SETTLED_S, seconds)
    return {
        "kind": kind,
        "workers": workers,
        "calls_per_s": counted.done(SETTLED_S),
        "busy": busy,
        "reached_s": counted.reached_s(0.9 * busy),
    }


def _show_calls(folder: Path, kind: str, workers: list[int], seconds: float) -> list[Any]:
    (folder / kind).mkdir()
    if kind == "map":
        # Each block is mapped once, so there must be enough for all workers until the end.
        count = 1.2 * max(workers) * seconds / MAP_S
        _write(folder / kind, int(count * BLOCK_BYTES) >> 20, BLOCK_BYTES)
    elif kind == "images":
        _write_images(folder / kind)
    else:
        _write(folder / kind, 64, 1 << 20)
    rows = []
    for count in workers:
        row = _calls(folder, kind, count, seconds)
        rows.append(row)
        print(
            f"{kind:8s} {count:3d} workers {row['calls_per_s']:7.1f} calls/s, "
            f"{row['busy']:5.1f} at once, nine tenths of that after {row['reached_s']:.2f} s",
            flush=True,
        )
    rate, busy = (rows[-1][name] / max(rows[0][name], 1e-9) for name in ("calls_per_s", "busy"))
    text = f"{rate:.2f} x the calls/s, {busy:.2f} x at once"
    print(f"{kind:8s} {workers[-1]} / {workers[0]} workers: {text}", flush=True)
    return rows


class WaitingStore:
    """As much of S3 as a reader needs, from files of a folder. Each answer comes after a delay."""

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
    told = [f"HTTP/1.1 {status} OK", f"Content-Length: {size}", "Accept-Ranges: bytes", *lines]
    return "\r\n".join([*told, "", ""]).encode()


@contextlib.contextmanager
def _store(folder: Path, delay_s: float) -> Iterator[int]:
    command = [sys.executable, __file__, "--serve", str(folder / "store"), str(delay_s)]
    environment = {**os.environ, LOG: str(folder / "events")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


def _show_store(folder: Path, delay_s: float, mib: int, seconds: float) -> dict[str, Any]:
    (folder / "store").mkdir()
    _write(folder / "store", mib, BATCH_BYTES)
    with _store(folder, delay_s) as port:
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "scaling",
            "AWS_SECRET_ACCESS_KEY": "scaling",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "DATAPLANE_CACHE_DIR": str(folder / "cache"),
        }
        events = _measured(folder, "store", environment, "s3://scaling/shards/", seconds)
    begin = events["at"].min()
    seconds = min(seconds, events["at"].max() - begin)  # small samples are read before
    bytes_, reads = Counted(events, begin, seconds), events.copy()
    reads["size"] = np.sign(reads["size"])
    counts = Counted(reads, begin, seconds)
    edges = [edge for edge in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0) if edge < seconds]
    gb_per_s = bytes_.done(0.0) / 1e9
    print(f"store    {delay_s * 1000:g} ms, {gb_per_s:.2f} GB/s in {seconds:.2f} s")
    under_way = []
    for since, until in pairwise([*edges, seconds]):
        count, mb = counts.mean(since, until), bytes_.mean(since, until) / 1e6
        print(f"store    {since:.1f} to {until:.1f} s: {count:5.1f} reads, {mb:6.1f} MB under way")
        under_way.append({"since_s": since, "until_s": until, "reads": count, "mb": mb})
    return {
        "kind": "store",
        "latency_ms": delay_s * 1000,
        "gb_per_s": gb_per_s,
        "under_way": under_way,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--store-mib", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        _read(*given.read)
    if given.serve:
        folder, delay_s = given.serve
        asyncio.run(WaitingStore(Path(folder), float(delay_s), Path(os.environ[LOG])).serve())
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ["DATAPLANE_STATE_DIR"] = str(folder / "state")
        for kind in given.only:
            if kind == "store":
                rows.append(
                    _show_store(folder, given.latency_ms / 1000, given.store_mib, given.seconds)
                )
            else:
                rows += _show_calls(folder, kind, given.workers, given.seconds)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
