"""The list of formats, and the choice of a shard's format.

Other packages add formats by entry points of the group `dataplane.formats`: an object, or a class
without arguments, that satisfies `Format`. It may have three more attributes: `index_version`, a
number to raise when the results of its `index` change; `first_reads(size_bytes)`, the regions that
`index` reads first of most shards of this size, which the node then reads early; and
`column_bounds(url, preamble, blocks, names)`, the ColumnBounds of these columns in each of these
blocks, as far as the preamble has them: blocks without a row of a view are not read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from types import MappingProxyType

from dataplane import suffixes
from dataplane.errors import ConfigError
from dataplane.formats import not_shards
from dataplane.formats.base import Format

GROUP = "dataplane.formats"
# Grows when what `index` returns changes, so that remembered indexes are made again.
INDEX_VERSION = 3

# The module of each class: reading one format imports no other.
BUILT_IN: Mapping[str, tuple[str, str]] = {
    "parquet": ("dataplane.formats.parquet", "Parquet"),
    "arrow": ("dataplane.formats.arrow_ipc", "ArrowIpc"),
    "tfrecord": ("dataplane.formats.tfrecord", "TfRecord"),
    "tar": ("dataplane.formats.tar", "Tar"),
    "jsonl": ("dataplane.formats.jsonl", "JsonLines"),
}


def _is_declared(group: str) -> bool:
    """Whether an installed package may have entry points of this group.

    importlib.metadata takes 25 to 50 ms of CPU to import and to say so, which is a tenth of what a
    node takes until its first batch. If packages may lie elsewhere than in folders of `sys.path`,
    only importlib.metadata knows.
    """
    if any(hasattr(each, "find_distributions") for each in sys.meta_path if each is not PathFinder):
        return True
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")  # noqa: PTH208
        except NotADirectoryError:  # packages in a zip file
            return True
        except OSError:
            continue
        for name in names:
            if name.lower().endswith(("dist-info", "egg-info")):
                path = os.path.join(folder, name, "entry_points.txt")  # noqa: PTH118
                with contextlib.suppress(OSError), open(path, "rb", 0) as points:  # noqa: PTH123
                    if group.encode() in points.read():
                        return True
    return False


@functools.cache
def _others() -> Mapping[str, Format]:
    """The formats of other packages, by name.

    Raises:  ConfigError: an entry point cannot be loaded, or takes a name that is taken.
    """
    if not _is_declared(GROUP):
        return MappingProxyType({})
    from importlib.metadata import entry_points

    found: dict[str, Format] = {}
    for point in entry_points(group=GROUP):
        try:
            loaded = point.load()
            format_: Format = loaded() if isinstance(loaded, type) else loaded
            name = format_.name
        except Exception as fault:
            raise ConfigError(
                f"the format {point.name!r} ({point.value}) cannot be loaded: {fault}"
            ) from fault
        if name in found or name in BUILT_IN:
            raise ConfigError(f"two formats are named {name!r}; the second is {point.value}")
        found[name] = format_
    return MappingProxyType(found)


@functools.cache
def _built_in(name: str) -> Format:
    module, cls = BUILT_IN[name]
    made: Format = getattr(importlib.import_module(module), cls)()
    return made


def by_name(name: str) -> Format:
    """The format of this name.

    Raises:  ConfigError: there is none.
    """
    if name in BUILT_IN:
        return _built_in(name)
    known = _others()
    if name not in known:
        names = ", ".join([*BUILT_IN, *known])
        raise ConfigError(f"no format is named {name!r}; there are {names}")
    return known[name]


def format_of_url(url: str) -> Format | None:
    """The format with the longest suffix that the url's path ends with."""
    path = suffixes.path_of(url)
    # Grouped by last letter, for speed: a listing may have a million urls.
    for suffix, name in _by_end().get(path[-1:], ()):
        if path.endswith(suffix):
            return by_name(name)
    return None


def shard_suffixes() -> tuple[str, ...]:
    """Every file name ending that names a shard."""
    return tuple(suffix for suffix, _ in _by_suffix())


@functools.cache
def _by_suffix() -> tuple[tuple[str, str], ...]:
    """(suffix, name) of every known format, the built-in ones first."""
    ours = [(suffix, name) for name, known in suffixes.BY_FORMAT.items() for suffix in known]
    theirs = [(suffix, f.name) for f in _others().values() for suffix in f.suffixes]
    return (*ours, *theirs)


@functools.cache
def _by_end() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """The suffixes that end in each letter, the longest first, each with its format."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for suffix, name in sorted(_by_suffix(), key=lambda pair: -len(pair[0])):
        found[suffix[-1:]] = (*found.get(suffix[-1:], ()), (suffix, name))
    return found


def dataset_format(urls: Iterable[str]) -> Format:
    """The one format of all shards of a dataset.

    Raises:  ConfigError: no format is known, or the shards have several.
    """
    first: tuple[str, Format] | None = None
    urls = list(urls)
    for url in urls:
        format_ = format_of_url(url)
        if format_ is None:
            why = not_shards.said_of(url, urls) or (
                "the format cannot be told from the name; known suffixes are "
                f"{', '.join(shard_suffixes())}"
            )
            raise ConfigError(
                f'{url}: {why}. If it is a shard, pass its format="…" (or --format)',
                field="format",
                shard=url,
            )
        first = first or (url, format_)
        if format_.name != first[1].name:
            raise ConfigError(
                f"shards of several formats in one dataset: {first[0]} is {first[1].name}, "
                f"{url} is {format_.name}; a dataset has one format"
            )
    if first is None:
        raise ConfigError("the dataset has no shards")
    return first[1]
