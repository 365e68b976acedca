"""Moves blocks from the arena of one process into that of another, as neighbours do.

    python benchmarks/neighbours.py [--block-kib 8192] [--run 1] [--mib 4096] [--threads 4]
        [--namespaces] [--tls]

The lender is bound to processor 0 and the asker to processor 1. With --namespaces, which needs
root, they are in two network namespaces that a veth pair joins; without, they use loopback. The
node's part, which answers what the lender asks, runs in the process of this script.

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
import resource
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.config import PeerTls
from dataplane.model import Region
from dataplane.neighbours import wire
from dataplane.neighbours.asking import Lines
from dataplane.neighbours.line_tls import LineTls
from dataplane.node.lending import Lending
from dataplane.rpc.fetches import Neighbour
from dataplane.rpc.lending import Asked
from dataplane.trace import Trace

ARENA_BYTES = 512 << 20
KEY = secrets.token_bytes(32)
GIB = 1 << 30
CLONE_NEWNET = 0x40000000
LENDER_ADDRESS, ASKER_ADDRESS = "10.213.0.1", "10.213.0.2"


def main() -> None:
    """Print one line a round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-kib", type=int, default=8192)
    parser.add_argument("--run", type=int, default=1, help="blocks that are asked for at once")
    parser.add_argument("--mib", type=int, default=4096, help="moved in each round")
    parser.add_argument("--threads", type=int, default=4, help="connections")
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
    listener = socket.create_server((LENDER_ADDRESS if lends else "127.0.0.1", 0))
    trace = Trace("bench")
    lending = Lending(listener, "lender", arena, give, lambda _: None, trace, tls=tls)
    lending.keys("job", 1, KEY)
    os.sched_setaffinity(lending.pid, {0})
    neighbour = Neighbour(
        "{}:{}".format(*listener.getsockname()),
        "job",
        1,
        KEY,
        "asker",
        "lender",
        bytes(16),
        0,
        0,
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=ask, args=(theirs, asks, neighbour, options, blocks, tls))
    process.start()
    try:
        await asyncio.to_thread(ours.recv)
        for number in range(options.rounds * (1 + (options.run > 1))):
            before = cpu_s(lending.pid)
            ours.send("begin")
            took_s, asker_s = await asyncio.to_thread(ours.recv)
            moved = options.mib << 20
            lender_s = cpu_s(lending.pid) - before
            print(
                f"{options.block_kib:>6} KiB a block, {at_once(options, number):>2} at once, "
                f"{'TLS' if tls else 'plain'}: "
                f"{moved / took_s / 1e9:5.2f} GB/s, "
                f"CPU s/GiB: lender {lender_s * GIB / moved:.2f}, asker {asker_s * GIB / moved:.2f}"
                f", load {os.getloadavg()[0]:.1f}",
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
    """The process of the asker, as a fetcher works: threads that fill extents of an arena."""
    enter(namespace)
    os.sched_setaffinity(0, {1})
    block_bytes = options.block_kib << 10
    count = (options.mib << 20) // block_bytes
    arena = Arena.create("asked", ARENA_BYTES)
    arena.prepare(0, ARENA_BYTES)
    lines, turns = Lines(None if tls is None else LineTls(tls)), threading.Lock()

    def run(numbers: Iterator[int], together: int) -> None:
        while True:
            with turns:
                number = next(numbers, None)
            if number is None:
                return
            at = number * together % blocks
            asked = replace(neighbour, block=at)
            into = [
                arena.view(each * block_bytes, block_bytes) for each in range(at, at + together)
            ]
            if together > 1:
                answer, _ = lines.read_run(asked, into, lambda _: None, lambda: None)
            else:
                answer = lines.read(asked, into[0], lambda _: None, lambda: None)
            for each in into:
                each.release()
            assert answer.length == together * block_bytes

    pipe.send("ready")
    rounds = itertools.count()
    while pipe.recv() == "begin":
        together = at_once(options, next(rounds))
        began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        numbers = iter(range(count // together))
        threads = [
            threading.Thread(target=run, args=(numbers, together)) for _ in range(options.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s, now = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
        spent_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        pipe.send((took_s, spent_s))
    lines.close()
    arena.close()


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    main()
