"""The list of formats, and the choice of a shard's format.

Other packages add formats as entry points of the group `dataplane.formats`: an object that
satisfies `Format`, or a class without arguments whose instance does. It may have three more
attributes: `index_version`, a number to raise when the results of its `index` change;
`first_reads(size_bytes)`, the regions that `index` reads first of most shards of this size, which
the node then reads early; and `column_bounds(url, preamble, blocks, names)`, the ColumnBounds of
these columns in each of these blocks, as far as the preamble states them: blocks in which no row
can satisfy a view's condition are not read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import posixpath
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from dataplane.base import suffixes
from dataplane.base.suffixes import names_a_shard, path_of, suffix_of
from dataplane.base.units import meant
from dataplane.formats.base import Format
from dataplane.model.errors import ConfigError

# Identify files that no format reads by their names, and advise what to do with them.

_CONVERT = "write it as Parquet, Arrow, TFRecord, tar or JSON lines, which are read as they are"
_AS_DATASET = "pass a torch Dataset that reads it as the first argument"
# By suffix: the kind of file, and the advice.
_BY_ENDING: Final[dict[tuple[str, ...], tuple[str, str]]] = {
    (".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".jxl", ".jp2", ".ppm"): (
        "an image",
        ("convert them to JPEG, PNG or WebP, and folders of them are read as they are; or pack "
        "them into tar files of a few hundred MB (name.gif beside name.cls)"),
    ),
    (".mds.br", ".mds.bz2", ".mds.snappy"): (
        "one of MosaicML's MDS files in an unsupported compression", "use zstd, gzip or none"
    ),
    (".mp4", ".mov", ".mkv", ".webm", ".avi", ".wav", ".mp3", ".flac", ".ogg", ".m4a"): (
        "audio or video", f"{_AS_DATASET}, or pack such files into tar files of a few hundred MB"
    ),
    (".npz", ".h5", ".hdf5", ".mat"): (
        "an array", f"save it with numpy.save (.npy), or {_CONVERT}, or {_AS_DATASET}"
    ),
    (".pt", ".pth", ".pkl", ".pickle", ".safetensors"): (
        "Python objects, which nodes do not unpickle", f"{_AS_DATASET}, or {_CONVERT}"
    ),
    (".jsonl.xz", ".jsonl.bz2"): (
        "JSON in an unsupported compression", "use zstd (.jsonl.zst), gzip (.jsonl.gz), or none"
    ),
    (".tar.xz", ".tar.bz2", ".tzst"): (
        "a tar file in an unsupported compression",
        "use none (images are compressed already), zstd (.tar.zst) or gzip (.tar.gz)",
    ),
    (".json",): (
        "JSON, which must have one object per line",
        'write one object per line; if it has that, rename it to .jsonl or pass format="jsonl"',
    ),
    (".zip", ".7z", ".rar"): ("an archive of an unsupported kind", "pack its files into tar files"),
    (".beton",): ("one of FFCV's files", "write its samples from their source as tar or Parquet"),
    (".mdb", ".lmdb", ".sqlite", ".db"): ("a database", f"{_AS_DATASET}, or {_CONVERT}"),
    (".bin", ".tokens", ".tok"): (
        "of a kind that its name does not show",
        (
            'if it has token ids, pass format="tokens:uint16,end=50256" with their type and the id '
            'that ends a document, or format="tokens:uint16,length=1024" for rows of so many ids'
        ),
    ),
    (".orc", ".avro", ".lance", ".vortex", ".rec", ".txt", ".txt.gz", ".xml",
     ".array_record", ".arrayrecord"): ("in an unsupported format", _CONVERT),
}  # fmt: skip
_INDEXES: Final = {"index.json", "dataset_info.json", "state.json"}
_NEIGHBOURS_MAX = 1000


def advice_of(url: str, urls: Sequence[str]) -> str:
    """Describe the file at `url`, whose suffix belongs to no format, and give advice; "" if its
    kind is unknown.

    The rest of the dataset matters: an index.json alone says nothing, and if there are shards
    beside a README, the user meant the shards.
    """
    near = urls[:_NEIGHBOURS_MAX]
    shard = next((neighbour for neighbour in near if names_a_shard(neighbour)), None)
    if shard is not None:
        ending, folder = suffix_of(shard), posixpath.dirname(shard)
        return (
            f"this is not a shard, but {posixpath.basename(shard)} in the same dataset is: list "
            f"only the shards, for example {folder}/*{ending}"
        )
    kind, is_it = _known_kind(url), True
    if posixpath.basename(path_of(url)) in _INDEXES or kind is None:
        others = (_known_kind(neighbour) for neighbour in near if neighbour != url)
        other = next((neighbour for neighbour in others if neighbour is not None), None)
        kind, is_it = (kind, True) if other is None else (other, False)
    if kind is None:
        return ""
    what, to_do = kind
    return f"this is {what}: {to_do}" if is_it else f"beside it is {what}: {to_do}"


def _known_kind(url: str) -> tuple[str, str] | None:
    path = path_of(url)
    fitting = {
        len(ending): said
        for endings, said in _BY_ENDING.items()
        for ending in endings
        if path.endswith(ending)
    }
    return fitting[max(fitting)] if fitting else None


GROUP = "dataplane.formats"
_PACKAGE = "dataplane-loader"
# Raise this number when the results of `index` change for any format, so that cached indexes are
# made again.
INDEX_VERSION = 3

# The module and class of each format, imported on demand: reading one format imports no other.
BUILT_IN: Mapping[str, tuple[str, str]] = {
    "files": ("dataplane.formats.files", "Files"),
    "parquet": ("dataplane.formats.parquet", "Parquet"),
    "arrow": ("dataplane.formats.arrow_ipc", "ArrowIpc"),
    "tfrecord": ("dataplane.formats.tfrecord", "TfRecord"),
    "tar": ("dataplane.formats.tar", "Tar"),
    "jsonl": ("dataplane.formats.jsonl", "JsonLines"),
    "csv": ("dataplane.formats.csv", "Csv"),
    "npy": ("dataplane.formats.npy", "Npy"),
    "mds": ("dataplane.formats.mds", "Mds"),
}
# Formats whose names have parameters behind a colon.
WITH_PARAMETERS: Mapping[str, tuple[str, str]] = {
    "tokens": ("dataplane.formats.tokens", "TokenFile"),
    "litdata": ("dataplane.formats.litdata", "LitData"),
    "megatron": ("dataplane.formats.megatron", "Megatron"),
    "files": ("dataplane.formats.files", "FileTable"),
}


def _is_declared(group: str) -> bool:
    """Return whether an installed package may have entry points of this group.

    Importing importlib.metadata to find out takes 25 to 50 ms of CPU, a tenth of what a node needs
    until its first batch. Reading the folders of `sys.path` is faster, and it suffices unless
    packages may be elsewhere.
    """
    if any(
        hasattr(finder, "find_distributions")
        for finder in sys.meta_path
        if finder is not PathFinder
    ):
        return True
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")  # noqa: PTH208
        except NotADirectoryError:  # a zip file, which may contain packages
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
    """Return the formats of other packages, by name.

    Raises:  ConfigError: an entry point cannot be loaded, or its name is used twice.
    """
    if not _is_declared(GROUP):
        return MappingProxyType({})
    from importlib.metadata import entry_points

    formats: dict[str, Format] = {}
    for point in entry_points(group=GROUP):
        try:
            loaded = point.load()
            format_: Format = loaded() if isinstance(loaded, type) else loaded
            name = format_.name
        except Exception as fault:
            raise ConfigError(
                f"the format {point.name!r} ({point.value}) cannot be loaded: {fault}"
            ) from fault
        if name in formats or name in BUILT_IN or name in WITH_PARAMETERS:
            raise ConfigError(f"two formats are named {name!r}; the second is {point.value}")
        formats[name] = format_
    return MappingProxyType(formats)


@functools.cache
def _built_in(name: str) -> Format:
    module, cls = BUILT_IN[name]
    made: Format = getattr(importlib.import_module(module), cls)()
    return made


@functools.lru_cache(maxsize=64)
def _with_parameters(family: str, parameters: str) -> Format:
    module, cls = WITH_PARAMETERS[family]
    made: Format = getattr(importlib.import_module(module), cls)(parameters)
    return made


def import_all() -> None:
    """Import the modules of all built-in formats."""
    for module, _ in (*BUILT_IN.values(), *WITH_PARAMETERS.values()):
        importlib.import_module(module)


class KnownFormat(Struct, frozen=True):
    """A format for `dataplane formats`: its suffixes, the package that has it, and what else it
    needs than a file of that suffix.
    """

    name: str
    suffixes: tuple[str, ...]
    package: str
    needs: str = ""


def known_formats() -> list[KnownFormat]:
    """Return all formats.   Raises:  ConfigError: one of another package cannot be loaded."""
    known = [KnownFormat(name, by_name(name).suffixes, _PACKAGE) for name in BUILT_IN]
    for name, (module, cls) in WITH_PARAMETERS.items():
        kind = getattr(importlib.import_module(module), cls)
        known.append(KnownFormat(name, kind.suffixes, _PACKAGE, kind.needs))
    packages = {}
    if _others():
        from importlib.metadata import entry_points

        packages = {point.load(): point.dist for point in entry_points(group=GROUP)}
    for format_ in _others().values():
        dist = packages.get(type(format_)) or packages.get(format_)
        needs = str(getattr(format_, "needs", ""))
        name = dist.name if dist is not None else "?"
        known.append(KnownFormat(format_.name, tuple(format_.suffixes), name, needs))
    return known


def by_name(name: str) -> Format:
    """Return the format of this name.

    Raises:  ConfigError: no format has this name.
    """
    if name in BUILT_IN:
        return _built_in(name)
    family, _, parameters = name.partition(":")
    if family in WITH_PARAMETERS:
        return _with_parameters(family, parameters)
    known = _others()
    if name not in known:
        names = dict.fromkeys([*BUILT_IN, *known, *WITH_PARAMETERS])
        raise ConfigError(
            f"no format is named {name!r}{meant(name, names)} (there are {', '.join(names)})",
            field="format",
        )
    return known[name]


def format_of_url(url: str) -> Format | None:
    """Return the format with the longest suffix that matches the url's path."""
    path = suffixes.path_of(url)
    # Compare only suffixes with the same last letter, since a listing may have a million urls.
    for suffix, name in _by_end().get(path[-1:], ()):
        if path.endswith(suffix):
            return by_name(name)
    return None


