"""Limits on what a peer sends: on names, since they are stored, logged and shown, and on addresses,
since others connect to them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sized

from dataplane.errors import ConfigError
from dataplane.rpc.address import TcpAddress, parse
from dataplane.trace import UNSAFE

NAME_LENGTH_MAX = 256
ELEMENTS_MAX = 1 << 17
"""Elements of all lists of a message: each takes far more memory and time than its two bytes."""
VALUES_MAX = 2 * ELEMENTS_MAX
"""Values of a trainer's message, with those in its lists: a url is one, an image step a dozen."""
URLS_MAX = 64
"""URLs of a dataset, as a node names them to the coordinator."""
_SHOWN_LENGTH = 40


def check_name(field: str, name: str, *, needed: bool = True, most: int = NAME_LENGTH_MAX) -> None:
    """Check one name of a message.

    Raises:  ConfigError: it is too long, or needed and not given, or has a character that is none
    of a name; names the field.
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
    """Check how long a text of a message is.

    Raises:  ConfigError: it is too long, or needed and not given; names the field.
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
    """Check how many entries a list of a message has.

    Raises:  ConfigError: there are more; names the field.
    """
    if len(entries) > most:
        raise ConfigError(f"{len(entries)} {field}: {most} at most", field=field)


def check_data_address(address: str) -> None:
    """Check where a node says that others reach it: they are made to connect to it.

    Raises:  ConfigError: it is not an IP address with a port, as `TcpAddress` writes it, or never
    one of a node, such as that of a cloud's metadata service.
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
