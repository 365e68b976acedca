"""The life of a batch: valid for as long as it is held, and never in the way of the next one."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_node import POISON, SPECS, Script, open_job, serving, write
from hypothesis import given
from hypothesis import strategies as st

from dataplane.arena.slab_layout import pieces
from dataplane.client.endpoint import Served
from dataplane.client.session import Session
from dataplane.client.stream import Batches, SlabStream, copied
from dataplane.client.waiting import Notice
from dataplane.client.wire import NoAnswer, Wire
from dataplane.model.errors import PeerLost
from dataplane.rpc import local
from dataplane.rpc.messages import (
    Batch,
    CloseStream,
    EndOfStream,
    FromNode,
    NextSlab,
    Release,
    ToNode,
    Working,
)


def content(batches: Batches) -> list[list[bytes]]:
    """Per batch, the bytes of every piece."""
    return [
        [
            batches.memory[offset : offset + size].tobytes()
            for spec, column in zip(SPECS, batches.columns, strict=True)
            for offset, size in pieces(spec, column, i, about.rows)
        ]
        for i, about in enumerate(batches.batches)
    ]


def expected(positions: list[int]) -> list[bytes]:
    memory = np.zeros(1 << 16, np.uint8)
    columns = write(memory, [positions], 0)
    return content(Batches(memory, (Batch(0, len(positions), len(positions)),), columns))[0]


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=6), min_size=1, max_size=4))
def test_a_copied_batch_has_the_same_pieces_in_other_memory(positions: Any) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    about = tuple(Batch(i, len(rows), len(rows)) for i, rows in enumerate(positions))
    slab = Batches(memory, about, write(memory, positions, 0))
    before = content(slab)
    copies = copied(slab, SPECS)
    memory[:] = POISON
    assert [piece for copy in copies for piece in content(copy)] == before
    assert all(one.memory.flags.writeable and one.memory.base is None for one in copies)


class Consumer:
    """One iterator of a program that holds any number of batches."""

    def __init__(self, session: Session) -> None:
        self.stream, self.step = SlabStream(session, 0, 0), 0
        self.held: list[tuple[Batches, list[int]]] = []

    def advance(self) -> None:
        for slab in self.stream.batches_from(self.step):
            self.held.append((slab, [about.step for about in slab.batches]))
            self.step = slab.batches[-1].step + 1

    def check(self) -> None:
        for slab, steps in self.held:
            ends = [min(57, 4 * step + 4) for step in steps]
            positions = [list(range(4 * s, end)) for s, end in zip(steps, ends, strict=True)]
            assert content(slab) == [expected(rows) for rows in positions]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["next", "drop", "new", "drop all"]))),
    st.booleans(),
)
def test_whatever_is_held_stays_right_and_never_blocks_what_comes(plan: Any, copy_out: Any) -> None:
    """Memory that was returned to the node is poisoned, and there are only 6 slots."""
    name = f"test-{uuid.uuid4().hex}"
    with serving(Script(sample_count=57, arena_bytes=6 * 4096, copy_out=copy_out), name) as node:
        session = Session(Served("host:1", name), open_job())
        consumers = [Consumer(session) for _ in range(3)]
        for who, what in plan:
            one = consumers[who]
            if what == "next":
                one.advance()
            elif what == "drop" and one.held:
                del one.held[len(one.held) // 2]
            elif what == "new":
                one.stream.close()
                one.stream, one.step = SlabStream(session, 0, 0), 0
            else:
                one.held.clear()
            mount = session.mount()
            assert mount.held_bytes <= mount.job.held_bytes_max
            one.check()
        for one in consumers:
            one.check()
            one.held.clear()
            one.stream.close()
        if plan:
            # A stray answer of a stream that was left may still be in the socket: one more round.
            assert SlabStream(session, 0, 0).batches_from(0)
        session.close()
    assert node.free_count == node.slots.layout.slot_count


def test_all_batches_may_be_held_at_once(fake, session) -> None:
    fake(sample_count=400, arena_bytes=6 * 4096)
    mine = session()
    stream, step, held = SlabStream(mine, 0, 0), 0, []
    while slabs := stream.batches_from(step):
        held += slabs
        step = slabs[-1].batches[-1].step + 1
    assert step == 100
    assert [piece for slab in held for piece in content(slab)] == [
        expected(list(range(4 * i, 4 * i + 4))) for i in range(100)
    ]
    assert 0 < mine.mount().held_bytes <= mine.job.held_bytes_max
    stream.close()


def test_a_trainer_allocates_no_memory_that_a_slab_does_not_use(fake, session) -> None:
    node = fake(slot_bytes=1 << 20, arena_bytes=6 << 20)
    stream = SlabStream(session(), 0, 0)
    node.arena.release(0, node.arena.size_bytes)
    batches = stream.batches_from(0)
    assert os.fstat(node.arena.fd).st_blocks * 512 < 128 << 10
    assert content(batches[0])[0] == expected([0, 1, 2, 3])
    stream.close()


def test_many_streams_at_once_never_starve_each_other(fake, session) -> None:
    fake(sample_count=40, arena_bytes=6 * 4096)
    mine = session()
    streams = [SlabStream(mine, 0, 0) for _ in range(12)]
    for step in (0, 1, 4, 7):
        for stream in streams:
            assert stream.batches_from(step)[0].batches[0].step == step
    for stream in streams:
        stream.close()


def test_streams_stride_over_steps_and_resume_anywhere(fake, session) -> None:
    fake()
    mine = session()
    for worker in range(3):
        stream, step, seen = SlabStream(mine, 0, 8, worker, 3), worker, []
        while slabs := stream.batches_from(step):
            seen += [about.step for slab in slabs for about in slab.batches]
            step = seen[-1] + 3
        assert seen == list(range(worker, 23, 3))
        assert stream.batches_from(step) == []
        # Going back, or on, opens the stream again at the step that is wanted.
        assert stream.batches_from(seen[2])[0].batches[0].step == seen[2]
        stream.close()


def test_a_dropped_stream_is_closed(fake, session) -> None:
    node, mine = fake(), session()
    stream = SlabStream(mine, 0, 0)
    stream.batches_from(0)
    del stream
    other = SlabStream(mine, 0, 0)
    other.batches_from(0)
    assert any(isinstance(one, CloseStream) for one in node.seen)
    other.close()


Pair = tuple[Wire, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A wire, and the node's end of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wire = Wire(ours)
    yield wire, theirs
    wire.close()
    theirs.close()


def ask(wire: Wire) -> int:
    return wire.ask(NextSlab(1, 0, 0.0, ""), soon())


def soon() -> float:
    return time.monotonic() + 60


def test_what_has_arrived_is_seen_without_waiting_and_is_still_to_be_had(pair) -> None:
    wire, node = pair
    first, second = ask(wire), ask(wire)
    assert wire.arrived(first) is None
    local.send(node, FromNode(second, EndOfStream(2)))
    assert wire.arrived(first) is None
    local.send(node, FromNode(first, EndOfStream(1)))
    assert wire.arrived(first) == wire.arrived(first) == EndOfStream(1)
    assert wire.arrived(second) == EndOfStream(2)
    assert [wire.wait(one, soon())[0] for one in (first, second)] == [
        EndOfStream(1),
        EndOfStream(2),
    ]


def test_a_lost_node_sends_nothing_more_and_its_waiters_get_an_error(pair) -> None:
    wire, node = pair
    request = ask(wire)
    node.shutdown(socket.SHUT_RDWR)
    assert wire.arrived(request) is None
    assert wire.arrived(request) is None
    with pytest.raises(PeerLost):
        wire.wait(request, soon())


def test_while_another_thread_receives_its_answers_are_seen(pair) -> None:
    wire, node = pair
    request, other = ask(wire), ask(wire)
    waiter = threading.Thread(target=wire.wait, args=(other, soon()))
    waiter.start()
    local.send(node, FromNode(request, EndOfStream(1)))
    pause = threading.Event()
    while wire.arrived(request) is None:
        pause.wait(0.001)
    local.send(node, FromNode(other, EndOfStream(2)))
    waiter.join(60)
    assert not waiter.is_alive()
    assert wire.wait(request, soon())[0] == EndOfStream(1)


def test_slabs_freed_before_a_wait_are_reported_before_it(pair) -> None:
    """(5): otherwise a node could wait for that memory while we wait for the node."""
    wire, node = pair
    seen = []

    def flush() -> None:
        seen.append(wire.is_waiting)
        wire.tell_nowait(Release("job", (7,)))

    request = ask(wire)
    local.send(node, FromNode(request, EndOfStream(1)))
    wire.wait(request, soon(), flush=flush)
    assert seen[0] is True
    assert local.receive(node, ToNode)[0].body == NextSlab(1, 0, 0.0, "")
    assert local.receive(node, ToNode)[0].body == Release("job", (7,))


def test_a_request_waits_on_while_the_node_says_that_it_works_for_it(pair) -> None:  # [6]
    wire, node = pair
    first, second = ask(wire), ask(wire)
    local.send(node, FromNode(first, Working("counting packs", 1, 4)))
    with pytest.raises(NoAnswer):  # it is not about this one
        wire.wait(second, time.monotonic() + 0.01)
    assert wire.arrived(first) is None
    with pytest.raises(NoAnswer):
        wire.wait(first, time.monotonic() + 0.01)
    waits, said = threading.Event(), []
    notice = Notice("a test")
    notice.working = said.append  # type: ignore[method-assign]

    def work() -> None:
        for done in range(2, 5):
            local.send(node, FromNode(first, Working("counting packs", done, 4)))
            waits.wait(0.02)
        local.send(node, FromNode(first, EndOfStream(1)))

    worker = threading.Thread(target=work)
    worker.start()
    assert wire.wait(first, time.monotonic() + 20, notice)[0] == EndOfStream(1)
    worker.join(60)
    assert [work.done for work in said] == sorted({work.done for work in said})
    assert not wire._working
