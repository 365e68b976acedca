"""TLS for data connections (the setting `peer_tls`), around the handshake of wire.py and all
later messages.

TLS proves that both sides have a certificate of the CA and, with `peers`, that the certificate is
for one of these URIs. The handshake inside proves the identity of the node, so host names are not
checked.

The certificate files are the same as for calls to the coordinator, and are checked for changes at
each new connection.
"""

from __future__ import annotations

import socket
import ssl
import threading
from typing import Any

from msgspec import Struct

from dataplane.model.config import PeerTls
from dataplane.model.errors import ConfigError
from dataplane.neighbours.wire import ONE_SIDE, WrongFrameError
from dataplane.security.tls import Certificates, Pems, TlsFiles, is_any_of, load_cert_chain

LINE_BYTES_MAX = 256 << 30
"""The most bytes that one connection may carry. This is less than the limit of TLS for an AES-GCM
key (RFC 8446, 5.5).
"""


class _Contexts(Struct, frozen=True):
    """The TLS contexts for one version of the files."""

    version: int
    lender: ssl.SSLContext
    asker: ssl.SSLContext


class LineTls:
    """The TLS contexts of one process, which follow changes of the files. Thread-safe."""

    def __init__(self, tls: PeerTls) -> None:
        self._files = TlsFiles(tls.cert, tls.key, tls.ca)
        self._peers = tls.peers
        self._lock = threading.Lock()
        self._certificates: Certificates | None = None
        self._contexts: _Contexts | None = None

    def of_lender(self, sock: socket.socket) -> ssl.SSLSocket:
        """Wrap the connection of an asker. The caller makes the TLS handshake, and must not use
        `sock` again.

        Raises:  OSError: the connection is gone.  ConfigError: the files cannot be read.
        """
        context = self._current().lender
        return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def of_asker(self, family: socket.AddressFamily) -> ssl.SSLSocket:
        """Return a new unconnected socket.   Raises:  ConfigError: a file cannot be read."""
        context = self._current().asker
        return context.wrap_socket(socket.socket(family), do_handshake_on_connect=False)

    def shake_hands(self, sock: ssl.SSLSocket) -> None:
        """Make the TLS handshake, and check the certificate of the other side.

        Raises:  WrongFrameError: the handshake failed, or the certificate is refused.
        SSLWantReadError, SSLWantWriteError: the socket is non-blocking, and not ready.  OSError:
        the connection broke.
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
        """Return the contexts for the present files.   Raises:  ConfigError."""
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
    """Return why a TLS handshake failed, for people. In reasons with the word "alert", it was the
    other side that refused.
    """
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
    # Accept a CA that is itself signed by another CA, as gRPC does.
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    try:
        load_cert_chain(context, pems.key + b"\n" + pems.cert)
        context.load_verify_locations(cadata=pems.ca.decode("ascii", "replace"))
    except (ssl.SSLError, OSError, ValueError) as error:  # `Certificates` could read the files
        raise ConfigError(f"the certificates cannot be used: {error}") from error
    return context
