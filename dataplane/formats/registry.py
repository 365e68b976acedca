"""Which formats there are, and which one a shard has.

Formats of other packages arrive as entry points of the group `dataplane.formats`: an object, or a
class without arguments, that satisfies `Format`. Its attribute `index_version`, if it has one,
grows when what its `index` returns changes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from dataplane.errors import ConfigError
from dataplane.formats.arrow_ipc import ArrowIpc
from dataplane.formats.base import Format
from dataplane.formats.jsonl import JsonLines
from dataplane.formats.parquet import Parquet
from dataplane.formats.tar import Tar
from dataplane.formats.tfrecord import TfRecord

GROUP = "dataplane.formats"
# Grows when what `index` returns changes, so that remembered indexes are made again.
INDEX_VERSION = 1

BUILT_IN: tuple[Format, ...] = (Parquet(), ArrowIpc(), TfRecord(), Tar(), JsonLines())


@functools.cache
def formats() -> Mapping[str, Format]:
    """Every known format by name, the built-in ones first.

    Raises:  ConfigError: an entry point cannot be loaded, or takes a name that is taken.
    """
    found = {format_.name: format_ for format_ in BUILT_IN}
    for point in entry_points(group=GROUP):
        try:
            loaded = point.load()
            format_: Format = loaded() if isinstance(loaded, type) else loaded
            name = format_.name
        except Exception as fault:
            raise ConfigError(
                f"the format {point.name!r} ({point.value}) cannot be loaded: {fault}"
            ) from fault
        if name in found:
            raise ConfigError(f"two formats are named {name!r}; the second is {point.value}")
        found[name] = format_
    return MappingProxyType(found)


def by_name(name: str) -> Format:
    """The format of this name.

    Raises:  ConfigError: there is none.
    """
    known = formats()
    if name not in known:
        raise ConfigError(f"no format is named {name!r}; there are {', '.join(known)}")
    return known[name]


def format_of_url(url: str) -> Format | None:
    """The format whose suffix the url's path ends with, the longest one first."""
    path = url.lower().partition("?")[0].partition("#")[0]
    fitting = [(len(s), f) for f in formats().values() for s in f.suffixes if path.endswith(s)]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def shard_suffixes() -> tuple[str, ...]:
    """Every file name ending that names a shard."""
    return tuple(suffix for format_ in formats().values() for suffix in format_.suffixes)


def dataset_format(urls: Iterable[str]) -> Format:
    """The one format of all shards of a dataset.

    Raises:  ConfigError: none is known, or there are several.
    """
    first: tuple[str, Format] | None = None
    for url in urls:
        format_ = format_of_url(url)
        if format_ is None:
            raise ConfigError(
                f"{url}: the name tells no format; known endings are "
                f"{', '.join(shard_suffixes())}. Name the format if the endings are others"
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
