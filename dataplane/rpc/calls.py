"""A client of the coordinator over gRPC, with a deadline for every call, retries and our errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from dataplane.base.trace import Trace
from dataplane.model.errors import (
    AccessDenied,
    ClosedError,
    DataplaneError,
    NotWrittenError,
    PeerLost,
)
from dataplane.rpc.address import TcpAddress, UnixAddress, is_this_host, parse
from dataplane.rpc.grpc_errors import error_of
from dataplane.rpc.membership import (
    ChangeRequest,
    ChangeResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    LeaveResponse,
    LedgerRequest,
    LedgerResponse,
    RegisterNodeRequest,
    RegisterNodeResponse,
    StatusRequest,
    StatusResponse,
)
from dataplane.rpc.services import (
    REQUEST_BYTES_MAX,
    RESPONSE_BYTES_MAX,
    channel_credentials,
    coordinator_methods,
)
from dataplane.rpc.sharing import ShareManifestRequest, ShareManifestResponse
from dataplane.security.node_identity import NodeIdentity
from dataplane.security.security import NODE_PROOF, Security

_LISTENS, _ROOT = "0A", 0
CHANNEL_OPTIONS = (
    # Detect a peer whose machine has vanished within 15 s, even between calls.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect within a second after a restart of the coordinator.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_send_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_receive_message_length", RESPONSE_BYTES_MAX),
    # Give each client its own connection: otherwise clients of one process would share a connection
    # that one of them may close.
    ("grpc.use_local_subchannel_pool", 1),
    # Ignore proxy settings of the environment: they are not meant for hosts of the same cluster.
    ("grpc.enable_http_proxy", 0),
)
_trace = Trace("rpc")
_WAIT = wait_random_exponential(multiplier=0.05, max=1.0)


class CoordinatorClient:
    """`Coordination` over gRPC, from one event loop. Connects with the first call.

    A call waits `timeout_s` for an answer. Without an answer, calls that are not periodic are
    repeated for `patience_s`, apart from status, which says that nobody answers.
    """

    def __init__(
        self,
        address: str,
        security: Security,
        timeout_s: float = 5.0,
        patience_s: float = 10.0,
        identity: NodeIdentity | None = None,
    ) -> None:
        """Prepare calls to `address`. `identity` belongs to the node that makes the calls; None if
        the caller is not a node.

        Raises:  ConfigError: `address` is not an address, or the token would cross the network in
        plain text.
        """
        parsed = parse(address)
        self.address = parsed.target
        self._security = None
        self._on_host: TcpAddress | None = None
        if not isinstance(parsed, UnixAddress):
            security.check_channel(self.address, is_loopback=is_this_host(parsed))
            self._security = security
            tokens = security.tokens
            if is_this_host(parsed) and security.tls is None and tokens and tokens.is_own:
                self._on_host = parsed
        self._shown = () if identity is None else ((NODE_PROOF, identity.secret),)
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._methods = {method.python_name: method for method in coordinator_methods()}
        self._channel: grpc.aio.Channel | None = None
        self._channel_version = 0
        self._before: grpc.aio.Channel | None = None
        self._calls: dict[str, grpc.aio.UnaryUnaryMultiCallable[Any, Any]] = {}
        self._closed = False
        self._away_since: float | None = None
        self._unwritten = set[str]()

    async def register_node(self, request: RegisterNodeRequest) -> RegisterNodeResponse:
        """See `Coordination.register_node`."""
        answer = await self._patiently("register_node", request, self._patience_s)
        return cast(RegisterNodeResponse, answer)

    async def join(self, request: JoinRequest) -> JoinResponse:
        """See `Coordination.join`."""
        return cast(JoinResponse, await self._patiently("join", request, self._patience_s))

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        """See `Coordination.heartbeat`."""
        return cast(HeartbeatResponse, await self._watched("heartbeat", request))

    async def leave(self, request: LeaveRequest) -> LeaveResponse:
        """See `Coordination.leave`. The call is repeated for at most a second, since it delays the
        exit of the process.
        """
        patience_s = min(1.0, self._patience_s)
        return cast(LeaveResponse, await self._patiently("leave", request, patience_s))

    async def share_manifest(self, request: ShareManifestRequest) -> ShareManifestResponse:
        """See `Coordination.share_manifest`."""
        return cast(ShareManifestResponse, await self._watched("share_manifest", request))

    async def status(self, request: StatusRequest) -> StatusResponse:
        """See `Coordination.status`."""
        return cast(StatusResponse, await self._call("status", request))

    async def ledger(self, request: LedgerRequest) -> LedgerResponse:
        """See `Coordination.ledger`."""
        return cast(LedgerResponse, await self._of_command("ledger", request))

    async def change(self, request: ChangeRequest) -> ChangeResponse:
        """See `Coordination.change`."""
        return cast(ChangeResponse, await self._of_command("change", request))

    async def close(self) -> None:
        """Close the connection; may be called twice."""
        self._closed = True
        self._calls.clear()
        channels, self._channel, self._before = (self._channel, self._before), None, None
        for channel in channels:
            if channel is not None:
                await channel.close()

    async def _patiently(self, name: str, request: object, patience_s: float) -> object:
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(PeerLost),
            wait=_WAIT,
            stop=stop_after_delay(patience_s),
            reraise=True,
        )
        return await attempts(self._watched, name, request)

    async def _of_command(self, name: str, request: object) -> object:
        """Make a call for a command. Without patience, log nothing: the error says it all."""
        if not self._patience_s:
            return await self._call(name, request)
        return await self._patiently(name, request, self._patience_s)

    async def _watched(self, name: str, request: object) -> object:
        """Make a call, and log when the coordinator stops answering or answers again, and when it
        refuses calls of this kind because it cannot write, while others may succeed.
        """
        try:
            answer = await self._call(name, request)
        except NotWrittenError as error:
            self._answered()
            if name not in self._unwritten:
                self._unwritten.add(name)
                what = f"coordinator refuses each {name}, trying again"
                _trace.failed(what, address=self.address, error=str(error))
            raise
        except PeerLost as error:
            if self._away_since is None:
                self._away_since = time.monotonic()
                what = "coordinator does not answer, trying again"
                _trace.failed(what, address=self.address, error=str(error))
            raise
        except DataplaneError:
            self._answered()
            raise
        self._answered()
        if name in self._unwritten:
            self._unwritten.remove(name)
            _trace.failed(f"coordinator accepts a {name} again", address=self.address)
        return answer

    def _answered(self) -> None:
        if self._away_since is not None:
            away_s = round(time.monotonic() - self._away_since, 1)
            self._away_since = None
            _trace.failed("coordinator answers again", address=self.address, away_s=away_s)

    async def _call(self, name: str, request: object) -> object:
        await self._renew()
        if self._on_host is not None:
            await asyncio.to_thread(_check_own, self._on_host)
        call = self._calls.get(name) or self._open(name)
        try:
            metadata = () if self._security is None else self._security.metadata() + self._shown
            return cast(object, await call(request, timeout=self._timeout_s, metadata=metadata))
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure, self.address)
            if failure.code() is grpc.StatusCode.UNAUTHENTICATED and self._security is not None:
                error = AccessDenied(
                    f"{self.address}: {error}. {self._security.advice()}", **error.nouns
                )
            raise self._told(error) from failure

    def _told(self, error: DataplaneError) -> DataplaneError:
        """Return the error; if the peer was lost, with a complaint about our own certificate, since
        a peer that rejects a certificate hangs up without a reason.
        """
        tls = None if self._security is None else self._security.tls
        complaint = tls.complaint() if tls is not None and isinstance(error, PeerLost) else ""
        return PeerLost(f"{error}. {complaint}", **error.nouns) if complaint else error

    async def _renew(self) -> None:
        """Use a new channel if the certificates have changed, since gRPC cannot replace the
        certificates of a channel. Calls in flight end on the old channel.
        """
        tls = None if self._security is None else self._security.tls
        if tls is None or self._channel is None or tls.current()[1] == self._channel_version:
            return
        self._calls.clear()
        oldest, self._before, self._channel = self._before, self._channel, None
        if oldest is not None:
            await oldest.close(self._timeout_s)

    def _new_channel(self) -> grpc.aio.Channel:
        tls = None if self._security is None else self._security.tls
        if tls is None:
            return grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        pems, self._channel_version = tls.current()
        return grpc.aio.secure_channel(
            self.address, channel_credentials(pems), options=CHANNEL_OPTIONS
        )

    def _open(self, name: str) -> grpc.aio.UnaryUnaryMultiCallable[Any, Any]:
        if self._closed:
            raise ClosedError(f"the client of {self.address} is closed")
        if self._channel is None:
            self._channel = self._new_channel()
        method = self._methods[name]
        call = self._channel.unary_unary(
            method.path,
            request_serializer=method.write,
            response_deserializer=method.read_response,
        )
        self._calls[name] = call
        return call


def _check_own(address: TcpAddress) -> None:
    """Check that every process that listens at this port belongs to this user or to root. While a
    coordinator is down, any user could listen in its place and receive the token. Call this in a
    thread: the kernel's tables have a line for each connection of the host.

    Source:  proc_pid_net(5); Documentation/networking/proc_net_tcp.rst.
    Raises:  PeerLost: another user's process listens. The call may be retried, since that process
    may end and the coordinator may return.
    """
    sockets = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            sockets += Path(table).read_text(encoding="ascii").splitlines()[1:]
    listening = [words for words in map(str.split, sockets) if words[3] == _LISTENS]
    at_port = [words for words in listening if words[1].endswith(f":{address.port:04X}")]
    if strangers := {int(words[7]) for words in at_port} - {os.geteuid(), _ROOT}:
        raise PeerLost(
            f"what listens at port {address.port} is of user {min(strangers)}, and not of user "
            f"{os.geteuid()}, whose token is in the state directory: it was not sent. If it is "
            "your coordinator, give both the same token (DATAPLANE_TOKEN, --token-file)",
            peer=address.target,
        )
