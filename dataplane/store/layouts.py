"""Choose the objects below a folder that make up one dataset.

A table format keeps the files of older versions beside the present ones, a saved dataset keeps its
user's caches, and many datasets keep test data beside training data. If these were read as plain
folders, they would have other samples than their own readers return.

Invariants:
1. The decision needs one listing and a few requests for each name that a user gives, never one
   request for each shard.
2. Objects that a user names one by one are read, whatever lies beside them.
"""

from __future__ import annotations

import contextlib
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from dataplane.base.suffixes import MANIFEST, is_beside, suffix_of
from dataplane.base.trace import Trace
from dataplane.model.errors import ConfigError, ShardNotFound, StoreDenied
from dataplane.model.records import ObjectInfo
from dataplane.model.typed import complete
from dataplane.store.base import Restricted, Store
from dataplane.store.urls import FILE_PREFIX, base_of, compile_glob, folder_of

_DELTA, _HUDI, _ICEBERG, _LANCE = "_delta_log", ".hoodie", "metadata", "_versions"
_FILES = "pass the files of this version, "
_TABLES = {
    _DELTA: ("a Delta table", "pass 'delta+{url}', for its present version"),
    _HUDI: (
        "a Hudi table",
        _FILES + "the base_file_relative_path() of each of "
        "hudi.HudiTableBuilder.from_base_uri({url!r}).build().get_file_slices()",
    ),
    _ICEBERG: (
        "an Iceberg table",
        (
            "pass 'iceberg+' and the url of its present file of metadata, which is the "
            "metadata_location of pyiceberg's table"
        ),
    ),
    _LANCE: (
        "a Lance dataset",
        (
            "write it as Parquet, pyarrow.dataset.write_dataset("
            'lance.dataset({url!r}).scanner().to_reader(), folder, format="parquet")'
        ),
    ),
}
_TABLE_FOLDER = re.compile(r"/(_delta_log|\.hoodie|_versions)(?=/)")
_HUDI_PARTITION = ".hoodie_partition_metadata"
_MARKS = frozenset({"state.json", "dataset_info.json", "dataset_dict.json", _HUDI_PARTITION})
_OF_ICEBERG = re.compile(r".*\.metadata\.json(?:\.gz)?|snap-.*\.avro", re.DOTALL)
_PROBES = ((_DELTA, "_delta_log/"), (_HUDI, ".hoodie/"), (_ICEBERG, "metadata/snap-"))
"""Listings that show whether a folder is a table: they are empty if it is not. All writers of
Iceberg call the list of a version's files "snap-…".
"""
_SPLIT_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""The words for splits in names of files and folders, as on the Hugging Face Hub.
Source: huggingface.co/docs/hub/datasets-file-names-and-splits
"""
_SPLIT = re.compile(
    rf"(?:\A|(?<=[-._ 0-9]))({'|'.join(sorted(_SPLIT_OF, reverse=True))})(?=[-._ 0-9]|\Z)",
    re.IGNORECASE,
)
_STEMS = ("train", "val", "dev", "test", "eval")
"""Each word for a split begins with one of these."""
_UNDERSCORED = re.compile(r"(?:[^._][^/]*/)*_(?!temporary/|delta_log/|change_data/)[^/=]*(?:/|\Z)")
_NUMBERED = re.compile(r"(.+?)[-.](\d{5})-of-(\d{5})(?!\d)", re.DOTALL)
_REVISION = re.compile(r"/((?:datasets|models|spaces)--[^/]+/snapshots)/([^/]+)/")
_CACHED = re.compile(r"cache-.*\.arrow", re.DOTALL)
_STATE_BYTES_MAX = 64 << 20
_SPLITS_SHOWN = 5
_trace = Trace("store")


class _File(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    """The state.json that `save_to_disk` of the `datasets` library writes."""

    data_files: list[_File] = msgspec.field(name="_data_files")
    indices_files: list[_File] | None = msgspec.field(name="_indices_files", default=None)
    indices_data_files: list[_File] | None = msgspec.field(name="_indices_data_files", default=None)


def of_one_dataset(
    name: str, prefix: str, chosen: Sequence[ObjectInfo], listed: Sequence[ObjectInfo], store: Store
) -> list[ObjectInfo]:
    """Select the objects that make up one dataset from those that a user's name matched. The name
    is a folder or a pattern; `listed` has all objects below `prefix`, including hidden ones.

    Raises:  ConfigError: the objects are a table, or several splits or revisions.  ShardNotFound: a
    saved dataset lacks a file.  Errors of the store.
    """
    folder = folder_of(prefix)
    marks = _Marks(folder, listed)
    _refuse_tables(chosen, marks.tables)
    kept = _without_caches(chosen, listed, marks, store, is_whole=prefix == folder)
    # Join the names: a search in one text takes a tenth of the time of searches in a million texts.
    below = "\n".join([info.url[len(folder) :] for info in kept]).lower()
    if "snapshots/" in below or folder.endswith("snapshots/"):
        _refuse_revisions(kept, folder)
    if marks.dicts or _may_have_splits(below):
        _refuse_splits(name, kept, folder, marks.dicts)
    return kept


def tables_above(prefix: str) -> Iterator[str]:
    """Yield the folders above a listed prefix that may be tables although the listing cannot show
    that, without a slash at the end: the folder of the names that begin with the prefix, and the
    folders that contain folders of partitions or a folder "data".
    """
    at, is_shown = folder_of(prefix)[:-1], prefix.endswith("/")
    while at != base_of(at):
        above, _, last = at.rpartition("/")
        is_partition = "=" in last
        if not (is_partition or is_shown):
            yield at
        if not is_partition and last != "data":
            return
        at, is_shown = above, False


def refuse_table(root: str, store: Store) -> None:
    """Refuse objects in a folder that is a table. A folder that may not be listed counts as not
    being a table.

    Raises:  ConfigError.  Errors of the store.
    """
    if isinstance(store, Restricted) and not store.opens(f"{root}/"):
        return
    with contextlib.suppress(StoreDenied, ShardNotFound):
        for kind, prefix in _PROBES:
            if next(iter(store.list(f"{root}/{prefix}")), None) is not None:
                raise _is_table(kind, root)
        store.head(f"{root}/{_HUDI_PARTITION}")
        raise _is_table(_HUDI, root)


def series_together(
    urls: Sequence[str], names: Iterable[str]
) -> tuple[str, Mapping[str, int]] | None:
    """Find the first folder whose shards form several complete series that would be read as one
    dataset, such as "en-00000-of-00003" beside "de-00000-of-00002". Return the folder and the
    number of shards in each series, by the prefix of their names; None if there is no such folder.
    `urls` are in the order of a listing.

    Series are ignored if their prefix names a split, since splits were checked before. A folder is
    skipped if the last parts of the user's `names` contain the prefixes of all its series.
    """
    named = "\n".join(name.rstrip("/").rpartition("/")[2] for name in names)
    of_folder: dict[str, dict[str, int]] = {}
    at = 0
    while at < len(urls):
        start, number, count = _numbered(urls[at])
        last = at + count - 1
        is_whole = not number and at <= last < len(urls)
        if not (is_whole and _numbered(urls[last]) == (start, count - 1, count)):
            at += 1
            continue
        at += count
        folder, _, prefix = start.rpartition("/")
        if not _split_in(prefix):
            of_folder.setdefault(f"{folder}/", {})[prefix] = count
    for folder, series in of_folder.items():
        if len(series) > 1 and not all(prefix[:-1] in named for prefix in series):
            return folder, series
    return None


def _numbered(url: str) -> tuple[str, int, int]:
    """Split "…/name-00001-of-00003" into its beginning and its numbers; zeros for other urls."""
    above, slash, last = url.rpartition("/")
    match = _NUMBERED.match(last)
    if match is None:
        return "", 0, 0
    return f"{above}{slash}{last[: match.start(2)]}", int(match[2]), int(match[3])


def note_hidden(folder: str, listed: Sequence[ObjectInfo]) -> None:
    """Log that shards whose names begin with an underscore are left out, except those of unfinished
    jobs and of tables.
    """
    names = (info.url[len(folder) :] for info in listed)
    hidden = [name for name in names if _UNDERSCORED.match(name) and _is_shard(name)]
    if hidden:
        _trace.failed(
            "shards whose names begin with an underscore are left out",
            folder=folder,
            count=len(hidden),
            such_as=hidden[0],
        )


class _Marks:
    """The objects of a listing that show what their folders are."""

    def __init__(self, folder: str, listed: Sequence[ObjectInfo]) -> None:
        self.tables: dict[str, str] = {}
        self.states: list[ObjectInfo] = []
        self.with_info: set[str] = set()
        self.dicts: list[str] = []
        before, is_metadata = "", False
        for info in listed:
            above, _, last = info.url.rpartition("/")
            if above != before:
                before, is_metadata = above, above.endswith("/metadata")
                self._note_folder(above, len(folder) - 1)
            if is_metadata or last in _MARKS:
                self._note_file(above, last, info)

    def _note_file(self, above: str, last: str, info: ObjectInfo) -> None:
        if last == "state.json":
            self.states.append(info)
        elif last == "dataset_info.json":
            self.with_info.add(above)
        elif last == "dataset_dict.json":
            self.dicts.append(f"{above}/")
        elif last == _HUDI_PARTITION:
            self.tables[f"{above}/"] = _HUDI
        elif _OF_ICEBERG.fullmatch(last):
            self.tables[above.removesuffix("metadata")] = _ICEBERG

    def _note_folder(self, folder: str, start: int) -> None:
        """Record the tables that a folder's url shows, searched from the index `start` on."""
        for match in _TABLE_FOLDER.finditer(f"{folder[start:]}/"):
            root = folder[: start + match.start()]
            if match[1] != "_versions" or root.endswith(".lance"):
                self.tables[f"{root}/"] = match[1]


