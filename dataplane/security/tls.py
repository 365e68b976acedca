"""Certificates from PEM files, read again when they change.

cert-manager and SPIRE replace these files hours before the old certificates end. A server uses the
new ones for the next connection, a client opens a new channel with its next call, and connections
that are open stay.

The three files are read together and checked together. While they do not fit each other, because
they are being replaced one by one, those read last stay in use.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataplane.errors import ConfigError
from dataplane.trace import Trace

_LOOK_S = 1.0
_FILE_BYTES_MAX = 1 << 20
_trace = Trace("security")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; "" for none. `cert` is a chain, with the own certificate first."""

    cert: str = ""
    key: str = ""
    ca: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Pems:
    """What the files hold; None where there is none."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


class Certificates:
    """The certificates of this process. May be used from any thread."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises:  ConfigError: a file cannot be read, or they do not fit each other."""
        if bool(files.cert) != bool(files.key):
            given, missing = ("tls_cert", "tls_key") if files.cert else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} is set and {missing} is not: give both", key=missing)
        self.files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._seen_now()
        self._looked = clock()
        self._pems = _read(files)
        self._version = 0

    def __repr__(self) -> str:
        return f"Certificates({self.files})"

    def current(self) -> tuple[Pems, int]:
        """The content of the files, at most a second late, and a number that grows when it
        changes.
        """
        with self._lock:
            now = self._clock()
            if now - self._looked >= _LOOK_S:
                self._looked = now
                self._look()
            return self._pems, self._version

    def _look(self) -> None:
        seen = self._seen_now()
        if seen == self._seen:
            return
        try:
            pems = _read(self.files)
        except ConfigError as error:
            _trace.failed("certificates cannot be read; the last ones stay", error=error)
            return
        if self._seen_now() != seen:
            return  # replaced meanwhile: look again in a second
        self._seen = seen
        if pems != self._pems:
            self._pems = pems
            self._version += 1
            _trace.noted("certificates read again", cert=self.files.cert, ca=self.files.ca)

    def _seen_now(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_seen(path) for path in (self.files.cert, self.files.key, self.files.ca))


def _read(files: TlsFiles) -> Pems:
    pems = Pems(_content(files.cert), _content(files.key), _content(files.ca))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if pems.cert is not None and pems.key is not None:
        try:
            _load(context, pems.key + b"\n" + pems.cert)
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


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """The ssl module reads only files, and the bytes checked must be those used."""
    fd = os.memfd_create("dataplane-tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}", password=lambda: "")
    finally:
        os.close(fd)


def _content(path: str) -> bytes | None:
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", file=path) from error
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {_FILE_BYTES_MAX} bytes: not PEM", file=path)
    return content


def _seen(path: str) -> tuple[int, int, int] | None:
    try:
        status = Path(path).stat() if path else None
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)
