"""The messages of calls, which are received only once their call is allowed, and in bounded number.

gRPC receives the message of a unary call before it calls the method, no matter who sent the
message. So each method here is declared to gRPC as taking a stream of messages, and the server
reads from that stream only after the call is allowed. Until then, a call takes at most the memory
of a stream's window (`WINDOW_BYTES`).

Invariants:
1. Before a call is allowed, no byte of its message is received beyond the window, and no byte is
   parsed. The message of a health check is never read: the answer is the same for all services.
2. At most `_MESSAGES_MAX` messages of one host are in memory at once, and each must have arrived
   within `_RECEIVE_S`.
3. Large messages are parsed outside the event loop's thread, one at a time.
4. Bytes that are not a message are answered with an error of ours, and with a line of the log but
   no traceback.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from msgspec import Struct
from msgspec.structs import replace

from dataplane.base.trace import Trace
from dataplane.model.config import VERSION
from dataplane.model.errors import AccessDenied, ConfigError, DataplaneError, VersionMismatch
from dataplane.model.redact import redacted
from dataplane.rpc import grpc_errors
from dataplane.rpc.address import network_of
from dataplane.rpc.bounds import NAME_LENGTH_MAX, URLS_MAX
from dataplane.rpc.membership import (
    ChangeRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    JobNodes,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    RegisterNodeRequest,
)
from dataplane.rpc.services import Method
from dataplane.rpc.sharing import ShareManifestRequest
from dataplane.security import node_identity
from dataplane.security.security import NODE_PROOF, Security
from dataplane.security.tokens import ADMIN_ONLY, ANYBODY, CALLS, NODE_ONLY, Caller, WrongTokenError
from dataplane.security.urls import are_under, is_under

WINDOW_BYTES = 1024
WINDOW = (
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    # Disable the bandwidth probe, which enlarges the windows of fast connections.
    ("grpc.http2.bdp_probe", 0),
)
HEALTH = "grpc.health.v1.Health"
_MESSAGES_MAX = 16
_RECEIVE_S = 10.0
_LARGE_BYTES = 4 << 10

_trace = Trace("security")

Context = Any  # grpc.aio.ServicerContext, which is generic in its message types
Answer = Callable[[Any, Context], Awaitable[Any]]
Receive = Callable[[Method, Context], "Receiving"]
Receiving = Any  # an async context manager of the request
Around = Callable[[Callable[[], Receiving], Answer, Context], Awaitable[Any]]


def host_of(peer: str) -> str:
    """Return the host, or the IPv6 network, of a peer in gRPC's form: "ipv4:10.0.0.9:51234" or
    "ipv6:%5B2001:db8::1%5D:51234".
    """
    host = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")[0]
    return network_of(host.removeprefix("[").removesuffix("]"))


async def abort(
    context: Context, error: DataplaneError, code: grpc.StatusCode | None = None
) -> None:
    """End a call with an error of ours."""
    code = code or grpc_errors.code_of(error)
    await context.abort(code, grpc_errors.details_of(error), grpc_errors.trailer_of(error))


class Inbox:
    """Receives the messages of a server."""

    def __init__(self) -> None:
        self._places: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="dataplane-messages")

    def close(self) -> None:
        """Parse no more large messages. May be called twice."""
        self._parser.shutdown(wait=False)

    @asynccontextmanager
    async def receive(self, method: Method, context: Context) -> AsyncIterator[Any]:
        """Receive the message of a call. The message counts towards its host's limit until the
        block ends. If no message or an invalid one comes, the call ends with an error.
        """
        host = host_of(context.peer())
        self._users[host] += 1
        places = self._places.setdefault(host, asyncio.Semaphore(_MESSAGES_MAX))
        try:
            async with places:
                yield await self._received(method, context)
        finally:
            self._users[host] -= 1
            if not self._users[host]:
                del self._users[host], self._places[host]

    async def _received(self, method: Method, context: Context) -> Any:
        try:
            async with asyncio.timeout(_RECEIVE_S):
                wire = await context.read()
            if not isinstance(wire, bytes):
                raise ConfigError("it ended without a message")
            if len(wire) <= _LARGE_BYTES:
                return method.read_request(wire)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._parser, method.read_request, wire)
        except TimeoutError:
            error = ConfigError(f"no message came within {_RECEIVE_S:g} s")
        except ConfigError as not_a_message:
            error = not_a_message
        peer = context.peer()
        _trace.refused(
            "malformed message", by=host_of(peer), peer=peer, call=method.name, why=str(error)
        )
        await abort(context, error)
        raise error  # never reached: abort() raises


class Call(Struct, frozen=True):
    """A unary method, the function that answers it, and the function that receives its message."""

    method: Method
    answer: Answer
    receive: Receive

    def for_grpc(self, around: Around | None = None) -> grpc.RpcMethodHandler:
        """Return the handler that gRPC calls. `around` may check the call before it receives the
        message, and check the message before it answers the call.
        """
        method, answer, receive = self.method, self.answer, self.receive

        async def serve(_: object, context: Context) -> Any:
            if around is not None:
                return await around(lambda: receive(method, context), answer, context)
            async with receive(method, context) as request:
                return await answer(request, context)

        return grpc.stream_unary_rpc_method_handler(serve, response_serializer=method.write)


class Health:
    """The standard health service, which a probe may call without a token. It gives the same answer
    for every service that a message may name.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

    def for_grpc(self) -> dict[str, grpc.RpcMethodHandler]:
        """Return the handlers of the methods, by name."""
        write = health_pb2.HealthCheckResponse.SerializeToString
        return {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, response_serializer=write),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=write),
        }

    async def set(self, *, is_serving: bool) -> None:
        """Change the answer."""
        answers = health_pb2.HealthCheckResponse
        async with self._changed:
            self._status = answers.SERVING if is_serving else answers.NOT_SERVING
            self._changed.notify_all()

    async def _check(self, _: object, __: Context) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=self._status)

    async def _watch(self, _: object, context: Context) -> None:
        last = None
        while True:
            async with self._changed:
                while self._status == last:
                    await self._changed.wait()
                last = self._status
            await context.write(health_pb2.HealthCheckResponse(status=last))


