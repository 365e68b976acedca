"""Decide which urls a node opens for its trainers, and wrap stores so that they open no others.

Invariants:
1. A url is checked before anything is sent or opened for it, so no error shows bytes of it.
2. A local file is judged by its path after all symbolic links are resolved.
3. An http connection is judged by the address that it is connected to, and a redirect by the url
   that it leads to.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import unicodedata
import urllib.parse
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from msgspec import Struct
from typing_extensions import Buffer

from dataplane.base.suffixes import TABLE_PREFIXES
from dataplane.base.trace import Trace
from dataplane.model.errors import ConfigError, StoreDenied
from dataplane.model.records import ObjectInfo
from dataplane.model.redact import unpinned
from dataplane.security.urls import covers, is_under
from dataplane.store.base import Page, Paged, Pinning, Reconnecting, Store
from dataplane.store.reads import fill
from dataplane.store.urls import FILE_PREFIX, local_path, normalise

# Addresses, besides link-local ones, where clouds serve credentials to their machines.
_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    )
)
_OUT = "is a symbolic link that leads out of"
_trace = Trace("security")
_BUCKETS = frozenset({"s3", "gs", "az", "adl", "abfs", "abfss", "oss", "hf"})
"""Schemes whose urls contain no host name: 2852039166 is a possible bucket, not an address."""
_HOST_ENDS = re.compile(r"[/?#\\]")
_MAYBE_ADDRESS = re.compile(r"[\d.]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.%\w]*")
_MAYBE_NUMBERS = re.compile(r"[0-9A-Fa-fXx.]+")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class UrlPolicy(Struct, frozen=True):
    """The prefixes of urls that may be opened; () for all. Link-local addresses, and addresses
    where clouds serve credentials, are refused unless a prefix names them.
    """

    prefixes: tuple[str, ...] = ()

    def check_names(self, names: Iterable[str]) -> None:
        """Check the urls that a trainer passes, which may have wildcards.

        Raises:  StoreDenied.  ConfigError: not a url.
        """
        for url in map(normalise, names):
            if url.startswith(TABLE_PREFIXES):  # its package would open whatever its files name
                raise ConfigError(
                    f"{url}: a node of a service opens no table: pass the url of a manifest that "
                    "`dataplane index … -o FILE` has made of it",
                    field="urls",
                )
            if self.prefixes and not is_under(url, self.prefixes):
                raise self._denied(url)
            self._check_host(url)

    def check(self, url: str) -> None:
        """Check the url of an object.

        Raises:  StoreDenied.
        """
        if self.prefixes:
            if not covers(url, self.prefixes):
                raise self._denied(url)
            path = local_path(url)
            if path is not None and not is_under(_target(path), self._roots()):
                raise self._denied(url, _OUT)
        self._check_host(url)

    def allows(self, url: str) -> bool:
        """Return whether a prefix covers this url. Nothing is logged."""
        return not self.prefixes or covers(url, self.prefixes)

    def check_all(self, urls: Iterable[str]) -> None:
        """Check the urls of many objects. The links in the path of a folder are resolved once.

        Raises:  StoreDenied.
        """
        roots = self._roots()
        inside: dict[str, bool] = {}
        for url in urls:
            folder, _, name = url.rpartition("/")
            if not folder.startswith(FILE_PREFIX) or name in {"", ".", ".."}:
                self.check(url)
                continue
            if not self.prefixes:
                continue
            if folder not in inside:
                inside[folder] = is_under(_target(folder[len(FILE_PREFIX) :] or "/"), roots)
            path = url[len(FILE_PREFIX) :]
            if not is_under(url, self.prefixes):
                raise self._denied(url)
            # Use os.path, since making a Path for each of a million files would take seconds.
            is_link = os.path.islink(path)  # noqa: PTH114
            if (is_link or not inside[folder]) and not is_under(_target(path), roots):
                raise self._denied(url, _OUT)

    def check_address(self, url: str, address: str) -> None:
        """Check the IP address to which a request for this url connects.

        Raises:  StoreDenied.
        """
        if is_of_machine(address) and not self._names(address):
            refused(url, f"its server is at {address}")
            raise StoreDenied(
                f"{url}: its server is at {address}, which is link-local or serves the "
                "credentials of a cloud's machine: a node connects there only if allowed_urls "
                "names the address",
                shard=url,
            )

    def _check_host(self, url: str) -> None:
        """Check a host that is written as an address, in a url of any scheme."""
        if address := _address_in(url):
            self.check_address(url, address)

    def _names(self, address: str) -> bool:
        """Return whether a prefix has exactly this address as its host."""
        return any(_address_in(prefix) == address for prefix in self.prefixes)

    def _roots(self) -> tuple[str, ...]:
        """Return the resolved paths of file prefixes, which may contain links themselves."""
        return tuple(_target(path) for prefix in self.prefixes if (path := local_path(prefix)))

    def _denied(self, url: str, why: str = "is not below") -> StoreDenied:
        refused(url, f"it {why} allowed_urls")
        return StoreDenied(
            f"{url} {why} the urls that this node may open: {', '.join(self.prefixes)}. "
            "Add it to allowed_urls of the node (--allowed-urls), or choose another",
            shard=url,
        )


def refused(url: str, why: str) -> None:
    """Log a refused url in one line; the number of lines is limited for each server."""
    _trace.refused("url refused", by=_base(url), url=url, why=why)


def _base(url: str) -> str:
    """Return the scheme and the host of a url."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{_HOST_ENDS.split(rest, maxsplit=1)[0].rpartition('@')[2]}"


