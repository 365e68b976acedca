"""Decides whether a loader's first argument names shards or is a dataset; both may be lists of
strings.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from dataplane import suffixes
from dataplane.errors import ConfigError
from dataplane.transforms.mixture_options import Mixture

_GLOB = re.compile(r"[*?\[{]")


class _Looks(enum.Enum):
    """The looks of a string: it names shards, may be a path to shards, or is a text sample."""

    SHARDS = enum.auto()
    PATH = enum.auto()
    TEXT = enum.auto()


def listed(dataset: Any) -> Any:
    """A collection or an iterator of paths as a list, so that it names shards as one would: arrays
    and tuples of configurations, `Path.glob()`, keys of a dict. A set is sorted. Anything else is
    returned as it is.
    """
    if not _may_hold_paths(dataset):
        return dataset
    members = list(dataset)
    if not all(isinstance(one, str | os.PathLike) for one in members):
        return iter(members) if isinstance(dataset, Iterator) else dataset
    paths = [str(one) if isinstance(one, str) else one for one in members]
    return sorted(paths, key=os.fspath) if isinstance(dataset, AbstractSet) else paths


def _may_hold_paths(dataset: Any) -> bool:
    """Whether this is a collection or an iterator, but no list, tuple or mapping, no text, and no
    array of numbers.
    """
    if isinstance(dataset, list | tuple | str | bytes | bytearray):
        return False
    if type(dataset).__module__ == "numpy" and getattr(dataset, "ndim", 0) == 1:
        return bool(dataset.dtype.kind in "UO")
    if isinstance(dataset, Sequence | AbstractSet | Iterator):
        return True
    return isinstance(dataset, Collection) and not hasattr(dataset, "__getitem__")


def names_shards(dataset: object, *, for_urls: bool, for_torch: bool) -> bool:
    """Whether this is one url, a list of urls, or a mixture. `for_urls` and `for_torch` say that
    the user passed arguments that apply only to urls, or only to torch Datasets, which decides what
    a list of strings is. Without either, all strings must look like shards: by suffix, scheme,
    glob or folder.

    Raises:  ConfigError: the list is empty, or its strings might be urls or samples.
    """
    if isinstance(dataset, str | os.PathLike | Mixture):
        return True
    if not isinstance(dataset, list | tuple):
        return False
    if not dataset:
        raise ConfigError(
            f"the dataset is {dataset!r}: there is nothing to load. If it comes from a glob that "
            "matched nothing, pass the pattern itself: the error will then name it",
            field="dataset",
        )
    if not all(isinstance(one, str | os.PathLike) for one in dataset):
        return False
    if for_urls or for_torch:
        return for_urls
    return _all_name_shards(dataset)


def _all_name_shards(dataset: Sequence[str | os.PathLike[str]]) -> bool:
    looks = {_Looks.SHARDS: 0, _Looks.PATH: 0, _Looks.TEXT: 0}
    for one in dataset:
        looks[_looks(one)] += 1
        if looks[_Looks.PATH] or (looks[_Looks.SHARDS] and looks[_Looks.TEXT]):
            raise ConfigError(
                f"a list of {len(dataset)} strings may name shards, or be samples: "
                f"{os.fspath(one)!r:.80} does not end as a shard does, and is not a folder, glob "
                'or url. If they are shards, name their format, as in format="parquet"; if they '
                "are samples, pass collate_fn, or a Dataset that wraps the list",
                field="dataset",
            )
    return not looks[_Looks.TEXT]


def _looks(given: str | os.PathLike[str]) -> _Looks:
    if not isinstance(given, str) or "://" in given or suffixes.names_a_shard(given):
        return _Looks.SHARDS
    if any(space in given for space in " \t\n"):
        return _Looks.TEXT
    is_path = given.startswith(("/", "./", "../", "~/"))
    if _GLOB.search(given):
        return _Looks.SHARDS if is_path or "/" in given else _Looks.PATH
    if is_path:
        return _Looks.SHARDS if Path(given).expanduser().is_dir() else _Looks.PATH
    is_folder = given.endswith("/") or os.path.isdir(given)  # noqa: PTH112 - Path's may raise
    return _Looks.SHARDS if is_folder else _Looks.TEXT
