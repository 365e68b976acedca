"""Addresses of gRPC services: "host:port", "[::1]:port" or "unix:/path/to/socket"."""

from __future__ import annotations

import hashlib
import ipaddress
import socket

from msgspec import Struct

from dataplane.base import units
from dataplane.base.units import ValueKind
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


# -- names of nodes' sockets -----------------------------------------------------------------------
#
# Abstract names, under which nodes listen: trainer and node compute the same one.

_LOOPBACK = "127.0.0.1"


def served_name(uid: int, service: str) -> str:
    """Return the socket name of this user's node on this host for the coordinator at `service`.
    Upper and lower case, and different names of the loopback address, give the same name.

    Raises:  ConfigError: `service` is not an address.
    """
    parsed = parse(service.strip())
    if isinstance(parsed, TcpAddress):
        host = parsed.host.lower()
        host = _LOOPBACK if host in {"localhost", "::1"} else host
        return _name(uid, "served", TcpAddress(host, parsed.port).target)
    return _name(uid, "served", parsed.target)


def embedded_name(uid: int, version: str, run: str) -> str:
    """Return the socket name of the node that the trainers of one run on this host share."""
    return _name(uid, "embedded", version, run)


def _name(uid: int, *parts: str) -> str:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
    return f"dataplane-{uid}-{parts[0]}-{digest}"


# -- addresses as settings -------------------------------------------------------------------------
#
# The allowed forms, and the descriptions of these in help texts.


def _address(given: object) -> str:
    try:
        return parse(units.text(given)).target
    except ConfigError as error:
        raise ValueError(given) from error


def _address_or_none(given: object) -> str:
    return "" if given == "" else _address(given)


def _data_address(given: object) -> str:
    if given in ("", NO_NEIGHBOURS):
        return str(given)
    found = units.text(given)
    is_port = found.startswith(":")
    target = _address(f"localhost{found}" if is_port else found)
    # Refuse wildcard addresses: a node that listens at every address could not tell other nodes
    # which address to connect to.
    if target.startswith(_NOT_ONE):
        raise ValueError(given)
    return found if is_port else target


def _metrics_address(given: object) -> str:
    if given == "":
        return ""
    text = units.text(given)
    target = _address(f"127.0.0.1{text}" if text.startswith(":") else text)
    if target.startswith("unix:"):
        raise ValueError(given)
    return target


NO_NEIGHBOURS = "none"
_NOT_ONE = ("unix:", "0.0.0.0:", "[::]:")
_FORMS = '"host:port", "[::1]:port" or "unix:/path"'
ADDRESS = ValueKind(_FORMS, "ADDRESS", _address)
DATA_ADDRESS = ValueKind(
    '"host:port", "[::1]:port", ":port" at the address from which the node reaches its '
    'coordinator, or "none"',
    "ADDRESS",
    _data_address,
)
METRICS_ADDRESS = ValueKind(
    '"host:port", "[::1]:port", ":port" for 127.0.0.1, or "" for none', "ADDRESS", _metrics_address
)
ADDRESS_OR_NONE = ValueKind(f'{_FORMS}, or "" for none', "ADDRESS", _address_or_none)
