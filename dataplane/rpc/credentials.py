"""TLS credentials for gRPC: of a server, which follow changes of the files, and of a channel."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from dataplane.security.tls import Certificates, Pems


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
