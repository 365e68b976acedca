"""Glob patterns over urls, with the rules that data folders need.

`*` and `?` stay within one folder, `**` as a whole segment crosses any number of them, `[…]` is a
set of characters. Files that tools leave beside the data ("_SUCCESS", ".part-0.crc", "_temporary/")
are hidden: wildcards do not match them, and folders do not include them. "_key=value" is not
hidden. Hadoop's "name._COPYING_" and "name_$folder$" are hidden, too.
"""

from __future__ import annotations

import re

_MAGIC = re.compile(r"[*?\[]")
_HIDDEN = re.compile(r"(?:\A|/)(?:\.|_[^/=]*(?:/|\Z))")
_LEFT_BY_HADOOP = ("._COPYING_", "_$folder$")
_VISIBLE = r"(?!\.)(?!_[^/=]*(?:/|\Z))"
"""At the start of a segment: the segment is not hidden."""


def is_glob(pattern: str) -> bool:
    """Whether a pattern contains a wildcard. In an http url, a question mark starts the query."""
    return _MAGIC.search(_searched(pattern)) is not None


def literal_prefix(pattern: str) -> str:
    """Return the longest start of the pattern without a wildcard: the prefix to list."""
    found = _MAGIC.search(_searched(pattern))
    return pattern[: found.start()] if found else pattern


def is_hidden(name: str) -> bool:
    """Whether any segment of a key below a folder is hidden."""
    return _HIDDEN.search(name) is not None or name.endswith(_LEFT_BY_HADOOP)


def compile_glob(pattern: str) -> re.Pattern[str]:
    """Return the regular expression that whole urls match."""
    scheme, _, rest = pattern.partition("://")
    question = re.escape("?") if scheme in ("http", "https") else "[^/]"
    segments = rest.split("/")
    text = ""
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        if segment == "**":
            below = f"(?:{_VISIBLE}[^/]+/)*"
            text += below + (f"{_VISIBLE}[^/]+" if last else "")
        else:
            text += _segment(segment, question) + ("" if last else "/")
    return re.compile(f"{re.escape(scheme)}://{text}", re.DOTALL)


def _segment(segment: str, question: str) -> str:
    shown = segment[:1] in ("*", "?") or (segment[:1] == "[" and segment[1:2] not in ("_", "."))
    text = _VISIBLE if shown else ""
    index = 0
    while index < len(segment):
        letter = segment[index]
        close = segment.find("]", index + 2) if letter == "[" else -1
        if letter == "*":
            text += "[^/]*"
        elif letter == "?":
            text += question
        elif close > 0:
            text += _set(segment[index + 1 : close])
            index = close
        else:
            text += re.escape(letter)
        index += 1
    return text


def _set(inner: str) -> str:
    negated = inner[0] in "!^" and len(inner) > 1
    body = inner[1:] if negated else inner
    parts: list[str] = []
    index = 0
    while index < len(body):
        if body[index + 1 : index + 2] == "-" and index + 2 < len(body):
            low, high = sorted((body[index], body[index + 2]))
            parts.append(f"{re.escape(low)}-{re.escape(high)}")
            index += 3
        else:
            parts.append(re.escape(body[index]))
            index += 1
    return f"(?!/)[{'^' if negated else ''}{''.join(parts)}]"


def _searched(pattern: str) -> str:
    """Return the part that may contain wildcards. The query of an http url may not, and is sent
    unchanged.
    """
    if pattern.startswith(("http://", "https://")):
        return pattern.partition("?")[0]
    return pattern
