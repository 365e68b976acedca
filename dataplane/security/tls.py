"""Certificates from PEM files, read again when they change.

cert-manager and SPIRE replace these files hours before the old certificates end. A server uses the
new ones for the next connection, a client opens a new channel with its next call, and connections
that are open stay.

The three files are read together and checked together. While they do not fit each other, because
they are being replaced one by one, those read last stay in use.
"""

from __future__ import annotations

import datetime as dt
import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import Struct

from dataplane.errors import ConfigError
from dataplane.security.validity import why_not_valid
from dataplane.security.watched import Watched, content

_FILE_BYTES_MAX = 1 << 20


class TlsFiles(Struct, frozen=True):
    """Paths of PEM files; "" for none. `cert` begins with the certificate of this process."""

    cert: str = ""
    key: str = ""
    ca: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Pems:
    """The content of the files; None where there is none."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


class Certificates:
    """The certificates of this process. May be used from any thread."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the files.

        Raises:  ConfigError: a file cannot be read, or they do not fit each other.
        """
        if bool(files.cert) != bool(files.key):
            given, missing = ("tls_cert", "tls_key") if files.cert else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} is set and {missing} is not: give both", key=missing)
        self.files = files
        paths = (files.cert, files.key, files.ca)
        self._pems = Watched("certificates", paths, partial(_read, files), clock)

    def __repr__(self) -> str:
        return f"Certificates({self.files})"

    def current(self) -> tuple[Pems, int]:
        """The content of the files, at most a second late, and a number that grows when it
        changes.
        """
        return self._pems.current()

    def complaint(self) -> str:
        """Return what to do about this process's certificate if nobody trusts it now; else ""."""
        own = self.current()[0].cert
        why = "" if own is None else why_not_valid(own, dt.datetime.now(dt.UTC))
        if not why:
            return ""
        return (
            f"The certificate of this process, {self.files.cert}, is not valid now: {why}. Renew "
            "it, or set this host's clock"
        )


def is_any_of(uris: Sequence[str], peers: Sequence[str]) -> bool:
    """Whether one of these URIs matches one of `peers`: "spiffe://cluster/ns/*" matches all that
    start so.
    """
    return any(
        uri.startswith(peer[:-1]) if peer.endswith("/*") else uri == peer
        for uri in uris
        for peer in peers
    )


def _read(files: TlsFiles) -> Pems:
    pems = Pems(_content(files.cert), _content(files.key), _content(files.ca))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if pems.cert is not None and pems.key is not None:
        try:
            load_cert_chain(context, pems.key + b"\n" + pems.cert)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ConfigError(
                f"{files.cert} and {files.key} are not a certificate and its key in PEM, without a "
                f"password: {getattr(error, 'reason', None) or error}",
                file=files.cert,
            ) from error
    if pems.ca is not None:
        try:
            context.load_verify_locations(cadata=pems.ca.decode("ascii", "replace"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{files.ca} has no certificates in PEM: {getattr(error, 'reason', None) or error}",
                file=files.ca,
            ) from error
    return pems


def load_cert_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """Load this key and certificate. The ssl module reads only files, and must get the bytes that
    were checked.

    Raises:  ssl.SSLError, OSError, ValueError: they are invalid.
    """
    fd = os.memfd_create("dataplane-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}", password=lambda: "")
    finally:
        os.close(fd)


def _content(path: str) -> bytes | None:
    return content(path, _FILE_BYTES_MAX) if path else None
