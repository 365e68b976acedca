"""Members of a tar archive: headers checked, long names resolved, bodies skipped.

Source:  POSIX.1-2001 pax, and GNU tar's documentation ("Basic Tar Format").
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from dataplane.formats.faults import corrupt, describe
from dataplane.formats.source import ByteSource

RECORD = 512
# Extended headers hold names; a megabyte is too long for a name.
EXTENDED_BYTES_MAX = 1 << 20
# How far past its end mark an archive is searched for more members (tar pads to 10 KiB).
PADDING_BYTES_MAX = 64 << 10

_ZEROS = bytes(RECORD)
_REGULAR = (b"0", b"\0", b"7")
# Links, devices, directories and pipes have no body, whatever their size field says. Unknown kinds
# have one, according to POSIX.
_BODILESS = (b"1", b"2", b"3", b"4", b"5", b"6")
_LINKS = {b"1": "hard link", b"2": "symbolic link"}


class TarMember(Struct, frozen=True):
    """One regular file of an archive. `start` is the place of its first header, `end` the earliest
    place at which the next member can start.
    """

    name: str
    start: int
    body: int
    size: int
    end: int


class _Header(Struct, frozen=True):
    kind: bytes
    name: bytes
    size: int


def members(source: ByteSource, at: int, end: int | None) -> Iterator[TarMember]:
    """Yield the regular files from `at` up to `end`, or up to the end mark if `end` is None.

    Raises:  CorruptShard: a header's checksum is wrong, a member does not fit, or no end mark.
    """
    start, extended = at, dict[str, bytes]()
    while end is None or at < end:
        record = source.view(at, RECORD)
        if len(record) < RECORD:
            if at == 0:
                raise corrupt(source.url, 0, "not a tar archive", found=describe(bytes(record)))
            raise corrupt(
                source.url,
                at,
                "the tar archive is truncated; upload it again",
                expected="a member or the end mark",
                found="the end of the shard",
            )
        if record == _ZEROS:
            _check_padding(source, at)
            return
        header = _parsed(source.url, at, bytes(record))
        size = header.size
        if "size" in extended and header.kind not in _BODILESS:
            size = int(extended["size"])
        body, stop = at + RECORD, at + RECORD + -(-size // RECORD) * RECORD
        if header.kind in {b"x", b"L"}:
            extended |= _extended(source, header, body)
            at = stop
            continue
        _check_fits(source, at, body + size, header.name)
        at = stop
        if header.kind in {b"g", b"K"}:
            continue
        name = extended.get("path", header.name)
        if header.kind in _REGULAR and not name.endswith(b"/"):
            yield TarMember(_text(source.url, start, name), start, body, size, stop)
        elif header.kind in _LINKS or header.kind == b"S":
            what = _LINKS.get(header.kind, "sparse file")
            raise corrupt(
                source.url,
                start,
                f"member {name.decode('utf-8', 'replace')!r} is a {what}, and its bytes are "
                "elsewhere; write the archive with tar --dereference --hard-dereference",
            )
        start, extended = at, {}


def _check_fits(source: ByteSource, at: int, end: int, name: bytes) -> None:
    """Check that the member's last byte is present; its padding may be missing only at the end."""
    if not len(source.view(end - 1, 1)):
        raise corrupt(
            source.url,
            at,
            f"member {name.decode('utf-8', 'replace')!r} is truncated; upload the shard again",
            expected=f"{end} bytes",
            found="the end of the shard before that",
        )


def _check_padding(source: ByteSource, at: int) -> None:
    """Check that only zeros follow the end mark: members after it would never be read."""
    rest = bytes(source.view(at, PADDING_BYTES_MAX))
    if rest.strip(b"\0"):
        more = at + len(rest) - len(rest.lstrip(b"\0"))
        raise corrupt(
            source.url,
            more,
            "more data follows the end mark of the tar archive; concatenated archives are not "
            "read, write one archive to a shard",
        )


def _parsed(url: str, at: int, record: bytes) -> _Header:
    try:
        stated = _number(record[148:156])
    except ValueError:
        stated = -1
    # Some old writers summed signed bytes.
    plain = 256 + sum(record[:148]) + sum(record[156:])
    signed = plain - 256 * sum(1 for byte in record[:148] + record[156:] if byte > 127)
    if stated not in {plain, signed}:
        what = "the checksum of a tar header is wrong"
        if at == 0 and record[257:262] != b"ustar":
            what = f"not a tar archive, or its first header is damaged ({describe(record)})"
        raise corrupt(url, at, what, expected=plain, found=stated)
    try:
        size = _number(record[124:136])
    except ValueError:
        size = -1
    if size < 0:
        raise corrupt(url, at, "the size in a tar header is wrong", found=repr(record[124:136]))
    kind, name = record[156:157], record[:100].split(b"\0", 1)[0]
    if record[257:263] == b"ustar\0":
        prefix = record[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return _Header(kind, name, 0 if kind in _BODILESS else size)


def _number(field: bytes) -> int:
    """Parse an octal number, or a big-endian one if the first bit is set (GNU)."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big", signed=False) - (1 << (8 * len(field) - 1))
    digits = field.split(b"\0", 1)[0].strip()
    return int(digits, 8) if digits else 0


def _extended(source: ByteSource, header: _Header, body: int) -> dict[str, bytes]:
    """Read what a pax or GNU extended header says about the next member."""
    if header.size > EXTENDED_BYTES_MAX:
        raise corrupt(
            source.url,
            body - RECORD,
            "an extended tar header is too long",
            expected=f"at most {EXTENDED_BYTES_MAX} bytes",
            found=header.size,
        )
    payload = bytes(source.view(body, header.size))
    if len(payload) < header.size:
        raise corrupt(source.url, body, "the tar archive is truncated in an extended header")
    if header.kind == b"L":
        return {"path": payload.split(b"\0", 1)[0]}
    entries: dict[str, bytes] = {}
    at = 0
    while at < len(payload):
        digits = payload[at : payload.find(b" ", at)]
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        key, equals, value = payload[at + len(digits) + 1 : at + length].partition(b"=")
        if length < 5 or at + length > len(payload) or not equals or not value.endswith(b"\n"):
            raise corrupt(source.url, body + at, "a pax header is damaged")
        if key in {b"path", b"size"}:
            entries[key.decode()] = value[:-1]
        if key.startswith(b"GNU.sparse"):
            raise corrupt(source.url, body + at, "sparse files are not supported in a tar shard")
        at += length
    if not entries.get("size", b"0").isdigit():
        raise corrupt(source.url, body, "the size in a pax header is wrong")
    return entries


def _text(url: str, at: int, name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as fault:
        what = "the name of a tar member is not UTF-8"
        raise corrupt(url, at, what, found=repr(name)) from fault
