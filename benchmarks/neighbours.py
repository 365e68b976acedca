"""Moves blocks from the arena of one process into that of another, as neighbours do.

    python benchmarks/neighbours.py [--block-kib 8192] [--run 1] [--mib 4096] [--threads 4]
        [--namespaces] [--tls]

The lender's side is bound to processor 0 and the asker's side to processor 1. With --namespaces,
which needs root, they are in two network namespaces that a veth pair joins; without, they use
loopback. Each side has the process that moves bytes (lender, fetcher), and the part of a node that
answers or gives its orders, in the event loop of another process. Nodes have more in their loops:
schedulers, workers and trainers are not there.

Each line has how late a tick of these two loops was, at the 99th percentile: of the lender's side,
then of the asker's. The processor of each loop is also that of the process that moves bytes.

With --run, so many blocks that lie one after the other are asked for at once, and rounds of this
and of single blocks take turns.

With --tls, which needs the program openssl, rounds in plain text and inside of TLS take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.config import PeerTls
from dataplane.machine import ProcessorWaits
from dataplane.model import Region, StorePause
from dataplane.neighbours import wire
from dataplane.node.fetchers import Fetchers
from dataplane.node.lending import Lending
from dataplane.rpc.fetches import Neighbour, NeighbourGave, ReadRange, ReadTarget, StartFetching
from dataplane.rpc.lending import Asked
from dataplane.rpc.tasks import BLOCK_ARENA
from dataplane.store.outage import Outages, Pauses
from dataplane.trace import Trace

ARENA_BYTES = 512 << 20
KEY = secrets.token_bytes(32)
GIB = 1 << 30
TICK_S = 0.001
CLONE_NEWNET = 0x40000000
LENDER_ADDRESS, ASKER_ADDRESS = "10.213.0.1", "10.213.0.2"


def main() -> None:
    """Print one line a round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-kib", type=int, default=8192)
    parser.add_argument("--run", type=int, default=1, help="blocks that are asked for at once")
    parser.add_argument("--mib", type=int, default=4096, help="moved in each round")
    parser.add_argument("--threads", type=int, default=4, help="reads under way, each a connection")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--namespaces", action="store_true")
    parser.add_argument("--tls", action="store_true", help="compare plain text and TLS")
    options = parser.parse_args()
    with (
        namespaces() if options.namespaces else contextlib.nullcontext(("", "")) as names,
        tempfile.TemporaryDirectory() as folder,
    ):
        if options.tls:
            files, options.rounds, rounds = certificate(Path(folder)), 1, options.rounds
            for _ in range(rounds):
                asyncio.run(lend(options, *names))
                asyncio.run(lend(options, *names, files))
        else:
            asyncio.run(lend(options, *names))


def at_once(options: argparse.Namespace, number: int) -> int:
    """How many blocks are asked for at once in this round."""
    return options.run if number % 2 else 1


def certificate(folder: Path) -> PeerTls:
    """One that is its own authority."""
    cert, key = str(folder / "crt"), str(folder / "key")
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    named = ("-nodes", "-subj", "/CN=bench", "-days", "1", "-keyout", key, "-out", cert)
    subprocess.run([*made, *named], check=True, stderr=subprocess.DEVNULL)
    return PeerTls(cert, key, cert)


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
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
    options: argparse.Namespace, lends: str, asks: str, tls: PeerTls | None = None
) -> None:
    """The process of the lender, as a node lends: its event loop answers each ask."""
    block_bytes = options.block_kib << 10
    blocks = ARENA_BYTES // block_bytes
    arena = Arena.create("lent", ARENA_BYTES)
    arena.reserve(0, ARENA_BYTES)
    arena.buffer[:] = secrets.token_bytes(1 << 20) * (ARENA_BYTES >> 20)

    def give(asked: Asked) -> None:
        first, *more = [
            Region(number * block_bytes, asked.length // asked.count)
            for number in range(asked.block, asked.block + asked.count)
        ]
        note = wire.pack_run_note((wire.GIVEN_WHOLE,) * asked.count) if more else b""
        lending.give(asked.number, first, note=note, more=tuple(more))

    enter(lends)
    os.sched_setaffinity(0, {0})
    listener = socket.create_server((LENDER_ADDRESS if lends else "127.0.0.1", 0))
    trace = Trace("bench")
    lending = Lending(listener, "lender", arena, give, lambda _: None, trace, tls=tls)
    lending.keys("job", 1, KEY)
    of = ("asker", "lender", bytes(16), 0, 0)
    neighbour = Neighbour("{}:{}".format(*listener.getsockname()), "job", 1, KEY, *of)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=ask, args=(theirs, asks, neighbour, options, blocks, tls))
    process.start()
    try:
        await asyncio.to_thread(ours.recv)
        for number in range(options.rounds * (1 + (options.run > 1))):
            before = cpu_s(lending.pid)
            ours.send("begin")
            async with ticking() as ticks:
                took_s, asker_s, asker_ticks = await asyncio.to_thread(ours.recv)
            moved = options.mib << 20
            lender_s = cpu_s(lending.pid) - before
            print(
                f"{options.block_kib:>6} KiB a block, {at_once(options, number):>2} at once, "
                f"{'TLS' if tls else 'plain'}: "
                f"{moved / took_s / 1e9:5.2f} GB/s, "
                f"CPU s/GiB: lender {lender_s * GIB / moved:.2f}, asker {asker_s * GIB / moved:.2f}"
                f"; p99 of the loops: {p99(ticks)} and {p99(asker_ticks)}"
                f"; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        ours.send("end")
    finally:
        process.join(60)
        lending.close()
        arena.close()


def ask(
    pipe: Connection,
    namespace: str,
    neighbour: Neighbour,
    options: argparse.Namespace,
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
    options: argparse.Namespace,
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
            ReadTarget(each * block_bytes, Region(each * block_bytes, block_bytes))
            for each in range(at, at + together)
        ]
        place = ("s3://nowhere/shard", first.offset, "etag", BLOCK_ARENA, first.into, tuple(more))
        end: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        fetchers.read(ReadRange(0, *place, replace(neighbour, block=at)), end.set_result)
        found = await end
        assert found == NeighbourGave(together * block_bytes), found

    async def run(numbers: Iterator[int], together: int) -> None:
        for number in numbers:
            await read(number, together)

    count = (options.mib << 20) // block_bytes
    await asyncio.gather(*(read(number, 1) for number in range(blocks)))  # allocates the arena
    pipe.send("ready")
    rounds = itertools.count()
    while await asyncio.to_thread(pipe.recv) == "begin":
        together = at_once(options, next(rounds))
        (fetcher,) = fetchers.pids
        began, used = time.monotonic(), time.process_time() + cpu_s(fetcher)
        numbers = iter(range(count // together))
        async with ticking() as ticks:
            await asyncio.gather(*(run(numbers, together) for _ in range(options.threads)))
        spent_s = time.process_time() + cpu_s(fetcher) - used
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


def p99(ticks: list[tuple[float, float]]) -> str:
    """The 99th percentile of both, in milliseconds."""
    if not ticks:
        return "no tick yet"
    late, own = (sorted(each)[len(each) * 99 // 100] * 1e3 for each in zip(*ticks, strict=True))
    return f"{late:.1f} ms ({own:.1f} without waits for the processor)"


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
