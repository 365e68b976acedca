"""Where a gRPC service listens: "host:port", "[::1]:port" or "unix:/path/to/socket"."""

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
    """A host and a port; port 0 asks for a free one."""

    host: str
    port: int

    @property
    def target(self) -> str:
        """The address in gRPC's form."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """The family of sockets for it; the host is an IP address."""
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

    Raises:  ConfigError: it is not an address.
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
    """The same with the host as one IP address, so that a name with several addresses is bound
    once.

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
    """Return a socket that listens at this address, whose host is an IP address.

    Raises:  OSError: the address is taken, or is none of this machine.
    """
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        # A process that is started again takes its port although old connections linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def network_of(host: str) -> str:
    """Whose address this is, for limits: itself, or the network of an IPv6 address, since whoever
    has one has all of these.
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
    """Whether the host, as it was given, is sure to mean this machine: other names than localhost
    may resolve to another address tomorrow.
    """
    try:
        return is_loopback(address)
    except ValueError:
        return address.host.lower() == "localhost"


def is_loopback(address: TcpAddress) -> bool:
    """Whether only this machine reaches it; the host is an IP address."""
    return ipaddress.ip_address(address.host.partition("%")[0]).is_loopback
