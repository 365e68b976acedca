"""What users find when files and folders are wrong: each kind has its clear answer, and none hangs.

A kind makes a folder, or the url to read, and says what is read of it: the ids of the rows, or the
error. Files are indexed and decoded in this process, as a worker does it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sample_files import litdata_bytes, litdata_index, mds_bytes
from shards import (
    arrow_bytes,
    example_bytes,
    json_lines,
    npy_bytes,
    parquet_bytes,
    tar_bytes,
    tfrecord_bytes,
    zipped,
)

from dataplane.commands.datasets import read_block, schema_of
from dataplane.index.indexing import index_dataset
from dataplane.index.run import IndexProgress
from dataplane.model.errors import (
    ConfigError,
    CorruptShard,
    DataplaneError,
    DatasetChangedError,
    SchemaMismatch,
    ShardNotFound,
    StoreDenied,
)

IDS = list(range(9))
TABLE = pa.table({"id": IDS, "text": [f"t{at}" for at in IDS]})
PARQUET, ARROW = parquet_bytes(TABLE), arrow_bytes(TABLE, rows=9, file=True)
LINES = json_lines(TABLE.to_pylist())
TAR = tar_bytes((f"{at}.{end}", b"%d" % at) for at in IDS for end in ("id", "txt"))
RECORDS = tfrecord_bytes(example_bytes({"id": ("int64_list", [at])}) for at in IDS)
LARGE = 5 << 30

Files = dict[str, bytes]
Make = Callable[[Path], object]
Answer = tuple[type[DataplaneError], str] | list[int]


def written(files: Files) -> Make:
    def make(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    return make


def changed(content: bytes, at: int, to: bytes) -> bytes:
    body = bytearray(content)
    body[at : at + len(to) or None] = to
    return bytes(body)


def beside(make: Make) -> Make:
    """What `make` makes, beside a shard that is right."""

    def both(folder: Path) -> object:
        (folder / "b.parquet").write_bytes(PARQUET)
        return make(folder)

    return both


def stretched(name: str, content: bytes) -> Make:
    """A file of 5 GB, without blocks behind its beginning."""

    def make(folder: Path) -> None:
        (folder / name).write_bytes(content)
        os.truncate(folder / name, LARGE)

    return make


def bound(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "a.parquet"))


def of_bytes(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/a\xff.parquet")).write_bytes(PARQUET)


def symlinked_member() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        link = tarfile.TarInfo("1.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return sink.getvalue()


def objects() -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.array([{1: 2}], dtype=object))
    return sink.getvalue()


def reading(folder: Path, source: object, format_name: str = "", **options: Any) -> list[int]:
    manifest = index_dataset(str(source or folder), format_name=format_name, **options)
    schema = schema_of(manifest)
    columns = [name for name in schema.names if name in {"id", "cls"}] or schema.names[:1]
    blocks = [read_block(manifest, at, schema, columns) for at in range(manifest.block_count)]
    return [value for block in blocks for value in block.column(0).to_pylist()]


TWICE = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
LITDATA = litdata_bytes({"id": "int"}, [{"id": 1}])
FOOTER = len(PARQUET) - 8
KINDS: dict[str, tuple[Make, Answer]] = {
    # files that end early, or late
    "truncated Parquet": (
        written({"a.parquet": PARQUET[:-30]}),
        (CorruptShard, "the Parquet file is truncated, its footer is missing"),
    ),
    "truncated Arrow": (
        written({"a.arrow": ARROW[:-30]}),
        (CorruptShard, "Arrow IPC file is trunc"),
    ),
    "truncated tar": (
        written({"a.tar": TAR[:-9000]}),
        (CorruptShard, "the tar archive is truncated"),
    ),
    "truncated TFRecord": (
        written({"a.tfrecord": RECORDS[:-3]}),
        (CorruptShard, "record 8 is truncated"),
    ),
    "truncated line": (
        written({"a.jsonl": LINES[:-5]}),
        (CorruptShard, r"byte 192, line 1 .*: broken JSON"),
    ),
    "truncated gzip": (
        written({"a.jsonl.gz": zipped(LINES)[:-12]}),
        (CorruptShard, "the compressed data is truncated; upload the shard again"),
    ),
    "bytes behind the end": (
        written({"a.parquet": PARQUET + b"\n"}),
        (CorruptShard, "the Parquet file is truncated"),
    ),
    "empty file": (
        beside(written({"a.parquet": b""})),
        (CorruptShard, "a.parquet: .*shard is empty"),
    ),
    "array that is shorter than it says": (
        written({"a.npy": npy_bytes(np.zeros(3)).replace(b"(3,)", b"(9,)")}),
        (CorruptShard, "expected 72 bytes of 9 rows, found 24 bytes"),
    ),
    # files that are something else
    "wrong suffix": (
        written({"a.parquet": ARROW}),
        (CorruptShard, "not a Parquet file: expected PAR1, found an Arrow IPC file"),
    ),
    "zeros": (written({"a.parquet": bytes(999)}), (CorruptShard, "not a Parquet file")),
    "error page": (
        written({"a.parquet": b"<!doctype html><html>log in</html>"}),
        (CorruptShard, "found an HTML page"),
    ),
    "Git LFS pointer": (
        written({"a.parquet": b"version https://git-lfs.github.com/spec/v1\nsize 5\n"}),
        (CorruptShard, r"a Git LFS pointer \(fetch the real object: git lfs pull\)"),
    ),
    "encrypted": (
        written({"a.parquet": b"PARE" + PARQUET[4:-4] + b"PARE"}),
        (CorruptShard, "encrypted Parquet files are not supported"),
    ),
    "gzip twice": (
        written({"a.jsonl.gz": gzip.compress(zipped(LINES))}),
        (CorruptShard, "not JSON lines: expected {, found gzip data"),
    ),
    "array of JSON": (
        written({"a.jsonl": json.dumps(TABLE.to_pylist()).encode()}),
        (CorruptShard, "not JSON lines: expected {, found JSON text"),
    ),
    "Python objects": (
        written({"a.npy": objects()}),
        (SchemaMismatch, "it has Python objects, which nodes do not unpickle"),
    ),
    # files that lie
    "length of the footer": (
        written({"a.parquet": changed(PARQUET, FOOTER, (1 << 31).to_bytes(4, "little"))}),
        (CorruptShard, "the length of the Parquet footer is wrong: expected at most"),
    ),
    "footer": (
        written({"a.parquet": changed(PARQUET, FOOTER - 60, bytes(30))}),
        (CorruptShard, "the Parquet footer is damaged"),
    ),
    "length of Arrow's footer": (
        written({"a.arrow": changed(ARROW, len(ARROW) - 10, (1 << 30).to_bytes(4, "little"))}),
        (CorruptShard, "the length of the footer is impossible: found 1073741824"),
    ),
    "bomb of gzip": (
        written({"a.jsonl.gz": gzip.compress(bytes(256 << 20), 1)}),
        (CorruptShard, "not JSON lines: expected {, found bytes 00"),
    ),
    "5 GB of nothing as Parquet": (
        stretched("a.parquet", PARQUET),
        (CorruptShard, "byte 5368709116: the Parquet file is truncated"),
    ),
    "5 GB of nothing behind a tar": (stretched("a.tar", TAR), IDS),
    "deep JSON": (
        written({"a.jsonl": b'{"a": ' + b"[" * 99_999 + b"]" * 99_999 + b"}\n"}),
        (CorruptShard, "line 1 is nested deeper than 256 levels"),
    ),
    # text
    "key twice in a line": (
        written({"a.jsonl": b'{"id": 1, "id": 2}\n'}),
        (CorruptShard, "broken JSON .*specified twice"),
    ),
    "mark of UTF-8": (written({"a.jsonl": b"\xef\xbb\xbf" + LINES}), IDS),
    "UTF-16": (
        written({"a.jsonl": LINES.decode().encode("utf-16")}),
        (CorruptShard, "not JSON lines: expected {, found bytes ff fe"),
    ),
    "CRLF": (written({"a.jsonl": LINES.replace(b"\n", b"\r\n")}), IDS),
    "NUL bytes": (
        written({"a.jsonl": LINES + bytes(99)}),
        (CorruptShard, "byte 216, line 1 .*: broken JSON"),
    ),
    "ragged CSV": (
        written({"a.csv": b"id,text\n1,a\n2\n"}),
        (CorruptShard, r"a record does not fit the table .*Row #2: Expected 2 columns, got 1"),
    ),
    "open quote": (
        written({"a.csv": b'id,text\n1,"a\n2,b\n'}),
        (CorruptShard, "a quote is not closed: the table is truncated or damaged"),
    ),
    # tables
    "no rows": (
        written({"a.parquet": parquet_bytes(TABLE[:0])}),
        (ConfigError, "no samples: no rows in"),
    ),
    "no columns": (
        written({"a.parquet": parquet_bytes(pa.table({}))}),
        (ConfigError, "no samples"),
    ),
    "column twice": (
        written({"a.parquet": parquet_bytes(TWICE)}),
        (ConfigError, "two columns are named 'a'; rename one"),
    ),
    "other schema": (
        beside(written({"a.parquet": parquet_bytes(pa.table({"id": ["x"]}))})),
        (SchemaMismatch, r"column 'id': .*a.parquet has string, this shard has int64"),
    ),
    "other format": (
        beside(written({"a.arrow": ARROW})),
        (ConfigError, "a.arrow is arrow, .*b.parquet is parquet. A dataset has one format"),
    ),
    # archives and indexes
    "absolute members": (
        written({"a.tar": tar_bytes([("/etc/1.id", b"1"), ("../../2.id", b"2")])}),
        [1, 2],  # names of samples, and no paths: nothing is extracted
    ),
    "link in a tar": (
        written({"a.tar": symlinked_member()}),
        (CorruptShard, "member '1.txt' is a symbolic link, .* tar --dereference"),
    ),
    "index.json that names a file outside": (
        written(
            {
                "../outside.bin": LITDATA,
                "chunk-0-0.bin": LITDATA,
                "index.json": litdata_index({"id": "int"}, ["chunk-0-0.bin", "../outside.bin"]),
            }
        ),
        (ShardNotFound, r"index.json names \.\./outside.bin, which is not there"),
    ),
    "broken index.json": (
        written({"chunk-0-0.bin": LITDATA, "index.json": b"{"}),
        (CorruptShard, r"index.json is damaged \(.*\): restore it"),
    ),
    "broken index.json that nobody needs": (
        written({"shard.00000.mds": mds_bytes({"id": "int"}, [{"id": 1}]), "index.json": b"{"}),
        [1],
    ),
    # folders
    "newline in a name": (written({"a\nb.parquet": PARQUET}), IDS),
    "name that is not UTF-8": (of_bytes, (ConfigError, r"a\\xff.parquet' is not UTF-8: rename it")),
    "folder named like a shard": (written({"a.parquet/b.parquet": PARQUET}), IDS),
    "link that dangles": (
        beside(lambda folder: (folder / "a.parquet").symlink_to("nowhere")),
        (ShardNotFound, "a.parquet is a symbolic link to nowhere, which is not there"),
    ),
    "link to itself": (
        beside(lambda folder: (folder / "a.parquet").symlink_to("a.parquet")),
        (ShardNotFound, "is a symbolic link to a.parquet, which is not there"),
    ),
    "loop of links": (beside(lambda folder: (folder / "x").symlink_to(folder)), IDS),
    "pipe": (
        beside(lambda folder: os.mkfifo(folder / "a.parquet")),
        (ShardNotFound, "a.parquet is a pipe, a socket or a device, and no file: remove it"),
    ),
    "socket": (beside(bound), (ShardNotFound, "a.parquet is a pipe, a socket or a device")),
    "device": (
        lambda folder: (folder / "a.jsonl").symlink_to("/dev/zero"),
        (ShardNotFound, "a.jsonl is a pipe, a socket or a device"),
    ),
    "pipe by its name": (
        lambda folder: os.mkfifo(folder / "a.parquet") or folder / "a.parquet",
        (ShardNotFound, "a.parquet is not a regular file"),
    ),
    "partial upload": (beside(written({"a.parquet.tmp": PARQUET[:40]})), IDS),
    "hidden files": (beside(written({".a.parquet": b"", "_a.parquet": b""})), IDS),
    "no shards": (
        written({"README.md": b"x"}),
        (ConfigError, "none of the 1 objects has a suffix"),
    ),
    "nothing": (lambda _: None, (ShardNotFound, "is an empty folder")),
    "no folder": (lambda folder: folder / "no", (ShardNotFound, "there is no file .*/no")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_has_its_answer(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    make, answer = KINDS[kind]
    source = make(folder)
    if isinstance(answer, list):
        assert reading(folder, source) == answer
        return
    with pytest.raises(answer[0], match=answer[1]) as caught:
        reading(folder, source)
    assert "\n" not in str(caught.value).removesuffix("\n") or kind == "newline in a name"


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, if the tests run as root."""
    before = os.geteuid()
    if not before:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_may_not_be_read_is_named(*, is_folder: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # the folder of tests is private
        folder = Path(name)
        folder.chmod(0o755)
        written({"x/a.parquet": PARQUET})(folder)
        wrong = folder / "x" if is_folder else folder / "x/a.parquet"
        wrong.chmod(0)
        with (
            as_nobody(),
            pytest.raises(StoreDenied, match=f"may not read .*{wrong}: check its mode"),
        ):
            reading(folder, None)
        wrong.chmod(0o755)


def test_a_listing_that_changes_while_it_is_indexed_is_named(tmp_path: Path) -> None:
    written({"a.parquet": PARQUET, "b.parquet": PARQUET})(tmp_path)

    def remove(_: IndexProgress) -> None:
        (tmp_path / "b.parquet").unlink(missing_ok=True)

    with pytest.raises(ShardNotFound, match=r"there is no file .*b.parquet"):
        reading(tmp_path, None, progress=remove)


def test_a_file_that_is_replaced_after_it_was_indexed_is_named(tmp_path: Path) -> None:
    written({"a.parquet": PARQUET})(tmp_path)
    manifest = index_dataset(str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(PARQUET + PARQUET)
    with pytest.raises(DatasetChangedError, match=r"a.parquet"):
        read_block(manifest, 0, schema_of(manifest), ["id"])


@pytest.mark.slow
def test_many_tiny_files_are_one_dataset(tmp_path: Path) -> None:
    count = 100_000
    for at in range(count):
        (tmp_path / f"{at:06}.png").write_bytes(b"%d" % at)
    found = index_dataset(str(tmp_path))
    assert found.sample_count == count
    assert found.block_count < count // 200
