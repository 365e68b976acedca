"""A proxy before an S3 server of this host, which delays each request, for other benchmarks."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from dataplane_bench.processes import pause

_SPLICE_BYTES = 1 << 20

_requests: list[int] = []


class Delayed:
    """A running proxy, which listens at `port`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self._out, self._in = process.stdout, process.stdin
        self.port = int(self._out.readline())

    def request_count(self) -> int:
        """How many requests have come."""
        self._in.write("\n")
        self._in.flush()
        return int(self._out.readline())


@contextlib.contextmanager
def delayed(port: int, delay_s: float) -> Iterator[Delayed]:
    """A proxy before this port, in a process of its own."""
    command = [sys.executable, __file__, str(port), str(delay_s)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Delayed(process)
        finally:
            process.kill()


def _forward(port: int, delay_s: float) -> None:
    """Forward connections to a port of this host; delay requests by `delay_s`. Prints its port and,
    for each line that it reads, how many requests have come.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_tell_requests, daemon=True).start()
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_pass_on, args=(client, port, delay_s), daemon=True).start()


def _pass_on(client: socket.socket, port: int, delay_s: float) -> None:
    server = socket.create_connection(("127.0.0.1", port))
    for each in (client, server):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_answers, args=(server, client), daemon=True).start()
    pause(delay_s)  # a connection takes a round trip before it takes a request
    with contextlib.suppress(OSError):
        while said := client.recv(65536):
            _requests.append(said.count(b" HTTP/1.1\r\n"))
            pause(delay_s)
            server.sendall(said)
        server.shutdown(socket.SHUT_WR)


def _tell_requests() -> None:
    for _ in sys.stdin:
        print(sum(_requests), flush=True)


def _answers(server: socket.socket, client: socket.socket) -> None:
    """Forward the server's answers at once."""
    out, into = os.pipe()
    with contextlib.suppress(OSError):
        while count := os.splice(server.fileno(), into, _SPLICE_BYTES):
            while count:
                count -= os.splice(out, client.fileno(), count)
    for end in (out, into):
        os.close(end)
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    _forward(int(sys.argv[1]), float(sys.argv[2]))
