"""Requests for slabs, also hostile ones, as a lender serves them; the test is its node."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket

import pytest
from lender_bench import (
    HONEST,
    HOSTILE,
    LIMITS,
    OF_NEIGHBOUR,
    OLD_KEY,
    Bench,
    bench,
    every_line_is_written,
    frame,
    is_closed,
    opening,
    received,
    wrong_proof,
)
from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours import wire
from dataplane.rpc import lending, local, tasks
from dataplane.security.admission import AdmissionRules

__all__ = ["bench", "every_line_is_written"]

ROOM = 1 << 30
BODY = b"what to make"


def slab_request(body: bytes = BODY, room: int = ROOM, number: int = 1) -> bytes:
    return wire.pack(slab(number, room, body))


def slab(number: int, room: int, body: bytes) -> lending.Request:
    return lending.Request(number, lending.NO_DATASET, 0, 0, room, BlockForm.SLAB, slab=body)


def ask(bench: Bench, sock: socket.socket, body: bytes = BODY, room: int = ROOM) -> lending.Asked:
    sock.sendall(slab_request(body, room))
    asked = bench.hear()
    assert isinstance(asked, lending.Asked)
    assert asked.request == slab(1, room, body)
    return asked


def answer(sock: socket.socket, body: bytes = BODY) -> wire.Answer:
    return wire.unpack_answer(frame(sock), slab(1, ROOM, body))


@pytest.fixture
def made(bench: Bench) -> Arena:
    """A delivery arena, number 5, that the lender has."""
    arena = Arena.create("made", 1 << 20)
    bench.connected.append(arena)
    arena.reserve(0, 1 << 20)
    arena.buffer[:] = os.urandom(1 << 20)
    local.send(bench.sock, lending.ToLender(tasks.AttachArena(5)), (arena.fd,))
    return arena


def take(sock: socket.socket, given: wire.Answer) -> tuple[bytes, bytes]:
    """Note and slab, with a receipt for them."""
    body = received(sock, given.length)
    sock.sendall(wire.pack(wire.Receipt(1)))
    return given.note, body


def test_what_is_sent_is_the_note_and_then_the_slab(bench: Bench, made: Arena) -> None:
    sock = bench.opened()
    for length, note in ((1000, b"a note"), (0, b"too small"), (0, b""), (1 << 20, b"n" * 200_000)):
        asked = ask(bench, sock)
        bench.tell(lending.Give(asked.number, Region(0, length), 5, note))
        found = answer(sock)
        assert (found.length, found.note) == (length, note)
        assert take(sock, found) == (note, bytes(made.view(0, length)))
        assert bench.hear() == lending.Given(asked.number, length + len(note))
    bench.tell(lending.Refuse(ask(bench, sock).number))
    assert answer(sock).outcome is wire.Outcome.REFUSED


def test_a_body_comes_in_pieces_and_is_as_long_as_it_says(bench: Bench) -> None:
    sock, body = bench.opened(), os.urandom(wire.BODY_BYTES_MAX)
    sent = slab_request(body)
    for start in range(0, len(sent), 300_000):
        sock.sendall(sent[start : start + 300_000])
    asked = bench.hear()
    assert isinstance(asked, lending.Asked)
    assert asked.request.slab == body
    bench.tell(lending.Refuse(asked.number))
    assert answer(sock, body).outcome is wire.Outcome.REFUSED
    bench.lends(sock)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (slab_request(bytes(wire.BODY_BYTES_MAX + 1)), "1048577 bytes about"),
        (slab_request(b""), "0 bytes about"),
        (slab_request(room=1 << 50), "a request for 1125899906842624"),
        (slab_request()[: wire.HEAD_BYTES], "took too long"),
        (slab_request()[:-1], "took too long"),
        (slab_request() + b"x", "before it had its answer"),
    ],
    ids=["too long", "empty", "too much room", "no body", "part of a body", "more than a body"],
)
def test_a_request_that_breaks_the_rules_costs_its_connection_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture, sent: bytes, why: str
) -> None:
    honest, other = bench.opened(HONEST), bench.opened(asker="other")
    other.sendall(sent)
    while not is_closed(other):
        pass
    if why.startswith("before"):  # the node was asked; its answer goes nowhere
        asked = bench.hear()
        assert isinstance(asked, lending.Asked)
        bench.tell(lending.Give(asked.number, Region(0, 9), 5, b""))
        assert bench.hear() == lending.Given(asked.number, 0)
    bench.lends(honest)
    assert len(caplog.records) == 1
    assert why in caplog.text
    assert "node=other" in caplog.text


def test_bytes_of_a_body_do_not_move_its_deadline(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    sock = bench.opened()
    sock.settimeout(0.03)
    body = bytes(1000)
    sock.sendall(slab_request(body)[: wire.HEAD_BYTES])
    for _ in range(len(body) - 1):
        try:
            sock.sendall(b"x")
            if not sock.recv(1):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    else:
        pytest.fail("it is still open")
    assert "a request took too long" in caplog.text


def test_a_request_of_somebody_without_the_key_reaches_nobody(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for key in (OLD_KEY, bytes(32)):
        stranger = bench.connect(HOSTILE)
        wrong_proof(stranger, key, opening())
        with contextlib.suppress(ConnectionError):
            stranger.sendall(slab_request())
        assert is_closed(stranger)
    early = bench.connect(HOSTILE)
    early.sendall(opening() + slab_request())  # before the proof
    while not is_closed(early):
        pass
    bench.lends(bench.opened(HONEST))  # this is the first thing that the node hears
    assert [record.message.count("does not have the key") for record in caplog.records] == [
        1,
        1,
        0,
    ]


def test_bodies_take_no_more_memory_than_the_limits_allow(
    run_mark: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dataplane")
    mebibyte = 1 << 20
    with contextlib.closing(
        Bench(
            replace(
                LIMITS, body_bytes=3 * mebibyte, body_bytes_of_neighbour=2 * mebibyte, frame_s=60.0
            )
        )
    ) as bench:
        body = bytes(mebibyte - 200)  # with its frame, a mebibyte at most
        greedy = [bench.opened(asker="greedy") for _ in range(3)]
        for sock in greedy:
            sock.sendall(slab_request(body)[:100])
        (refused, *_), _, _ = select.select(greedy, [], [])
        greedy.remove(refused)
        assert is_closed(refused)
        others = [bench.opened(asker=f"node-{number}") for number in range(2)]
        others[0].sendall(slab_request(body)[:100])
        bench.lends(bench.opened(HONEST))
        others[1].sendall(slab_request(body)[:100])
        assert is_closed(others[1])
        greedy[0].close()
        greedy[1].sendall(slab_request(body)[100:])
        asked = bench.hear()
        assert isinstance(asked, lending.Asked)
        assert asked.node_id == "greedy"
        # Two of the three are free again: one was closed, the node has read the other.
        for number in range(6):
            bench.tell(lending.Refuse(ask(bench, bench.opened(asker=f"{number}"), body).number))
        assert len(caplog.records) == 2


def test_hundreds_that_wait_for_slabs_keep_nobody_waiting(run_mark: str) -> None:
    """They count no bytes in flight, though they have room for more than is allowed."""
    with contextlib.closing(Bench(replace(LIMITS, admission=AdmissionRules(1000)))) as bench:
        waiting = [bench.opened(asker=f"node-{number % 7}") for number in range(400)]
        asked = [ask(bench, sock) for sock in waiting]
        honest = bench.opened(HONEST, "honest")
        bench.lends(honest)
        bench.tell(lending.Give(asked[7].number, Region(4096, 1000), 0, b"note"))
        found = answer(waiting[7])
        assert take(waiting[7], found) == (b"note", bytes(bench.arena.view(4096, 1000)))
        assert bench.hear() == lending.Given(asked[7].number, 1004)


def test_given_slabs_take_turns_within_the_bytes_in_flight(bench: Bench) -> None:
    first, second, third = (bench.opened() for _ in range(3))
    asked = [ask(bench, sock) for sock in (first, second, third)]
    for each in asked:
        bench.tell(lending.Give(each.number, Region(0, OF_NEIGHBOUR), 0, b""))
    bench.lends(bench.opened(HONEST, "another"))
    third.close()  # while it waits for its turn
    assert bench.hear() == lending.Given(asked[2].number, 0)
    second.setblocking(False)
    with pytest.raises(BlockingIOError):
        second.recv(1)
    assert answer(first).length == OF_NEIGHBOUR
    first.close()
    assert bench.hear() == lending.Given(asked[0].number, 0)
    second.setblocking(True)
    found = answer(second)
    assert found.length == OF_NEIGHBOUR
    take(second, found)
    assert bench.hear() == lending.Given(asked[1].number, OF_NEIGHBOUR)


def test_what_is_no_arena_costs_nothing_but_a_refusal(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4096)
    local.send(bench.sock, lending.ToLender(tasks.AttachArena(5)), (fd,))
    os.close(fd)
    sock = bench.opened()
    asked = ask(bench, sock)
    bench.tell(lending.Give(asked.number, Region(0, 10), 5, b""))
    assert bench.hear() == lending.Given(asked.number, 0)
    assert answer(sock).outcome is wire.Outcome.REFUSED
    assert "no arena to lend" in caplog.text
