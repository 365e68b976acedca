"""Data connections inside of TLS, and what comes to a lender that expects it, or does not."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import Authority
from lender import free
from lender_bench import (
    HONEST,
    HOSTILE,
    KEY,
    LIMITS,
    OF_NEIGHBOUR,
    Bench,
    every_line_is_written,
    frame,
    is_closed,
    opening,
    wrong_proof,
)
from msgspec.structs import replace

from dataplane.base.machine import raise_descriptor_limit
from dataplane.model.config import PeerTls
from dataplane.model.errors import NeighbourGone
from dataplane.model.records import BlockForm, Region
from dataplane.neighbours import wire
from dataplane.neighbours.asking import Lines
from dataplane.neighbours.connection import LoanStage
from dataplane.neighbours.entrance import Entrance
from dataplane.neighbours.line_tls import LineTls
from dataplane.neighbours.wire import ONE_SIDE
from dataplane.rpc import lending
from dataplane.rpc.fetches import Neighbour, Peer
from dataplane.security.tls import TlsFiles

__all__ = ["every_line_is_written"]

URI, PEERS = "spiffe://cluster/ns/training/node", ("spiffe://cluster/ns/training/*",)


def peer_tls(files: TlsFiles, *peers: str) -> PeerTls:
    return PeerTls(files.cert, files.key, files.ca, peers)


class Certified:
    """Certificates of one CA and of others."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority, self.other = folder, Authority.made(), Authority.made("other")
        self.node = peer_tls(self.authority.write(folder, "node", uri=URI), *PEERS)

    def shown(self, name: str) -> PeerTls:
        """Somebody who trusts the lender, and shows another certificate."""
        if name == "another CA":
            files = self.other.write(self.folder, "b", uri=URI, trusts=self.authority)
        elif name == "expired":
            files = self.authority.write(self.folder, "c", uri=URI, lasts=dt.timedelta(hours=-1))
        else:
            files = self.authority.write(self.folder, "d", uri=name)
        return peer_tls(files)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return Certified(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def bench(run_mark: str, caplog: pytest.LogCaptureFixture, certified: Certified) -> Iterator[Bench]:
    caplog.set_level(logging.INFO, "dataplane")
    made = Bench(replace(LIMITS, handshake_s=1.0), certified.node)
    made.arena.view(0, OF_NEIGHBOUR)[:] = os.urandom(OF_NEIGHBOUR)
    try:
        yield made
    finally:
        made.close()
    assert KEY.hex() not in caplog.text


def neighbour(bench: Bench) -> Neighbour:
    host, port = bench.address
    return Neighbour(Peer(f"{host}:{port}", "job", 2, KEY, "asker", "lender"), bytes(16), 0)


def read(bench: Bench, lines: Lines, length: int) -> bytes:
    """Through an asker's lines; the node gives."""
    into, failed = bytearray(length), []

    def ask() -> None:
        try:
            lines.read(neighbour(bench), [memoryview(into)], free, bool)
        except NeighbourGone as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    asked = bench.hear()
    assert isinstance(asked, lending.Asked)
    bench.tell(lending.Give(asked.number, Region(0, length), ends=(wire.GIVEN_WHOLE,)))
    thread.join()
    assert failed == []
    assert bench.hear() == lending.Given(asked.number, length)
    return bytes(into)


def without_certificate(certified: Certified) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certified.node.ca)
    context.check_hostname = False
    return context


