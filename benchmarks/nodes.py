"""Nodes beside each other: lines between them, nodes that lend blocks, nodes that make slabs.

    python benchmarks/nodes.py lines | lending | making [--json]

All of them run on this machine, so moving bytes takes processor time from whatever else is done; on
hosts of their own it would not.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from dataplane_bench import s3
from dataplane_bench.scripts import (
    Row,
    family_cpu_s,
    line_of,
    lists,
    run,
    send,
    serve,
    shard,
    started,
    tokens_table,
)
from msgspec import Struct
from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.base.machine import ProcessorWaits
from dataplane.base.trace import Trace
from dataplane.model.config import PeerTls
from dataplane.model.records import Region, StorePause
from dataplane.neighbours import wire
from dataplane.node.fetchers import Fetchers
from dataplane.node.neighbours import Lending
from dataplane.rpc.fetches import (
    Neighbour,
    NeighbourGave,
    Peer,
    ReadRange,
    ReadTarget,
    StartFetching,
)
from dataplane.rpc.lending import Asked
from dataplane.rpc.tasks import BLOCK_ARENA
from dataplane.store.outage import Outages, Pauses

ARENA_BYTES = 512 << 20
KEY = secrets.token_bytes(32)
GIB = 1 << 30
TICK_S = 0.001
CLONE_NEWNET = 0x40000000
LENDER_ADDRESS, ASKER_ADDRESS = "10.213.0.1", "10.213.0.2"


class LineOptions(Struct, frozen=True):
    """How `lines` measures."""

    block_kib: int
    run: int
    mib: int
    threads: int
    rounds: int

    def at_once(self, number: int) -> int:
        """How many blocks are asked for at once in this round."""
        return self.run if number % 2 else 1


def lines(
    *,
    block_kib: int = 8192,
    run: int = 1,
    mib: int = 4096,
    threads: int = 4,
    rounds: int = 3,
    namespaces: bool = False,
    tls: bool = False,
) -> Iterator[Row]:
    """Blocks that move from the arena of one process into that of another, as neighbours move them.

    The lender's side is bound to processor 0 and the asker's to processor 1. With --namespaces,
    which needs root, they are in two network namespaces that a veth pair joins; without, they use
    loopback. Each side has the process that moves bytes (lender, fetcher), and the part of a node
    that answers or gives its orders, in the event loop of another process; schedulers, workers and
    trainers are not there. A row has how late a tick of these two loops was, at the 99th
    percentile. The processor of each loop is also that of the process that moves bytes.

    With --run, so many blocks that lie one after the other are asked for at once, and rounds of
    this and of single blocks take turns. With --tls, which needs the program openssl, rounds in
    plain text and inside of TLS take turns.
    """
    options = LineOptions(block_kib, run, mib, threads, 1 if tls else rounds)
    with (
        joined_namespaces() if namespaces else contextlib.nullcontext(("", "")) as names,
        tempfile.TemporaryDirectory() as folder,
    ):
        ways = (None, certificate(Path(folder))) if tls else (None,)
        for _, way in itertools.product(range(rounds if tls else 1), ways):
            yield from asyncio.run(lend(options, *names, way))


def certificate(folder: Path) -> PeerTls:
    """A certificate that is its own authority, for both sides."""
    cert, key = str(folder / "crt"), str(folder / "key")
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    named = ("-nodes", "-subj", "/CN=bench", "-days", "1", "-keyout", key, "-out", cert)
    subprocess.run([*made, *named], check=True, stderr=subprocess.DEVNULL)
    return PeerTls(cert, key, cert)


@contextlib.contextmanager
def joined_namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a veth pair."""
    names = [f"dataplane-{side}-{os.getpid()}" for side in ("lends", "asks")]
    links = [f"dp{side}{os.getpid() % 10**6}" for side in "la"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, host in zip(names, links, (LENDER_ADDRESS, ASKER_ADDRESS), strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{host}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
        yield names[0], names[1]
    finally:
        for name in names:
            ip("netns", "del", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def enter(namespace: str) -> None:
    """Move this thread, and what it starts, into a network namespace."""
    if namespace:
        with Path("/var/run/netns", namespace).open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


async def lend(
    options: LineOptions, lends: str, asks: str, tls: PeerTls | None = None
) -> list[Row]:
    """The process of the lender, as a node lends: its event loop answers each ask."""
    block_bytes = options.block_kib << 10
    blocks = ARENA_BYTES // block_bytes
    arena = Arena.create("lent", ARENA_BYTES)
    arena.reserve(0, ARENA_BYTES)
    arena.buffer[:] = secrets.token_bytes(1 << 20) * (ARENA_BYTES >> 20)

    def give(message: Asked) -> None:
        request = message.request
        first, *more = [
            Region(number * block_bytes, request.length // request.count)
            for number in range(request.block, request.block + request.count)
        ]
        ends = (wire.GIVEN_WHOLE,) * request.count
        lender.give(message.number, first, more=tuple(more), ends=ends)

    enter(lends)
    rows: list[Row] = []
    os.sched_setaffinity(0, {0})
    listener = socket.create_server((LENDER_ADDRESS if lends else "127.0.0.1", 0))
    trace = Trace("bench")
    lender = Lending(listener, "lender", arena, trace, tls=tls)
    lender.serve(give)
    lender.keys("job", 1, KEY)
    address = "{}:{}".format(*listener.getsockname())
    neighbour = Neighbour(Peer(address, "job", 1, KEY, "asker", "lender"), bytes(16), 0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run_asker, args=(theirs, asks, neighbour, options, blocks, tls)
    )
    process.start()
    try:
        await asyncio.to_thread(ours.recv)
        for number in range(options.rounds * (1 + (options.run > 1))):
            before = family_cpu_s(lender.pid)
            ours.send("begin")
            async with ticking() as ticks:
                took_s, asker_s, asker_ticks = await asyncio.to_thread(ours.recv)
            moved = options.mib << 20
            lender_s = family_cpu_s(lender.pid) - before
            many = f"{options.at_once(number)} blocks of {options.block_kib} KiB at once"
            lags = zip(("lender's", "asker's"), (ticks, asker_ticks), strict=True)
            values = {
                "GB/s": moved / took_s / 1e9,
                "CPU s/GiB lender": lender_s * GIB / moved,
                "asker": asker_s * GIB / moved,
                **{f"ms p99 of the {side} loop": p99(some) for side, some in lags},
            }
            rows.append(Row(f"{many}, {'TLS' if tls else 'plain'}", values))
        ours.send("end")
    finally:
        process.join(60)
        lender.close()
        arena.close()
    return rows


def run_asker(
    pipe: Connection,
    namespace: str,
    neighbour: Neighbour,
    options: LineOptions,
    blocks: int,
    tls: PeerTls | None,
) -> None:
    """The process of the asker, as a node asks: its event loop gives orders to a fetcher."""
    enter(namespace)
    os.sched_setaffinity(0, {1})
    with contextlib.suppress(EOFError):
        asyncio.run(ask_rounds(pipe, neighbour, options, blocks, tls))


async def ask_rounds(
    pipe: Connection,
    neighbour: Neighbour,
    options: LineOptions,
    blocks: int,
    tls: PeerTls | None,
) -> None:
    """Answer each "begin" of the lender with a round."""
    block_bytes = options.block_kib << 10
    arena, preambles = Arena.create("asked", ARENA_BYTES), Arena.create("preambles", 1 << 20)
    start = StartFetching((), 60.0, 30.0, tls=tls)
    pauses = Pauses()
    pauses.publish(StorePause("s3://nowhere", 3, 1e6))  # no read is asked for again there
    fetchers = Fetchers(1, start, (arena, preambles), Trace("bench"), Outages(), pauses)
    fetchers.start()

    async def read(number: int, together: int) -> None:
        at = number * together % blocks
        first, *more = [
            ReadTarget(block * block_bytes, Region(block * block_bytes, block_bytes))
            for block in range(at, at + together)
        ]
        place = ("s3://nowhere/shard", first.offset, "etag", BLOCK_ARENA, first.into, tuple(more))
        end: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        fetchers.read(ReadRange(0, *place, replace(neighbour, block=at)), end.set_result)
        outcome = await end
        assert outcome == NeighbourGave(together * block_bytes), outcome

    async def run(numbers: Iterator[int], together: int) -> None:
        for number in numbers:
            await read(number, together)

    count = (options.mib << 20) // block_bytes
    await asyncio.gather(*(read(number, 1) for number in range(blocks)))  # allocates the arena
    pipe.send("ready")
    rounds = itertools.count()
    while await asyncio.to_thread(pipe.recv) == "begin":
        together = options.at_once(next(rounds))
        (fetcher,) = fetchers.pids
        began, used = time.monotonic(), time.process_time() + family_cpu_s(fetcher)
        numbers = iter(range(count // together))
        async with ticking() as ticks:
            await asyncio.gather(*(run(numbers, together) for _ in range(options.threads)))
        spent_s = time.process_time() + family_cpu_s(fetcher) - used
        pipe.send((time.monotonic() - began, spent_s, ticks))
    fetchers.close()
    arena.close()
    preambles.close()


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[list[tuple[float, float]]]:
    """How late the ticks of this event loop are: in all, and without the time for which its thread
    waited for a processor, in seconds.
    """
    ticks: list[tuple[float, float]] = []
    waits = ProcessorWaits(threading.get_native_id())

    async def tick() -> None:
        while True:
            due, queued_s = time.monotonic() + TICK_S, waits.seconds()
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - due
            ticks.append((late_s, max(0.0, late_s - (waits.seconds() - queued_s))))

    task = asyncio.create_task(tick())
    try:
        yield ticks
    finally:
        task.cancel()
        waits.close()


def p99(ticks: list[tuple[float, float]]) -> float:
    """Milliseconds of the latest tick but one of a hundred, without waits for a processor."""
    own = sorted(late for _, late in ticks)
    return own[len(own) * 99 // 100] * 1e3 if own else float("nan")


LENT_ROW_BYTES, SHARD_BLOCKS, LENT_BATCH_ROWS = 8192, 4, 64
BUCKET = "lent"
LENT_TRAINER = """
import json, sys, time
from dataplane_torch import DataLoader
given = json.loads(sys.argv[1])
with DataLoader(given.pop("url"), **given) as loader:
    len(loader)
    print("open", flush=True)
    for _ in sys.stdin:
        began, before = time.perf_counter(), loader.statistics()
        rows = sum(len(batch["tokens"]) for batch in loader)
        took, found = time.perf_counter() - began, loader.statistics().since(before)
        told = [rows, took, found.origin_bytes, found.neighbour_bytes, found.memory_bytes]
        print(json.dumps(told), flush=True)
"""


class TickingLoop(asyncio.SelectorEventLoop):
    """An event loop that prints how late its ticks were since the last time, at each SIGUSR1."""

    def run_forever(self) -> None:
        """Tick while it runs."""
        self.create_task(self._tick())
        super().run_forever()

    async def _tick(self) -> None:
        async with ticking() as ticks:

            def report() -> None:
                sys.stderr.write(f"ticks: {p99(ticks)}\n")
                sys.stderr.flush()
                ticks.clear()

            self.add_signal_handler(signal.SIGUSR1, report)
            await asyncio.Event().wait()


def _as_node(*arguments: str) -> None:
    """Run this command of dataplane in a ticking loop."""
    from dataplane.cli import main as dataplane

    class Policy(asyncio.DefaultEventLoopPolicy):
        _loop_factory = TickingLoop

    asyncio.set_event_loop_policy(Policy())
    sys.argv = ["dataplane", *arguments]
    dataplane()


def shards(mib: int, block_bytes: int) -> dict[str, bytes]:
    """Uncompressed Arrow, whose rows are gathered as they are."""
    rows, random = block_bytes // LENT_ROW_BYTES, np.random.default_rng(0)
    return {
        f"{number:04}.arrow": shard(
            tokens_table(random, rows * SHARD_BLOCKS, LENT_ROW_BYTES // 4), "arrow", rows
        )
        for number in range((mib << 20) // (block_bytes * SHARD_BLOCKS))
    }


def lateness(node: subprocess.Popen[str]) -> float:
    """How late its loop was since this was asked last; other lines of its log are shown."""
    node.send_signal(signal.SIGUSR1)
    while not (line := line_of(node.stderr)).startswith("ticks: "):
        sys.stderr.write(line)
    return float(line.removeprefix("ticks: "))


def lending(
    *, mib: int = 512, block_kib: int = 4096, epochs: int = 4, arena: float = 0.75
) -> Iterator[Row]:
    """Two whole nodes that lend each other half of a dataset, and how late their event loops are.

    A coordinator, two nodes with a trainer each, and an S3 server. Each node has memory for the
    blocks that it owns and a few more (--arena is the share of the dataset), so from the second
    epoch on it gets the other half from its neighbour. A ticker in the event loop of each node
    measures how late it is, without the time for which the loop's thread waited for a processor. A
    ticker is up to 1 ms late by itself.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        server = stack.enter_context(s3.s3_server(Path(folder), os.environ))
        server.upload(BUCKET, shards(mib, block_kib << 10))
        os.environ |= server.environment() | {
            "DATAPLANE_STATE_DIR": f"{folder}/state",
            "DATAPLANE_CACHE_DIR": f"{folder}/cache",
            "DATAPLANE_BLOCK_ARENA_BYTES": f"{int(mib * arena)}MiB",
            "DATAPLANE_WORKER_COUNT": "1",
            "DATAPLANE_LOG_LEVEL": "warning",
            "OMP_NUM_THREADS": "1",
        }
        _, address = serve(stack, "--coordinator", "--listen", "127.0.0.1:0")
        nodes, trainers = [], []
        for number in range(2):
            service = f"bench-{number}-{os.getpid()}:1"
            command = ("serve", "--node", "--join", address, "--service", service)
            as_node = (sys.executable, __file__, "as-node", "--", *command)
            nodes.append(started(stack, *as_node, stderr=subprocess.PIPE))
            line_of(nodes[-1].stdout)
            given = {
                "url": f"s3://{BUCKET}/", "batch_size": LENT_BATCH_ROWS, "service": service,
                "name": "bench", "dp_rank": number, "dp_size": 2, "shuffle": True, "lanes": 1,
            }  # fmt: skip
            trainers.append(started(stack, sys.executable, "-c", LENT_TRAINER, json.dumps(given)))
        for trainer in trainers:
            assert line_of(trainer.stdout) == "open\n"
        for epoch in range(epochs):
            for node in nodes:
                lateness(node)
            for trainer in trainers:
                send(trainer)
            ends = [json.loads(line_of(trainer.stdout)) for trainer in trainers]
            _, times, origin, lent, memory = zip(*ends, strict=True)
            lags = zip(("first", "second"), map(lateness, nodes), strict=True)
            values = {
                "GB/s between nodes": sum(lent) / max(times) / 1e9,
                "s": max(times),
                "GiB lent": sum(lent) / GIB,
                "GiB of the origin": sum(origin) / GIB,
                "GiB of memory": sum(memory) / GIB,
                **{f"ms p99 of the {node} loop": late for node, late in lags},
            }
            yield Row(f"epoch {epoch}", values)


BLOCK_ROWS, TOKENS = 64, 2048


def photographs(folder: Path, count: int, path: Path) -> None:
    """A shard of the photographs in a folder, repeated."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    jpegs = [paths[i % len(paths)].read_bytes() for i in range(count)]
    table = pa.table({"jpg": pa.array(jpegs, pa.large_binary()), "label": range(count)})
    pq.write_table(table, path, row_group_size=BLOCK_ROWS, compression="none", use_dictionary=False)


def tokens(count: int, path: Path) -> None:
    """A shard of compressed lists."""
    chance = np.random.default_rng(1)
    values = np.minimum(chance.zipf(1.3, count * TOKENS), 50_000).astype(np.int32)
    table = pa.table({"tokens": lists(values, TOKENS)})
    pq.write_table(table, path, row_group_size=8 * BLOCK_ROWS, compression="zstd")


@contextlib.contextmanager
def rows_of(photos: str, samples: int) -> Iterator[str]:
    """A shard of photographs, or without a folder of them of zstd-compressed token lists."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "DATAPLANE_CACHE_DIR": f"{folder}/cache",
            "DATAPLANE_STATE_DIR": f"{folder}/state",
            "OMP_NUM_THREADS": "1",
        }
        path = Path(folder) / "rows.parquet"
        if photos:
            photographs(Path(photos), samples, path)
        else:
            tokens(samples, path)
        yield str(path)


EPOCHS = 3
MADE_TRAINER = """
import json, sys, time, resource
from dataplane_torch import DataLoader, RandomResizedCrop
given = json.loads(sys.argv[1])
crops = {"transforms": {"jpg": [RandomResizedCrop(given["size"])]}} if given["crops"] else {}
with DataLoader(
    given["url"], given["batch"], shuffle=True, seed=1, service=given["service"], name="job",
    dp_rank=given["rank"], dp_size=given["size_of_job"], **crops
) as loader:
    for _ in range(given["epochs"]):
        began, cpu = time.perf_counter(), time.process_time()
        rows = sum(len(next(iter(batch.values()))) for batch in loader)
        took = time.perf_counter() - began
        print(json.dumps([rows, took, time.process_time() - cpu]), flush=True)
"""


def making(
    *,
    photographs: str = "",
    makers: int = 2,
    size: int = 224,
    batch: int = 64,
    samples: int = 4096,
    rounds: int = 3,
) -> Iterator[Row]:
    """A host without workers, fed by others, against what these reach for their own trainers.

    Three epochs of photographs with random resized crops, or of token lists: as --makers ranks,
    each from a node with one worker, and as one rank, from a node without any beside these. The
    rate is that of the second and third epoch. Both ways take turns, and the best round of each
    counts. CPU seconds are those for 1,000 samples.
    """
    given = {
        "batch": batch, "size": size, "crops": bool(photographs), "epochs": EPOCHS,
        "samples": samples, "makers": makers,
    }  # fmt: skip
    best: dict[bool, Row] = {}
    with rows_of(photographs, samples) as url:
        for _, is_delegated in itertools.product(range(rounds), (False, True)):
            rate = made_rate(given | {"url": url}, is_delegated=is_delegated)
            yield rate
            before = best.setdefault(is_delegated, rate)
            best[is_delegated] = max(before, rate, key=lambda some: some.value)
    ratios = {what: best[True].values[what] / best[False].values[what] for what in rate.values}
    yield Row("delegated / local", ratios)


def made_rate(given: Mapping[str, Any], *, is_delegated: bool) -> Row:
    """One round of one way."""
    with contextlib.ExitStack() as stack:
        _, address = serve(stack, "--coordinator", "--listen", "127.0.0.1:0")
        names = [f"maker-{n}-{os.getpid()}-{is_delegated}:1" for n in range(given["makers"])]
        join = ("--node", "--join", address, "--service")
        nodes = [serve(stack, *join, name, "--worker-count", "1")[0] for name in names]
        if is_delegated:
            names = [f"trainers-{os.getpid()}:1"]
            nodes.append(serve(stack, *join, names[0], "--worker-count", "0")[0])
        trainers = []
        for rank, service in enumerate(names):
            own = {"service": service, "rank": rank, "size_of_job": len(names)}
            command = (sys.executable, "-c", MADE_TRAINER, json.dumps({**given, **own}))
            trainers.append(started(stack, *command))
        ends = [[json.loads(line_of(trainer.stdout))] for trainer in trainers]
        before = sum(map(family_cpu_s, nodes))
        for trainer, epochs in zip(trainers, ends, strict=True):
            epochs += [json.loads(line_of(trainer.stdout)) for _ in range(EPOCHS - 1)]
        spent_s = sum(map(family_cpu_s, nodes)) - before
    counts = [sum(rows for rows, _, _ in epoch) for epoch in zip(*ends, strict=True)]
    assert counts == [given["samples"]] * EPOCHS
    later = [epoch for epochs in ends for epoch in epochs[1:]]
    thousands = sum(rows for rows, _, _ in later) / 1000
    took_s = max(sum(took for _, took, _ in epochs[1:]) for epochs in ends)
    values = {
        "samples/s": 1000 * thousands / took_s,
        "CPU s of nodes": spent_s / thousands,
        "CPU s of trainers": sum(cpu for _, _, cpu in later) / thousands,
    }
    return Row("delegated" if is_delegated else "local", values)


if __name__ == "__main__":
    sys.exit(run(__doc__, lines, lending, making, _as_node))
