"""Limits on what a peer sends: on names, since they are stored, logged and shown, and on addresses,
since others connect to them.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sized

from dataplane.base.trace import UNSAFE
from dataplane.model.errors import ConfigError
from dataplane.rpc.address import TcpAddress, parse

NAME_LENGTH_MAX = 256
ELEMENTS_MAX = 1 << 17
"""The most elements of all lists of a message together. An element takes far more memory and time
than the two bytes that are enough to send it.
"""
VALUES_MAX = 2 * ELEMENTS_MAX
"""The most values of a trainer's message, including the values in its lists: a url is one value, an
image step has a dozen.
"""
URLS_MAX = 64
"""The most urls of a dataset that a node may send to the coordinator."""
_SHOWN_LENGTH = 40
_VALUES_A_TURN, _TURN_PAUSE_S = 500, 0.001
_FIXED = dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3), 0)
"""The number of bytes that follow the first byte of a number, None or bool, by the first byte."""
_FIXED |= {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED |= {0xA0 + length: length for length in range(32)}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""The number of bytes in which the length of a text or of bytes is written, by the first byte."""
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""The number of bytes in which the length of an array or a map is written, and the number of values
per entry, by the first byte.
"""


def check_name(field: str, name: str, *, needed: bool = True, most: int = NAME_LENGTH_MAX) -> None:
    """Check one name of a message.

    Raises:  ConfigError: the name is too long, or has a character that no name may have, or is
    needed but empty; names the field.
    """
    check_length(field, name, needed=needed, most=most)
    unsafe = UNSAFE.search(name)
    if unsafe:
        raise ConfigError(
            f"{field} {name[:_SHOWN_LENGTH]!r} has the character {unsafe[0]!r}: a name has "
            "no control characters, line ends, or halves of surrogate pairs",
            field=field,
        )


def check_length(field: str, name: str, *, needed: bool, most: int) -> None:
    """Check the length of a text of a message.

    Raises:  ConfigError: the text is too long, or is needed but empty; names the field.
    """
    if len(name) > most or (needed and not name):
        least = "1 to " if needed else ""
        shown = f" ({name[:_SHOWN_LENGTH]!r} …)" if name else ""
        raise ConfigError(
            f"{field} has {len(name)} characters{shown}: {least}{most}"
            f"{' are needed' if needed else ' at most'}",
            field=field,
        )


def check_count(field: str, entries: Sized, most: int) -> None:
    """Check that a list of a message has at most `most` entries.

    Raises:  ConfigError: the list has more entries; names the field.
    """
    if len(entries) > most:
        raise ConfigError(f"{len(entries)} {field}: {most} at most", field=field)


def check_data_address(address: str) -> None:
    """Check the data address that a node sends, since other nodes will connect to it.

    Raises:  ConfigError: the text is not an IP address with a port, in the form of `TcpAddress`; or
    no node can have this address, as with the address of a cloud's metadata service.
    """
    check_name("data_address", address)
    parsed = parse(address)
    if not isinstance(parsed, TcpAddress) or not parsed.port or parsed.target != address:
        raise ConfigError(
            f"{address!r} is not an IP address with a port", field="data_address", found=address
        )
    try:
        host = ipaddress.ip_address(parsed.host)
    except ValueError as error:
        raise ConfigError(
            f"{address!r} is a name: an IP address is needed", field="data_address", found=address
        ) from error
    hidden = isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None
    never = host.is_link_local or host.is_multicast or host.is_unspecified
    if never or hidden or str(host) != parsed.host:
        raise ConfigError(
            f"{address!r} is never the address of a node", field="data_address", found=address
        )


def check_values(name: str, wire: bytes, most: float) -> None:
    """Count the values of a message of codec.py, including the values in its lists. This is done
    before decoding, since msgspec holds the interpreter lock while it decodes; the count pauses to
    let other threads run, so call it in a thread. A message of at most `most` bytes is not counted:
    it cannot have more values. A message that ends too early is left to the decoder.

    Source:  github.com/msgpack/msgpack/blob/master/spec.md.
    Raises:  ConfigError: there are more than `most` values, or a value is not MessagePack.
    """
    at, count, left, end = 0, 0, 1 if len(wire) > most else 0, len(wire)
    while left and at < end:
        kind = wire[at]
        at, left, count = at + 1, left - 1, count + 1
        if (follow := _FIXED.get(kind)) is not None:
            at += follow
        elif (size := _SIZED.get(kind)) is not None:
            at += size + int.from_bytes(wire[at : at + size])
        elif kind < 0xA0:
            left += (kind & 15) * (1 if kind & 16 else 2)
        elif kind in _COUNTED:
            size, each = _COUNTED[kind]
            left += each * int.from_bytes(wire[at : at + size])
            at += size
        else:
            raise ConfigError(f"not a {name} message: no value begins with the byte {kind}")
        if count + left > most:
            raise ConfigError(
                f"a {name} message has more than {most} values in its lists: name fewer urls, "
                "sources or columns"
            )
        if not count % _VALUES_A_TURN:
            time.sleep(_TURN_PAUSE_S)  # let other threads take the interpreter lock
