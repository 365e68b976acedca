"""Prefixes of urls, in tokens and settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from dataplane.model.redact import hub_parts, is_commit, unpinned

_WILD, _WILD_IN_HTTP = re.compile(r"[*?\[{]"), re.compile(r"[*\[{]")
_DOTS = re.compile(r"[/\\{},](?:\.|%2e){1,2}(?=\Z|[/\\{},])", re.IGNORECASE)


def is_under(url: str, prefixes: Iterable[str]) -> bool:
    """Return whether everything that this url or pattern can name lies under one of the prefixes.

    "s3://bucket/train" contains itself and "s3://bucket/train/a", but not "s3://bucket/train-2".
    A url with a segment "..", which a server or library may resolve, is never under a prefix.
    """
    if _DOTS.search(url.partition("?")[0].partition("#")[0] if _is_http(url) else url):
        return False
    fixed = literal(url)
    is_whole = len(fixed) == len(url)
    return any(_starts(fixed, prefix, is_whole=is_whole) for prefix in prefixes)


def covers(url: str, prefixes: Iterable[str]) -> bool:
    """Check the url of a listed object like `is_under`. An object at a pinned commit of a
    repository counts as the object on the branch. (The code that resolves the branch checks whether
    it may be read.)
    """
    prefixes = tuple(prefixes)
    if is_under(url, prefixes):
        return True
    hub = hub_parts(url)
    if hub is None or not is_commit(hub[1]):
        return False
    return is_under(unpinned(url), map(unpinned, prefixes))


def are_under(urls: Collection[str], prefixes: Collection[str]) -> bool:
    """Return whether there are urls, and all of them are under the prefixes."""
    return bool(urls) and all(is_under(url, prefixes) for url in urls)


def roots(urls: Iterable[str]) -> tuple[str, ...]:
    """Return prefixes of everything that these urls and patterns can name: the urls themselves, and
    the folders in which wildcards begin. If the urls are under some prefixes, so are their roots.
    """
    found = set[str]()
    for url in urls:
        fixed = literal(url)
        found.add(fixed if fixed == url else fixed[: fixed.rfind("/") + 1])
    return tuple(sorted(found))


def literal(pattern: str) -> str:
    """Return the text before the first wildcard or brace, with which all matching urls begin. In an
    http url, a question mark begins the query, and the host may contain brackets.
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
