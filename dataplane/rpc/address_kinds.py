"""Addresses as settings: the allowed forms, and how help texts describe them."""

from __future__ import annotations

from dataplane import units
from dataplane.errors import ConfigError
from dataplane.rpc import address
from dataplane.units import ValueKind


def _address(given: object) -> str:
    try:
        return address.parse(units.text(given)).target
    except ConfigError as error:
        raise ValueError(given) from error


def _address_or_none(given: object) -> str:
    return "" if given == "" else _address(given)


_FORMS = '"host:port", "[::1]:port" or "unix:/path"'
ADDRESS = ValueKind(_FORMS, "ADDRESS", _address)
ADDRESS_OR_NONE = ValueKind(f'{_FORMS}, or "" for none', "ADDRESS", _address_or_none)
