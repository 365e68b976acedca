"""Parse and normalise the urls that a user names, and match patterns over them.

Normalised urls are "scheme://authority/key", with the key as the store knows it: nothing is
percent-encoded, except in http urls, which keep the form of the web. A local file is
"file:///absolute/path".
"""

from __future__ import annotations

import os
import posixpath
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from dataplane.base.suffixes import TABLE_PREFIXES
from dataplane.model.errors import ConfigError

Url = str | os.PathLike[str]

NAMES_MAX = 100_000
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
SCHEMES = (
    "s3", "gs", "az", "abfs", "abfss", "adl", "http", "https", "file", "hf", "hdfs", "webhdfs",
    "sftp", "ssh", "smb", "oss", "memory",
)  # fmt: skip
"""Common schemes, with which a misspelt scheme is compared."""
FILE_PREFIX = "file://"
# A scheme without "//", such as "s3:/bucket". The user means a url, unless a local file with this
# name exists.
_MISSING_SLASH = re.compile(
    r"(s3[an]?|gs|gcs|az|azure|adl|abfss?|wasbs?|https?|hf|s?ftp|ssh|(?:web)?hdfs|smb|oss|memory)"
    r":(?!//)/*(.*)",
    re.IGNORECASE | re.DOTALL,
)
_CHAIN = re.compile(r"::[A-Za-z][A-Za-z0-9+.\-]*://")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])")
_EXACT = ("s3://", "gs://", "az://", "adl://", "abfs://", "abfss://", FILE_PREFIX)
_NO_AUTHORITY = ("file", "memory", "local")


def normalise(url: Url) -> str:
    """Return the canonical form of this url. A trailing slash, which names a folder, is kept.

    Raises:  ConfigError: not a url, or not one that can name an object.
    """
    text = os.fspath(url)
    if not isinstance(text, str):
        raise ConfigError(f"{text!r} is {type(text).__name__}: pass shards as str or path")
    if text.startswith(TABLE_PREFIXES):
        kind, _, table = text.partition("+")
        return f"{kind}+{normalise(table)}"
    if not text.strip() or "\0" in text:
        what = "has a NUL character" if "\0" in text else "is empty"
        raise ConfigError(f"{text!r} {what}: pass a url or a path")
    if text.startswith("pipe:"):
        raise ConfigError(
            f"{text!r:.200} is a command, which is not run: pass the urls that it reads, such as"
            " s3://bucket/train-{000..099}.tar, or files that it has written"
        )
    if _CHAIN.search(text):
        raise ConfigError(
            f"{text!r} is a chain of urls, which cannot be read by range: pass a single url"
        )
    scheme_match = _SCHEME.match(text)
    if scheme_match is None:
        _check_slashes(text)
    if scheme_match is None and not text.startswith("file:"):
        return _file_url(os.path.expanduser(text))  # noqa: PTH111 - Path would drop the last slash
    scheme = scheme_match[1].lower() if scheme_match else "file"
    scheme = _ALIASES.get(scheme, scheme)
    rest = text[scheme_match.end() :] if scheme_match else text.removeprefix("file:")
    if scheme in ("file", "local"):
        return _from_file_url(rest, text)
    authority = rest.partition("/")[0]
    if not authority and scheme not in _NO_AUTHORITY:
        raise ConfigError(f"{text!r} names no bucket: write {scheme}://bucket/key")
    return f"{scheme}://{rest}"


def canonical(url: str) -> str:
    """Return one text for all ways to write a normalised url. The url of an object in a bucket can
    be written in one way only.
    """
    if url.startswith(_EXACT):
        return url
    if not url.startswith(("http://", "https://")):
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{posixpath.normpath('/' + rest.lstrip('/'))[1:]}"
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.lower().removesuffix(":80" if parts.scheme == "http" else ":443")
    path = posixpath.normpath(urllib.parse.unquote(parts.path) or "/")
    return urllib.parse.urlunsplit((parts.scheme, host, path, parts.query, ""))


def prefixes_of(text: str) -> tuple[str, ...]:
    """Parse the prefixes of urls in a setting, and normalise them.

    Raises:  ConfigError: a prefix is not a url.
    """
    return tuple(map(normalise, text.split()))


def _check_slashes(text: str) -> None:
    typo = _MISSING_SLASH.match(text)
    if typo is not None and not os.path.lexists(text):
        raise ConfigError(
            f"{text!r} is neither a url nor an existing file: did you mean "
            f"{typo[1].lower()}://{typo[2]}? For a local path write ./{text}"
        )


def exists(path: str | Path) -> bool:
    """Return whether a file or folder of this name exists; False if the name is too long."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists() raises


def local_path(url: str) -> Path | None:
    """Return the path of a file url; None for every other url."""
    return Path(url[len(FILE_PREFIX) :]) if url.startswith(FILE_PREFIX) else None


def scheme_of(url: str) -> str:
    """Return the scheme of a normalised url: "s3"."""
    return url.partition("://")[0]


def base_of(url: str) -> str:
    """Return scheme and authority of a normalised url, without a trailing slash: "s3://bucket"."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def key_of(url: str) -> str:
    """Return the part after the authority: "folder/name", as the store knows it."""
    return url[len(base_of(url)) + 1 :]


