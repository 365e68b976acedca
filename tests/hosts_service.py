"""A service over hosts of one machine: a coordinator on the first, a store on the second, a node on
each of the others, and the ranks of a job.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from certificates import Authority
from dataplane_bench import s3
from hosts_namespaces import Host, enter
from hosts_rank import STEP
from warm import WarmProcess, WarmPython, warm_python

RANK = Path(__file__).with_name("hosts_rank.py")
STORE_LOG = Path(__file__).with_name("hosts_store_log.py")
READS = "reads.log"
BUCKET = "hosts"
URL = f"s3://{BUCKET}/"
PORT = 7077
RESTART_S = 1.0
START_S = 120.0
END_S = 300.0
ROW_TOKENS = 254
ROW_BYTES = 4 * ROW_TOKENS + 8
SLAB_BYTES = 1 << 19
DELIVERY_MIB = 8
BLOCK_ROWS = 500
SHARD_BLOCKS = 32
PLAIN: dict[str, Any] = {"compression": "NONE", "use_dictionary": False}
TOKEN = "the-token-of-a-soak-over-hosts-0123456789-0123456789"

_pause = threading.Event()


class Failed(Exception):
    """A promise did not hold."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The processes on the hosts."""

    ranks: int
    workers: int
    batch: int
    lanes: int
    window: int
    seed: int
    lease_s: float
    arena: str

    @property
    def options(self) -> dict[str, Any]:
        return {
            "shuffle": True, "seed": self.seed, "lanes": self.lanes, "window": self.window,
        }  # fmt: skip

    def batches_per_slab(self, size: int) -> int:
        """Of one of so many ranks."""
        return -(-SLAB_BYTES // (self.batch // size * ROW_BYTES))


class Node:
    """`dataplane serve` on a host, a node or the coordinator, started again a second after it ended."""

    def __init__(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.host, self.starts = host, 0
        self._command, self.environ = [*host.within, *command], dict(environ)
        self.folder = Path(environ["DATAPLANE_STATE_DIR"])
        self.folder.mkdir()
        self.log = self.folder / "node.log"
        self.before_start: Callable[[], None] = lambda: None
        self._closing = threading.Event()
        self.process = self._started()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()

    def family(self) -> list[psutil.Process]:
        """The node and all its processes."""
        with contextlib.suppress(psutil.Error):
            node = psutil.Process(self.process.pid)
            return [node, *node.children(recursive=True)]
        return []

    def close(self) -> None:
        self._closing.set()
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._supervisor.join()

    def _started(self) -> subprocess.Popen[bytes]:
        self.before_start()
        self.starts += 1
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ
            )

    def _supervise(self) -> None:
        while not self._closing.is_set():
            self.process.wait()
            if not self._closing.wait(RESTART_S):
                self.process = self._started()
        self.process.wait()


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank, and what it got so far."""

    host: Host
    process: WarmProcess
    out: Path

    def steps(self) -> np.ndarray:
        found = self.out.with_suffix(".steps")
        return np.fromfile(found, STEP) if found.exists() else np.empty(0, STEP)

    def ids(self) -> np.ndarray:
        return np.fromfile(self.out.with_suffix(".ids"), np.int64)


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of one launch."""

    ranks: list[Rank]
    log: Path

    def check_alive(self) -> None:
        """Raises:  Failed: a trainer ended with an error."""
        for number, rank in enumerate(self.ranks):
            if rank.process.poll():
                raise Failed(f"rank {number} ended with {rank.process.returncode}: {self.said()}")

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def end_after(self, epochs: int) -> None:
        for rank in self.ranks:
            rank.process.stdin.write(f"{epochs}\n")
            rank.process.stdin.flush()

    def wait(self) -> None:
        deadline = time.monotonic() + END_S
        while any(rank.process.poll() is None for rank in self.ranks):
            self.check_alive()
            if time.monotonic() > deadline:
                raise Failed(f"ranks did not end within {END_S:g} s: {self.said()}")
            _pause.wait(0.05)
        self.check_alive()

    def epochs(self, row_count: int) -> list[np.ndarray]:
        """The ids of each epoch, in the order of the global batches: int64[rows] each.

        Raises:  Failed: the ranks have uneven shares.
        """
        size, found = len(self.ranks), []
        steps, ids = [r.steps() for r in self.ranks], [r.ids() for r in self.ranks]
        for epoch in range(int(max(s["epoch"][-1] for s in steps)) + 1):
            whole = np.full(row_count, -1, np.int64)
            for rank, (own, got) in enumerate(zip(steps, ids, strict=True)):
                first = int(own["count"][own["epoch"] < epoch].sum())
                count = int(own["count"][own["epoch"] == epoch].sum())
                share = whole[rank::size]
                if len(share) != count:
                    raise Failed(f"rank {rank} has {count} of {len(share)} in epoch {epoch}")
                share[:] = got[first : first + count]
            found.append(whole)
        return found


@dataclass
class Service:
    """Everything that runs; `started` makes one."""

    folder: Path
    hosts: list[Host]
    shape: Shape
    row_count: int
    environ: dict[str, str]
    python: WarmPython
    nodes: list[Node] = field(default_factory=list)
    control: list[Node] = field(default_factory=list)
    """The coordinator's process."""

    @property
    def coordinator(self) -> Host:
        return self.hosts[0]

    @property
    def store(self) -> Host:
        return self.hosts[1]

    @property
    def address(self) -> str:
        return f"{self.coordinator.address}:{PORT}"

    def launch(self, name: str, hosts: Sequence[Host], per_host: int, step_s: float) -> Job:
        """Start a job with this many ranks on each of these hosts."""
        job = Job([], self.folder / f"{name}.log")
        size, together = len(hosts) * per_host, self.folder / f"{name}.together"
        together.write_bytes(bytes(8 * size))
        with job.log.open("ab") as log:
            for rank in range(size):
                host, out = hosts[rank // per_host], self.folder / f"{name}-{rank}"
                options = self.shape.options | {
                    "global_batch_size": self.shape.batch, "service": self.address, "name": name,
                }  # fmt: skip
                told = {
                    "host": host.places, "url": URL, "options": options, "step_s": step_s,
                    "out": str(out), "together": "" if step_s else str(together),
                }  # fmt: skip
                launched = {
                    "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_host,
                    "LOCAL_WORLD_SIZE": per_host, "GROUP_RANK": rank // per_host,
                    "TORCHELASTIC_RUN_ID": name, "OMP_NUM_THREADS": 1,
                }  # fmt: skip
                environ = {**os.environ, **{key: str(value) for key, value in launched.items()}}
                process = self.python.run([str(RANK), json.dumps(told)], environ, log.fileno())
                job.ranks.append(Rank(host, process, out))
        return job

    def status(self) -> dict[str, Any]:
        """Return the output of `dataplane status --json`."""
        command = [*_dataplane("status", self.address), "--json"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=self.environ
        )
        if done.returncode:
            raise Failed(f"dataplane status: {done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def reads(self) -> dict[str, int]:
        """The statistics of all nodes, added up. Nodes report them with their heartbeats."""
        total: dict[str, int] = {}
        for node in self.status()["nodes"]:
            for name, value in node["reads"].items():
                if isinstance(value, int):
                    total[name] = total.get(name, 0) + value
        return total


@contextlib.contextmanager
def started(
    folder: Path, hosts: list[Host], shape: Shape, mib: int, more: Mapping[str, str] | None = None
) -> Iterator[Service]:
    """A store with a dataset of this size, a coordinator with TLS and a token, and the nodes, with
    more environment. This process is on the first host, with the coordinator; the store is on the
    second.
    """
    coordinator, store = hosts[:2]
    with contextlib.ExitStack() as stack:
        python = stack.enter_context(warm_python("dataplane_torch"))
        bare = {k: v for k, v in os.environ.items() if not k.startswith(("DATAPLANE_", "AWS_"))}
        enter(*store.places)
        server = stack.enter_context(s3.s3_server(folder, bare))
        row_count = _upload(server, mib)
        port = stack.enter_context(_store_log(server.port, folder / READS))
        enter(*coordinator.places)
        reached = {"AWS_ENDPOINT_URL": f"http://{store.address}:{port}"}
        os.environ.update(server.environment() | reached)
        tls = Authority.made().write(folder, "tls", address=coordinator.address)
        environ = {
            **bare, **server.environment(), **reached,
            "DATAPLANE_TOKEN": TOKEN, "DATAPLANE_LEASE_S": str(shape.lease_s),
            "DATAPLANE_TLS_CA": tls.ca, "DATAPLANE_TLS_CERT": tls.cert,
            "DATAPLANE_TLS_KEY": tls.key, "DATAPLANE_WORKER_COUNT": str(shape.workers),
            "DATAPLANE_BLOCK_ARENA_BYTES": shape.arena,
            "DATAPLANE_SLAB_BYTES": str(SLAB_BYTES), "DATAPLANE_DELIVERY_BYTES_PER_RANK": f"{DELIVERY_MIB}MiB",
        }  # fmt: skip
        made = Service(folder, hosts, shape, row_count, environ, python)
        at_node = ("--node", "--data-listen", ":0", "--join", made.address)
        roles = {coordinator: ("--coordinator", "--listen", made.address)} | dict.fromkeys(
            hosts[2:], at_node
        )
        for host, role in roles.items():
            own = str(folder / host.name)
            folders = {"DATAPLANE_STATE_DIR": own, "DATAPLANE_CACHE_DIR": own}
            process = Node(host, _dataplane("serve", *role), environ | folders | dict(more or {}))
            stack.callback(process.close)
            (made.control if host is coordinator else made.nodes).append(process)
            if host is coordinator:
                _wait_for(process.log, "ready: coordinator", process.process)
        for node in made.nodes:
            _wait_for(node.log, "ready: node", node.process)
        yield made


@contextlib.contextmanager
def _store_log(port: int, log: Path) -> Iterator[int]:
    """A proxy before this port, which writes down what is read; its own port."""
    log.touch()
    command = [sys.executable, str(STORE_LOG), "0.0.0.0", str(port), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def _dataplane(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dataplane", *arguments]


def _wait_for(log: Path, words: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while words not in (said := log.read_text(encoding="utf-8")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise Failed(f"{log.name} never says {words!r}: {said}")
        _pause.wait(0.05)


def _upload(server: s3.S3Server, mib: int) -> int:
    """Shards of rows with an id each; the number of rows, which no batch divides."""
    random = np.random.default_rng(0)
    row_count, shard_rows = (mib << 20) // ROW_BYTES + 3, SHARD_BLOCKS * BLOCK_ROWS
    with contextlib.closing(server.client()) as client:
        client.create_bucket(Bucket=BUCKET)
        for shard, first in enumerate(range(0, row_count, shard_rows)):
            count = min(shard_rows, row_count - first)
            tokens = pa.array(random.integers(0, 50_000, count * ROW_TOKENS, dtype=np.int32))
            table = pa.table({
                "id": pa.array(np.arange(first, first + count)),
                "tokens": pa.FixedSizeListArray.from_arrays(tokens, ROW_TOKENS),
            })  # fmt: skip
            out = io.BytesIO()
            pq.write_table(table, out, row_group_size=BLOCK_ROWS, **PLAIN)
            client.put_object(Bucket=BUCKET, Key=f"{shard:04}.parquet", Body=out.getvalue())
    return row_count
