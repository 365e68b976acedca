"""A service under attack: what floods and frames of nonsense cost others, memory and logs.

python tests/hostile.py trainer [--seconds 60]     a trainer that floods its node, beside another one
python tests/hostile.py frames [--count 40000]     fuzzed frames and calls on all ports of a service

`trainer` prints how long another trainer waits for its slabs without and with the hostile one, and
fails if its p99 grows by more than 50 ms. `frames` sends them with and without a token, and fails
if the service crashes, grows by more than its bound, or writes more than 30 lines a minute of an
event. Both take about two minutes; the suite runs them for a moment.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import multiprocessing
import os
import random
import re
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import fleet
import grpc
import grpc.aio
import numpy as np
import psutil
import pyarrow as pa
from fleet import Service
from msgspec import structs
from openings import opening
from raw_trainer import Node, Trainer
from warm import SERVICE, warm_python

from dataplane.base.trace import LINES_A_MINUTE
from dataplane.model.config import PROTOCOL_VERSION, VERSION
from dataplane.model.errors import PeerLost
from dataplane.neighbours.wire import Opening, pack
from dataplane.rpc import convert, local, messages
from dataplane.rpc.address import served_name
from dataplane.rpc.bounds import VALUES_MAX
from dataplane.rpc.codec import encode
from dataplane.rpc.services import coordinator_methods

PROCESSORS = sorted(os.sched_getaffinity(0))
PAUSE_S = 0.004
MINUTE = timedelta(seconds=59.99)
"""A line is written a little later than it was allowed."""
CONNECTIONS = 200
SLOWER_S_MAX = 0.05
GROWTH_BYTES_MAX = 256 << 20
TOKEN = "a-token-that-only-this-script-knows-0123456789"
BIG = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
SLABS = b"\x93\xa6ToNode\x00\x93\xa7Release\xa1j\xdd"
"""A Release of slabs, without how many and which."""

Attack = Callable[[str, str, float], None]


def until(deadline: float) -> Iterator[int]:
    """Numbers, until this time."""
    return itertools.takewhile(lambda _: time.monotonic() < deadline, itertools.count(2))


@contextlib.contextmanager
def greeted(name: str) -> Iterator[socket.socket]:
    """A connection that has said Hello, and was welcomed."""
    with local.connect(name, 5.0) as sock:
        local.send(sock, messages.ToNode(1, messages.Hello(VERSION, PROTOCOL_VERSION, os.getpid())))
        local.receive(sock, messages.FromNode)
        yield sock


def open_job(job: str, url: str) -> messages.OpenJob:
    return opening(url, job=job, member=f"m-{job}", global_batch=4)


def opens_what_is_not_there(name: str, _: str, deadline: float) -> None:
    """Far more jobs than are ever answered; no answer is read."""
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception), greeted(name) as sock:
            for n in until(deadline):
                local.send(sock, messages.ToNode(n, open_job(f"h{n}", f"/nowhere/{n}.arrow")))


def opens_what_is_there(name: str, url: str, deadline: float) -> None:
    """One job after another, none of which is closed."""
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception), greeted(name) as sock:
            for n in until(deadline):
                local.send(sock, messages.ToNode(n, open_job(f"v{os.getpid()}-{n}", url)))
                answer, descriptors = local.receive(sock, messages.FromNode)
                for fd in descriptors:
                    os.close(fd)
                if not isinstance(answer.body, messages.JobOpened | messages.Welcome):
                    break


def sends_valid_messages(name: str, _: str, deadline: float) -> None:
    """Without a pause, and without an answer."""
    bodies = (
        messages.Release("j", tuple(range(200))),
        messages.NextSlab(7, 0, 0.0),
        messages.CloseStream(3),
        messages.Hello(VERSION, PROTOCOL_VERSION, os.getpid()),
    )
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception), greeted(name) as sock:
            for n in until(deadline):
                local.send(sock, messages.ToNode(0, bodies[n % len(bodies)]))


def sends_a_million_parts(name: str, _: str, deadline: float) -> None:
    """In one message of some megabytes."""
    wire = SLABS + struct.pack(">I", 2 << 20) + b"\xa0" * (2 << 20)
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception), greeted(name) as sock:
            for _ in until(deadline):
                local.send_encoded(sock, wire)


def sends_as_many_parts_as_are_allowed(name: str, _: str, deadline: float) -> None:
    shares = messages.ScheduledWeights(0, ())  # four values, with its name
    mixture = messages.MixtureAsked((), schedule=(shares,) * (VALUES_MAX // 4 - 100))
    wire = encode(messages.ToNode(2, structs.replace(open_job("p", "/nowhere"), mixture=mixture)))
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception), greeted(name) as sock:
            for _ in until(deadline):
                local.send_encoded(sock, wire)


def connects(name: str, _: str, deadline: float) -> None:
    """Again and again, and sends nonsense, or nothing."""
    while time.monotonic() < deadline:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, PeerLost):
            for n in range(20):
                sock = stack.enter_context(local.connect(name, 1.0))
                if n % 2:
                    sock.send(os.urandom(1000))


def opens_on_many_connections(name: str, _: str, deadline: float) -> None:
    """Half of them open as many jobs as may be under way, half send valid messages."""
    while time.monotonic() < deadline:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, PeerLost):
            connections: list[socket.socket] = []
            while len(connections) < CONNECTIONS and time.monotonic() < deadline:
                with contextlib.suppress(Exception):  # few may be silent at once
                    connections.append(stack.enter_context(greeted(name)))
                    connections[-1].setblocking(False)
            for n in until(deadline):
                for number, sock in enumerate(connections):
                    body: messages.ToNodeBody = messages.Release("j", tuple(range(200)))
                    if number % 2:
                        body = open_job(f"c{number}-{n}", f"/nowhere/{number}-{n}.arrow")
                    with contextlib.suppress(BlockingIOError):
                        local.send(sock, messages.ToNode(n, body))


ATTACKS: tuple[Attack, ...] = (
    opens_what_is_not_there,
    opens_what_is_there,
    sends_valid_messages,
    sends_valid_messages,
    sends_a_million_parts,
    sends_as_many_parts_as_are_allowed,
    connects,
    opens_on_many_connections,
)


def compute(seconds: float) -> None:
    """A trainer that takes a processor, and does the node no harm."""
    for _ in until(time.monotonic() + seconds):
        os.urandom(1 << 16)


def attack(seconds: float, name: str, url: str, only: str) -> None:
    """The hostile trainer: everything at once, from one process."""
    deadline = time.monotonic() + seconds
    chosen = [one for one in ATTACKS if only in one.__name__]
    threads = [threading.Thread(target=one, args=(name, url, deadline)) for one in chosen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def waits(trainer: Trainer, epochs: Iterator[int], seconds: float) -> list[float]:
    """How long each slab took, at a trainer's pace."""
    found, deadline = [], time.monotonic() + seconds
    for epoch in epochs:
        began = time.monotonic()
        for _ in trainer.slabs(epoch=epoch):
            found.append(time.monotonic() - began)
            threading.Event().wait(PAUSE_S)  # a trainer computes
            began = time.monotonic()
            if began > deadline:
                return found
    return found


