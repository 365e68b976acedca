"""Bytes are received whole, into memory and files, and every way in which they end is told apart."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import Buffer

from dataplane.arena.memfd import Arena
from dataplane.model.errors import BudgetTooSmall
from dataplane.store.faults import SilentError
from dataplane.store.receiving import Patience, receive_into_file, receive_into_memory

BODY = os.urandom(3 << 20)


class _File:
    """A Sink that is a file."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        self.fd, self.offset = os.open(path, os.O_RDWR | os.O_CREAT | flags), 0

    def write(self, body: Buffer) -> int:
        return os.pwrite(self.fd, body, self.offset)

    def moved(self, count: int, error: int = 0) -> None:
        self.offset += count
        if error:
            raise OSError(error, os.strerror(error))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def _sending(theirs: socket.socket, body: bytes) -> threading.Thread:
    def send() -> None:
        theirs.sendall(body)
        theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("sent", [len(BODY), len(BODY) - 5])
def test_bytes_are_received_to_their_end(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path, sent: int
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = _sending(theirs, BODY[:sent])
        into = bytearray(len(BODY))
        assert receive_into_memory(ours, memoryview(into), Patience()) == sent
        assert into[:sent] == BODY[:sent]
        thread.join()
    thread, sink = _sending(pair[1], BODY[:sent]), _File(tmp_path / "file")
    sink.offset = 100
    assert receive_into_file(pair[0], sink, len(BODY), Patience()) == sent
    assert sink.offset == 100 + sent
    assert os.pread(sink.fd, len(BODY), 100) == BODY[:sent]
    thread.join()
    os.close(sink.fd)


def test_no_byte_beyond_the_length_is_taken(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    ours, theirs = pair
    theirs.send(b"0123456789")
    sink, into = _File(tmp_path / "file"), bytearray(3)
    assert receive_into_file(ours, sink, 4, Patience()) == 4
    assert receive_into_memory(ours, memoryview(into), Patience()) == 3
    assert receive_into_memory(ours, memoryview(into)[:0], Patience()) == 0
    assert receive_into_file(ours, sink, -1, Patience()) == 0
    assert (os.pread(sink.fd, 9, 0), bytes(into), ours.recv(9)) == (b"0123", b"456", b"789")
    os.close(sink.fd)


def test_a_file_or_a_source_that_cannot_be_spliced_loses_nothing(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    ours, theirs = pair
    theirs.send(BODY[:50_000])
    sink = _File(tmp_path / "file", os.O_APPEND)
    moved = receive_into_file(ours, sink, 50_000, Patience())
    assert sink.offset == moved > 0, "what had left the socket was copied"
    assert os.pread(sink.fd, 50_000, 0) == BODY[:moved]
    rest = bytearray(50_000 - moved)
    receive_into_memory(ours, memoryview(rest), Patience())
    assert rest == BODY[moved:50_000]
    os.close(sink.fd)


@pytest.mark.parametrize(
    ("patience", "error"),
    [
        (Patience(0.0), TimeoutError),
        (Patience(time.monotonic() + 3600, 0.01), SilentError),
        (Patience(float("inf"), 0.0), SilentError),
    ],
)
def test_bytes_that_do_not_come_are_not_waited_for(
    pair: tuple[socket.socket, socket.socket],
    tmp_path: Path,
    patience: Patience,
    error: type[Exception],
) -> None:
    sink = _File(tmp_path / "file")
    with pytest.raises(TimeoutError) as raised:
        receive_into_memory(pair[0], memoryview(bytearray(9)), patience)
    assert type(raised.value) is error
    with pytest.raises(TimeoutError) as raised:
        receive_into_file(pair[0], sink, 9, patience)
    assert type(raised.value) is error
    os.close(sink.fd)


def test_errors_name_their_cause(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        theirs.close()
        select.select([ours], [], [])
        with ours, pytest.raises(ConnectionResetError):
            receive_into_memory(ours, memoryview(bytearray(9)), Patience())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"0123456789")
        sink = _File(tmp_path / "file")
        os.close(sink.fd)
        sink.fd = os.open(tmp_path / "file", os.O_RDONLY)
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            receive_into_file(ours, sink, 9, Patience())
        os.close(sink.fd)


def test_memory_that_the_machine_lacks_is_our_error(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena.create("test", 1 << 20)
    sink = arena.new_memory(arena.view(0, 4096))
    assert sink is not None
    sink.fd = os.open("/dev/full", os.O_RDWR)
    pair[1].send(bytes(4096))
    with pytest.raises(BudgetTooSmall, match="No space left"):
        receive_into_file(pair[0], sink, 4096, Patience())
    os.close(sink.fd)
    arena.close()


def test_bytes_that_come_slowly_are_taken_as_they_come(tmp_path: Path) -> None:
    """Over TCP, where a wait may be for many bytes."""
    sink, body, into = _File(tmp_path / "file"), BODY[:2_000_000], bytearray(1_000_000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        pause = threading.Event()

        def send() -> None:
            for at in range(0, len(body), 500_000):
                theirs.sendall(body[at : at + 499_990])
                pause.wait(0.1)
                theirs.sendall(body[at + 499_990 : at + 500_000])

        thread = threading.Thread(target=send)
        thread.start()
        with ours, theirs:
            patience = Patience(time.monotonic() + 60.0, 20.0)
            assert receive_into_file(ours, sink, 1_000_000, patience) == 1_000_000
            assert receive_into_memory(ours, memoryview(into), patience) == 1_000_000
            thread.join()
            theirs.send(b"!")
            assert ours.recv(9) == b"!", "a single byte wakes it again"
    assert os.pread(sink.fd, 1_000_000, 0) + into == body
    os.close(sink.fd)
