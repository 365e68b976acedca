"""Folders of image files, read file by file: every row is one file, and every file one row."""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import CenterCrop, DataLoader
from pictures import drawn, encoded
from servers import S3Server, reach

from dataplane.cli import run
from dataplane.index import files
from dataplane.index.indexing import index_dataset
from dataplane.model.errors import (
    BudgetTooSmall,
    ConfigError,
    CorruptShard,
    DatasetChangedError,
    ImageError,
    ShardNotFound,
)
from dataplane.model.joined import Joined
from dataplane.model.records import ObjectInfo
from dataplane.plan.manifest import Manifest
from dataplane.plan.permute import Domain
from dataplane.plan.permute import key as plan_key
from dataplane.plan.views import identity_of
from dataplane.store.retry import Retrying

KINDS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP"}
Rows = list[tuple[str, str, bytes]]


def content(count: int = 40, of: str = "train") -> dict[str, bytes]:
    """Images by name, of three classes, in folders of different depth."""
    kinds = list(KINDS)
    names = (
        f"{of}/{('cat', 'dog/small', 'zebra')[at % 3]}/{at:03d}{kinds[at % len(kinds)]}"
        for at in range(count)
    )
    return {
        name: encoded(drawn(8 + at, 9), KINDS[Path(name).suffix]) for at, name in enumerate(names)
    }


def rows_of(objects: dict[str, bytes]) -> Rows:
    """The rows in the order of the listing."""
    keys = {name.partition("/")[2]: body for name, body in objects.items()}
    return [(key, key.partition("/")[0], keys[key]) for key in sorted(keys)]


def read(source: Any, **options: Any) -> Rows:
    with DataLoader(source, batch_size=7, **options) as loader:
        return [
            (key, label, bytes(image))
            for batch in loader
            for key, label, image in zip(
                batch["__key__"], batch["label"], batch["image"], strict=True
            )
        ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, content())
    return tmp_path / "train"


def write(root: Path, objects: dict[str, bytes]) -> None:
    for name, body in objects.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(body)


@pytest.mark.usefixtures("shared_node")
@pytest.mark.parametrize("shape", ["{}", "{}/", "file://{}/", "{}/*/**", "{}/**/*.*"])
def test_a_folder_of_images_is_read_file_by_file(folder: Path, shape: str) -> None:
    (folder / "README.md").write_text("not an image")
    assert read(shape.format(folder), shuffle=False) == rows_of(content())
    assert sorted(read(shape.format(folder))) == sorted(rows_of(content()))


@pytest.mark.usefixtures("shared_node")
def test_labels_come_as_codes_without_reading_an_image(folder: Path) -> None:
    options: dict[str, Any] = {"batch_size": 40, "codes": ["label"], "shuffle": False}
    with DataLoader(folder, transforms={"image": [CenterCrop(8)]}, **options) as loader:
        (batch,) = loader
        assert loader.categories("label") == ("cat", "dog", "zebra")
    assert batch["image"].shape == (40, 8, 8, 3)
    assert batch["label"].tolist() == [
        ("cat", "dog", "zebra").index(label) for _, label, _ in rows_of(content())
    ]


@pytest.mark.usefixtures("shared_node")
def test_files_directly_in_the_folders_that_are_named_have_these_as_labels(folder: Path) -> None:
    small = folder / "dog" / "small"
    rows = read([folder / "cat", f"{small}/"], shuffle=False, format="files")
    assert [label for _, label, _ in rows] == ["cat"] * 14 + ["small"] * 13
    assert rows[0][0] == "000.jpg"


def many() -> dict[str, bytes]:
    """Files of two blocks, some of them empty."""
    return {f"train/{at % 2}/{at:04d}.png": b"file %d " % at * (at % 5) for at in range(300)}


