"""Checks every call that reaches a gRPC server over TCP, before its message is parsed.

One line of the log for each refusal: peer, call and reason, never the token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from dataplane.errors import AccessDenied
from dataplane.rpc import status
from dataplane.security.calls import ANYBODY, CALLS, Caller
from dataplane.security.security import Security, WrongTokenError
from dataplane.trace import Trace

_trace = Trace("security")

_Context = Any  # grpc.aio.ServicerContext, generic in what it carries
_Continue = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets a call through if its token is known and may make it."""

    def __init__(self, security: Security) -> None:
        self._security = security

    async def intercept_service(
        self, continuation: _Continue, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """As gRPC calls it."""
        method = await continuation(details)
        if method is None:
            return None
        allowed = CALLS.get(details.method)
        if allowed == ANYBODY:
            return method
        try:
            caller = self._security.caller(dict(details.invocation_metadata))
        except WrongTokenError as error:
            return self._refusing(details.method, str(error), grpc.StatusCode.UNAUTHENTICATED)
        if not caller.roles & (allowed or ANYBODY):
            why = f"its token is for {_named(caller)}, which may not make this call"
            return self._refusing(details.method, why, grpc.StatusCode.PERMISSION_DENIED)
        if self._security.peers and method.unary_unary is not None:
            return self._of_known_peers(details.method, method)
        return method

    def _of_known_peers(self, path: str, method: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Looks at the certificate, which gRPC has verified, before it parses the message."""

        async def answer(message: bytes, context: _Context) -> Any:
            uris = [one.decode() for one in context.auth_context().get("peer_uri", ())]
            if not self._security.knows(uris):
                why = f"its certificate is for {', '.join(uris) or 'no URI'}, not in tls_peers"
                await _refuse(context, path, why, grpc.StatusCode.PERMISSION_DENIED)
            return await method.unary_unary(method.request_deserializer(message), context)

        return grpc.unary_unary_rpc_method_handler(
            answer, response_serializer=method.response_serializer
        )

    def _refusing(self, path: str, why: str, code: grpc.StatusCode) -> grpc.RpcMethodHandler:
        """Answers without a look at the message."""

        async def refuse(_: bytes, context: _Context) -> None:
            await _refuse(context, path, why, code)

        return grpc.unary_unary_rpc_method_handler(refuse)


async def _refuse(context: _Context, path: str, why: str, code: grpc.StatusCode) -> None:
    """Abort the call, with one line of the log."""
    call = path.rpartition("/")[2]
    _trace.failed("call refused", peer=context.peer(), call=call, why=why)
    error = AccessDenied(f"the call {call} was refused: {why}", call=call)
    await context.abort(code, status.details_of(error), status.trailer_of(error))


def _named(caller: Caller) -> str:
    return ", ".join(sorted(role.value for role in caller.roles)) or "nobody"
