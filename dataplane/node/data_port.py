"""The port at which other nodes request blocks from this one."""

from __future__ import annotations

import ipaddress
import socket

from dataplane.base.trace import Trace
from dataplane.model.errors import ConfigError
from dataplane.rpc.address import TcpAddress, UnixAddress, is_loopback, parse, resolve
from dataplane.rpc.address_kinds import NO_NEIGHBOURS

_trace = Trace("node")

_BACKLOG = 1024
# Of a network that is never used (RFC 5737): the kernel takes the default route to it.
_ELSEWHERE = TcpAddress("192.0.2.1", 9)


def open_data_port(
    wanted: str, coordinator: str, *, is_own: bool = False, is_safe: bool = True
) -> socket.socket | None:
    """Open a listening socket for the setting `data_listen`; None if there is none.

    `is_own`: the coordinator is in this process. `is_safe`: connections are encrypted, or may be
    plain text. May wait for a name server.

    Raises:  ConfigError: the address is taken, or none of this machine.
    """
    if wanted == NO_NEIGHBOURS:
        return None
    if wanted and not wanted.startswith(":"):
        parsed = parse(wanted)
        assert isinstance(parsed, TcpAddress), "the setting allows no other"
        return _listening(resolve(parsed))
    here = _address_here(coordinator)
    if here is None:
        return None
    if not wanted and is_loopback(here) and is_own:
        return None  # nobody on another host can join
    if not wanted and not is_loopback(here) and not is_safe:
        _trace.failed(
            "no data port: this node lends no blocks to other nodes and makes no slabs for them, "
            "since these would cross the network in plain text. --peer-tls, on all nodes, encrypts "
            "them; --data-listen :0 allows plain text, and --data-listen none leaves this line out"
        )
        return None
    return _listening(TcpAddress(here.host, int(wanted.removeprefix(":") or 0)))


def data_address(listener: socket.socket | None) -> str:
    """Return the address at which others reach this socket; "" without one."""
    return "" if listener is None else _bound(listener).target


def reaches_other_hosts(address: str) -> bool:
    """Whether nodes on other hosts can connect to this `data_address`."""
    parsed = parse(address) if address else None
    return isinstance(parsed, TcpAddress) and not is_loopback(parsed)


def _bound(sock: socket.socket) -> TcpAddress:
    host, port = sock.getsockname()[:2]
    return TcpAddress(str(ipaddress.ip_address(host)), port)


def _address_here(coordinator: str) -> TcpAddress | None:
    """Return the address of this machine from which it reaches the coordinator, or any other host
    while the coordinator's name is unknown. None if there is none, or other hosts could not connect
    to it.
    """
    parsed = parse(coordinator)
    if isinstance(parsed, UnixAddress):
        return None
    try:
        there = resolve(parsed)
    except ConfigError:
        there = _ELSEWHERE  # the coordinator may start later than its nodes
    family = socket.AF_INET6 if ":" in there.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((there.host, there.port or _ELSEWHERE.port))  # sends nothing
            here = _bound(asking)
        except OSError:
            return None
    return None if ipaddress.ip_address(here.host).is_link_local else here


def _listening(address: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A node that is started again takes its port although old connections linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen for neighbours at {address.target}: {error.strerror}. Give an "
            "address of this machine and a free port with --data-listen HOST:PORT, or none with "
            "--data-listen none",
            key="data_listen",
            found=address.target,
        ) from error
    return listener
