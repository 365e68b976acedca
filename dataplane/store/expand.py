"""Expand the urls that a user passes to the existing objects."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from dataplane.base.units import some_of
from dataplane.model.errors import ConfigError, ShardNotFound
from dataplane.model.records import ObjectInfo
from dataplane.model.redact import hub_parts, is_commit
from dataplane.store import layouts
from dataplane.store.base import Pinning, Store
from dataplane.store.local import same_files
from dataplane.store.urls import (
    FILE_PREFIX,
    Url,
    base_of,
    braces,
    canonical,
    compile_glob,
    exists,
    is_glob,
    is_hidden,
    literal_prefix,
    local_path,
    normalise,
)

Connect = Callable[[str], Store]
_Found = tuple[list[ObjectInfo], Iterable[str]]
"""Objects, and the folders above them that may be tables."""
T = TypeVar("T")
R = TypeVar("R")

_IN_FLIGHT = 64
_AHEAD = 4 * _IN_FLIGHT
_NAMES_SHOWN = 3
_ONCE = (
    "an epoch reads each shard once. Leave one of them out; to read a part of the data more often, "
    "make it a source of a Mixture"
)


def expand(urls: Url | Iterable[Url], stores: Connect) -> list[ObjectInfo]:
    """Return every object that `urls` name: in the order of the names, and by url within one name.

    A name is a url or path; braces, wildcards and folders expand to many. A folder expands to all
    objects below it that are not hidden (see urls) and form one dataset (see layouts). Objects of
    a repository with revisions have urls at the present commit. `stores` returns the store of a
    url. Objects without bytes that only represent a folder are included: see `missing`.

    Raises:  ConfigError: an object is listed twice, a name is not a url, or a name matches
    something other than one dataset.  ShardNotFound: a name matches nothing; suggests similar ones.
    Errors of the stores.
    """
    names = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    if not names:
        raise ConfigError("no shards: the list of urls is empty")
    by_name: dict[str, ObjectInfo] = {}
    counts: list[int] = []
    roots: dict[str, None] = {}
    for name, (matches, above) in zip(names, _matches(names, stores), strict=True):
        roots.update(dict.fromkeys(above))
        # Sort only if needed: stores list in url order, and sorting a million urls would block all
        # other threads.
        if any(info.url > next_.url for info, next_ in pairwise(matches)):
            matches.sort(key=lambda info: info.url)
        for info in matches:
            key = canonical(info.url)
            if key in by_name:
                if not info.size_bytes:
                    continue  # may be an object that represents a folder
                at = list(by_name).index(key)
                first = names[bisect_right(counts, at)]
                raise ConfigError(
                    f"{info.url} is listed twice, by {os.fspath(first)!r} and by "
                    f"{os.fspath(name)!r}: {_ONCE}",
                    shard=info.url,
                )
            by_name[key] = info
        counts.append(len(by_name))
    for _ in _in_parallel(lambda root: layouts.refuse_table(root, stores(root)), roots):
        pass
    listed = list(by_name.values())
    same = same_files(listed)
    if same is not None:
        raise ConfigError(
            f"{same[0].url} and {same[1].url} are the same file, by a link: {_ONCE}",
            shard=same[1].url,
        )
    return listed


def missing(listed: Iterable[ObjectInfo], stores: Connect) -> set[str]:
    """Return the urls of listed objects that do not exist (see `Store.list`). Each needs a request
    of its own; many are sent concurrently.

    Raises:  Errors of the stores.
    """

    def is_there(info: ObjectInfo) -> bool:
        try:
            stores(info.url).head(info.url)
        except ShardNotFound:
            return False
        return True

    unsure = list(listed)
    there = _in_parallel(is_there, unsure)
    return {info.url for info, is_there_now in zip(unsure, there, strict=True) if not is_there_now}


def _matches(names: Sequence[Url], stores: Connect) -> Iterator[tuple[list[ObjectInfo], list[str]]]:
    """Yield the objects of each name, and the folders above it that may be tables. The patterns of
    all names are looked up in parallel, since each lookup takes a round trip.
    """
    commits: dict[tuple[str, str], str] = {}
    patterns = (
        (at, _pinned(pattern, stores, commits))
        for at, name in enumerate(names)
        for pattern in _patterns(name)
    )
    matches = _in_parallel(lambda each: (each[0], *_objects(each[1], stores)), patterns)
    for _, group in groupby(matches, key=itemgetter(0)):
        results = list(group)
        infos = [info for _, infos, _ in results for info in infos]
        yield infos, [root for *_, roots in results for root in roots]


def _in_parallel(call: Callable[[T], R], given: Iterable[T]) -> Iterator[R]:
    """Yield the results of `call` in the given order; only a few calls run ahead of the
    consumer.
    """
    rest = iter(given)
    ahead = list(islice(rest, 2))
    if len(ahead) < 2:
        yield from map(call, ahead)
        return
    with ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="dataplane-list") as pool:
        running = deque(
            pool.submit(call, argument) for argument in chain(ahead, islice(rest, _AHEAD))
        )
        try:
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(call, argument) for argument in islice(rest, 1))
        finally:
            for future in running:
                future.cancel()


def _patterns(name: Url) -> Iterator[str]:
    """Yield the patterns of one name."""
    url = normalise(name)
    path = local_path(url)
    if path is not None and exists(path):
        yield url  # an existing file, whose name may contain braces and stars
    else:
        yield from braces(url)


def _pinned(url: str, stores: Connect, commits: dict[tuple[str, str], str]) -> str:
    """Return the url or pattern at the present commit of its branch, so that a push during the run
    changes nothing. Each branch is looked up once, so that a dataset has one version.
    """
    hub = hub_parts(url)
    if hub is None or is_commit(hub[1]):
        return url
    repository, revision, rest = hub
    key = (repository, revision or "main")
    if key not in commits:
        store = stores(url)
        pinned = store.pinned(url) if isinstance(store, Pinning) else url
        commits[key] = pinned.removesuffix(rest)
    return f"{commits[key]}{rest}"


def _objects(pattern: str, stores: Connect) -> _Found:
    """Return the objects that a pattern matches."""
    path = local_path(pattern)
    is_literal = not is_glob(pattern) or (path is not None and exists(path))
    return _named(pattern, stores) if is_literal else _matching(pattern, stores)


def _named(url: str, stores: Connect) -> _Found:
    """Return the object with that url, or else all objects below the folder with that url."""
    store = stores(url)
    is_folder = (url.endswith("/") and _can_be_folder(url)) or url == base_of(url)
    if not is_folder:
        try:
            return [store.head(url)], ()
        except ShardNotFound as cause:
            if not _can_be_folder(url):
                raise
            missing = cause
    folder = f"{url.rstrip('/')}/"
    below = list(store.list(folder)) if _can_be_folder(url) else []
    inside = _of_folder(url, folder, below, store)
    if inside is not None:
        return inside
    if below:
        shown = [info.url for info in below]
        raise ShardNotFound(
            f"all {len(below)} objects below {folder} are hidden (names begin with a dot or "
            f"underscore): {some_of(shown, _NAMES_SHOWN)}. A pattern such as {folder}_* names them",
            shard=url,
        )
    path = local_path(url)
    if path is not None and os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises
        raise ShardNotFound(f"{path} {_without_files(path)}", shard=url)
    if is_folder:
        raise ShardNotFound(f"there is nothing below {folder}{_near_file(folder)}", shard=url)
    raise ShardNotFound(
        f"{missing}. There is nothing below {folder} either{_near_file(url)}", shard=url
    ) from missing


def _of_folder(name: str, folder: str, below: Sequence[ObjectInfo], store: Store) -> _Found | None:
    """Return the objects below the folder that a user's name means; None if all of them are hidden,
    or there are none.
    """
    shown = [info for info in below if not is_hidden(info.url[len(folder) :])]
    if not shown:
        return None
    if len(shown) < len(below):
        layouts.note_hidden(folder, below)
    chosen = layouts.of_one_dataset(name, folder, shown, below, store)
    return chosen, layouts.tables_above(folder)


def _matching(pattern: str, stores: Connect) -> _Found:
    prefix, store = literal_prefix(pattern), stores(pattern)
    listed = list(store.list(prefix))
    # If an object has exactly this name, the user means that object, even if the name contains
    # brackets and stars.
    exact = [info for info in listed if info.url == pattern]
    if exact:
        return exact, ()
    folder = f"{pattern.rstrip('/')}/"
    below = [info for info in listed if info.url.startswith(folder)]
    inside = _of_folder(pattern, folder, below, store)
    if inside is not None:
        return inside
    matches = compile_glob(pattern).fullmatch
    chosen = [info for info in listed if matches(info.url)]
    if chosen:
        chosen = layouts.of_one_dataset(pattern, prefix, chosen, listed, store)
        return chosen, layouts.tables_above(prefix)
    if not listed:
        raise ShardNotFound(
            f"no object matches {pattern}: no url starts with {prefix}{_near_file(prefix)}",
            shard=pattern,
        )
    objects = f"{len(listed)} object{'s' if len(listed) > 1 else ''}"
    where = f"under {prefix}" if prefix.endswith("/") else f"with a url that starts {prefix}"
    near = _near(pattern, [info.url for info in listed])
    if "=" in pattern.rpartition("/")[0]:
        near += "; to choose by keys of folders, pass the folder above, and where="
    raise ShardNotFound(
        f"{objects} {where}, but none matches {pattern}{near}",
        shard=pattern,
    )


def _near(pattern: str, urls: Sequence[str]) -> str:
    """Guess the intended name: the pattern with another suffix, else existing names."""
    import difflib

    stem, dot, ending = pattern.rpartition(".")
    if dot and "/" not in ending:
        endings = {url.rpartition(".")[2] for url in urls if "." in url.rpartition("/")[2]}
        for near in difflib.get_close_matches(ending, sorted(endings), n=3, cutoff=0.5):
            matches = compile_glob(f"{stem}.{near}").fullmatch
            if any(matches(url) for url in urls):
                return f"; did you mean {stem}.{near}?"
    return f": there is {', '.join(islice(urls, _NAMES_SHOWN))}"


def _near_file(url: str) -> str:
    """Return the names beside a missing local file; for remote ones, listing costs too much."""
    path = local_path(url)
    if path is None:
        return ""
    folder = path if url.endswith("/") else path.parent
    while not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir() raises if it is too long
        path, folder = folder, folder.parent
    import difflib

    names = sorted(entry.name for entry in islice(os.scandir(folder), 10_000))
    if path.name in names:  # it is there, but is no regular file
        return ""
    # Also compare with the beginnings of names: the text before a wildcard is only a beginning.
    starts = {name[: len(path.name) + 1]: name for name in reversed(names)}
    near = difflib.get_close_matches(path.name, names, n=_NAMES_SHOWN) or [
        starts[start] for start in difflib.get_close_matches(path.name, starts, n=1)
    ]
    if near:
        return f"; did you mean {', '.join(str(folder / name) for name in near)}?"
    there = f"; {folder} is there and has {len(names)} entries"
    if folder != Path.cwd():
        return there
    name = url.removeprefix(f"{FILE_PREFIX}{folder}/")
    urls = f"s3://{name}, hf://datasets/{name} or https://{name}"
    return f"{there}. If this is no path, give its whole url, such as {urls}"


def _without_files(folder: Path) -> str:
    """Explain why no file was found below a folder."""
    names = sorted(entry.name for entry in islice(os.scandir(folder), _NAMES_SHOWN))
    if not names:
        return "is an empty folder: pass one that has shards, or check that they were written"
    return f"has folders ({', '.join(names)}, …), but there is no file in any of them"


def _can_be_folder(url: str) -> bool:
    """Return whether a url may name a folder; not on http servers, which cannot list."""
    return not url.startswith(("http://", "https://"))
