"""Read when a certificate is valid from its DER (RFC 5280, 4.1): Python's ssl module reports this
only for CAs' certificates, and a node installs no other library for it.
"""

from __future__ import annotations

import datetime as dt
import ssl

_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17
_SEQUENCES_BEFORE = 2  # the signature's algorithm, and the issuer


def why_not_valid(pem: bytes, now: dt.datetime) -> str:
    """Return why the first of these certificates is not valid now, such as "it ended at 2026-10-25
    17:35 UTC"; "" if it is valid, or if its times cannot be read.
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

    Raises:  ValueError, IndexError: it is no certificate in PEM.
    """
    text = pem.decode("ascii", "replace")
    first = text[text.index(ssl.PEM_HEADER) : text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
    der = ssl.PEM_cert_to_DER_cert(first)
    _, certificate, _ = _element(der)
    _, rest, _ = _element(certificate)
    tag, _, after = _element(rest)
    if tag == _VERSION:
        _, _, after = _element(after)  # the serial number
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
    if tag == _UTC_TIME:  # two digits of the year: from 1950 to 2049
        text = ("20" if text < "5" else "19") + text
    return dt.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=dt.UTC)
