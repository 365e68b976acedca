"""Certificates from PEM files, read again when they change.

cert-manager and SPIRE replace these files hours before the old certificates expire. A server uses
the new ones for the next connection, a client opens a new channel with its next call, and open
connections stay. gRPC asks a server for its certificate at each handshake, but cannot replace a
client's.

The three files are read and checked together. While they do not fit each other, because they are
being replaced one by one, the certificates read last stay in use.
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

from dataplane.model.errors import ConfigError
from dataplane.security.private_file import Watched, content

# -- validity ----------------------------------------------------------------------------------
#
# Parse the time in which a certificate is valid from its DER form (RFC 5280, 4.1). Python's ssl
# module reports this time only for certificates of CAs, and a node installs no other library for
# this purpose.

_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17
_SEQUENCES_BEFORE = 2  # the signature's algorithm, and the issuer


def why_not_valid(pem: bytes, now: dt.datetime) -> str:
    """Return why the first of these certificates is not valid now, such as "it ended at 2026-10-25
    17:35 UTC"; "" if it is valid, or if its times cannot be parsed.
    """
    try:
        begins, ends = _validity(pem)
    except (ValueError, IndexError):
        return ""
    if now < begins:
        return f"it begins at {begins:%Y-%m-%d %H:%M} UTC, and it is {now:%Y-%m-%d %H:%M} UTC here"
    return f"it ended at {ends:%Y-%m-%d %H:%M} UTC" if now > ends else ""


def _validity(pem: bytes) -> tuple[dt.datetime, dt.datetime]:
    """Return the first and the last moment at which a certificate is valid.

    Raises:  ValueError, IndexError: the bytes are not a certificate in PEM.
    """
    text = pem.decode("ascii", "replace")
    first = text[text.index(ssl.PEM_HEADER) : text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
    der = ssl.PEM_cert_to_DER_cert(first)
    _, certificate, _ = _element(der)
    _, rest, _ = _element(certificate)
    tag, _, after = _element(rest)
    if tag == _VERSION:
        _, _, after = _element(after)  # skip the serial number
    for _ in range(_SEQUENCES_BEFORE):
        tag, _, after = _element(after)
        if tag != _SEQUENCE:
            raise ValueError("not a certificate")
    _, times, _ = _element(after)
    begins_tag, begins, times = _element(times)
    ends_tag, ends, _ = _element(times)
    return _time(begins_tag, begins), _time(ends_tag, ends)


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and content of the first element, and the bytes after it."""
    tag, length, at = der[0], der[1], 2
    if length & 0x80:
        at += length & 0x7F
        length = int.from_bytes(der[2:at])
    return tag, der[at : at + length], der[at + length :]


def _time(tag: int, content: bytes) -> dt.datetime:
    text = content.decode("ascii")
    if tag == _UTC_TIME:  # years have two digits, for 1950 to 2049
        text = ("20" if text < "5" else "19") + text
    return dt.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=dt.UTC)


_FILE_BYTES_MAX = 1 << 20


class TlsFiles(Struct, frozen=True):
    """Paths of PEM files; "" for none. `cert` begins with the certificate of this process."""

    cert: str = ""
    key: str = ""
    ca: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Pems:
    """The contents of the files; None for a file that is not set."""

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
        self.watched = Watched("certificates", paths, partial(_read, files), clock)

    def __repr__(self) -> str:
        return f"Certificates({self.files})"

    def current(self) -> tuple[Pems, int]:
        """Return the contents of the files, at most a second late, and a number that grows when
        they change.
        """
        return self.watched.current()

    def complaint(self) -> str:
        """Return advice if this process's certificate is not valid now; otherwise ""."""
        own = self.current()[0].cert
        why = "" if own is None else why_not_valid(own, dt.datetime.now(dt.UTC))
        if not why:
            return ""
        return (
            f"The certificate of this process, {self.files.cert}, is not valid now: {why}. Renew "
            "it, or set this host's clock"
        )


def is_any_of(uris: Sequence[str], peers: Sequence[str]) -> bool:
    """Return whether one of these URIs matches one of `peers`: "spiffe://cluster/ns/*" matches all
    URIs that begin with "spiffe://cluster/ns/".
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
    """Load this key and certificate into a context. They pass through a file in memory, since the
    ssl module reads only files, and must get exactly the bytes that were checked.

    Raises:  ssl.SSLError, OSError, ValueError: the key or the certificate is invalid.
    """
    fd = os.memfd_create("dataplane-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}", password=lambda: "")
    finally:
        os.close(fd)


def _content(path: str) -> bytes | None:
    return content(path, _FILE_BYTES_MAX) if path else None