def hello(certified: Certified) -> bytes:
    """Return the first bytes of a client with TLS."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = without_certificate(certified).wrap_bio(incoming, outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


Attack = Callable[[Bench, Certified], socket.socket]


def sends(frame: Callable[[Certified], bytes]) -> Attack:
    def attack(bench: Bench, certified: Certified) -> socket.socket:
        sock = bench.connect()
        sock.sendall(frame(certified))
        return sock

    return attack


def shows(name: str) -> Attack:
    def attack(bench: Bench, certified: Certified) -> socket.socket:
        sock = bench.connect()
        bench.inside_tls(sock, LineTls(certified.shown(name)))
        return bench.connected[-1]

    return attack


def no_certificate(bench: Bench, certified: Certified) -> socket.socket:
    sock = bench.connect()
    bench.connected.remove(sock)
    bench.connected.append(without_certificate(certified).wrap_socket(sock))
    return bench.connected[-1]


def older_tls(bench: Bench, certified: Certified) -> socket.socket:
    context = without_certificate(certified)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    sock = bench.connect()
    bench.connected.remove(sock)
    bench.connected.append(context.wrap_socket(sock, do_handshake_on_connect=False))
    with pytest.raises(OSError):
        bench.connected[-1].do_handshake()  # type: ignore[attr-defined]
    return bench.connected[-1]


def wrong_inside(bench: Bench, certified: Certified) -> socket.socket:
    assert bench.tls is not None
    sock = bench.inside_tls(bench.connect(), bench.tls)
    sock.sendall(b"x" * 200)
    return sock


def wrong_key_inside(bench: Bench, certified: Certified) -> socket.socket:
    assert bench.tls is not None
    sock = bench.inside_tls(bench.connect(), bench.tls)
    wrong_proof(sock, bytes(32), opening())
    return sock


ATTACKS: dict[str, tuple[Attack, str]] = {
    "no TLS": (sends(lambda _: opening()), ONE_SIDE),
    "http": (sends(lambda _: b"GET / HTTP/1.1\r\n\r\n"), "it does not speak TLS"),
    "broken TLS": (sends(lambda _: b"\x16\x03\x01\x00\x05" + bytes(5)), "its TLS is refused"),
    "an older TLS": (older_tls, "its TLS is refused: unsupported protocol"),
    "half a hello": (sends(lambda c: hello(c)[:-9]), "its handshake took too long"),
    "silence": (sends(lambda _: b""), "its handshake took too long"),
    "no certificate": (no_certificate, "it showed no certificate"),
    "another CA": (shows("another CA"), "its certificate is refused: unable to get local issuer"),
    "an expired certificate": (shows("expired"), "its certificate is refused: certificate has exp"),
    "another URI": (shows("spiffe://cluster/ns/web"), "spiffe://cluster/ns/web, not in tls_peers"),
    "no URI": (shows(""), "its certificate is for no URI, not in tls_peers"),
    "no handshake in it": (wrong_inside, "where a frame begins"),
    "a wrong key in it": (wrong_key_inside, "does not have the key"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_stranger_is_refused_with_one_line_and_nobody_notices(
    bench: Bench, certified: Certified, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    attack, why = ATTACKS[name]
    honest = bench.opened(HONEST)
    bench.lends(honest)
    stranger = attack(bench, certified)
    try:
        while stranger.recv(1000):
            pass
    except OSError:
        pass
    bench.lends(honest, 2)
    bench.lends(bench.opened(HONEST))
    assert len(caplog.records) == 1
    assert "data connection refused" in caplog.text
    assert why in caplog.text
    assert HOSTILE in caplog.text


def test_bytes_arrive_as_they_are_over_a_connection_that_is_used_again(bench: Bench) -> None:
    for length in (1, 16 << 10, 300_001, OF_NEIGHBOUR, 5):
        assert read(bench, bench.lines, length) == bytes(bench.arena.view(0, length))
    bench.lines.close()


def test_what_is_left_of_a_record_is_not_forgotten(bench: Bench) -> None:
    """A long request in one record, of which the lender reads a part first."""
    sock, body = bench.opened(HONEST), os.urandom(12_000)
    slab = lending.Request(1, lending.NO_DATASET, 0, 0, 1 << 20, BlockForm.SLAB, slab=body)
    sock.sendall(wire.pack(slab))
    asked = bench.hear()
    assert isinstance(asked, lending.Asked)
    assert asked.request == slab
    bench.tell(lending.Give(asked.number, Region(0, 0), 0, b"a note"))
    assert wire.unpack_answer(frame(sock), slab).note == b"a note"
    sock.sendall(wire.pack(wire.Receipt(1)))
    assert bench.hear() == lending.Given(asked.number, len(b"a note"))


@pytest.mark.parametrize("is_lender", [True, False])
def test_both_sides_say_that_peer_tls_is_set_on_one_side_only(
    run_mark: str, certified: Certified, caplog: pytest.LogCaptureFixture, is_lender: bool
) -> None:
    bench = Bench(tls=certified.node if is_lender else None)
    lines = Lines(None if is_lender else LineTls(certified.node))
    try:
        with pytest.raises(NeighbourGone, match=ONE_SIDE):
            lines.read(neighbour(bench), [memoryview(bytearray(9))], free, bool)
        bench.lends(bench.opened(HONEST))
        assert [ONE_SIDE in record.message for record in caplog.records] == [True]
    finally:
        lines.close()
        bench.close()


@pytest.mark.parametrize("name", ["another CA", "expired"])
def test_an_asker_refuses_a_lender_with_a_wrong_certificate(
    run_mark: str, certified: Certified, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    bench, lines = Bench(tls=certified.shown(name)), Lines(LineTls(certified.node))
    try:
        with pytest.raises(NeighbourGone, match="its certificate is refused"):
            lines.read(neighbour(bench), [memoryview(bytearray(9))], free, bool)
    finally:
        lines.close()
        bench.close()


def test_a_handshake_of_slow_bytes_is_not_waited_for(
    bench: Bench, certified: Certified, caplog: pytest.LogCaptureFixture
) -> None:
    slow, frame, wait = bench.connect(), hello(certified), threading.Event()
    for at in range(len(frame)):
        try:
            slow.sendall(frame[at : at + 1])
        except OSError:
            break
        wait.wait(0.02)
    else:
        pytest.fail("it is still open")
    bench.lends(bench.opened(HONEST))
    assert "its handshake took too long" in caplog.text


@pytest.mark.parametrize("connections", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_handshakes_of_one_host_crowd_out_only_each_other(
    bench: Bench, certified: Certified, caplog: pytest.LogCaptureFixture, connections: int
) -> None:
    raise_descriptor_limit()
    honest, frame = bench.opened(HONEST), hello(certified)
    bench.lends(honest)
    flood = []
    for count in range(connections):
        flood.append(bench.connect())
        flood[-1].sendall(frame)
        if count % 100 == 50:
            newcomer = bench.opened(HONEST)
            bench.lends(newcomer)
            newcomer.close()
    bench.lends(honest, 2)
    assert 0 < len(caplog.records) <= 30, "its rate is limited"


def test_new_connections_use_new_certificates_and_open_ones_stay(
    run_mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dataplane.security.private_file.LOOK_S", 0.0)
    tls = peer_tls(Authority.made().write(tmp_path, "node"))
    with contextlib.closing(Bench(tls=tls)) as bench:
        old, before = bench.opened(HONEST), LineTls(tls)
        before._current()
        bench.lends(old)
        assert isinstance(old, ssl.SSLSocket)
        Authority.made("next").write(tmp_path, "node")
        new = bench.opened(HONEST)
        assert isinstance(new, ssl.SSLSocket)
        assert new.getpeercert(binary_form=True) != old.getpeercert(binary_form=True)
        bench.lends(new)
        bench.lends(old, 2)
        Path(tls.cert).write_text("half of a certif")  # while it is replaced
        bench.lends(bench.opened(HONEST))


def test_files_that_cannot_be_read_refuse_connections_and_say_why(
    run_mark: str, certified: Certified, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = PeerTls(*(str(tmp_path / name) for name in ("crt", "key", "ca")))
    bench, lines = Bench(tls=absent), Lines(LineTls(absent))
    try:
        with pytest.raises(NeighbourGone, match="cannot be read"):
            lines.read(neighbour(bench), [memoryview(bytearray(9))], free, bool)
        lines = Lines(LineTls(certified.node))
        with pytest.raises(NeighbourGone):
            lines.read(neighbour(bench), [memoryview(bytearray(9))], free, bool)
        assert [f"{absent.cert} cannot be read" in one.message for one in caplog.records] == [True]
    finally:
        lines.close()
        bench.close()


def test_a_neighbour_that_stops_reading_is_cut_off_and_its_region_is_free(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    honest, stuck = bench.opened(HONEST), bench.opened(asker="stuck")
    asked = bench.ask(stuck, OF_NEIGHBOUR)
    bench.tell(lending.Give(asked.number, Region(0, OF_NEIGHBOUR), ends=(wire.GIVEN_WHOLE,)))
    bench.lends(honest)
    assert bench.hear() == lending.Given(asked.number, 0)
    assert is_closed(stuck) or stuck.recv(1)
    assert ["neighbour cut off" in record.message for record in caplog.records] == [True]


def test_an_event_of_an_older_connection_with_the_same_descriptor_does_no_harm(
    run_mark: str, certified: Certified
) -> None:
    with (
        select.epoll() as epoll,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        select.select([listener], [], [])
        entrance = Entrance(listener, epoll, 60.0, LineTls(certified.node))
        (connection,) = entrance.accept()
        with connection.sock:
            epoll.register(connection.fd, select.EPOLLIN)
            entrance.secure(connection)  # though nothing has come
            assert connection.stage is LoanStage.TLS
