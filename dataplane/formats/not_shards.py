"""Identifies files that no format reads, by their names, and says what to do with them."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import Final

from dataplane.suffixes import names_a_shard, path_of, suffix_of

_CONVERT = "write it as Parquet, Arrow, TFRecord, tar or JSON lines, which are read as they are"
_AS_DATASET = "pass a torch Dataset that reads it as the first argument"
# By ending: the kind of file, and the advice.
_BY_ENDING: Final[dict[tuple[str, ...], tuple[str, str]]] = {
    (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".jxl",
     ".jp2", ".ppm"): (
        "an image",
        ("load a folder of them with DataLoader(torchvision.datasets.ImageFolder(folder, "
        "transform)), since any torch Dataset works; or pack them into tar files of a few "
        'hundred MB (name.jpg beside name.cls) and pass those with transforms={"jpg": [...]}'),
    ),
    (".mds", ".mds.zstd", ".mds.zst"): (
        "one of MosaicML's MDS files",
        ("pass a streaming.StreamingDataset over the folder as the first argument, or write the "
        "samples as Parquet, Arrow, TFRecord, tar or JSON lines, which are read as they are"),
    ),
    (".mp4", ".mov", ".mkv", ".webm", ".avi", ".wav", ".mp3", ".flac", ".ogg", ".m4a"): (
        "audio or video", f"{_AS_DATASET}, or pack such files into tar files of a few hundred MB"
    ),
    (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.zst"): (
        "a text table, which has neither types nor blocks",
        ("convert it once, as with "
        'pyarrow.parquet.write_table(pyarrow.csv.read_csv("a.csv"), "a.parquet")'),
    ),
    (".npy", ".npz", ".h5", ".hdf5", ".mat"): ("an array", f"{_AS_DATASET}, or {_CONVERT}"),
    (".pt", ".pth", ".pkl", ".pickle", ".safetensors"): (
        "Python objects, which nodes do not unpickle", f"{_AS_DATASET}, or {_CONVERT}"
    ),
    (".jsonl.zst", ".jsonl.xz", ".jsonl.bz2", ".ndjson.zst", ".json.zst"): (
        "JSON in an unsupported compression", "use gzip (.jsonl.gz), or none"
    ),
    (".tar.zst", ".tar.xz", ".tar.bz2", ".tzst"): (
        "a tar file in an unsupported compression",
        "use none (images are compressed already), or gzip (.tar.gz)",
    ),
    (".json",): (
        "JSON, which must have one object per line",
        'write one object per line; if it has that, rename it to .jsonl or pass format="jsonl"',
    ),
    (".zip", ".7z", ".rar"): ("an archive of an unsupported kind", "pack its files into tar files"),
    (".beton",): ("one of FFCV's files", "write its samples from their source as tar or Parquet"),
    (".mdb", ".lmdb", ".sqlite", ".db"): ("a database", f"{_AS_DATASET}, or {_CONVERT}"),
    (".orc", ".avro", ".lance", ".vortex", ".rec", ".bin", ".txt", ".txt.gz", ".xml"): (
        "of an unsupported format", _CONVERT
    ),
}  # fmt: skip
_INDEXES: Final = {"index.json", "dataset_info.json", "state.json"}
_LOOKED_AT_MAX = 1000


def said_of(url: str, urls: Sequence[str]) -> str:
    """Describe the file at `url`, which has no ending of a format, with advice; "" if unknown.

    The rest of the dataset matters, too: an index.json alone says nothing, and if there are shards
    beside a README, the user meant the shards.
    """
    near = urls[:_LOOKED_AT_MAX]
    shard = next((one for one in near if names_a_shard(one)), None)
    if shard is not None:
        ending, folder = suffix_of(shard), posixpath.dirname(shard)
        return (
            f"this is not a shard, but {posixpath.basename(shard)} in the same dataset is: list "
            f"only the shards, for example {folder}/*{ending}"
        )
    found, is_it = _known(url), True
    if posixpath.basename(path_of(url)) in _INDEXES or found is None:
        others = (_known(one) for one in near if one != url)
        other = next((one for one in others if one is not None), None)
        found, is_it = (found, True) if other is None else (other, False)
    if found is None:
        return ""
    what, to_do = found
    return f"this is {what}: {to_do}" if is_it else f"beside it is {what}: {to_do}"


def _known(url: str) -> tuple[str, str] | None:
    path = path_of(url)
    fitting = {
        len(ending): said
        for endings, said in _BY_ENDING.items()
        for ending in endings
        if path.endswith(ending)
    }
    return fitting[max(fitting)] if fitting else None