@pytest.mark.usefixtures("own_node")
def test_a_bucket_is_read_file_by_file_and_resumed(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(s3_server, monkeypatch)
    bucket, objects = s3_server.bucket(), many()
    s3_server.put(bucket, objects)
    url = f"s3://{bucket}/train/"
    assert index_dataset(url).block_rows.tolist() == [256, 44]
    assert read(url, shuffle=False) == rows_of(objects)
    with DataLoader(url, batch_size=50) as loader:
        first = [key for batch in islice(loader, 2) for key in batch["__key__"]]
        state = loader.state_dict()
    with DataLoader(url, batch_size=50) as loader:
        loader.load_state_dict(state)
        rest = [key for batch in loader for key in batch["__key__"]]
    assert sorted(first + rest) == [key for key, *_ in rows_of(objects)]


@pytest.mark.usefixtures("shared_node")
def test_a_split_of_a_folder_goes_by_the_names_of_files(tmp_path: Path) -> None:
    objects = many()
    write(tmp_path, objects)
    before = {key for key, *_ in read(tmp_path / "train", split=("train", 0.8))}
    for at in range(40):
        objects[f"train/0/{at}-new.png"] = b"new"
    write(tmp_path, objects)
    keys = {key for key, *_ in rows_of(objects)}
    splits = [
        {key for key, *_ in read(tmp_path / "train", **options, shuffle=shuffle)}
        for shuffle in (True, False)
        for options in ({"split": ("train", 0.8)}, {"split": ("test", 0.2)}, {"sample": 0.5})
    ]
    assert splits[:3] == splits[3:]
    train, test, sample = splits[:3]
    assert train | test == keys
    assert not train & test
    assert before == {key for key in train if "-new" not in key}
    for use, limit, share in ((0, 0.8, train), (1, 0.5, sample)):
        words = {key: digest_word(key) for key in keys}
        hashes = {key: plan_key(0, Domain.SHARE, use, word, 0) for key, word in words.items()}
        assert share == {key for key, v in hashes.items() if v >> 32 < int(limit * 2**32)}
    one = read(tmp_path / "train", split=("train", 0.8), where="label == '0'", shuffle=False)
    assert {key for key, *_ in one} == {key for key in train if key.startswith("0/")}
    assert len(read(tmp_path / "train", limit=10)) == 10


def digest_word(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@pytest.mark.usefixtures("shared_node")
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_file_that_changed_since_it_was_listed_is_named(tmp_path: Path, *, is_lost: bool) -> None:
    write(tmp_path, many())
    saved, changed = tmp_path / "train.manifest", tmp_path / "train/1/0299.png"
    saved.write_bytes(index_dataset(tmp_path / "train").to_bytes())
    if is_lost:
        changed.unlink()
    else:
        changed.write_bytes(b"something else")
    error = ShardNotFound if is_lost else DatasetChangedError
    with pytest.raises(error, match=r"1/0299\.png") as caught:
        read(saved)
    assert caught.value.shard == f"file://{changed}"


def test_a_copy_of_a_folder_differs_in_etags_alone(folder: Path, tmp_path: Path) -> None:
    before = identity_of(index_dataset(folder))
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for at, file in enumerate(sorted(copy.rglob("*.*"))):
        os.utime(file, (1.7e9 + at * 3.7, 1.7e9 + at * 3.7))
    after = identity_of(index_dataset(copy))
    assert after.layout == before.layout
    assert after.content != before.content
    (copy / "cat/003.webp").rename(copy / "cat/003b.webp")
    assert identity_of(index_dataset(copy)).layout != before.layout


class SignedStore:
    """Has an image at every url."""

    def head(self, url: str) -> ObjectInfo:
        return ObjectInfo(url, 9, f'"{url[:20]}"')

    def read(self, url: str, offset: int, length: int, etag: str) -> bytes:
        return bytes(length)


@pytest.mark.parametrize("signature", ["sig=a", "sig=secret", "sig=a/b/c"])
def test_signatures_are_in_neither_names_nor_identities(signature: str) -> None:
    def manifest(query: str) -> Manifest:
        store = Retrying(cast("Any", SignedStore()))
        urls = [f"https://h/cat/{at}.jpg?{query}{at}" for at in range(3)]
        return index_dataset(urls, connect=lambda _: store)

    signed = manifest(signature)
    (shard,) = signed.shards
    joined = Joined.of(shard.url, shard.etag)
    assert joined.root == "https://h/cat/"
    assert joined.keys() == ["0.jpg", "1.jpg", "2.jpg"]
    assert set(joined.labels()) == {"cat"}
    assert shard.url == "https://h/cat/0.jpg+2"
    assert [m.url.partition("?")[2] for m in joined.members] == [
        f"{signature}{n}" for n in range(3)
    ]
    assert identity_of(signed) == identity_of(manifest("sig=other"))


@pytest.mark.parametrize(
    "stored",
    [
        ([0], ["a"], [1], ['"e"', '"f"'], 0, b""),
        ([0], ["a"], [-5], ['"e"'], 0, b""),
        ([99], ["a"], [1], ['"e"'], 0, b""),
        ([0], ["a"], [1], ['"e"'], 99, b""),
        ([0], ["a"], [1], ['"e"'], 0, b"", [1, 2]),
        ([0], ["a"], [1 << 63], ['"e"'], 0, b""),
        ([0], ["a"], [1], ["joined:x"], 0, b""),
        ([], [], [], [], 0, b""),
        bytes(65 << 20),
    ],
)
def test_damaged_lists_of_files_are_refused(stored: object) -> None:
    plain = stored if isinstance(stored, bytes) else msgspec.msgpack.encode(stored)
    etag = f"joined:{base64.b64encode(zlib.compress(plain, 1)).decode()}"
    with pytest.raises(CorruptShard, match="index the dataset again"):
        Joined.of("http://h/b", etag)


def test_a_folder_is_verified_in_the_shards_that_training_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, many())
    assert run(["verify", str(tmp_path / "train")]) == 0
    assert "OK: 300 samples in 2 blocks of 2 shards" in capfd.readouterr().out
    good, bad = encoded(drawn(8, 9), "PNG"), b"no image"
    write(tmp_path / "some", {"a/0.png": good, "a/1.png": bad})
    assert run(["verify", "--decode", str(tmp_path / "some")]) == 1
    out = capfd.readouterr().out
    assert "0.png+1: row 1, column 'image'" in out
    assert "(__key__ 'a/1.png')" in out
    assert "2 samples in 1 block (" in out
    assert "undamaged" not in out


def labelled(form: str, root: Path, paths: list[str]) -> Path:
    """A table of these paths and of their numbers."""
    table = root / f"labels.{form}"
    columns = {"path": paths, "number": list(range(len(paths)))}
    if form == "parquet":
        pq.write_table(pa.table(columns), table, row_group_size=7)
    else:
        rows = zip(paths, range(len(paths)), strict=True)
        table.write_text("".join(f'{{"path": "{p}", "number": {n}}}\n' for p, n in rows))
    return table


@pytest.mark.usefixtures("shared_node")
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_table_of_paths_gives_its_rows_and_the_bytes_of_the_files(
    tmp_path: Path, form: str
) -> None:
    objects = many()
    write(tmp_path, objects)
    paths = [*reversed(objects), f"file://{tmp_path}/train/../train/0/0002.png", "train/0/0002.png"]
    table = labelled(form, tmp_path, paths)
    with DataLoader(table, files="path", batch_size=50, shuffle=False) as loader:
        rows = [
            row
            for batch in loader
            for row in zip(batch["path"], batch["number"].tolist(), batch["image"], strict=True)
        ]
    objects[paths[-2]] = objects[paths[-1]]
    assert rows == [(path, number, objects[path]) for number, path in enumerate(paths)]


def test_a_table_of_paths_in_a_bucket_names_objects(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reach(s3_server, monkeypatch)
    monkeypatch.setattr(files, "_HEADS_MAX", 2)
    bucket, other = s3_server.bucket(), s3_server.bucket()
    s3_server.put(other, {"b": b"bb"})
    s3_server.put(bucket, {"x/0": b"0", "x/1": b"11", "x/y/2": b"222"})
    paths = ["../x/1", f"s3://{other}/b", "y/2", "0"]
    s3_server.put(bucket, {"x/labels.jsonl": labelled("jsonl", tmp_path, paths).read_bytes()})
    manifest = index_dataset(f"s3://{bucket}/x/labels.jsonl", format_name="files::path")
    (shard,) = manifest.shards
    members = Joined.of(shard.url, shard.etag).members
    assert [(member.url, member.size_bytes) for member in members] == [
        (f"s3://{bucket}/x/1", 2),
        (f"s3://{other}/b", 2),
        (f"s3://{bucket}/x/y/2", 3),
        (f"s3://{bucket}/x/0", 1),
    ]


@pytest.mark.parametrize(
    ("paths", "column", "says"),
    [
        (["1.png", "2.png"], "path", r"none of the 2 files that it names is there, as .*1\.png"),
        (["0.png", ""], "path", "row 1 has '' for the path of its file"),
        (["0.png"], "number", "row 0 has 0 for the path of its file"),
        (["0.png"], "image", "has no column 'image', which files= names; it has path, number"),
    ],
)
def test_a_table_that_names_no_file_is_refused(
    tmp_path: Path, paths: list[str], column: str, says: str
) -> None:
    (tmp_path / "0.png").write_bytes(b"0")
    table = labelled("parquet", tmp_path, paths)
    with pytest.raises((ConfigError, ShardNotFound), match=says) as caught:
        index_dataset(table, format_name=f"files::{column}")
    assert caught.value.shard


def loaded(table: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows of a table of paths, in its order."""
    with DataLoader(table, files="path", batch_size=50, shuffle=False, **options) as loader:
        return [
            dict(zip(batch, row, strict=True))
            for batch in loader
            for row in zip(*map(list, batch.values()), strict=True)
        ]


@pytest.mark.usefixtures("shared_node")
def test_missing_files_of_a_table_are_listed_left_out_or_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [f"{row:03d}.png" for row in range(600)]
    lost = {3, 257, 258, 599}
    for row in set(range(600)) - lost:
        (tmp_path / paths[row]).write_bytes(b"%d" % row)
    table = labelled("parquet", tmp_path, paths)
    says = (
        r"labels.parquet names 4 files that are not there: row 3: .*003\.png; row 257: .*; row 599"
    )
    with pytest.raises(ShardNotFound, match=says):
        loaded(table)
    others = loaded(table, columns=["number"])
    assert [row["number"] for row in others] == list(range(600)), "no file is needed"
    view = loaded(table, where="number not in (3, 257, 258, 599)")
    assert [bytes(row["image"]) for row in view] == [b"%d" % row["number"] for row in view]
    assert len(view) == 596
    with pytest.raises(CorruptShard, match=r"row 1 names a file that is not there: .*257\.png"):
        loaded(table, where="number > 100")
    rows = loaded(table, on_bad="replace", bad_max=0.1)
    assert [at for at, row in enumerate(rows) if row["number"] != at] == sorted(lost)
    assert all(bytes(row["image"]) == b"%d" % row["number"] for row in rows)
    assert run(["verify", str(table), "--files", "path"]) == 1
    shown = capsys.readouterr().out
    assert [f"{row:03d}.png" in shown for row in sorted(lost)] == [True] * 4, shown


def test_an_image_is_not_a_table_of_paths(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"0")
    with pytest.raises(ConfigError, match=r"0\.png is an image, and files='path' needs a table"):
        index_dataset(tmp_path, format_name="files::path")


def cut(root: Path) -> None:
    (root / "cat/000.jpg").write_bytes((root / "cat/000.jpg").read_bytes()[:-20])


def mislabel(root: Path) -> None:
    (root / "cat/000.jpg").write_text("hello")


def empty(root: Path) -> None:
    (root / "cat/000.jpg").write_bytes(b"")


def break_link(root: Path) -> None:
    (root / "cat/999.png").symlink_to("nowhere")


def link(root: Path) -> None:
    (root / "cat/999.jpg").hardlink_to(root / "cat/000.jpg")


def name_in_bytes(root: Path) -> None:
    (root / "cat/000.jpg").rename(os.fsdecode(os.fsencode(root) + b"/cat/\xff.jpg"))


def swell(root: Path) -> None:
    with (root / "zebra/999.png").open("wb") as file:
        file.truncate(5 << 30)


@pytest.mark.usefixtures("shared_node")
@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (cut, ImageError, "row 0 .*'cat/000.jpg'.*truncated, or corrupt"),
        (mislabel, ImageError, "row 0 .*'cat/000.jpg'.*which is text: 'hello'"),
        (empty, ImageError, "row 0 .*'cat/000.jpg'.*0 bytes, where an image should be"),
        (break_link, ShardNotFound, r"999\.png is a symbolic link to nowhere"),
        (link, ConfigError, r"000\.jpg and .*999\.jpg are the same file, by a link"),
        (name_in_bytes, ConfigError, "is not UTF-8: rename it"),
        (swell, BudgetTooSmall, r"zebra/999\.png\+0: one block takes"),
    ],
)
def test_each_kind_of_damage_has_its_answer(
    folder: Path, damage: Callable[[Path], None], error: type[Exception], says: str
) -> None:
    damage(folder)
    with pytest.raises(error, match=says):
        read(folder, transforms={"image": [CenterCrop(8)]}, shuffle=False)


@pytest.mark.usefixtures("shared_node")
def test_a_broken_image_of_a_folder_is_named_itself(folder: Path) -> None:
    (folder / "dog/small/001.jpeg").write_bytes(b"no image")
    cropped: dict[str, Any] = {"transforms": {"image": [CenterCrop(8)]}}
    named = r"^the file 'dog/small/001.jpeg', row 14 of the files from \S+ on .*: delete or mend "
    for columns, says in (
        (["__key__", "image"], named + "the file, or where=\"__key__ != 'dog/small/001.jpeg'\""),
        (["image"], r"^row 14 of the files from \S+ on, column .*columns= has \"__key__\""),
    ):
        with (
            DataLoader(folder, 40, columns=columns, shuffle=False, **cropped) as loader,
            pytest.raises(ImageError, match=says) as caught,
        ):
            list(loader)
        assert "tombstone" not in str(caught.value)


@pytest.mark.usefixtures("shared_node")
def test_files_that_are_odd_but_sound_are_read(folder: Path) -> None:
    folder.joinpath("cat/000.jpg").rename(folder / "cat/00\n0.png")
    (folder / "zebra/folder.png").mkdir()
    (folder / ".hidden.png").write_bytes(b"x")
    options: dict[str, Any] = {"on_bad": "replace", "bad_max": 0.1, "shuffle": False}
    (folder / "zebra/001.jpeg").write_bytes(b"no image")
    with DataLoader(
        folder, batch_size=41, transforms={"image": [CenterCrop(8)]}, **options
    ) as loader:
        (batch,) = loader
    assert batch["__key__"][0] == "cat/00\n0.png"
    assert len(batch["image"]) == 41


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_system_calls_grow_with_blocks_and_not_with_rows(tmp_path: Path) -> None:
    """A network file system answers each of them from afar. It has no device, as /dev/shm."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="files-") as folder:
        folders = [Path(folder, form) for form in ("parquet", "arrow")]
        for place, shard in itertools.product(folders, range(3)):
            place.mkdir(exist_ok=True)
            table = pa.table({"x": np.arange(20_000) + shard})
            if place.name == "arrow":  # small batches form one block
                with pa.ipc.new_file(place / f"{shard}.arrow", table.schema) as writer:
                    writer.write_table(table, 10_000)
            else:
                pq.write_table(table, place / f"{shard}.parquet", row_group_size=10_000)
        code = (
            "import sys; from dataplane_torch import DataLoader\n"
            "for folder in sys.argv[1:]:\n"
            "    with DataLoader(folder, 100, shuffle=True, seed=1) as loader:\n"
            "        print(len([*loader]))"
        )
        trace = "trace=newfstatat,fstat,statx,openat,pread64,preadv,madvise"
        subprocess.run(
            ["strace", "-f", "-qq", "-y", "-e", trace, "-o", str(tmp_path / "calls"),
             sys.executable, "-c", code, *map(str, folders)],
            check=True, capture_output=True, timeout=200,
        )  # fmt: skip
        calls = (tmp_path / "calls").read_text().splitlines()
    for place in folders:
        assert 3 < sum(f"{place}/" in call for call in calls) < 100
    assert sum("MADV_WILLNEED" in call for call in calls) >= 3 + 6, "blocks are read as a whole"
