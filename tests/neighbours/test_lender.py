"""A lender under attack: each attempt is refused with one line of the log, and nobody else notices.
It runs in a thread, with short deadlines, and the test is its node.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque

import pytest
from lender import free
from lender_bench import (
    HONEST,
    HOSTILE,
    KEY,
    LIMITS,
    OF_NEIGHBOUR,
    OLD_KEY,
    Bench,
    bench,
    every_line_is_written,
    frame,
    is_closed,
    opening,
    request,
    wrong_proof,
)
from msgspec.structs import replace

from dataplane.base.machine import raise_descriptor_limit
from dataplane.model.errors import PeerLost
from dataplane.model.records import Region
from dataplane.neighbours import wire
from dataplane.rpc import lending
from dataplane.rpc.fetches import Neighbour, Peer

__all__ = ["bench", "every_line_is_written"]

REFUSALS = {
    # Not the first byte of TLS, which is refused for another reason.
    "garbage": (lambda s: s.sendall(b"\xff" + os.urandom(47) + b"x" * 200), "a frame begins"),
    "http": (lambda s: s.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n" * 4), "a frame begins"),
    "an older generation": (lambda s: s.sendall(opening(generation=1)), "generation 1, not 2"),
    "a later generation": (lambda s: s.sendall(opening(generation=3)), "generation 3, not 2"),
    "an unknown job": (lambda s: s.sendall(opening(job="nobody's")), "no such job"),
    "another node": (lambda s: s.sendall(opening(lender="node-7")), "another node"),
    "a wrong key": (lambda s: wrong_proof(s, bytes(32), opening()), "does not have the key"),
    "the stolen key of an older generation": (
        lambda s: wrong_proof(s, OLD_KEY, opening()),
        "does not have the key",
    ),
    "the key of another job": (
        lambda s: wrong_proof(s, KEY, opening(job="another")),
        "does not have the key",
    ),
    "an oversized frame": (lambda s: s.sendall(opening("j" * 5000)), "bytes, not 4096 at most"),
    "no proof": (lambda s: s.sendall(opening()), "took too long"),
    "silence": (lambda _: None, "took too long"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_stranger_is_refused_with_one_line_and_nobody_notices(
    bench: Bench, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    attack, why = REFUSALS[name]
    honest = bench.opened(HONEST)
    bench.lends(honest, 1)
    stranger = bench.connect()
    attack(stranger)
    while not is_closed(stranger):
        pass
    bench.lends(honest, 2)
    assert len(caplog.records) == 1
    assert "data connection refused" in caplog.text
    assert why in caplog.text
    assert HOSTILE in caplog.text


def test_a_neighbour_that_has_not_heard_of_the_end_of_a_job_is_no_reason_for_a_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.lends(bench.opened())
    bench.tell(lending.LendingKeys("another", 2, b""))
    late = bench.connect()
    late.sendall(opening(job="another"))
    assert is_closed(late)
    (line,) = caplog.records
    assert line.levelname == "INFO"
    assert "the job has left this node" in caplog.text
    later = bench.connect()
    later.sendall(opening(generation=3, job="another"))
    assert is_closed(later)
    assert [line.levelname for line in caplog.records] == ["INFO", "WARNING"]
    assert "no such job" in caplog.text


def test_a_recorded_handshake_opens_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    opened = opening()
    seen = bench.connect(HONEST)
    seen.sendall(opened)
    challenge = frame(seen)
    proof = wire.answer_challenge(KEY, opened, challenge)
    seen.sendall(proof)
    bench.lends(seen)
    reflected = wire.pack(wire.Proof(wire.unpack(wire.Challenge, challenge).proof))
    for recorded in (opened + proof, opened + reflected):
        replayed = bench.connect()
        replayed.sendall(recorded)
        assert frame(replayed) != challenge
        assert is_closed(replayed)
    assert [record.message.count("does not have the key") for record in caplog.records] == [1, 1]
    bench.lends(seen, 2)


def test_a_lender_without_the_key_learns_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The asker closes the connection before it proves or asks anything."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        host, port = impostor.getsockname()
        neighbour = Neighbour(Peer(f"{host}:{port}", "job", 2, KEY, "a", "lender"), bytes(16), 0)
        failed: list[str] = []

        def ask() -> None:
            try:
                bench.lines.read(neighbour, [memoryview(bytearray(9))], free, bool)
            except PeerLost as error:
                failed.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        sock, _ = impostor.accept()
        opened = frame(sock)
        sock.sendall(wire.pack_challenge(bytes(32), opened, bytes(32)))
        assert is_closed(sock)
        sock.close()
        thread.join()
    assert "does not have the key" in failed[0]
    assert KEY not in opened


def test_slow_bytes_are_not_waited_for(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Each byte comes before a deadline of its own would have passed."""
    slow, opened = bench.connect(), opening()
    inside = bench.opened(asker="insider")
    bench.lends(inside)
    wait = threading.Event()
    for at in range(40):
        for sock, piece in ((slow, opened[at : at + 1]), (inside, wire.pack(request(9, 2)))):
            try:
                sock.sendall(piece[:1] if sock is slow else piece[at : at + 1])
            except OSError:
                wait.set()
        wait.wait(0.03)
    assert is_closed(slow)
    assert is_closed(inside)
    said = sorted(record.message.rpartition("why=")[2] for record in caplog.records)
    assert said == ['"a request took too long"', '"its handshake took too long"']


