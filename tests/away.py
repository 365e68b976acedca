"""A TCP proxy before a server that can simulate each kind of store outage."""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_RECEIVE_BYTES = 256 << 10
_WAIT_S = 120
_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n"
    b"Date: Thu, 01 Jan 2026 00:00:00 GMT\r\nConnection: close\r\n\r\n"
)


class Away(enum.Enum):
    """How the server behind the proxy can be reached."""

    WELL = "as if there were no proxy"
    REFUSED = "nobody listens; connections that were there are reset"
    RESET = "connections are accepted, and reset when something is asked"
    UNAVAILABLE = "503 to everything"
    HANG = "connections are accepted, and nothing is ever answered; what hung goes on hanging"


class Proxy:
    """Listens on `endpoint` while it is not REFUSED. Everything that hangs ends with `close`."""

    def __init__(self, port: int, way: Away = Away.WELL) -> None:
        # On a separate host in 127.0.0.0/8, so that no process takes the port while it is closed.
        self.host = ".".join(map(str, (127, *os.urandom(2), 1)))
        self._server_port = port
        self._changed = threading.Condition()
        self._way, self._then = way, way
        self._requests_left = 0
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listening: socket.socket | None = None
        self._closed = False
        with socket.create_server((self.host, 0)) as first:
            self.port = int(first.getsockname()[1])
        self.be(way)

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def be(self, way: Away, after_requests: int = 0) -> None:
        """Behave this way from now on, or after this many more requests."""
        with self._changed:
            self._then, self._requests_left = way, after_requests
        if not after_requests:
            self._become(way)

    def wait_until(self, way: Away) -> None:
        """Until it is so."""
        with self._changed:
            is_so = self._changed.wait_for(lambda: self._way is way, _WAIT_S)
            assert is_so, f"still {self._way}, {self._requests_left} requests to go"

    def close(self) -> None:
        self._closed = True
        self._become(Away.REFUSED)
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            thread.join(30)

    def _become(self, way: Away) -> None:
        with self._changed:
            before, self._way = self._way, way
            listening = self._listening
            # Hanging connections stay so, like connections that a firewall has forgotten.
            ended = [] if Away.HANG in (before, way) and not self._closed else list(self._open)
            if way is Away.REFUSED and listening is not None:
                self._listening = None
                _end(listening)
            elif way is not Away.REFUSED and listening is None:
                self._listening = socket.create_server((self.host, self.port), backlog=128)
                self._start(self._accept, self._listening)
            self._changed.notify_all()
        for connection in ended:
            _reset(connection)

    def _start(self, work: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=work, args=given, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                with self._changed:
                    self._open.add(client)
                    self._start(self._serve, client)
        listening.close()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            with self._changed:
                way = self._way
            if way is Away.WELL:
                with socket.create_connection(("127.0.0.1", self._server_port)) as server:
                    with self._changed:
                        self._open.add(server)
                        self._start(self._pass_on, server, client, False)
                    self._pass_on(client, server, True)
            elif way in (Away.RESET, Away.UNAVAILABLE):
                client.recv(_RECEIVE_BYTES)
                if way is Away.UNAVAILABLE:
                    client.sendall(_UNAVAILABLE)
                    client.shutdown(socket.SHUT_WR)
                    client.recv(_RECEIVE_BYTES)
                else:
                    _reset(client)
            elif way is Away.HANG:
                while client.recv(_RECEIVE_BYTES):
                    pass
        with self._changed:
            self._open.discard(client)

    def _pass_on(self, source: socket.socket, target: socket.socket, is_asking: bool) -> None:
        """Forward one direction. While the proxy hangs, it swallows this and all later bytes."""
        is_dead = False
        try:
            while piece := source.recv(_RECEIVE_BYTES):
                if is_asking:
                    self._count()
                with self._changed:
                    is_dead = is_dead or self._way is Away.HANG
                if not is_dead:
                    target.sendall(piece)
        except OSError:
            pass
        finally:
            with self._changed:
                self._open.discard(source)
            if is_asking or not is_dead:
                _end(target)

    def _count(self) -> None:
        with self._changed:
            self._requests_left -= 1
            is_time = self._requests_left == 0
        if is_time:
            self._become(self._then)


class Names:
    """A host name that can be added and removed for the commands `within`, which see a file of ours
    as /etc/hosts.
    """

    HOST = "store.invalid"

    def __init__(self, folder: Path) -> None:
        self._hosts = folder / "hosts"
        self._hosts.touch()
        is_root = os.getuid() == 0
        mount = f'mount --bind {self._hosts} /etc/hosts && exec "$@"'
        self.within = ("unshare", "-m" if is_root else "-rm", "sh", "-c", mount, "sh")

    @property
    def works(self) -> bool:
        """Whether this machine supports this."""
        try:
            return subprocess.run([*self.within, "true"], check=False).returncode == 0
        except OSError:
            return False

    def know(self, address: str) -> None:
        """The name has this address."""
        self._hosts.write_text(f"{address} {self.HOST}\n", encoding="utf-8")

    def forget(self) -> None:
        """Make the name resolve to no address."""
        self._hosts.write_text("", encoding="utf-8")


@contextlib.contextmanager
def proxy_before(port: int, way: Away = Away.WELL) -> Iterator[Proxy]:
    """A proxy before a port of 127.0.0.1, until the block ends."""
    made = Proxy(port, way)
    try:
        yield made
    finally:
        made.close()


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _reset(sock: socket.socket) -> None:
    """Send RST instead of FIN, and wake threads that wait for the socket."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    _end(sock)
