"""One connection: packets that have arrived, and messages that are sent before a wait.

Numbers in brackets are invariants of dataplane.client.wire.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dataplane.client.waiting import Notice
from dataplane.client.wire import NoAnswer, Wire
from dataplane.model.errors import PeerLost
from dataplane.rpc import local
from dataplane.rpc.messages import (
    EndOfStream,
    FromNode,
    NextSlab,
    Release,
    ToNode,
    Working,
)

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
