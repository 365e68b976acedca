"""Datasets that are indexed ahead of their node: what comes of it is what the node would find."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from shards import arrow_bytes, parquet_bytes

from dataplane.errors import CorruptShard, DataplaneError, StoreError
from dataplane.formats.first_reads import PROBE_BYTES, first_reads
from dataplane.index import ahead
from dataplane.index.ahead import found_ahead
from dataplane.index.found import FoundDataset, Part, Place, Scouted
from dataplane.index.indexing import index_dataset
from dataplane.model import ObjectInfo
from dataplane.store.local import LocalStore

TABLE = pa.table(
    {
        "id": range(3000),
        "text": [f"row {n}" for n in range(3000)],
        "v": [[n] * 3 for n in range(3000)],
    }
)


def written(folder: Path, name: str) -> Path:
    """Three shards of this format, the middle one without rows if that is possible."""
    folder.mkdir()
    empty = TABLE.slice(0, name == "jsonl")
    for number, rows in enumerate((TABLE, empty, TABLE.slice(100, 2000))):
        path = folder / f"{number}.{name}"
        if name == "parquet":
            path.write_bytes(parquet_bytes(rows, row_group_size=500))
        elif name == "arrow":
            path.write_bytes(arrow_bytes(rows))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
    return folder


def scouted(folder: Path) -> Scouted:
    """What a scout would have read of these shards."""
    files = sorted(folder.iterdir())
    listed = [LocalStore().head(file.as_uri()) for file in files]
    parts = [
        (at, place.offset, file.read_bytes()[place.offset : place.offset + place.length])
        for at, file in enumerate(files)
        for place in first_reads(str(file), file.stat().st_size)
    ]
    return Scouted([(one.url, one.size_bytes, one.etag) for one in listed], parts)


class Refusing:
    """A store that must not be asked."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        raise StoreError("asked", shard=prefix)

    def head(self, url: str) -> ObjectInfo:
        raise StoreError("asked", shard=url)

    def read(self, url: str, *_: object) -> bytes:
        raise StoreError("asked", shard=url)

    def stream(self, url: str, _etag: str) -> Iterator[bytes]:
        raise StoreError("asked", shard=url)


@pytest.mark.parametrize("name", ["parquet", "arrow", "jsonl"])
@pytest.mark.parametrize("is_scouted", [True, False])
def test_the_manifest_is_the_same_and_nothing_is_asked_again(
    tmp_path: Path, name: str, *, is_scouted: bool
) -> None:
    folder = written(tmp_path / "data", name)
    found = found_ahead((str(folder),), "", scouted(folder) if is_scouted else None)
    whole = index_dataset(folder).to_bytes()
    assert index_dataset(folder, found=found).to_bytes() == whole
    assert [at for at, _ in found.indexes] == ([] if name == "jsonl" else [0, 1, 2])
    if name != "jsonl":
        again = index_dataset(folder, connect=lambda _: Refusing(), found=found)
        assert again.to_bytes() == whole
    for at, offset, content in found.preambles:
        shard = Path(found.listed[at][0].removeprefix("file://")).read_bytes()
        assert shard[offset : offset + len(content)] == content
    assert bool(found.preambles) == (is_scouted and name != "jsonl")


def test_only_the_first_shards_are_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "SHARDS_MAX", 2)
    folder = written(tmp_path / "data", "arrow")
    found = found_ahead((str(folder),), "", None)
    assert [at for at, _ in found.indexes] == [0, 1]
    assert index_dataset(folder, found=found).to_bytes() == index_dataset(folder).to_bytes()


