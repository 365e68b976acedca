"""The file suffixes of shards, by format.

Trainers, which import no format, use this too: to distinguish a list of shards from a list of
samples.
"""

from __future__ import annotations

from collections.abc import Mapping

FILES = "files"
"""The format of files that are rows themselves."""
BESIDES = (FILES, "npy", "csv")
"""Formats of files that often lie beside shards of another format, such as metadata.csv: then they
are left out. If a folder has several of these, the first is read.
"""
# The suffixes of each format in lower case, the longest first.
BY_FORMAT: Mapping[str, tuple[str, ...]] = {
    FILES: (".jpeg", ".webp", ".jpg", ".png"),
    "parquet": (".parquet", ".parq", ".pqt"),
    "arrow": (".arrows", ".arrow", ".feather", ".ipc"),
    "tfrecord": (
        *(".tfrecords.gz", ".tfrecord.gz", ".tfrecords", ".tfrecord", ".tfrec.gz"),
        ".tfrec",
    ),
    "tar": (".tar.zst", ".tar.gz", ".tgz", ".tar"),
    "jsonl": (
        *(".ndjson.zst", ".jsonl.zst", ".json.zst", ".ndjson.gz", ".jsonl.gz", ".json.gz"),
        *(".ndjson", ".jsonl"),
    ),
    "csv": (".csv.zst", ".tsv.zst", ".csv.gz", ".tsv.gz", ".csv", ".tsv"),
    "npy": (".npy",),
    "mds": (".mds.zstd", ".mds.zst", ".mds.gz", ".mds"),
}
MANIFEST = ".manifest"
"""The suffix of a manifest, which `dataplane index` saves for a whole dataset."""
TABLE_PREFIXES = ("delta+", "iceberg+")
"""The beginnings of urls of tables: see store/tables.py."""

_ALL = (
    MANIFEST,
    *(suffix for name, own in BY_FORMAT.items() if name != FILES for suffix in own),
)


def path_of(url: str) -> str:
    """Return the path of a url in lower case, without query and fragment. Only urls of the web have
    these: in a key or a file name, "?" and "#" are ordinary characters.
    """
    lower = url.lower()
    is_of_web = lower.startswith(("http://", "https://"))
    return lower.partition("?")[0].partition("#")[0] if is_of_web else lower


def is_beside(url: str) -> bool:
    """Return whether a file may lie beside shards without being one."""
    path = path_of(url)
    return any(path.endswith(BY_FORMAT[name]) for name in BESIDES)


def names_a_shard(url: str) -> bool:
    """Return whether a name has the suffix of a built-in format, or of a manifest."""
    return bool(suffix_of(url))


def suffix_of(url: str) -> str:
    """Return the suffix of `url` that marks a shard or a manifest; "" if there is none."""
    path = path_of(url)
    return next((suffix for suffix in _ALL if path.endswith(suffix)), "")
