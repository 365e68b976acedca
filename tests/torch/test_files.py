"""Folders of image files, read file by file: every row is one file, and every file one row."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from dataplane_torch import CenterCrop, DataLoader
from pictures import drawn, encoded
from servers import S3Server, reach

from dataplane.index.indexing import index_dataset
from dataplane.model.errors import (
    DatasetChangedError,
    ShardNotFound,
)

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
    rows = read([folder / "cat", f"{small}/"], shuffle=False)
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