# -- the check of every call -----------------------------------------------------------------------
#
# Calls that reach a gRPC server over TCP are checked before their message is parsed. Each refusal
# is one line of the log, with peer, call and reason, but never the token.


_NAME_SHOWN_MAX = 256
_NAMELESS = "a JWT without sub"
_UNPROVED = " (by the shared token)"
_UNKNOWN = "there is no such call here: both sides must be of one version"

_Continue = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Let a call through if its token is known and allows the call. `calls` has the server's calls
    by path.
    """

    def __init__(self, security: Security, calls: Mapping[str, Call]) -> None:
        self._security, self._calls = security, calls

    async def intercept_service(
        self, continuation: _Continue, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """Check one call; gRPC calls this."""
        method = await continuation(details)
        if method is None:
            return self._refusing(details.method, _UNKNOWN, grpc.StatusCode.UNIMPLEMENTED)
        allowed = CALLS.get(details.method)
        if allowed == ANYBODY:
            return method
        shown = dict(details.invocation_metadata)
        try:
            caller = self._security.caller(shown)
        except WrongTokenError as error:
            return self._refusing(details.method, str(error), grpc.StatusCode.UNAUTHENTICATED)
        if not caller.roles & (allowed or ANYBODY):
            why = f"its token is for {_named(caller)}, which may not make this call"
            return self._refusing(details.method, why, grpc.StatusCode.PERMISSION_DENIED)
        is_limited = caller.job or caller.datasets is not None or allowed in (NODE_ONLY, ADMIN_ONLY)
        call = self._calls.get(details.method)
        if call is not None and (self._security.peers or is_limited):
            check = partial(self._limited, details.method, caller, shown.get(NODE_PROOF))
            return call.for_grpc(check)
        return method

    async def _limited(
        self,
        path: str,
        caller: Caller,
        secret: str | bytes | None,
        receive: Callable[[], Receiving],
        answer: Answer,
        context: Context,
    ) -> Any:
        """Check the certificate, which gRPC has verified; then receive the message, and check its
        sender and its content; then answer.
        """
        why = self._unknown(context)
        if why:
            await _refuse(context, path, why, grpc.StatusCode.PERMISSION_DENIED)
        async with receive() as request:
            why = _another(request, secret)
            why = why or _outside(request, caller, self._security.allowed_urls)
            if why:
                await _refuse(context, path, why, grpc.StatusCode.PERMISSION_DENIED)
            answered = await answer(_of_caller(request, caller), context)
            if caller.datasets is None:
                return answered
            return _of_datasets(answered, caller.datasets)

    def _unknown(self, context: Context) -> str:
        """Return why a peer with this certificate is refused; "" if it is not."""
        if not self._security.peers:
            return ""
        uris = [one.decode() for one in context.auth_context().get("peer_uri", ())]
        if self._security.knows(uris):
            return ""
        return f"its certificate is for {', '.join(uris) or 'no URI'}, not in tls_peers"

    def _refusing(self, path: str, why: str, code: grpc.StatusCode) -> grpc.RpcMethodHandler:
        """Return a handler that refuses a call without receiving its message. To gRPC the call is a
        stream of messages, so nothing is received before the handler reads from the stream.
        """

        async def refuse(_: object, context: Context) -> None:
            await _refuse(context, path, why, code)

        return grpc.stream_unary_rpc_method_handler(refuse)


async def _refuse(context: Context, path: str, why: str, code: grpc.StatusCode) -> None:
    """Abort the call, with one line of the log."""
    call, peer = path.rpartition("/")[2][:_NAME_SHOWN_MAX], context.peer()
    _trace.refused("call refused", by=host_of(peer), peer=peer, call=call, why=why)
    error: DataplaneError = AccessDenied(f"the call {call} was refused: {why}", call=call)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        error = VersionMismatch(f"the call {call} was refused: {why}")
    await abort(context, error, code)


def _another(request: Any, secret: str | bytes | None) -> str:
    """Return why the sender of a message is not the node that the message names; "" if it is.

    A node's secret is sent in a header, never in a message.
    """
    match request:
        case RegisterNodeRequest() | JoinRequest() | LeaveRequest() | ShareManifestRequest():
            node_id = request.node_id
        case HeartbeatRequest():
            node_id = request.node.node_id
        case _:
            return ""
    if not isinstance(secret, bytes):
        return f"it names a node and shows no secret, as nodes of the version {VERSION} do"
    if node_identity.is_of(node_id, secret):
        return ""
    return f"it names the node {node_id[:_NAME_SHOWN_MAX]!r}, whose secret it does not show"


def _outside(request: Any, caller: Caller, allowed_urls: tuple[str, ...]) -> str:
    """Return what in a message the caller's token or the coordinator does not allow; "" if
    everything is allowed.
    """
    if caller.job:
        for job in _jobs(request):
            if job != caller.job:
                asked = f"asks for {job!r}" if job else "names none"
                return f"its token is for the job {caller.job!r}, and the call {asked}"
    if isinstance(request, JoinRequest | ShareManifestRequest):
        if len(request.urls) > URLS_MAX:
            return f"it names {len(request.urls)} urls"
        allowed = ((caller.datasets, "its token does"), (allowed_urls or None, "allowed_urls do"))
        urls = request.urls or ("",)
        if isinstance(request, JoinRequest):
            urls += request.spec.urls_before
        for prefixes, whose in allowed:
            for url in () if prefixes is None else urls:
                if not is_under(url, prefixes or ()):
                    return f"{whose} not allow {redacted(url) or 'a dataset without urls'}"
    return ""


def _jobs(request: Any) -> Iterable[str]:
    """Return the jobs that a message names; a RegisterNodeRequest names no job."""
    if isinstance(request, HeartbeatRequest):
        known = [one.job_id for one in request.known]
        return [*known, *(one.job_id for one in request.members)]
    return [request.job_id] if hasattr(request, "job_id") else []


def _of_caller(request: Any, caller: Caller) -> Any:
    """Return the request with the limits of the caller's token. The author of a change is the
    subject of the token. A node is limited to the job and the urls that the token allows. If the
    token allows no urls, the node's address is removed: the node gets no key, so other nodes would
    ask it for blocks that it cannot give.
    """
    if isinstance(request, ChangeRequest):
        # Mark the name that the sender claims as unproved in the log and the ledger: the holder of
        # a shared token may claim any name.
        name, claimed = caller.subject, request.by[: NAME_LENGTH_MAX - len(_UNPROVED)]
        return replace(request, by=claimed + _UNPROVED if name is None else name or _NAMELESS)
    if isinstance(request, HeartbeatRequest):
        return replace(request, node=_of_caller(request.node, caller))
    if not isinstance(request, RegisterNodeRequest):
        return request
    prefixes = caller.datasets
    address = "" if prefixes == () else request.data_address
    limits = {"only_job": caller.job, "only_under": prefixes or ()}
    return replace(request, data_address=address, **limits)


def _of_datasets(answer: Any, prefixes: tuple[str, ...]) -> Any:
    """Return the answer for a caller that may read only urls under these prefixes: with the key of
    a job only if nodes that use this key lend nothing else.
    """

    def is_told(nodes: JobNodes | None) -> bool:
        return nodes is not None and are_under(nodes.only_under, prefixes)

    if isinstance(answer, JoinResponse):
        return answer if is_told(answer.nodes) else replace(answer, nodes=None)
    if isinstance(answer, HeartbeatResponse):
        return replace(answer, jobs=tuple(filter(is_told, answer.jobs)))
    return answer


def _named(caller: Caller) -> str:
    return ", ".join(sorted(role.value for role in caller.roles)) or "nobody"
