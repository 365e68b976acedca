"""A scripted node on a real SEQPACKET socket, with slabs in a real memfd.

Its dataset is a function of the position: see `sample`. Memory that a trainer returns, or held when
it disconnected, is overwritten at once, so that later reads are seen. As a process it is started
like a node, and FAKE_NODE in the environment says what it does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from openings import opening

from dataplane.arena.memfd import Arena
from dataplane.arena.slab_layout import pieces
from dataplane.arena.slots import Slots, plan_slots
from dataplane.client.session import Session
from dataplane.client.stream import SlabStream
from dataplane.model.changes import EpochSteps
from dataplane.model.config import PROTOCOL_VERSION
from dataplane.model.errors import ConfigError, DataplaneError, PeerLost
from dataplane.model.records import ColumnSpec, DatasetIdentity, Kind, Region
from dataplane.plan.slices import Slice
from dataplane.rpc import local
from dataplane.rpc.codec import encode
from dataplane.rpc.messages import (
    Batch,
    CloseJob,
    CloseStream,
    Column,
    EndOfStream,
    FromNode,
    Hello,
    JobOpened,
    Layout,
    NextSlab,
    OpenJob,
    OpenStream,
    Release,
    Slab,
    StreamOpened,
    ToNode,
    Welcome,
)

COMMAND = (sys.executable, os.path.abspath(__file__))  # noqa: PTH100
POISON = 0xEE
SPECS = (
    ColumnSpec("x", Kind.FIXED, "int32", (4,)),
    ColumnSpec("t", Kind.FIXED, "int64"),
    ColumnSpec("flag", Kind.FIXED, "bool"),
    ColumnSpec("tokens", Kind.PADDED, "uint16"),
    ColumnSpec("steps", Kind.RAGGED, "float32"),
    ColumnSpec("text", Kind.STRING, ""),
    ColumnSpec("raw", Kind.BYTES, ""),
)


def sample(t: int, epoch: int = 0) -> dict[str, Any]:
    """The sample at a position of an epoch."""
    return {
        "x": [t, t + 1, t + 2, epoch],
        "t": t,
        "flag": t % 3 == 0,
        "tokens": [t % 60000 + i for i in range(t % 5)],
        "steps": [t + i / 2 for i in range((t + 1) % 4)],
        "text": None if t % 7 == 3 else f"s\N{MIDDLE DOT}{t}",
        "raw": None if t % 11 == 5 else bytes([t % 256]) * (t % 3),
    }


@dataclass(slots=True)
class Script:
    """The script of a node, with its faults."""

    sample_count: int = 100
    slot_bytes: int = 4096
    arena_bytes: int = 8 * 4096
    slab_batches: int = 3
    stall_timeout_s: float = 20.0
    protocol: int = PROTOCOL_VERSION
    hang_after: int | None = None
    die_after: int | None = None
    die_at_start: str = ""
    killed_at: str = ""  # "start", "hello", "open", "stream" or "slab"
    killed_once: str = ""  # the file that tells later nodes that one was killed; "": kill each node
    copy_out: bool = False
    open_error: str = ""
    salt: str = ""
    pixels: str = ""
    advice: tuple[str, ...] = ()
    linger_s: float = 0.1


@dataclass(slots=True, eq=False)
class _Peer:
    sock: socket.socket
    job: OpenJob | None = None
    streams: dict[int, tuple[OpenStream, Iterator[list[int]]]] = field(default_factory=dict)
    lent: dict[int, Region] = field(default_factory=dict)
    waiting: deque[tuple[int, NextSlab]] = field(default_factory=deque)


class FakeNode:
    """Runs in the thread that calls `run`. `seen` lists the received messages in order."""

    def __init__(self, script: Script, listener: socket.socket, *, embedded: bool = False) -> None:
        self.script, self.seen = script, deque[Any]()
        self.listener = listener
        self._embedded = embedded
        layout = plan_slots(script.arena_bytes, script.slot_bytes)
        self.arena = Arena.create("fake-delivery", layout.arena_bytes)
        self.arena.reserve(0, layout.arena_bytes)
        self.slots = Slots(layout)
        self.slabs_given = 0
        self._number = 0
        self._selector = selectors.DefaultSelector()
        self._peers: list[_Peer] = []
        self._stop, self._stopped = socket.socketpair()

    def run(self) -> None:
        self.listener.setblocking(False)
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        idle_since = time.monotonic()
        try:
            while True:
                events = self._selector.select(0.02 if self._embedded else None)
                for key, _ in events:
                    if key.fileobj is self._stopped:
                        return
                    if key.fileobj is self.listener:
                        self._accept()
                    else:
                        self._read(key.data)
                if self._peers or events:
                    idle_since = time.monotonic()
                if self._embedded and time.monotonic() - idle_since > self.script.linger_s:
                    return
        finally:
            for peer in list(self._peers):
                self._hang_up(peer)
            self._selector.close()
            for sock in (self.listener, self._stop, self._stopped):
                sock.close()
            self.arena.close()

    def stop(self) -> None:
        self._stop.send(b"stop")

    @property
    def free_count(self) -> int:
        return self.slots.free_count

    def hang_up_on_all(self) -> None:
        """Look like a node that died; call it only while nothing else is running."""
        for peer in list(self._peers):
            peer.sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        sock.setblocking(False)
        peer = _Peer(sock)
        self._peers.append(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            message, fds = local.receive(peer.sock, ToNode)
        except BlockingIOError:
            return
        except PeerLost:
            self._hang_up(peer)
            return
        assert not fds
        self.seen.append(message.body)
        try:
            self._answer(peer, message.request_id, message.body)
        except DataplaneError as error:
            self._send(peer, message.request_id, error)

    def _hang_up(self, peer: _Peer) -> None:
        self.seen.append("gone")
        self._peers.remove(peer)
        self._selector.unregister(peer.sock)
        peer.sock.close()
        for slab_id in list(peer.lent):
            self._free(peer, slab_id)
        self._serve_waiting()

    def _free(self, peer: _Peer, slab_id: int) -> None:
        region = peer.lent.pop(slab_id)
        np.frombuffer(self.arena.view(region.offset, region.length), np.uint8)[:] = POISON
        self.slots.give_back(region)

    def _send(self, peer: _Peer, request_id: int, body: Any, fds: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(PeerLost):
            local.send(peer.sock, FromNode(request_id, body), fds)

    def _answer(self, peer: _Peer, request_id: int, body: Any) -> None:
        node_id = f"fake-{os.getpid()}"
        if isinstance(body, Hello):
            may_be_killed(self.script, "hello")
            self._send(peer, request_id, Welcome("0.0.7", self.script.protocol, node_id))
        elif isinstance(body, OpenJob):
            may_be_killed(self.script, "open")
            self._open_job(peer, request_id, body)
        elif isinstance(body, OpenStream):
            assert peer.job is not None
            may_be_killed(self.script, "stream")
            ranks = peer.job.topology
            whole = EpochSteps(
                self.script.sample_count, body.cursor, peer.job.spec.global_batch, peer.job.spec.end,
                ranks.dp_size,
            )  # fmt: skip
            place = Slice(whole, ranks.dp_rank)
            self._number += 1
            steps = range(body.first_step, place.step_count, body.step_stride)
            peer.streams[self._number] = (body, self._slabs(place, list(steps)))
            self._send(peer, request_id, StreamOpened(self._number, place.step_count))
        elif isinstance(body, NextSlab):
            may_be_killed(self.script, "slab")
            peer.waiting.append((request_id, body))
            self._serve_waiting()
        elif isinstance(body, Release):
            for slab_id in body.slab_ids:
                self._free(peer, slab_id)
            self._serve_waiting()
        elif isinstance(body, CloseStream):
            del peer.streams[body.stream_id]
        else:
            assert isinstance(body, CloseJob)

    def _open_job(self, peer: _Peer, request_id: int, body: OpenJob) -> None:
        if self.script.open_error:
            raise ConfigError(self.script.open_error)
        given, name = body.spec, f"fake{self.script.salt}"
        spec = structs.replace(
            given, fingerprint=name, lanes=given.lanes or 1, window=given.window or 1
        )
        peer.job = body
        layout = self.slots.layout
        opened = JobOpened(
            spec, spec.digest(), DatasetIdentity("c", "l"), self.script.sample_count, SPECS, layout.arena_bytes,
            layout.held_bytes_max, 1, self.script.stall_timeout_s, self.script.pixels, advice=self.script.advice,
        )  # fmt: skip
        self._send(peer, request_id, opened, (self.arena.fd,))

    def _slabs(self, place: Slice, steps: list[int]) -> Iterator[list[tuple[int, Any]]]:
        """Ramps up: the first slab has one batch."""
        at, size = 0, 1
        while at < len(steps):
            yield [(step, place.positions_of_steps(step, 1)) for step in steps[at : at + size]]
            at, size = at + size, self.script.slab_batches

    def _serve_waiting(self) -> None:
        for peer in self._peers:
            for _ in range(len(peer.waiting)):
                request_id, asked = peer.waiting.popleft()
                if not self._give(peer, request_id, asked):
                    peer.waiting.append((request_id, asked))

    def _give(self, peer: _Peer, request_id: int, asked: NextSlab) -> bool:
        script = self.script
        if asked.stream_id not in peer.streams:
            return True
        if script.hang_after is not None and self.slabs_given >= script.hang_after:
            return False
        if not self.slots.free_count:
            return False
        request, slabs = peer.streams[asked.stream_id]
        steps = next(slabs, None)
        if steps is None:
            self._send(peer, request_id, EndOfStream(asked.stream_id))
            return True
        if script.die_after is not None and self.slabs_given >= script.die_after:
            os._exit(7)
        region = self.slots.take()
        assert region is not None
        memory = np.frombuffer(self.arena.view(region.offset, region.length), np.uint8)
        columns = write(memory, [s.positions.tolist() for _, s in steps], request.epoch)
        self.slabs_given += 1
        self._number += 1
        peer.lent[self._number] = region
        batches = tuple(Batch(step, int(s.rows[0]), int(s.valid[0])) for step, s in steps)
        told, out = encode(Layout(columns)), script.copy_out
        used = max(
            at + length
            for spec, column in zip(SPECS, columns, strict=True)
            for i, batch in enumerate(batches)
            for at, length in pieces(spec, column, i, batch.rows)
        )
        slab = Slab(
            *(asked.stream_id, self._number, region, batches, told),
            copy_out=out,
            bytes_used=used,
        )
        self._send(peer, request_id, slab)
        return True


def may_be_killed(script: Script, at: str) -> None:
    """SIGKILL this process, if the script says so for this moment."""
    if script.killed_at != at:
        return
    if script.killed_once:
        try:
            Path(script.killed_once).touch(exist_ok=False)
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)


def write(memory: Any, batches: list[list[int]], epoch: int) -> tuple[Column, ...]:
    """Write the batches in the layout of the protocol."""
    end, columns = 0, []

    def put(array: Any) -> int:
        nonlocal end
        wire = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        at, end = end, end + -(-len(wire) // 8) * 8
        memory[at : at + len(wire)] = wire
        return at

    for spec in SPECS:
        values, lengths, width = [], [], []
        rows = [[sample(t, epoch)[spec.name] for t in batch] for batch in batches]
        if spec.kind is Kind.FIXED:
            dtype = np.dtype(spec.dtype)
            base = put(np.array([one for batch in rows for one in batch], dtype))
            size = dtype.itemsize * int(np.prod(spec.shape))
            counts = np.cumsum([0, *map(len, batches)])[:-1]
            values = [int(base + count * size) for count in counts]
        for batch in rows if spec.kind is not Kind.FIXED else []:
            parts = [one if one is not None else b"" for one in batch]
            parts = [one.encode() if isinstance(one, str) else one for one in parts]
            counts = [len(one) for one in parts]
            if spec.kind is Kind.PADDED:
                width.append(max(counts, default=0))
                padded = np.zeros((len(batch), width[-1]), spec.dtype)
                for i, one in enumerate(parts):
                    padded[i, : len(one)] = one
                values.append(put(padded))
                lengths.append(put(np.array(counts, np.int64)))
                continue
            offsets = np.cumsum([0, *counts], dtype=np.int64)
            width.append(int(offsets[-1]))
            valid = np.array([one is not None for one in batch], np.uint8)
            if spec.kind is Kind.RAGGED:
                values.append(put(np.array([v for one in parts for v in one], spec.dtype)))
                lengths.append(put(offsets))
            else:
                values.append(put(np.frombuffer(b"".join(parts), np.uint8)))
                both = np.concatenate([offsets.view(np.uint8), valid])
                lengths.append(put(both))
        columns.append(Column(tuple(values), tuple(lengths), tuple(width)))
    return tuple(columns)


def open_job(**given: Any) -> OpenJob:
    """Return the request of a session."""
    fields: dict[str, Any] = {"global_batch": 4} | given
    place = fields.pop("topology", None)
    return opening("s3://bucket/shards", place, job="job", launch="launch", member="", **fields)


@contextlib.contextmanager
def serving(script: Script, name: str) -> Iterator[FakeNode]:
    """A fake node in a thread, under an abstract name."""
    node = FakeNode(script, local.listen(name))
    thread = threading.Thread(target=node.run, name="fake-node")
    thread.start()
    try:
        yield node
    finally:
        node.stop()
        thread.join()


def environment(script: Script) -> str:
    """FAKE_NODE for a process that does this."""
    return json.dumps(asdict(script))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listener-fd", type=int, required=True)
    parser.add_argument("--stderr-fd", type=int, required=True)
    parser.add_argument("--embedded", action="store_true")
    given, _ = parser.parse_known_args()
    script = Script(**json.loads(os.environ["FAKE_NODE"]))
    may_be_killed(script, "start")
    if script.die_at_start:
        sys.stderr.write(script.die_at_start)
        return 3
    os.dup2(given.stderr_fd, 2)
    os.close(given.stderr_fd)
    FakeNode(script, socket.socket(fileno=given.listener_fd), embedded=given.embedded).run()
    return 0


def steps_of(session: Session) -> list[int]:
    """The steps of all batches that a session gets."""
    stream, step, seen = SlabStream(session, 0, 0), 0, []
    while slabs := stream.batches_from(step):
        seen += [batch.step for slab in slabs for batch in slab.batches]
        step = seen[-1] + 1
    stream.close()
    return seen


if __name__ == "__main__":
    sys.exit(main())