@pytest.mark.parametrize(
    "sent",
    [
        os.urandom(50),
        wire.pack(request(9))[:-1] + b"" + b"\x00" + b"more",
        wire.pack(request(9)) * 2,
        wire.pack(request(1 << 50)),
        wire.pack(request(0)),
        wire.pack(wire.Receipt(1)) + bytes(50),
    ],
    ids=["garbage", "trailing bytes", "two at once", "too long", "empty", "another frame"],
)
def test_a_neighbour_that_breaks_the_rules_loses_its_connection_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    honest, other = bench.opened(HONEST), bench.opened(asker="other")
    bench.lends(honest, 1)
    other.sendall(sent)
    while not is_closed(other):
        pass
    asked: deque[lending.FromLenderBody] = deque()
    honest.sendall(wire.pack(request(5, 2)))
    while not asked or asked[-1].request.length != 5:
        asked.append(bench.hear())
    bench.tell(lending.Refuse(asked[-1].number))
    for unanswered in list(asked)[:-1]:  # of the one that has lost its connection
        bench.tell(lending.Give(unanswered.number, Region(0, 9), ends=(wire.GIVEN_WHOLE,)))
        assert bench.hear() == lending.Given(unanswered.number, 0)
    assert frame(honest)
    bench.lends(honest, 3)
    assert len(caplog.records) == 1
    assert "node=other" in caplog.text


@pytest.mark.parametrize("connections", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_connections_of_one_host_crowd_out_only_each_other(
    bench: Bench, caplog: pytest.LogCaptureFixture, connections: int
) -> None:
    raise_descriptor_limit()
    honest = bench.opened(HONEST)
    bench.lends(honest, 1)
    flood = []
    for count in range(connections):
        flood.append(bench.connect())
        if count % 100 == 50:
            newcomer = bench.opened(HONEST)
            bench.lends(newcomer)
            newcomer.close()
    assert is_closed(flood[0])
    bench.lends(honest, 2)
    assert 0 < len(caplog.records) <= 30, "its rate is limited"


def test_a_connection_that_nobody_uses_is_closed_without_a_line(
    run_mark: str, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(Bench(replace(LIMITS, idle_s=0.2))) as bench:
        idle = bench.opened()
        bench.lends(idle)
        assert is_closed(idle)
        assert caplog.records == []


def test_what_the_node_does_not_read_yet_waits_for_it(bench: Bench) -> None:
    """More questions than fit into the socket of a node that is busy."""
    bench.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    neighbours = [bench.opened(HONEST, f"node-{number}") for number in range(30)]
    asked: list[int] = []
    for turn in range(5):
        for sock in neighbours:
            sock.sendall(wire.pack(request(10, turn)))
        for _ in neighbours:
            question = bench.hear()
            assert isinstance(question, lending.Asked)
            asked.append(question.number)
        for number in asked[-30:]:
            bench.tell(lending.Refuse(number))
        for sock in neighbours:
            assert frame(sock)
    assert asked == sorted(set(asked))


def test_a_neighbour_that_stops_reading_is_cut_off_and_its_region_is_free(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    honest = bench.opened(HONEST)
    for number, length in enumerate((OF_NEIGHBOUR, 1000)):  # of the second one, it sends no receipt
        stuck = bench.opened(asker="stuck")
        asked = bench.ask(stuck, length)
        bench.tell(lending.Give(asked.number, Region(0, length), ends=(wire.GIVEN_WHOLE,)))
        bench.lends(honest, 1 + number)
        assert bench.hear() == lending.Given(asked.number, 0)
        stuck.close()
    bench.lends(honest, 3)
    assert [record.message.split(" peer")[0] for record in caplog.records] == [
        "neighbour cut off"
    ] * 2


def test_a_neighbour_that_leaves_frees_its_region(bench: Bench) -> None:
    gone = bench.opened()
    asked = bench.ask(gone, OF_NEIGHBOUR)
    bench.tell(lending.Give(asked.number, Region(0, OF_NEIGHBOUR), ends=(wire.GIVEN_WHOLE,)))
    gone.recv(1000)
    gone.close()
    assert bench.hear() == lending.Given(asked.number, 0)


def test_requests_beyond_the_bytes_in_flight_wait_for_their_turn_and_are_then_refused(
    bench: Bench,
) -> None:
    first, second = bench.opened(), bench.opened()
    asked = bench.ask(first, OF_NEIGHBOUR)
    second.sendall(wire.pack(request(1000)))
    other = bench.opened(asker="other")
    bench.lends(other)
    assert wire.unpack_answer(frame(second), request(1000)).outcome is wire.Outcome.REFUSED
    second.sendall(wire.pack(request(1000)))
    bench.tell(lending.Refuse(asked.number))
    later = bench.hear()
    assert isinstance(later, lending.Asked)
    assert later.request.length == 1000