def folder_of(prefix: str) -> str:
    """Return the folder, with its slash, that contains all urls that start with `prefix`."""
    cut = prefix.rfind("/")
    return prefix[: cut + 1] if cut >= len(base_of(prefix)) else f"{base_of(prefix)}/"


def braces(pattern: str) -> Iterator[str]:
    """Expand braces such as `{a,b}`, `{000..127}`, `{0..9..3}` and `{a..e}`, in order.

    Braces that a shell would not expand ("{}", "{a}") stay unchanged. Nothing inside a glob's
    brackets is expanded, so "[{]" is a plain brace.

    Raises:  ConfigError: a brace that never closes; more than NAMES_MAX names.
    """
    start, end = _outer_braces(pattern)
    if start < 0:
        yield pattern
        return
    head, inner, tail = pattern[:start], pattern[start + 1 : end], pattern[end + 1 :]
    choices = _alternatives(inner)
    count = 0
    for choice in choices if choices is not None else [f"{{{inner}}}"]:
        for rest in braces(tail):
            count += 1
            if count > NAMES_MAX:
                raise ConfigError(f"{pattern!r} expands to more than {NAMES_MAX} names")
            yield f"{head}{choice}{rest}"


def _file_url(path: str) -> str:
    absolute = os.path.abspath(path)  # noqa: PTH100 - lexical: links stay as they are
    # Undo two effects of abspath: it keeps a double slash at the beginning, and drops the slash at
    # the end, which says that a folder is meant.
    tail = "/" if path.endswith("/") else ""
    return "file:///" + (absolute.lstrip("/") + tail).removeprefix("/")


def _from_file_url(rest: str, text: str) -> str:
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if not path.startswith("/"):
        raise ConfigError(f"{text!r} is not absolute: write file:///folder/name, or a plain path")
    return _file_url(path)


def _outer_braces(pattern: str) -> tuple[int, int]:
    """Return where the first brace to expand opens and closes; (-1, -1) if there is none."""
    start, depth, index = -1, 0, 0
    while index < len(pattern):
        letter = pattern[index]
        if letter == "[":
            close = pattern.find("]", index + 2)
            if close > 0 and "/" not in pattern[index:close]:
                index = close
        elif letter == "{":
            start = index if depth == 0 else start
            depth += 1
        elif letter == "}" and depth:
            depth -= 1
            if depth == 0:
                return start, index
        index += 1
    if depth:
        raise ConfigError(
            f"{pattern!r} has a brace that never closes: write {{000..127}} or {{a,b}}"
        )
    return -1, -1


def _alternatives(inner: str) -> list[str] | None:
    """Return the texts that one pair of braces expands to; None if it is neither a list nor a
    range.
    """
    numbers = _RANGE.fullmatch(inner)
    if numbers:
        return _numbers(numbers[1], numbers[2], int(numbers[3] or 1))
    letters = _LETTERS.fullmatch(inner)
    if letters:
        first, last = ord(letters[1]), ord(letters[2])
        step = 1 if last >= first else -1
        return [chr(code) for code in range(first, last + step, step)]
    parts = _split(inner)
    if len(parts) == 1:
        nested = list(braces(inner))
        return None if nested == [inner] else [f"{{{name}}}" for name in nested]
    return [name for part in parts for name in braces(part)]


def _numbers(first: str, last: str, step: int) -> list[str]:
    low, high = int(first), int(last)
    step = max(1, abs(step)) * (1 if high >= low else -1)
    count = abs(high - low) // abs(step) + 1
    if count > NAMES_MAX:
        raise ConfigError(f"{{{first}..{last}}} stands for {count} names, more than {NAMES_MAX}")
    padded = any(len(end.lstrip("-")) > 1 and end.lstrip("-")[0] == "0" for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{number:0{width}d}" for number in range(low, high + (1 if step > 0 else -1), step)]


def _split(inner: str) -> list[str]:
    """Split `inner` at its commas, except for those within nested braces."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(inner):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append(inner[start:index])
            start = index + 1
    return [*parts, inner[start:]]


# Glob patterns over urls, with the rules that data folders need.
#
# `*` and `?` match within one folder, `**` as a whole segment matches any number of folders, `[…]`
# is a set of characters. Files that tools leave beside the data ("_SUCCESS", ".part-0.crc",
# "_temporary/") are hidden: wildcards do not match them, and folders do not include them.
# "_key=value" is not hidden. Hadoop's "name._COPYING_" and "name_$folder$" are hidden, too.

_MAGIC = re.compile(r"[*?\[]")
_HIDDEN = re.compile(r"(?:\A|/)(?:\.|_[^/=]*(?:/|\Z))")
_LEFT_BY_HADOOP = ("._COPYING_", "_$folder$")
_VISIBLE = r"(?!\.)(?!_[^/=]*(?:/|\Z))"
"""Matches at the beginning of a segment that is not hidden."""


def is_glob(pattern: str) -> bool:
    """Return whether a pattern contains a wildcard. In http urls, "?" begins the query."""
    return _MAGIC.search(_searched(pattern)) is not None


def literal_prefix(pattern: str) -> str:
    """Return the longest beginning of the pattern without a wildcard: the prefix to list."""
    wildcard = _MAGIC.search(_searched(pattern))
    return pattern[: wildcard.start()] if wildcard else pattern


def is_hidden(name: str) -> bool:
    """Return whether any segment of a key below a folder is hidden."""
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
