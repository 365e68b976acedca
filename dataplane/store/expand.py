"""Expands the urls that a user passes to the existing objects."""

from __future__ import annotations

import difflib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path

from dataplane.errors import ConfigError, ShardNotFound
from dataplane.model import ObjectInfo
from dataplane.store import globs
from dataplane.store.base import Store
from dataplane.store.urls import Url, base_of, braces, local_path, normalise

Connect = Callable[[str], Store]

_HEADS_IN_FLIGHT = 16
_NAMES_SHOWN = 3


def expand(urls: Url | Iterable[Url], stores: Connect) -> list[ObjectInfo]:
    """Every object that `urls` names: in the order of the names, and by url within one name.

    A name is a url or path; braces, wildcards and folders expand to many. A folder expands to all
    objects below it that are not hidden (see globs). `stores` gives the store of a url.

    Raises:  ConfigError: an object is listed twice, or a name is not a url.  ShardNotFound: a name
    matches nothing; suggests similar ones.  Errors of the stores.
    """
    names = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    if not names:
        raise ConfigError("no shards: the list of urls is empty")
    found: dict[str, ObjectInfo] = {}
    counts: list[int] = []
    for name in names:
        matches = [info for pattern in _patterns(name) for info in _objects(pattern, stores)]
        # Stores list in this order. A sort of a million keeps all other threads waiting.
        if any(one.url > next_.url for one, next_ in pairwise(matches)):
            matches.sort(key=lambda info: info.url)
        for info in matches:
            if info.url in found:
                at = list(found).index(info.url)
                first = names[bisect_right(counts, at)]
                raise ConfigError(
                    f"{info.url} is listed twice, by {os.fspath(first)!r} and by "
                    f"{os.fspath(name)!r}: an epoch visits each shard once",
                    shard=info.url,
                )
            found[info.url] = info
        counts.append(len(found))
    return list(found.values())


def _patterns(name: Url) -> Iterator[list[str]]:
    """The patterns of one name; literal ones together, since they are looked up together."""
    url = normalise(name)
    path = local_path(url)
    if path is not None and path.exists():
        yield [url]  # whatever braces and stars its name has
        return
    literals: list[str] = []
    for pattern in braces(url):
        if globs.is_glob(pattern):
            yield [pattern]
        else:
            literals.append(pattern)
    if literals:
        yield literals


def _objects(patterns: Sequence[str], stores: Connect) -> Iterator[ObjectInfo]:
    path = local_path(patterns[0])
    is_literal = not globs.is_glob(patterns[0]) or (path is not None and path.exists())
    if not is_literal:
        yield from _matching(patterns[0], stores)
    elif len(patterns) == 1:
        yield from _named(patterns[0], stores)
    else:
        with ThreadPoolExecutor(_HEADS_IN_FLIGHT, thread_name_prefix="dataplane-head") as pool:
            for infos in pool.map(lambda url: _named(url, stores), patterns):
                yield from infos


def _named(url: str, stores: Connect) -> list[ObjectInfo]:
    """The object with that url, or else all objects below the folder with that url."""
    store = stores(url)
    is_folder = (url.endswith("/") and _can_be_folder(url)) or url == base_of(url)
    if not is_folder:
        try:
            return [store.head(url)]
        except ShardNotFound as cause:
            if not _can_be_folder(url):
                raise
            missing = cause
    folder = f"{url.rstrip('/')}/"
    below = list(store.list(folder)) if _can_be_folder(url) else []
    shown = [info for info in below if not globs.is_hidden(info.url[len(folder) :])]
    if shown:
        return shown
    if below:
        raise ShardNotFound(
            f"all {len(below)} objects below {folder} are hidden (names begin with a dot or "
            f"underscore): {_some(below)}. A pattern such as {folder}_* names them",
            shard=url,
        )
    path = local_path(url)
    if path is not None and path.is_dir():
        raise ShardNotFound(f"{path} {_without_files(path)}", shard=url)
    if is_folder:
        raise ShardNotFound(f"there is nothing below {folder}{_near_file(folder)}", shard=url)
    raise ShardNotFound(
        f"{missing}. There is nothing below {folder} either{_near_file(url)}", shard=url
    ) from missing


def _matching(pattern: str, stores: Connect) -> Iterator[ObjectInfo]:
    prefix = globs.literal_prefix(pattern)
    listed = list(stores(pattern).list(prefix))
    matches = globs.compile_glob(pattern).fullmatch
    found = [info for info in listed if info.url == pattern or matches(info.url)]
    if found:
        return iter(found)
    if not listed:
        raise ShardNotFound(
            f"no object matches {pattern}: no url starts with {prefix}{_near_file(prefix)}",
            shard=pattern,
        )
    objects = f"{len(listed)} object{'s' if len(listed) > 1 else ''}"
    where = f"under {prefix}" if prefix.endswith("/") else f"with a url that starts {prefix}"
    near = _near(pattern, [info.url for info in listed])
    raise ShardNotFound(
        f"{objects} {where}, but none matches {pattern}{near}",
        shard=pattern,
    )


def _near(pattern: str, urls: Sequence[str]) -> str:
    """A guess at what was meant: the pattern with another suffix, else existing names."""
    stem, dot, ending = pattern.rpartition(".")
    if dot and "/" not in ending:
        endings = {url.rpartition(".")[2] for url in urls if "." in url.rpartition("/")[2]}
        for near in difflib.get_close_matches(ending, sorted(endings), n=3, cutoff=0.5):
            matches = globs.compile_glob(f"{stem}.{near}").fullmatch
            if any(matches(url) for url in urls):
                return f"; did you mean {stem}.{near}?"
    return f": there is {', '.join(islice(urls, _NAMES_SHOWN))}"


def _near_file(url: str) -> str:
    """The names beside a missing local file; for remote ones, listing costs too much."""
    path = local_path(url)
    if path is None:
        return ""
    folder = path if url.endswith("/") and path.is_dir() else path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    names = sorted(entry.name for entry in islice(os.scandir(folder), 10_000))
    # The text before a wildcard is a prefix.
    starts = {name[: len(path.name) + 1]: name for name in reversed(names)}
    near = difflib.get_close_matches(path.name, names, n=_NAMES_SHOWN) or [
        starts[start] for start in difflib.get_close_matches(path.name, starts, n=1)
    ]
    if near:
        return f"; did you mean {', '.join(str(folder / name) for name in near)}?"
    return f"; {folder} is there and has {len(names)} entries"


def _without_files(folder: Path) -> str:
    """Why a folder has no files below it."""
    names = sorted(entry.name for entry in islice(os.scandir(folder), _NAMES_SHOWN))
    if not names:
        return "is an empty folder: pass one that has shards, or check that they were written"
    return f"has folders ({', '.join(names)}, …), but there is no file in any of them"


def _some(infos: Sequence[ObjectInfo]) -> str:
    shown = ", ".join(info.url for info in infos[:_NAMES_SHOWN])
    return shown if len(infos) <= _NAMES_SHOWN else f"{shown}, …"


def _can_be_folder(url: str) -> bool:
    """An http server has only files: it cannot list a folder."""
    return not url.startswith(("http://", "https://"))
