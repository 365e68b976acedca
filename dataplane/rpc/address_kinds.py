"""Addresses as settings: their allowed forms, and the descriptions of these in help texts."""

from __future__ import annotations

from dataplane.base import units
from dataplane.base.units import ValueKind
from dataplane.model.errors import ConfigError
from dataplane.rpc import address


def _address(given: object) -> str:
    try:
        return address.parse(units.text(given)).target
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
    '"host:port", "[::1]:port", ":port" for the address by which it reaches its coordinator, or '
    '"none"',
    "ADDRESS",
    _data_address,
)
METRICS_ADDRESS = ValueKind(
    '"host:port", "[::1]:port", ":port" for 127.0.0.1, or "" for none', "ADDRESS", _metrics_address
)
ADDRESS_OR_NONE = ValueKind(f'{_FORMS}, or "" for none', "ADDRESS", _address_or_none)
