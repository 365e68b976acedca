"""Whose process listens at an address of this host.

A port above 1023 belongs to nobody: while a coordinator is down, another user's process can listen
in its place, and would be sent the token. The kernel says which user a listening socket is of.

Source: proc_pid_net(5); Documentation/networking/proc_net_tcp.rst.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path

from dataplane.errors import PeerLost
from dataplane.rpc.address import TcpAddress

_LISTENS = "0A"
_ROOT = 0
_MAPPED = bytes(10) + b"\xff\xff"


def check_own(address: TcpAddress) -> None:
    """Whether what listens there, if anything does, is of this user or root. Blocks: the kernel's
    tables are as long as the host has connections.

    Raises:  PeerLost: it is another user's. It may go away, and the coordinator come back.
    """
    hosts = ("127.0.0.1", "::1") if address.host.lower() == "localhost" else (address.host,)
    for host in hosts:
        found = _owners(host, address.port)
        if found - {os.geteuid(), _ROOT}:
            raise PeerLost(
                f"what listens at {address.target} is of user {min(found - {_ROOT})}, and not of "
                f"user {os.geteuid()}, whose token is in the state directory: it was not sent. If "
                "it is your coordinator, give both the same token (DATAPLANE_TOKEN, --token-file)",
                peer=address.target,
            )


def _owners(host: str, port: int) -> set[int]:
    """The users that listen there: at the address itself, else at all addresses. A socket of IPv6
    may also be one of IPv4.
    """
    address = ipaddress.ip_address(host)
    listening = _listeners("/proc/net/tcp6", port)
    wanted = [address.packed, bytes(16)]
    if address.version == 4:
        listening |= _listeners("/proc/net/tcp", port)
        wanted = [address.packed, _MAPPED + address.packed, bytes(4), bytes(16)]
    return next((found for one in wanted if (found := listening.get(_shown(one)))), set())


def _listeners(table: str, port: int) -> dict[str, set[int]]:
    """The users that listen at this port, by address."""
    try:
        lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return {}
    found: dict[str, set[int]] = {}
    for line in lines:
        words = line.split()
        at, _, number = words[1].partition(":")
        if words[3] == _LISTENS and int(number, 16) == port:
            found.setdefault(at, set()).add(int(words[7]))
    return found


def _shown(packed: bytes) -> str:
    """An address as the kernel writes it: words of four bytes, each in the machine's order."""
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
