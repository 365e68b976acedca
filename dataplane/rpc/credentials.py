"""TLS for gRPC: credentials of a server that follow changed files, and of a channel."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from dataplane.security.tls import Certificates, Pems


def server_credentials(
    certificates: Certificates, on_handshake: Callable[[], None]
) -> grpc.ServerCredentials:
    """The certificate of each new connection is that of the files. With a `ca`, clients must have a
    certificate of it. `on_handshake` is called for each new connection, in a thread of gRPC's.
    """
    first, version = certificates.current()
    used = [version]

    # gRPC calls it in a thread of its own, before each handshake.
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
    """Trusts the `ca`, or what gRPC trusts by default; shows the certificate, if there is one."""
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)
