"""Prefixes of urls, as tokens and settings name them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_GLOB = "*?[{"
_SEPARATORS = re.compile(r"[/\\{},]")
_DOTS = frozenset({".", "..", "%2e", "%2e%2e", ".%2e", "%2e."})


def is_under(url: str, prefixes: Iterable[str]) -> bool:
    """Whether everything that this url, or this pattern, can name lies under one of the prefixes.

    "s3://bucket/train" contains itself and "s3://bucket/train/a", but not "s3://bucket/train-2".
    A url with a segment "..", which a server or library may resolve, lies nowhere.
    """
    fixed = literal(url)
    path = url.partition("://")[2].partition("?")[0].partition("#")[0]
    if any(part.lower() in _DOTS for part in _SEPARATORS.split(path)):
        return False
    return any(_starts(fixed, prefix, is_whole=fixed == url) for prefix in prefixes)


def literal(pattern: str) -> str:
    """What is before the first wildcard or brace: what all urls that match begin with. In an http
    url, a question mark starts the query.
    """
    wild = _GLOB.replace("?", "") if pattern.startswith(("http://", "https://")) else _GLOB
    at = min((found for one in wild if (found := pattern.find(one)) >= 0), default=len(pattern))
    return pattern[:at]


def _starts(fixed: str, prefix: str, *, is_whole: bool) -> bool:
    if prefix.endswith("/"):
        return fixed.startswith(prefix) or (is_whole and f"{fixed}/" == prefix)
    return (is_whole and fixed == prefix) or fixed.startswith(f"{prefix}/")