def _refuse_tables(chosen: Sequence[ObjectInfo], tables: Mapping[str, str]) -> None:
    """Refuse objects that are part of a table."""
    urls = sorted(info.url for info in chosen) if tables else []
    for root, kind in tables.items():
        at = bisect_left(urls, root)
        if at < len(urls) and urls[at].startswith(root):
            raise _is_table(kind, root)


def _is_table(kind: str, root: str) -> ConfigError:
    what, how = _TABLES[kind]
    root = root.rstrip("/")
    url = root.removeprefix(FILE_PREFIX)
    return ConfigError(
        f"{root} is {what}, and its folder also holds data that is not in its present version: "
        f"{how.format(url=url)}",
        field="urls",
        shard=root,
    )


def _without_caches(
    chosen: Sequence[ObjectInfo],
    listed: Sequence[ObjectInfo],
    marks: _Marks,
    store: Store,
    *,
    is_whole: bool,
) -> list[ObjectInfo]:
    """Remove the objects that the `datasets` library keeps beside a dataset. Of a dataset that the
    library has saved, keep only the files that state.json names. `is_whole` means that all objects
    of the folder were listed.
    """
    if not marks.with_info:
        return list(chosen)
    files = _saved_files(marks, store)
    if files and is_whole:
        there = {info.url for info in listed}
        for root, urls in files.items():
            lost = next((url for url in urls if url not in there), None)
            if lost is not None:
                raise ShardNotFound(
                    f"{root}state.json names {lost.removeprefix(root)}, which is not there: the "
                    "dataset was not copied as a whole",
                    shard=lost,
                )
    roots = list(files)

    def is_kept(url: str) -> bool:
        at = bisect_right(roots, url) - 1
        if at >= 0 and url.startswith(roots[at]):
            return url in files[roots[at]]
        above, _, last = url.rpartition("/")
        return not (above in marks.with_info and _CACHED.fullmatch(last))

    return [info for info in chosen if is_kept(info.url)]


