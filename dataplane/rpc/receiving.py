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
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from msgspec import Struct

from dataplane.base.trace import Trace
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.rpc import grpc_errors
from dataplane.rpc.address import network_of
from dataplane.rpc.services import Method

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