def _arrow(folder: str, count: int) -> str:
    url, rows = str(Path(folder, "a.arrow")), pa.table({"x": np.arange(count)})
    with pa.OSFile(url, "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2000)
    return url


def beside_process(
    trainer: Trainer, epochs: Iterator[int], seconds: float, work: Callable[..., None], *given: str
) -> list[float]:
    """How long each slab took while another process did this work."""
    other = multiprocessing.get_context("spawn").Process(target=work, args=(seconds + 1, *given))
    other.start()
    # On processors of its own: what it takes of those is not the node's doing.
    os.sched_setaffinity(other.pid or 0, PROCESSORS[: len(PROCESSORS) // 2] or PROCESSORS)
    try:
        return waits(trainer, epochs, seconds)
    finally:
        other.kill()
        other.join()


def p99(found: list[float]) -> float:
    return statistics.quantiles(found, n=100)[98]


def trainers(seconds: float, only: str = "", *, most_s: float = SLOWER_S_MAX) -> str:
    """Run the trainer beside the hostile one. Returns the figures.   Raises:  AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        url = _arrow(folder, 200_000)
        os.sched_setaffinity(0, PROCESSORS[len(PROCESSORS) // 2 :])
        with Node(Path(folder)) as node, Trainer(node) as trainer:
            os.sched_setaffinity(node.process.pid, PROCESSORS[len(PROCESSORS) // 2 :])
            trainer.open(url, global_batch=64)
            epochs = itertools.count()
            waits(trainer, epochs, min(2.0, seconds / 4))
            alone = beside_process(trainer, epochs, min(20.0, seconds / 2), compute)
            beside = beside_process(trainer, epochs, seconds, attack, node.name, url, only)
            sys.stderr.write(node.errors.read_text()[-3000:])
            process = psutil.Process(node.process.pid)
            told = (
                f"p99 {p99(alone) * 1e3:.1f} ms beside one that computes, {p99(beside) * 1e3:.1f} ms beside it; "
                f"most {max(alone) * 1e3:.1f} and {max(beside) * 1e3:.1f}; {len(beside)} slabs in "
                f"{seconds:g} s; the node has {process.memory_info().rss >> 20} MiB"
            )
            os.sched_setaffinity(0, PROCESSORS)
            assert p99(beside) - p99(alone) <= most_s, told
    return told


# -- frames -----------------------------------------------------------------------------------


def mutated(wire: bytes, chance: random.Random) -> bytes:
    """A message with a few bytes changed, cut, or repeated."""
    if not wire or chance.random() < 0.2:
        return chance.randbytes(chance.choice((0, 1, 7, 100, 3000)))
    changed = bytearray(wire)
    for _ in range(chance.randint(1, 6)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    kind = chance.randrange(4)
    if kind == 1:
        del changed[chance.randrange(len(changed)) :]
    elif kind == 2:
        changed *= chance.choice((2, 50))
    return bytes(changed)


def requests() -> dict[str, bytes]:
    """A valid message for each method of the coordinator."""
    import membership
    from trusted import beat, join, leave, node, share

    from dataplane.rpc.membership import ChangeRequest, LedgerRequest, StatusRequest

    bodies = {
        "RegisterNode": node(), "Join": join(0), "Leave": leave(), "Status": StatusRequest(),
        "Heartbeat": beat(membership.progress()), "ShareManifest": share(),
        "Ledger": LedgerRequest("j"), "Change": ChangeRequest("j", "me"),
    }  # fmt: skip
    return {name: convert.encode(body) for name, body in bodies.items()}


async def calls(address: str, count: int, chance: random.Random) -> None:
    """Half of them with the token, some to methods that do not exist."""
    from trusted import OWN

    from dataplane.security.security import NODE_PROOF

    valid = requests()
    paths = [method.path for method in coordinator_methods()]
    paths += ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/x/y"]
    token = (("authorization", f"Bearer {TOKEN}"), (NODE_PROOF, OWN.secret))
    async with grpc.aio.insecure_channel(address, options=BIG) as channel:
        places = asyncio.Semaphore(64)

        async def call(path: str, wire: bytes, metadata: tuple[object, ...]) -> None:
            async with places:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await channel.unary_unary(path)(wire, timeout=20, metadata=metadata)

        waiting = []
        for n in range(count):
            path = chance.choice(paths)
            wire = mutated(valid.get(path.rpartition("/")[2], b""), chance)
            if n % 500 == 0:
                wire = bytes(6 << 20)
            metadata = token if n % 2 and not path.endswith("Watch") else ()
            waiting.append(asyncio.create_task(call(path, wire, metadata)))
            if len(waiting) == 500:
                await asyncio.gather(*waiting)
                waiting.clear()
        await asyncio.gather(*waiting)


def frames(address: str, count: int, first: bytes, chance: random.Random) -> None:
    """Frames over TCP that begin as `first` does, or not even that."""
    host, _, port = address.rpartition(":")
    for n in range(count):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5) as sock:
            sock.settimeout(0.05)
            begin = first if n % 2 else b""
            length = chance.choice((10, 100, 3000))
            sock.sendall(mutated(begin + chance.randbytes(length), chance))
            if n % 10 == 0:
                sock.recv(1000)


def packets(name: str, count: int, chance: random.Random) -> None:
    """Packets to a node's socket."""
    valid = [
        encode(messages.ToNode(5, body))
        for body in (
            open_job("j", "/nowhere"), messages.OpenStream("j", 0, 0), messages.NextSlab(1, 0, 0.0),
            messages.Release("j", (1,)), messages.CloseJob("j"), messages.DescribeColumns("j"),
        )
    ]  # fmt: skip
    left = count
    while left > 0:
        with contextlib.suppress(Exception), local.connect(name, 1.0) as sock:
            hello = messages.Hello(VERSION, PROTOCOL_VERSION, os.getpid())
            local.send(sock, messages.ToNode(1, hello))
            for _ in range(20):
                left -= 1
                local.send_encoded(sock, mutated(chance.choice(valid), chance) or b"\x00")


def data_address(process: psutil.Process, address: str) -> str:
    """Where the lender of this service listens, once there is one."""
    deadline = time.monotonic() + 30
    while not any(one.name() == "dp-lender" for one in process.children(recursive=True)):
        assert time.monotonic() < deadline, "no lender"
        threading.Event().wait(0.05)
    listening = (one for one in process.net_connections("tcp") if one.status == "LISTEN")
    (port,) = {one.laddr.port for one in listening} - {int(address.rpartition(":")[2])}
    return f"127.0.0.1:{port}"


def lines_of(log: str) -> dict[str, int]:
    """The most lines that each event has in a minute, which begins with its first line, and the
    next one with the first line after it.
    """
    begun: dict[str, datetime] = {}
    lines: collections.Counter[str] = collections.Counter()
    most: dict[str, int] = {}
    for line in log.splitlines():
        match = re.match(r"(\d{4}-\d\d-\d\dT\S+) \w+ ([\w.]+: [^=]*?)(?: \w+=|$)", line)
        if match is None:
            event = f"not a line of ours: {line[:100]}"
            most[event] = most.get(event, 0) + 1
            continue
        at, event = datetime.fromisoformat(match[1]), match[2]
        if event not in begun or at - begun[event] >= MINUTE:
            begun[event], lines[event] = at, 0
        lines[event] += 1
        most[event] = max(most.get(event, 0), lines[event])
    return most


def fuzzed(count: int, seed: int = 1) -> str:
    """Send all of these to a service. Returns the figures.   Raises:  AssertionError."""
    chance, preface = random.Random(seed), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    opening = pack(Opening("j", 1, "n", "m", bytes(32)))
    with tempfile.TemporaryDirectory() as folder:
        environ = {"DATAPLANE_STATE_DIR": folder, "DATAPLANE_TOKEN": TOKEN}
        environ |= {"DATAPLANE_CACHE_DIR": f"{folder}/cache", "DATAPLANE_WORKER_COUNT": "1"}
        log = Path(folder, "log")
        listen = ("--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0")
        with Service(*listen, environ=environ, log=log) as service:
            process = psutil.Process(service.process.pid)
            name = served_name(os.getuid(), service.address)
            with Trainer(SimpleNamespace(name=name)) as trainer:  # its job starts the lender
                trainer.open(_arrow(folder, 1000))
                lends = data_address(process, service.address)
            before = most = process.memory_info().rss
            for _ in range(4):
                part = count // 16
                asyncio.run(calls(service.address, 2 * part, chance))
                most = max(most, process.memory_info().rss)
                frames(service.address, part // 2, preface, chance)
                frames(lends, part // 2, opening, chance)
                packets(name, part, chance)
                most = max(most, process.memory_info().rss)
            assert service.process.poll() is None, log.read_text()[-5000:]
            asyncio.run(calls(service.address, 1, chance))
            assert service.stop() == 0
        written = log.read_text()
        worst = max(lines_of(written).items(), key=lambda one: one[1])
        told = (
            f"{count} frames and calls: {before >> 20} MiB, at most {most >> 20}; "
            f"{len(written)} bytes of log, at most {worst[1]} lines a minute ({worst[0]})"
        )
        assert "Traceback" not in written, written[:20_000]
        assert most - before <= GROWTH_BYTES_MAX, told
        assert worst[1] <= LINES_A_MINUTE, told
    return told


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """The process that nodes are forked from, as the suite has it."""
    with warm_python(*SERVICE) as python:
        fleet.WARM_SERVICES.append(python)
        try:
            yield
        finally:
            fleet.WARM_SERVICES.remove(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("trainer", "frames"))
    parser.add_argument("--attack", default="", help="only those with this in their name")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with warm():
        if given.what == "trainer":
            sys.stdout.write(trainers(given.seconds, given.attack) + "\n")
        else:
            sys.stdout.write(fuzzed(given.count, given.seed) + "\n")


if __name__ == "__main__":
    main()
