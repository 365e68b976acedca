"""Prefixes of urls, as tokens and settings name them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WILD, _WILD_IN_HTTP = re.compile(r"[*?\[{]"), re.compile(r"[*\[{]")
_DOTS = re.compile(r"[/\\{},](?:\.|%2e){1,2}(?=\Z|[/\\{},])", re.IGNORECASE)


def is_under(url: str, prefixes: Iterable[str]) -> bool:
    """Whether everything that this url, or this pattern, can name lies under one of the prefixes.

    "s3://bucket/train" contains itself and "s3://bucket/train/a", but not "s3://bucket/train-2".
    A url with a segment "..", which a server or library may resolve, lies nowhere.
    """
    if _DOTS.search(url.partition("?")[0].partition("#")[0] if _is_http(url) else url):
        return False
    fixed = literal(url)
    is_whole = len(fixed) == len(url)
    return any(_starts(fixed, prefix, is_whole=is_whole) for prefix in prefixes)


def literal(pattern: str) -> str:
    """What is before the first wildcard or brace: what all urls that match begin with. In an http
    url, a question mark starts the query, and the host may have brackets.
    """
    if _is_http(pattern):
        host = pattern.find("/", len("https://"))
        found = _WILD_IN_HTTP.search(pattern, host if host > 0 else len(pattern))
    else:
        found = _WILD.search(pattern)
    return pattern[: found.start()] if found else pattern


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _starts(fixed: str, prefix: str, *, is_whole: bool) -> bool:
    if prefix.endswith("/"):
        return fixed.startswith(prefix) or (is_whole and f"{fixed}/" == prefix)
    return fixed.startswith(f"{prefix}/") or (is_whole and fixed == prefix)
