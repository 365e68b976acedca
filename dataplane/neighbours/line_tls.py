"""TLS of data connections (the setting `peer_tls`), around the handshake of handshake.py and all
that follows.

It proves that both sides have a certificate of the CA and, with `peers`, of one of these URIs; the
handshake inside proves which node it is. So no name of a host is compared.

The files are those of the calls to the coordinator, and are looked at again for each connection.
"""

from __future__ import annotations

import socket
import ssl
import threading
from typing import Any

from msgspec import Struct

from dataplane.model.config import PeerTls
from dataplane.model.errors import ConfigError
from dataplane.neighbours.handshake import ONE_SIDE
from dataplane.neighbours.wire import WrongFrameError
from dataplane.security.tls import Certificates, Pems, TlsFiles, is_any_of, load_cert_chain

LINE_BYTES_MAX = 256 << 30
"""Bytes that one connection may carry. An AES-GCM key of TLS is good for more (RFC 8446, 5.5)."""


class _Contexts(Struct, frozen=True):
    """The contexts made of one version of the files."""

    version: int
    lender: ssl.SSLContext
    asker: ssl.SSLContext


class LineTls:
    """The certificates of one process. Thread-safe."""

    def __init__(self, tls: PeerTls) -> None:
        self._files = TlsFiles(tls.cert, tls.key, tls.ca)
        self._peers = tls.peers
        self._lock = threading.Lock()
        self._certificates: Certificates | None = None
        self._contexts: _Contexts | None = None

    def of_lender(self, sock: socket.socket) -> ssl.SSLSocket:
        """Wrap the connection of an asker, whose handshake must still be made; `sock` must not be
        used again.

        Raises:  OSError: it is gone.  ConfigError: the files cannot be read.
        """
        context = self._current().lender
        return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def of_asker(self, family: socket.AddressFamily) -> ssl.SSLSocket:
        """A new socket, which is not connected.   Raises:  ConfigError: a file cannot be read."""
        context = self._current().asker
        return context.wrap_socket(socket.socket(family), do_handshake_on_connect=False)

    def shake_hands(self, sock: ssl.SSLSocket) -> None:
        """Make the handshake, until the other side has shown an accepted certificate.

        Raises:  WrongFrameError: it has not.  SSLWantReadError, SSLWantWriteError: the socket does
        not wait.  OSError: the connection broke.
        """
        try:
            sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            raise WrongFrameError(why_refused(error)) from error
        if self._peers:
            shown: dict[str, Any] = sock.getpeercert() or {}
            uris = [name for kind, name in shown.get("subjectAltName", ()) if kind == "URI"]
            if not is_any_of(uris, self._peers):
                raise WrongFrameError(
                    f"its certificate is for {', '.join(uris) or 'no URI'}, not in tls_peers"
                )

    def _current(self) -> _Contexts:
        """Raises:  ConfigError."""
        with self._lock:
            if self._certificates is None:
                self._certificates = Certificates(self._files)
            pems, version = self._certificates.current()
            contexts = self._contexts
            if contexts is None or contexts.version != version:
                lender, asker = (
                    _context(pems, kind)
                    for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
                )
                contexts = self._contexts = _Contexts(version, lender, asker)
            return contexts


def why_refused(error: ssl.SSLError) -> str:
    """Why a handshake has failed, for people. The word "alert" is the other side's."""
    reason = (error.reason or "").replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "it closed the connection during the handshake"
    if "alert unexpected message" in reason:
        return ONE_SIDE
    if "not return a certificate" in reason:
        return "it showed no certificate"
    if "alert" in reason:
        return f"it refused this node's certificate or TLS: {reason}"
    return f"its TLS is refused: {reason or error}"


def _context(pems: Pems, kind: ssl._SSLMethod) -> ssl.SSLContext:
    assert pems.cert is not None
    assert pems.key is not None
    assert pems.ca is not None
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if kind is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # As gRPC: the CA may be one that another CA has signed.
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    try:
        load_cert_chain(context, pems.key + b"\n" + pems.cert)
        context.load_verify_locations(cadata=pems.ca.decode("ascii", "replace"))
    except (ssl.SSLError, OSError, ValueError) as error:  # they were readable a moment ago
        raise ConfigError(f"the certificates cannot be used: {error}") from error
    return context
