"""The methods of a gRPC service, read from its descriptor: only the proto files list them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import grpc
from msgspec import Struct

from dataplane.rpc.bounds import ELEMENTS_MAX
from dataplane.rpc.convert import decode, encode, value_class
from dataplane.rpc.v1 import coordinator_pb2
from dataplane.security.tls import Certificates, Pems

REQUEST_BYTES_MAX = 4 << 20
RESPONSE_BYTES_MAX = 64 << 20


class Method(Struct, frozen=True):
    """One unary method. Its requests and answers are values of membership.py and sharing.py."""

    name: str
    path: str
    python_name: str
    read_request: Callable[[bytes], Any]
    read_response: Callable[[bytes], Any]
    write: Callable[[Any], bytes] = encode


COORDINATOR: str = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name


def coordinator_methods() -> tuple[Method, ...]:
    """Return every method of the coordinator's service."""
    service = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
    return tuple(
        Method(
            name=method.name,
            path=f"/{service.full_name}/{method.name}",
            python_name=re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower(),
            read_request=functools.partial(
                decode, value_class(method.input_type), elements_max=ELEMENTS_MAX
            ),
            read_response=functools.partial(decode, value_class(method.output_type)),
        )
        for method in service.methods
    )


# -- TLS credentials -------------------------------------------------------------------------------
#
# TLS credentials for gRPC: of a server, which follow changes of the files, and of a channel.


def server_credentials(
    certificates: Certificates, on_handshake: Callable[[], None]
) -> grpc.ServerCredentials:
    """Return credentials that use the current certificate files for each new connection. With a
    `ca`, clients need a certificate from that CA. gRPC calls `on_handshake` for each new
    connection, in a thread of its own.
    """
    first, version = certificates.current()
    used = [version]

    # gRPC calls `fetch` in a thread of its own, before each handshake.
    def fetch() -> grpc.ServerCertificateConfiguration | None:
        on_handshake()
        pems, now = certificates.current()
        if now == used[0]:
            return None
        used[0] = now
        return _configuration(pems)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(first), fetch, require_client_authentication=first.ca is not None
    )


def channel_credentials(pems: Pems) -> grpc.ChannelCredentials:
    """Return credentials that trust the `ca`, or else the CAs that gRPC trusts by default, and that
    send the client's certificate, if there is one.
    """
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)
