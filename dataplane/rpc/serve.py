"""A gRPC server: listening, answering, stopping.

While the server stops, its health is NOT_SERVING and it rejects new calls.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from dataplane.base.machine import connections_max
from dataplane.base.trace import Trace
from dataplane.model.errors import ClosedError, ConfigError, DataplaneError, PeerLost
from dataplane.rpc.address import (
    TcpAddress,
    UnixAddress,
    is_loopback,
    listening,
    parse,
    resolve,
)
from dataplane.rpc.base import Coordination
from dataplane.rpc.connections import OpenConnections
from dataplane.rpc.receiving import (
    HEALTH,
    WINDOW,
    Answer,
    Call,
    Context,
    Guard,
    Health,
    Inbox,
    abort,
)
from dataplane.rpc.services import (
    COORDINATOR,
    REQUEST_BYTES_MAX,
    RESPONSE_BYTES_MAX,
    Method,
    coordinator_methods,
    server_credentials,
)
from dataplane.security.security import Security

_trace = Trace("rpc")

_OPTIONS = (
    # Do not let two servers share a port: each call would reach one of them at random.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_send_message_length", RESPONSE_BYTES_MAX),
    # Accept the pings of clients, which come every 10 s, with and without calls.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # Close the connection of a client whose machine has vanished.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Close the connection of a client that sends nothing after connecting, or makes no call for a
    # long time: nodes send heartbeats, and other clients can reconnect.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 120_000),
    # Limit the calls in flight of one connection; a node has only a few.
    ("grpc.max_concurrent_streams", 256),
    *WINDOW,
)


class GrpcServer:
    """One listening address. Use: `await start(service)`, `await stop(grace_s)`."""

    def __init__(self, address: str, security: Security) -> None:
        self._wanted = parse(address)
        self._security = security
        count_max = connections_max()
        most = ("grpc.max_allowed_incoming_connections", count_max)
        self._calls: dict[str, Call] = {}
        is_unix = isinstance(self._wanted, UnixAddress)
        guards = [] if is_unix else [Guard(security, self._calls)]
        self._server = grpc.aio.server(interceptors=guards, options=(*_OPTIONS, most))
        # A Unix socket needs no limits: only processes of the same user can connect to it.
        self._connections = OpenConnections(count_max) if guards else None
        self._health, self._inbox = Health(), Inbox()
        self._socket_file: tuple[Path, int] | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self.address = ""

    def check_free(self) -> None:
        """Check that `start` could listen, as far as possible without listening.

        Raises:  ConfigError: the address is taken, not of this machine, not allowed, or open to the
        network.
        """
        if isinstance(self._wanted, UnixAddress):
            _clear_socket_path(Path(self._wanted.path))
        else:
            self._free_tcp(self._wanted)

    async def start(self, service: Coordination) -> str:
        """Start answering calls. Return the address, with the actual port if port 0 was requested.

        Raises:  ConfigError: the address is taken, not of this machine, not allowed, or open to the
        network.
        """
        # Nothing between here and `self._server.start` may fail: a gRPC server that is bound but
        # never started keeps its socket.
        if isinstance(self._wanted, UnixAddress):
            self.address = self._bind_unix(self._wanted)
        else:
            self.address = self._bind_tcp(self._wanted)
        methods = {}
        for method in coordinator_methods():
            call = Call(method, self._answer(method, service), self._inbox.receive)
            self._calls[method.path] = call
            methods[method.name] = call.for_grpc()
        services = {COORDINATOR: methods, HEALTH: self._health.for_grpc()}
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(*one) for one in services.items()]
        )
        await self._server.start()
        if self._connections is not None:
            self._connections.start(int(self.address.rpartition(":")[2]))
        await self._health.set(is_serving=True)
        return self.address

    async def stop(self, grace_s: float) -> None:
        """Reject new calls, let calls in flight end within `grace_s`, and close. May be called
        twice.
        """
        self._draining = True
        await self._health.set(is_serving=False)
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            _trace.failed("stopped with calls unanswered", calls=self._in_flight)
        if self._connections is not None:
            await asyncio.to_thread(self._connections.close)
        await self._server.stop(None)
        self._inbox.close()
        if self._socket_file is not None:
            path, inode = self._socket_file
            self._socket_file = None
            if path.exists() and path.lstat().st_ino == inode:
                path.unlink()

    def _answer(self, method: Method, service: Coordination) -> Answer:
        serve = getattr(service, method.python_name)

        async def answer(request: Any, context: Context) -> Any:
            if self._draining:
                await abort(context, PeerLost(f"{self.address} is stopping", peer=self.address))
            self._in_flight += 1
            self._idle.clear()
            if self._connections is not None:
                self._connections.called(context.peer())
            try:
                return await serve(request)
            except ClosedError:
                await abort(context, PeerLost(f"{self.address} has stopped", peer=self.address))
            except DataplaneError as error:
                await abort(context, error)
            except Exception as error:  # noqa: BLE001 - a call is answered, whatever happens
                _trace.broke("a defect", call=method.name)
                sentence = f"a defect in {method.name}: {type(error).__name__}: {error}"
                await abort(context, DataplaneError(sentence))
            finally:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.set()

        return answer

    def _free_tcp(self, wanted: TcpAddress) -> TcpAddress:
        address = resolve(wanted)
        self._security.check_listener(wanted.target, is_loopback=is_loopback(address))
        if address.port:
            _refuse_if_taken(address)
        return address

    def _bind_tcp(self, wanted: TcpAddress) -> str:
        address = self._free_tcp(wanted)
        tls = self._security.tls
        if tls is None and not is_loopback(address):
            what = "open to the network without TLS: tokens and calls cross it in plain text"
            _trace.failed(what, address=address.target, by="--insecure")
        if tls is not None and (complaint := tls.complaint()):
            _trace.failed("no client will connect", address=address.target, why=complaint)
        try:
            if tls is None:
                port = self._server.add_insecure_port(address.target)
            else:
                assert self._connections is not None, "it listens on TCP"
                credentials = server_credentials(tls, self._connections.handshaking)
                port = self._server.add_secure_port(address.target, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen at {address.target}: {error}", address=address.target
            ) from error
        return TcpAddress(address.host, port).target

    def _bind_unix(self, wanted: UnixAddress) -> str:
        path = Path(wanted.path)
        _clear_socket_path(path)
        # Set the umask, since gRPC has no option for the mode of the socket file.
        old = os.umask(0o177)
        try:
            self._server.add_insecure_port(wanted.target)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen at {wanted.target}: {error}. Its folder must exist and be writable",
                address=wanted.target,
            ) from error
        finally:
            os.umask(old)
        self._socket_file = (path, path.lstat().st_ino)
        return wanted.target


def _refuse_if_taken(address: TcpAddress) -> None:
    """Raise an error with the reason if the address cannot be bound. Bind a plain socket to find
    the reason, since the error of gRPC is only "Failed to bind".
    """
    try:
        listening(address, 1).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {address.target}: {error.strerror}. {_advice(error, address)}",
            address=address.target,
            port=address.port,
        ) from error


def _advice(error: OSError, address: TcpAddress) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address.host} is no address of this host: `ip address` lists its own"
    if error.errno == errno.EACCES:
        return "Ports below 1024 are for root: choose a higher one"
    return (
        f"Is another service on port {address.port}? Stop it, choose another port, or use port 0 "
        "for a free one"
    )


def _clear_socket_path(path: Path) -> None:
    """Remove the socket file of a server that has ended; refuse any other file."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"unix:{path} is a file, not a socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"unix:{path} exists and cannot be connected to: {error.strerror}. Remove it, or "
                "choose another path",
                address=f"unix:{path}",
            ) from error
        else:
            raise ConfigError(
                f"another service listens at unix:{path}: stop it, or choose another path",
                address=f"unix:{path}",
            )