def test_a_shard_whose_index_needs_more_than_was_read_is_left_to_the_node(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    wide = pa.table({f"column {n:05}": [n] for n in range(4000)})  # a footer of more than 64 KiB
    (folder / "0.parquet").write_bytes(parquet_bytes(wide))
    (folder / "1.parquet").write_bytes(parquet_bytes(wide.slice(0, 1)))
    read = scouted(folder)
    assert all(len(content) == PROBE_BYTES for _, _, content in read.parts)
    for read_more in (None, lambda _: []):  # nobody is there to be asked, or has an answer
        found = found_ahead((str(folder),), "", read, read_more=read_more)
        assert found.indexes == []
        assert index_dataset(folder, found=found).to_bytes() == index_dataset(folder).to_bytes()


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_the_scout_is_asked_for_what_else_is_needed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    wide = pa.table({f"column {n:05}": [n] for n in range(4000)})  # a footer of more than 64 KiB
    batches = pa.table({"id": range(40), "blob": [b"x" * (20_000 + n) for n in range(40)]})
    for number in range(3):
        content = parquet_bytes(wide) if name == "parquet" else arrow_bytes(batches, rows=1)
        (folder / f"{number}.{name}").write_bytes(content)
    (folder / "other.txt").write_bytes(b"no shard")
    read, asked = scouted(folder), list[Place]()

    def read_more(places: list[Place]) -> list[Part]:
        asked.extend(places)
        files = sorted(folder.iterdir())
        return [(at, offset, files[at].read_bytes()[offset:][:n]) for at, offset, n in places]

    found = found_ahead((str(folder),), "", read, read_more=read_more)
    assert [at for at, _ in found.indexes] == [0, 1, 2]
    assert len(asked) == len(set(asked)) >= 3
    whole = index_dataset(folder).to_bytes()
    assert index_dataset(folder, connect=lambda _: Refusing(), found=found).to_bytes() == whole


def test_the_error_of_a_damaged_shard_is_the_nodes_own(tmp_path: Path) -> None:
    folder = written(tmp_path / "data", "parquet")
    (folder / "0.parquet").write_bytes(b"PAR1" + bytes(200) + b"PAR1")
    found = found_ahead((str(folder),), "", scouted(folder))
    assert [at for at, _ in found.indexes] == [1, 2]
    with pytest.raises(CorruptShard, match=r"0\.parquet"):
        index_dataset(folder, found=found)


def test_nothing_is_indexed_that_the_cache_has(tmp_path: Path) -> None:
    folder, cache = written(tmp_path / "data", "arrow"), str(tmp_path / "cache")
    whole = index_dataset(folder, cache_dir=cache)
    found = found_ahead((str(folder),), "", None, cache)
    assert (len(found.listed), found.indexes) == (3, [])
    again = index_dataset(folder, cache_dir=cache, connect=lambda _: Refusing(), found=found)
    assert again.to_bytes() == whole.to_bytes()


def test_what_was_found_is_kept_for_the_next_run(tmp_path: Path) -> None:
    folder, cache = written(tmp_path / "data", "arrow"), str(tmp_path / "cache")
    found = found_ahead((str(folder),), "", None, cache)
    index_dataset(folder, cache_dir=cache, found=found)
    unindexed = FoundDataset(found.format, found.listed, [], [])
    again = index_dataset(folder, cache_dir=cache, connect=lambda _: Refusing(), found=unindexed)
    assert again.to_bytes() == index_dataset(folder).to_bytes()


# In the place of a node.
_AHEAD = """
import json, os, sys
from dataplane.formats.parquet import Parquet
from dataplane.node.index_ahead import IndexAhead
code, patience, *urls = sys.argv[1:]
exec(code)
ahead = IndexAhead(tuple(urls), "", None)
ahead.start()
found = ahead.found(float(patience))
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    pass
else:
    raise AssertionError("a process is left")
print(json.dumps(None if found is None else [found.format, len(found.indexes)]))
"""


_NO_FORK = """
import errno
def fork():
    raise OSError(errno.EAGAIN, "no more")
os.fork = fork
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("", ["parquet", 3]),
        ("Parquet.index = lambda *_: os._exit(1)", None),
        ("Parquet.index = lambda *_: os.kill(os.getpid(), 11)", None),
        ("Parquet.index = lambda *_: bytearray(2 << 30)", None),
        ("Parquet.index = lambda *_: 1 / 0", None),
        ("import threading; Parquet.index = lambda *_: threading.Event().wait()", None),
        (_NO_FORK, None),
    ],
    ids=["well", "exits", "crashes", "takes too much memory", "has a bug", "hangs", "no process"],
)
def test_whatever_becomes_of_the_process_is_nobodys_error(
    tmp_path: Path, code: str, expected: object
) -> None:
    folder = written(tmp_path / "data", "parquet")
    command = [sys.executable, "-c", _AHEAD, code, "1" if "wait" in code else "60", str(folder)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert (json.loads(done.stdout), done.stderr) == (expected, "")


def test_what_may_be_a_folder_is_left_to_the_node(tmp_path: Path) -> None:
    found = scouted(written(tmp_path / "data", "parquet"))
    shards = found.listed[:]
    found.listed.append(("s3://bucket/folder", 0, "e"))
    assert found_ahead([str(tmp_path / "data")], "", found).listed == shards
    found.listed.append(("s3://bucket/folder.parquet", 0, "e"))
    with pytest.raises(DataplaneError, match="the node asks"):
        found_ahead([str(tmp_path / "data")], "", found)
