"""A proxy before an S3 server of this host, which writes down what is read.

    python tests/hosts_store_log.py ADDRESS SERVER_PORT LOG

Prints its port. One line of LOG a request for a range: time, host, object, first byte, last byte.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from typing import TextIO

SPLICE_BYTES = 1 << 20
REQUEST_BYTES = 1 << 16
_ASKED = re.compile(rb"GET /([^ ?]*)[^\r]* HTTP/1.1\r\n")
_RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d+)\r\n", re.IGNORECASE)


def main(address: str, server_port: int, log: str) -> None:
    listener = socket.create_server((address, 0), backlog=256)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    with open(log, "a", encoding="utf-8", buffering=1) as out:  # noqa: PTH123
        while True:
            client, (host, _) = listener.accept()
            told = (client, host, server_port, out)
            threading.Thread(target=_serve, args=told, daemon=True).start()


def _serve(client: socket.socket, host: str, server_port: int, out: TextIO) -> None:
    with client, socket.create_connection(("127.0.0.1", server_port)) as server:
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = threading.Thread(target=_answers, args=(server, client), daemon=True)
        answers.start()
        with contextlib.suppress(OSError):
            while said := client.recv(REQUEST_BYTES):
                _note(said, host, out)
                server.sendall(said)
            server.shutdown(socket.SHUT_WR)
        answers.join()


def _note(said: bytes, host: str, out: TextIO) -> None:
    asked, span = _ASKED.match(said), _RANGE.search(said)
    if asked and span:
        place = f"{asked[1].decode()} {int(span[1])} {int(span[2])}"
        out.write(f"{time.monotonic():.6f} {host} {place}\n")


def _answers(server: socket.socket, client: socket.socket) -> None:
    """Pass the server's answers on, without looking at them."""
    out, into = os.pipe()
    with contextlib.suppress(OSError):
        while count := os.splice(server.fileno(), into, SPLICE_BYTES):
            while count:
                count -= os.splice(out, client.fileno(), count)
    for end in (out, into):
        os.close(end)
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
