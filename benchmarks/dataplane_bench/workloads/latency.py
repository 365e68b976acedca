"""A TCP proxy that makes a server seem far away: what a client sends arrives later.

    python -m dataplane_bench.workloads.latency PORT DELAY_MS

It prints the port of 127.0.0.1 where it listens, and forwards to PORT of 127.0.0.1. Everything
on its way to the server waits DELAY_MS, however much it is, as on a long line; so every request
takes that much longer, and a client that keeps several on their way loses nothing. What the server
answers is passed on at once, and by the kernel alone, so that the proxy is no bottleneck.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

_RECEIVE_BYTES = 256 << 10
_HELD_BYTES_MAX = 8 << 20
"""Of one connection, on their way to the server: a large upload may not fill the memory."""
_PIPE_BYTES = 1 << 20
_THREAD_STACK_BYTES = 256 << 10
_CONNECTIONS_WAITING = 512


def serve(listening: socket.socket, port: int, delay_s: float) -> None:
    """Forward every connection, until the process ends."""
    threading.stack_size(_THREAD_STACK_BYTES)
    while True:
        client, _ = listening.accept()
        try:
            server = socket.create_connection(("127.0.0.1", port))
        except OSError:
            client.close()
            continue
        for side in (client, server):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_connection, args=(client, server, delay_s), daemon=True).start()


def _connection(client: socket.socket, server: socket.socket, delay_s: float) -> None:
    with client, server:
        back = threading.Thread(target=_quietly, args=(_pass_on, server, client), daemon=True)
        back.start()
        _quietly(lambda source, target: _delay(source, target, delay_s), client, server)
        back.join()


def _quietly(
    work: Callable[[socket.socket, socket.socket], None],
    source: socket.socket,
    target: socket.socket,
) -> None:
    """One direction, to the end of the source. After that, or an error, the other side is told."""
    try:
        work(source, target)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


def _delay(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Send what is received, each piece `delay_s` after it came."""
    held: deque[tuple[float, bytes]] = deque()
    held_bytes, is_open = 0, True
    while is_open or held:
        wait_s = max(held[0][0] - time.monotonic(), 0.0) if held else None
        if is_open and held_bytes < _HELD_BYTES_MAX:
            ready = select.select([source], [], [], wait_s)[0]
        else:
            time.sleep(wait_s or 0.0)
            ready = []
        if ready:
            piece = source.recv(_RECEIVE_BYTES)
            is_open = bool(piece)
            if piece:
                held.append((time.monotonic() + delay_s, piece))
                held_bytes += len(piece)
        while held and held[0][0] <= time.monotonic():
            piece = held.popleft()[1]
            target.sendall(piece)
            held_bytes -= len(piece)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Through a pipe, so that not a byte is copied into this process."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        # Pages of a pipe are limited for each user: with a small one it is slower, and still works.
        with contextlib.suppress(OSError):
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        while count := os.splice(source.fileno(), write_end, _PIPE_BYTES):
            while count:
                count -= os.splice(read_end, target.fileno(), count)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        _copy(source, target)
    finally:
        os.close(read_end)
        os.close(write_end)


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Where the kernel cannot splice sockets."""
    buffer = memoryview(bytearray(_PIPE_BYTES))
    while count := source.recv_into(buffer):
        target.sendall(buffer[:count])


def main() -> None:
    """Run the proxy; see the module docstring."""
    port, delay_ms = int(sys.argv[1]), float(sys.argv[2])
    with socket.create_server(("127.0.0.1", 0), backlog=_CONNECTIONS_WAITING) as listening:
        print(listening.getsockname()[1], flush=True)
        serve(listening, port, delay_ms / 1000)


if __name__ == "__main__":
    main()