def _saved_files(marks: _Marks, store: Store) -> dict[str, dict[str, None]]:
    """Return the urls of the files of each saved dataset, by its folder, in order; saved datasets
    are never nested.
    """
    files: dict[str, dict[str, None]] = {}
    outer = ""
    for info in sorted(marks.states, key=lambda info: info.url.removesuffix("state.json")):
        root = info.url.removesuffix("state.json")
        is_inside = outer and root.startswith(outer)
        if is_inside or root[:-1] not in marks.with_info or info.size_bytes > _STATE_BYTES_MAX:
            continue
        content = store.read(info.url, 0, info.size_bytes, info.etag)
        try:
            state = msgspec.json.decode(content, type=complete(_State))
        except msgspec.DecodeError:  # a state.json of some other program
            continue
        if state.indices_files or state.indices_data_files:
            raise ConfigError(
                f"{info.url} names a file of indices, which selects the rows of the dataset: save "
                "it again with a current version of `datasets`",
                field="urls",
                shard=info.url,
            )
        outer = root
        files[root] = {f"{root}{file.filename}": None for file in state.data_files}
    return files


def _refuse_revisions(infos: Sequence[ObjectInfo], folder: str) -> None:
    """Refuse several revisions of one dataset in the cache of the Hugging Face Hub."""
    start, known = len(folder) - 1, dict[str, str]()
    for info in infos:
        match = _REVISION.search(info.url)
        if match is None or match.end() <= start:
            continue
        before = known.setdefault(match[1], match[2])
        if before != match[2]:
            raise ConfigError(
                f"{info.url[: match.end(1)]} holds several revisions of one dataset, {before} and "
                f"{match[2]}: pass the folder of one of them",
                field="urls",
                shard=info.url,
            )


def _may_have_splits(below: str) -> bool:
    """Return whether these names, in lower case and one per line, may belong to several splits."""
    stems = [stem for stem in _STEMS if stem in below]
    if len(stems) != 1:
        return bool(stems)
    # If only some names contain the word, the others may belong to splits with unknown names.
    return any(stems[0] not in name for name in below.split("\n"))


