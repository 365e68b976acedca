"""The messages of a worker that indexes shards, and of its node."""

from __future__ import annotations

import gzip
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from dataplane.model.errors import CorruptShard
from dataplane.model.records import Region
from dataplane.rpc import local, tasks
from dataplane.worker.forking import fork_server

WAIT_S = 60.0
LINES = gzip.compress(b'{"id": 1}\n' * 1000)
DAMAGED = LINES[:10] + b"\xff" * 1000
"""The header of a gzip stream, and what no inflater takes."""


@pytest.fixture
def indexer() -> Iterator[socket.socket]:
    """The node's end of its socket."""
    ours, theirs = local.pair()
    ours.settimeout(WAIT_S)
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    try:
        with fork_server.held(), ours:
            with theirs:
                process = fork_server.start("worker", theirs, stderr, 1 << 30)
            try:
                yield ours
            finally:
                process.kill()
                assert process.wait(WAIT_S)
    finally:
        os.close(stderr)


def ask(sock: socket.socket, task: int, size_bytes: int) -> None:
    order = tasks.IndexShard("jsonl", f"s3://b/{task}.jsonl.gz", size_bytes, "etag")
    local.send(sock, tasks.Task(order, task))


def answered(
    sock: socket.socket, answer: Callable[[tasks.ReadShard], None]
) -> tuple[int, tasks.ResultBody]:
    """The task that ends next, and how; `answer` gets what is asked for until then."""
    while True:
        said, _ = local.receive(sock, tasks.Result)
        if not isinstance(said.body, tasks.ReadShard):
            return said.number, said.body
        answer(said.body)


def indexed(sock: socket.socket, task: int, shard: bytes) -> tasks.ResultBody:
    """How the indexing of a shard ends whose pieces come one request after the other."""
    pieces = iter((shard[:20], shard[20:]))

    def answer(asked: tasks.ReadShard) -> None:
        place = asked.place
        if place is None:
            piece = next(pieces, None)
            body = tasks.ShardBytes(asked.request, piece or b"", is_end=piece is None)
        else:
            body = tasks.ShardBytes(asked.request, _part(shard, place))
        local.send(sock, tasks.Task(body, task))

    ask(sock, task, len(shard))
    ended, outcome = answered(sock, answer)
    assert ended == task
    return outcome


def _part(shard: bytes, place: Region) -> bytes:
    return shard[place.offset : place.offset + place.length]


def test_bytes_of_a_shard_that_has_failed_do_not_end_the_process(indexer: socket.socket) -> None:
    """The next piece is on its way while the one before it is parsed."""
    late: list[int] = []
    streamed: list[int] = []

    def answer(asked: tasks.ReadShard) -> None:
        if asked.place is not None:
            body = tasks.ShardBytes(asked.request, _part(DAMAGED, asked.place))
        elif not streamed:
            streamed.append(asked.request)
            body = tasks.ShardBytes(asked.request, DAMAGED[:500])
        else:
            late.append(asked.request)
            return
        local.send(indexer, tasks.Task(body, 1))

    ask(indexer, 1, len(DAMAGED))
    ended, outcome = answered(indexer, answer)
    assert ended == 1
    assert isinstance(outcome, CorruptShard)
    assert len(late) == 1
    assert isinstance(indexed(indexer, 2, LINES), tasks.ShardIndexed)  # the first one is forgotten
    local.send(indexer, tasks.Task(tasks.ShardBytes(late[0], DAMAGED[500:]), 1))
    assert isinstance(indexed(indexer, 3, LINES), tasks.ShardIndexed)
