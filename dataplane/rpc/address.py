"""Addresses of gRPC services: "host:port", "[::1]:port" or "unix:/path/to/socket"."""

from __future__ import annotations

import ipaddress
import socket

from msgspec import Struct

from dataplane.model.errors import ConfigError

_UNIX = "unix:"
_UNIX_PATH_BYTES_MAX = 107
_PORT_MAX = 65535
_OWN_BITS = 64


class TcpAddress(Struct, frozen=True):
    """A host and a port; port 0 means any free port."""

    host: str
    port: int

    @property
    def target(self) -> str:
        """The address in gRPC's form."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """The family of sockets for this address, whose host must be an IP address."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


class UnixAddress(Struct, frozen=True):
    """A socket file."""

    path: str

    @property
    def target(self) -> str:
        """The address in gRPC's form."""
        return _UNIX + self.path


Address = TcpAddress | UnixAddress


def parse(address: str) -> Address:
    """Parse an address.

    Raises:  ConfigError: the text is not an address.
    """
    if address.startswith(_UNIX):
        path = address.removeprefix(_UNIX)
        path = path.removeprefix("//") if path.startswith("///") else path
        length = len(path.encode())
        if not 0 < length <= _UNIX_PATH_BYTES_MAX:
            raise ConfigError(
                f"{address!r}: a socket's path has 1 to {_UNIX_PATH_BYTES_MAX} bytes, not {length}",
                address=address,
            )
        return UnixAddress(path)
    if "://" in address:
        raise ConfigError(
            f"{address!r} is not an address: leave out {address.partition('://')[0]}://, and write "
            '"host:port", "[::1]:port" or "unix:/path"',
            address=address,
        )
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > _PORT_MAX:
        raise ConfigError(
            f'{address!r} is not an address: write "host:port", "[::1]:port" or "unix:/path"',
            address=address,
        )
    return TcpAddress(host, int(port))


def resolve(address: TcpAddress) -> TcpAddress:
    """Return the address with the host as one IP address, so that a name with several IP addresses
    is bound only once.

    Raises:  ConfigError: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{address.target!r}: the host name cannot be resolved: {error.strerror}",
            address=address.target,
        ) from error
    by_family = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return TcpAddress(str(by_family[0][4][0]), address.port)


def listening(address: TcpAddress, backlog: int) -> socket.socket:
    """Return a socket that listens at this address, whose host must be an IP address.

    Raises:  OSError: the address is taken, or does not belong to this machine.
    """
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        # Let a restarted process take its port again while connections of its predecessor linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def network_of(host: str) -> str:
    """Return the owner of an address, for limits per host: an IPv4 address itself; for an IPv6
    address its network of 64 bits, all addresses of which one host may use.
    """
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _OWN_BITS), strict=False))


def is_this_host(address: TcpAddress) -> bool:
    """Return whether the host, as given, certainly is this machine. Of names, only localhost is:
    other names may resolve to another address tomorrow.
    """
    try:
        return is_loopback(address)
    except ValueError:
        return address.host.lower() == "localhost"


def is_loopback(address: TcpAddress) -> bool:
    """Return whether only this machine reaches the address, whose host must be an IP address."""
    return ipaddress.ip_address(address.host.partition("%")[0]).is_loopback