def _refuse_splits(
    name: str, infos: Sequence[ObjectInfo], folder: str, dicts: Sequence[str]
) -> None:
    """Refuse objects of several splits, unless a pattern names a single split."""
    if any(_split_in(part) for part in name[len(folder) :].split("/")):
        return
    splits, others = _splits_of(infos, len(folder))
    for root in dicts:
        below = [info.url for info in infos if info.url.startswith(root)]
        of_dict: dict[str, list[str]] = {}
        for url in filter(_is_shard, below):
            of_dict.setdefault(url[len(root) :].partition("/")[0], []).append(url)
        splits = max(splits, of_dict, key=len)
    if len(splits) < 2:
        for split, urls in splits.items():
            _note_others(name, split, urls, others)
        return
    order = list(dict.fromkeys(_SPLIT_OF.values()))
    shown = sorted(splits, key=lambda split: (order.index(split) if split in order else 9, split))
    ways = {split: _way(split, splits, folder) for split in shown[:_SPLITS_SHOWN]}
    more = f" and {len(shown) - len(ways)} more" if len(shown) > len(ways) else ""
    listing = ", ".join(f"{split} ({way})" for split, way in ways.items())
    raise ConfigError(
        f"{name} holds several splits, which are not read together: {listing}{more}. Pass the one "
        "that you want, or a list of those that you do want together (split= takes a part of "
        "all samples by hash, and knows no names of files)",
        field="urls",
        shard=splits[shown[0]][0],
    )


def _note_others(name: str, split: str, urls: Sequence[str], others: Sequence[str]) -> None:
    """Log if shards of one split are read together with shards of no split."""
    shards = [*filter(_is_shard, others)]
    if shards and any(map(_is_shard, urls)):
        _trace.failed(
            "shards of a split are read together with others",
            dataset=name,
            split=split,
            such_as=urls[0],
            others=len(shards),
            other=shards[0],
        )


def _splits_of(infos: Sequence[ObjectInfo], start: int) -> tuple[dict[str, list[str]], list[str]]:
    """Return the urls of each split, and the urls of no split. A file's own name decides, otherwise
    the nearest folder. If a folder has splits, every other name like "name-00000-of-00001" in it
    counts as a split, too.
    """
    of_folder: dict[str, str] = {}
    splits: dict[str, list[str]] = {}
    rest: list[str] = []
    with_splits: set[str] = set()
    for info in infos:
        above, _, last = info.url[start:].rpartition("/")
        split = _split_in(last)
        if split:
            with_splits.add(above)
        elif above not in of_folder:
            parts = reversed(above.split("/"))
            split = of_folder[above] = next(filter(None, map(_split_in, parts)), "")
        else:
            split = of_folder[above]
        (splits.setdefault(split, []) if split else rest).append(info.url)
    others: list[str] = []
    for url in rest:
        above, _, last = url[start:].rpartition("/")
        numbered = _NUMBERED.match(last) if above in with_splits else None
        (others if numbered is None else splits.setdefault(numbered[1], [])).append(url)
    if len(splits) < 2 or not any(_is_shard(info.url) for info in infos):
        return splits, others
    shards = {split: [*filter(_is_shard, urls)] for split, urls in splits.items()}
    return {split: urls for split, urls in shards.items() if urls}, others


def _split_in(part: str) -> str:
    """Return the split that one part of a path names, if any."""
    match = _SPLIT.search(part)
    return _SPLIT_OF[match[1].lower()] if match else ""


def _is_shard(url: str) -> bool:
    has_suffix = suffix_of(url) not in {"", MANIFEST} and not is_beside(url)
    return has_suffix or _NUMBERED.match(url.rpartition("/")[2]) is not None


def _way(split: str, splits: Mapping[str, Sequence[str]], folder: str) -> str:
    """Return a pattern that matches all shards of a split and no others; if there is none, say how
    many shards there are.
    """
    urls = splits[split]
    others = [url for other, its in splits.items() if other != split for url in its]
    if len(urls) == 1:
        return urls[0]
    start = os.path.commonprefix(urls)  # noqa: RUF071 - of texts: names may differ in part
    above = start[: start.rfind("/") + 1]
    if not any(url.startswith(above) for url in others):
        return above
    suffix, first = suffix_of(urls[0]), urls[0][len(folder) :]
    parts = first.split("/")
    at = max((at for at, part in enumerate(parts) if _split_in(part) == split), default=-1)
    match = _SPLIT.search(parts[at]) if at >= 0 else None
    named = f"{parts[at][: match.end()]}*{suffix}" if match else ""
    if at >= 0 and at < len(parts) - 1:
        named = f"{parts[at]}/**"
    for way in (f"{start.rstrip('0123456789')}*{suffix}", f"{folder}**/{named}" if named else ""):
        matches = compile_glob(way).fullmatch
        if way and all(map(matches, urls)) and not any(map(matches, others)):
            return way
    return f"{len(urls)} shards such as {urls[0]}"