def shard_suffixes() -> tuple[str, ...]:
    """Return all suffixes of file names that identify a shard."""
    return tuple(suffix for suffix, _ in _by_suffix())


@functools.cache
def _by_suffix() -> tuple[tuple[str, str], ...]:
    """Return (suffix, name) of every known format, the built-in ones first."""
    ours = [(suffix, name) for name, known in suffixes.BY_FORMAT.items() for suffix in known]
    theirs = [(suffix, f.name) for f in _others().values() for suffix in f.suffixes]
    return (*ours, *theirs)


@functools.cache
def _by_end() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """Return the suffixes by last letter, the longest first, each with its format."""
    by_end: dict[str, tuple[tuple[str, str], ...]] = {}
    for suffix, name in sorted(_by_suffix(), key=lambda pair: -len(pair[0])):
        by_end[suffix[-1:]] = (*by_end.get(suffix[-1:], ()), (suffix, name))
    return by_end


def dataset_format(urls: Iterable[str]) -> Format:
    """Return the one format of all shards of a dataset.

    Raises:  ConfigError: no format is known, or the shards have several.
    """
    first: tuple[str, Format] | None = None
    urls = list(urls)
    for url in urls:
        format_ = format_of_url(url)
        if format_ is None:
            why = advice_of(url, urls) or (
                f"its name shows no format; known suffixes are {', '.join(shard_suffixes())}"
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
                f"{url} is {format_.name}. A dataset has one format: choose it with "
                f'format="{first[1].name}" (or --format), or pass a pattern',
                field="format",
            )
    if first is None:
        raise ConfigError("the dataset has no shards")
    return first[1]