def _address_in(url: str) -> str:
    """Return the IP address that is the host of a url, in its usual form; "" if the host is a name.
    The address may be written in any way that inet_aton(3) reads, with a dot at its end, or with
    characters that a resolver replaces by these.
    """
    scheme, _, host = _base(url).partition("://")
    if "%" in host or not host.isascii():
        host = unicodedata.normalize("NFKC", urllib.parse.unquote(host)).replace("\u3002", ".")
    if host.startswith("["):
        return _usual(host[1:].partition("]")[0])
    host = host.partition(":")[0]
    if scheme in _BUCKETS or not _MAYBE_NUMBERS.fullmatch(host):
        return _usual(host)
    with contextlib.suppress(OSError):
        return socket.inet_ntoa(socket.inet_aton(host.rstrip(".")))
    return ""


def _usual(address: str) -> str:
    """Return an IP address in its usual form; "" if the text is not an address."""
    if _MAYBE_ADDRESS.fullmatch(address):
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(address))
    return ""


def is_of_machine(address: str) -> bool:
    """Return whether an IP address, in any form, is link-local or one where a cloud serves
    credentials.
    """
    parsed: _Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if parsed in _NAT64:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        parsed = inner or parsed
    return (
        parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast or parsed in _METADATA
    )


class PolicedStore:
    """A store that opens only what the policy allows."""

    def __init__(self, inner: Store, policy: UrlPolicy) -> None:
        self._inner, self._policy = inner, policy

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if not (unpinned(prefix) != prefix and self._policy.allows(prefix)):
            self._policy.check_names([prefix])
        infos = list(self._inner.list(prefix))
        self._policy.check_all(info.url for info in infos)
        return iter(infos)

    def pinned(self, url: str) -> str:
        """Implement `base.Pinning.pinned`."""
        self._policy.check_names([url])
        return self._inner.pinned(url) if isinstance(self._inner, Pinning) else url

    def opens(self, url: str) -> bool:
        """Implement `base.Restricted.opens`."""
        return self._policy.allows(url)

    def has_pages(self) -> bool:
        """Implement `base.Paged.has_pages`."""
        return isinstance(self._inner, Paged) and self._inner.has_pages()

    def page(self, prefix: str, after: str | None) -> Page:
        """Implement `base.Paged.page`."""
        assert isinstance(self._inner, Paged)
        self._policy.check_names([prefix])
        page = self._inner.page(prefix, after)
        self._policy.check_all(info.url for info in chain(page.objects, page.empty))
        return page

    def head(self, url: str) -> ObjectInfo:
        self._policy.check(url)
        return self._inner.head(url)

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        self._policy.check(url)
        return self._inner.read(url, offset, length, etag)

    def read_into(self, url: str, offset: int, etag: str, *into: memoryview) -> None:
        """Implement `base.Filling.read_into`."""
        self._policy.check(url)
        fill(self._inner, url, offset, etag, *into)

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        self._policy.check(url)
        return self._inner.stream(url, etag)

    def reconnect(self) -> None:
        """Implement `base.Reconnecting.reconnect`."""
        if isinstance(self._inner, Reconnecting):
            self._inner.reconnect()


def _target(path: str | Path) -> str:
    """Return the url of a path after all symbolic links are resolved."""
    return f"{FILE_PREFIX}{os.path.realpath(path)}"
