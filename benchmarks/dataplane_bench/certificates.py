"""A certificate for a server of 127.0.0.1, made at run time and signed by an authority of its own.

`openssl` makes both, valid for some days. An authority apart is needed: rustls, which obstore and
others use, refuses a server that shows the certificate of an authority.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from dataplane_bench.processes import tool

_DAYS = "30"
_TIMEOUT_S = 60.0
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_SERVER = "subjectAltName=IP:127.0.0.1\nbasicConstraints=critical,CA:FALSE\n"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files in PEM format: what the server shows, its key, and whom clients must trust."""

    certificate: Path
    key: Path
    authority: Path


def make(folder: Path) -> Certificate:
    """Write a new certificate into this folder.

    Raises:  FileNotFoundError: there is no openssl.  ConnectionError: it fails; with its words.
    """
    authority, authority_key = folder / "authority.pem", folder / "authority.key"
    made = Certificate(folder / "server.pem", folder / "server.key", authority)
    asked, extensions = folder / "server.csr", folder / "server.ext"
    extensions.write_text(_SERVER)
    subject = ("-subj", "/CN=127.0.0.1")
    _openssl(
        *("req", "-x509", *_KEY, "-keyout", authority_key, "-out", authority, "-days", _DAYS),
        *("-subj", "/CN=dataplane bench"),
    )
    _openssl("req", *_KEY, "-keyout", made.key, "-out", asked, *subject)
    _openssl(
        *("x509", "-req", "-in", asked, "-CA", authority, "-CAkey", authority_key),
        *("-CAcreateserial", "-days", _DAYS, "-extfile", extensions, "-out", made.certificate),
    )
    return made


def _openssl(*arguments: str | Path) -> None:
    try:
        subprocess.run(
            [tool("openssl"), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise ConnectionError(f"no certificate for TLS: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise ConnectionError(f"no certificate for TLS within {_TIMEOUT_S:g} s") from error
