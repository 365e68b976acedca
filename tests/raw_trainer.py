"""A node process and trainers that speak its protocol by hand, packet by packet."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil
import pyarrow as pa
from fleet import WARM_SERVICES, worker_processes
from openings import opening
from slabs import batch_values

from dataplane.arena.memfd import Arena
from dataplane.model.config import PROTOCOL_VERSION, VERSION
from dataplane.model.errors import DataplaneError
from dataplane.model.records import Topology
from dataplane.rpc import local, messages
from dataplane.rpc.codec import decode

Batches = list[list[list[Any]]]
ANSWER_S = 60.0


class Node:
    """An embedded node process. It ends by itself after its last trainer."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.name = f"dp-test-{os.getpid()}-{time.monotonic_ns()}"
        own = {"cache_dir": folder / "cache", "linger_s": 0.2, "worker_count": 2} | settings
        told = {
            name if name.isupper() else f"DATAPLANE_{name.upper()}": str(value)
            for name, value in own.items()
        }
        listener = local.listen(self.name)
        self.errors = folder / "node.log"
        with self.errors.open("ab") as log:
            self.process = WARM_SERVICES[0].run_module(
                "dataplane.node", "--embedded", "--listener-fd", str(listener.fileno()),
                environ={**os.environ, **told}, stderr=log.fileno(), inherits=[listener.fileno()],
            )  # fmt: skip
        listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.process.kill()
            sys.stderr.write(self.errors.read_text())  # it may say why
        status = self.process.wait(60)
        if kind is None:
            assert status in {0, -signal.SIGKILL}, self.errors.read_text()
            assert "Traceback" not in self.errors.read_text(), self.errors.read_text()

    def workers(self) -> list[psutil.Process]:
        return worker_processes(psutil.Process(self.process.pid))


class Trainer:
    """One connection to a node."""

    def __init__(self, node: Node, *, greet: bool = True) -> None:
        self.sock = local.connect(node.name, ANSWER_S)
        self.arenas: dict[str, Arena] = {}
        self.columns: dict[str, tuple[Any, ...]] = {}
        self._asked = 0
        if greet:
            self.call(messages.Hello(VERSION, PROTOCOL_VERSION, os.getpid()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()
        for arena in self.arenas.values():
            arena.close()
        self.arenas.clear()

    def ask(self, body: messages.ToNodeBody) -> int:
        self._asked += 1
        local.send(self.sock, messages.ToNode(self._asked, body))
        return self._asked

    def tell(self, body: messages.ToNodeBody) -> None:
        local.send(self.sock, messages.ToNode(0, body))

    def answer(self) -> tuple[messages.FromNode, tuple[int, ...]]:
        found, descriptors = local.receive(self.sock, messages.FromNode)
        while isinstance(found.body, messages.Working):
            found, descriptors = local.receive(self.sock, messages.FromNode)
        if isinstance(found.body, DataplaneError):
            raise found.body
        return found, descriptors

    def call(self, body: messages.ToNodeBody) -> Any:
        request_id = self.ask(body)
        found, descriptors = self.answer()
        assert found.request_id == request_id
        assert not descriptors
        return found.body

    def is_hung_up(self) -> bool:
        self.sock.settimeout(ANSWER_S)
        try:
            return not self.sock.recv(1 << 18)
        except ConnectionError:
            return True

    def open(
        self, url: str, *, job: str = "j", dp_rank: int = 0, dp_size: int = 1, **request: Any
    ) -> messages.JobOpened:
        place = Topology(dp_rank=dp_rank, dp_size=dp_size, rank=dp_rank, world_size=dp_size)
        member = request.pop("member", f"{job}-{dp_rank}")
        request = {"global_batch": 4} | request
        self.ask(opening(url, place, job=job, launch="first", member=member, **request))
        found, descriptors = self.answer()
        assert isinstance(found.body, messages.JobOpened)
        if job in self.arenas:
            self.arenas[job].close()
        self.arenas[job] = Arena.attach(descriptors[0], found.body.arena_bytes)
        self.columns[job] = found.body.columns
        return found.body

    def slabs(
        self, job: str = "j", *, epoch: int = 0, cursor: int = 0, first: int = 0, stride: int = 1
    ) -> Iterator[messages.Slab]:
        """The slabs of a stream; each is released when the next is requested."""
        request = messages.OpenStream(job, epoch, cursor, first, stride)
        stream = self.call(request).stream_id
        while True:
            slab = self.call(messages.NextSlab(stream, cursor, 0.0))
            if isinstance(slab, messages.EndOfStream):
                break
            yield slab
            self.tell(messages.Release(job, (slab.slab_id,)))
        self.tell(messages.CloseStream(stream))

    def batches(self, job: str = "j", **stream: int) -> Batches:
        """Every batch of a stream: values[batch][column][row]."""
        return [b for slab in self.slabs(job, **stream) for b in self.values(slab, job)]

    def values(self, slab: messages.Slab, job: str = "j") -> Batches:
        view = self.arenas[job].view(slab.region.offset, slab.region.length)
        columns = decode(messages.Layout, slab.layout).columns
        return [
            [
                batch_values(view, spec, column, slab.batches, i)
                for spec, column in zip(self.columns[job], columns, strict=True)
            ]
            for i in range(len(slab.batches))
        ]


def raw_socket(node: Node) -> socket.socket:
    return local.connect(node.name, ANSWER_S)


ROWS = 90


def table(first: int, rows: int) -> pa.Table:
    """Rows `first` and on, as `expected` describes them."""
    x = np.arange(first, first + rows)
    return pa.table(
        {
            "x": pa.array(x, pa.int32()),
            "v": pa.array([np.arange(i % 5) for i in x], pa.list_(pa.int16())),
            "s": pa.array([f"row {i}" if i % 7 else None for i in x]),
        }
    )


def expected(i: int) -> list[object]:
    """The values of one row."""
    return [i, list(range(i % 5)), f"row {i}".encode() if i % 7 else None]


def rows_of(batches: Batches) -> list[list[object]]:
    """Batch after batch, row after row: the values of each column."""
    return [[column[i] for column in batch] for batch in batches for i in range(len(batch[0]))]
