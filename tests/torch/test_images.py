"""Images: the same pixels with every implementation, of every dtype and layout."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_torch import (
    CenterCrop,
    DataLoader,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ShardedIterableDataset,
    ToDtype,
    ToLayout,
)
from pictures import by_torchvision, encoded
from pictures import drawn as drawn_picture
from PIL import Image
from plan.plain import substitute

from dataplane.model.errors import ConfigError, ImageError, SpecMismatch

COUNT = 60
GLOBAL_BATCH = 12
CROP = [RandomResizedCrop(16), RandomHorizontalFlip()]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

pytestmark = pytest.mark.usefixtures("shared_node")


def jpeg(number: int) -> bytes:
    """A picture of no other number, whose left half is not its right half."""
    chance = np.random.default_rng(number)
    coarse = chance.integers(0, 256, (6, 8, 3), np.uint8)
    size = (64 + number % 5, 48 + number % 7)
    sink = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BILINEAR).save(sink, "JPEG", quality=90)
    return sink.getvalue()


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Two Parquet shards of pictures, in small blocks."""
    folder = tmp_path / "shards"
    folder.mkdir()
    table = pa.table(
        {
            "id": pa.array(range(COUNT), pa.int64()),
            "jpg": pa.array([jpeg(i) for i in range(COUNT)], pa.binary()),
            "text": [f"no. {i}" for i in range(COUNT)],
            "tokens": [[i] * (i % 3) for i in range(COUNT)],
        }
    )
    for i, start in enumerate(range(0, COUNT, 35)):
        pq.write_table(table.slice(start, 35), folder / f"{i}.parquet", row_group_size=10)
    return str(folder)


def launched(monkeypatch: pytest.MonkeyPatch, name: str, workers: int) -> None:
    """From here on, loaders use a separate node with this many workers: no other test has this
    name.
    """
    run_id = f"{name}-{os.getpid()}"
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": run_id}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("DATAPLANE_WORKER_COUNT", str(workers))


def drawn(batches) -> Iterator[tuple[int, str]]:
    """Each sample's id, and a hash of its pixels."""
    for batch in batches:
        for number, pixels in zip(batch["id"].tolist(), batch["jpg"], strict=True):
            yield number, hashlib.blake2b(pixels.numpy().tobytes(), digest_size=8).hexdigest()


def test_pixels_are_the_same_for_every_worker_count_dp_size_and_resume_point(
    shards, monkeypatch
) -> None:
    """Invariants 2, 3 and 5."""
    options = {
        "global_batch_size": GLOBAL_BATCH, "shuffle": True, "seed": 3, "columns": ["id", "jpg"],
        "transforms": {"jpg": CROP},
    }  # fmt: skip
    launched(monkeypatch, "one", 1)
    with DataLoader(shards, **options) as loader:
        iterator = iter(loader)
        head = [next(iterator), next(iterator)]
        state = loader.state_dict()
        whole = list(drawn([*head, *iterator]))
        second = dict(drawn(loader))
    assert sorted(number for number, _ in whole) == list(range(COUNT))
    assert len({hashed for _, hashed in whole}) == COUNT
    changed = sum(second[number] != hashed for number, hashed in whole)
    assert changed > COUNT * 0.9, "another epoch draws other boxes"
    for size, workers, resumed in ((2, 3, None), (3, 2, state)):
        launched(monkeypatch, f"of-{size}", workers)
        ranks = [
            DataLoader(shards, name="job", dp_rank=rank, dp_size=size, **options)
            for rank in range(size)
        ]
        parts = []
        for loader in ranks:
            if resumed is not None:
                loader.load_state_dict(resumed)
            parts.append(list(drawn(loader)))
            loader.close()
        rest = whole[2 * GLOBAL_BATCH :] if resumed is not None else whole
        assert [row for rows in zip(*parts, strict=True) for row in rows] == rest
    dataset = ShardedIterableDataset(shards, **options)
    assert list(drawn(dataset)) == whole
    dataset.close()


@pytest.mark.parametrize(("form", "small"), [("parquet", 0.7), ("arrow", 0.03)])
def test_pixels_are_the_same_whether_or_not_images_stay_in_memory(
    tmp_path, monkeypatch, form, small
) -> None:
    """Where they stay, crops of later epochs use what those of earlier ones have left."""
    count, folder = 40, tmp_path / "large"
    folder.mkdir()
    images = [encoded(drawn_picture(200, 300, seed=i), quality=90) for i in range(count)]
    table = pa.table(
        {"id": pa.array(range(count), pa.int64()), "jpg": pa.array(images, pa.large_binary())}
    )
    for start in range(0, count, 10):
        part, path = table.slice(start, 10).combine_chunks(), folder / f"{start}.{form}"
        if form == "parquet":
            pq.write_table(part, path, compression="none", use_dictionary=False)
        else:  # each is a block in the layout that rows are gathered from
            with pa.ipc.new_file(path, part.schema) as writer:
                writer.write_table(part)
    found = []
    for name, arena_bytes in (("stay", 64 << 20), ("go", int(table.nbytes * small))):
        launched(monkeypatch, name, 2)
        monkeypatch.setenv("DATAPLANE_BLOCK_ARENA_BYTES", str(arena_bytes))
        with DataLoader(
            str(folder), batch_size=8, shuffle=True, seed=3, window=1, lanes=1,
            transforms={"jpg": CROP},
        ) as loader:  # fmt: skip
            epochs = [list(drawn(loader)) for _ in range(2)]
            # Others read the same blocks: their pixels, and the images as they are.
            with DataLoader(
                str(folder), name="other", batch_size=8, transforms={"jpg": [CenterCrop(100)]}
            ) as other:
                middles = list(drawn(other))
            with DataLoader(str(folder), name="raw", batch_size=8) as raw:
                assert [image for batch in raw for image in batch["jpg"]] == images
            found.append([*epochs, list(drawn(loader)), middles])
    assert found[0] == found[1]
    assert len({hashed for epoch in found[0] for _, hashed in epoch}) == 4 * count


VIEWS = {
    ("uint8", "CHW", False): 0.5,
    ("float32", "HWC", False): 1 / 255,
    ("float16", "CHW", True): 1 / 255,
    ("bfloat16", "HWC", True): 3 / 255,
    ("float32", "CHW", True): 1 / 255,
}


@pytest.mark.parametrize(
    ("shard", "column"),
    [("webdataset/*.tar", "jpg"), ("parquet/images-huggingface.parquet", "image.bytes")],
)
def test_photographs_of_every_dtype_and_layout(data_dir, shard, column) -> None:
    url = str(data_dir / shard)

    def first(*more) -> torch.Tensor:
        steps = {column: [*CROP, *more]}
        with DataLoader(url, 8, shuffle=True, columns=[column], transforms=steps) as loader:
            found: torch.Tensor = next(iter(loader))[column]
        return found

    plain = first()
    assert (plain.dtype, plain.shape) == (torch.uint8, (8, 16, 16, 3))
    assert plain.float().std() > 20
    for (dtype, layout, normal), tolerance in VIEWS.items():
        steps = [ToLayout(layout), ToDtype(dtype), *([Normalize(MEAN, STD)] if normal else [])]
        found = first(*steps)
        assert found.dtype == getattr(torch, dtype)
        assert found.is_contiguous()
        found = found.movedim(1, 3) if layout == "CHW" else found
        expected = plain.float() if dtype == "uint8" else plain.float() / 255
        if normal:
            expected = (expected - torch.tensor(MEAN)) / torch.tensor(STD)
        assert found.shape == plain.shape
        difference = (found.float() - expected).abs().max()
        assert difference <= (tolerance / min(STD) if normal else tolerance)


def test_decode_says_which_images_are_decoded_at_a_reduced_size(shards) -> None:
    def made(decode: str | None, steps) -> list[int]:
        given = {"columns": ["jpg"], "transforms": {"jpg": steps}, "decode": decode}
        with DataLoader(shards, 20, **given) as loader:
            return torch.cat([batch["jpg"] for batch in loader]).flatten().tolist()

    for steps, same in (([Resize((12, 12))], "exact"), ([RandomResizedCrop(6)], "fast")):
        found = {decode: made(decode, steps) for decode in (None, "exact", "fast")}
        assert found["exact"] != found["fast"]
        assert found[None] == found[same]


def test_a_broken_image_names_shard_row_and_column(tmp_path) -> None:
    for number, (broken, said) in enumerate(
        [
            (b"no image at all", "15 bytes that begin with 6e 6f 20.*text: 'no image at all'"),
            (None, "null"),
            (jpeg(0)[:300], "300 bytes|runcated"),
            (b"", "0 bytes"),
        ]
    ):
        path = tmp_path / f"broken-{number}.parquet"
        images = [*(jpeg(i) for i in range(17)), broken, jpeg(18)]
        pq.write_table(pa.table({"jpg": pa.array(images, pa.binary())}), path, row_group_size=6)
        with DataLoader(path, 5, transforms={"jpg": CROP}) as loader:
            iterator = iter(loader)
            assert len(next(iterator)["jpg"]) == 5
            with pytest.raises(ImageError, match=said) as caught:
                list(iterator)
        error = caught.value
        assert (error.row, error.column) == (17, "jpg")
        assert str(error.shard).endswith(path.name)
        assert f"{error.shard}: row 17, column 'jpg': " in str(error)
        assert f"in a job of a service `dataplane tombstone JOB --row {path.name}:17`" in str(error)
        assert "BytesIO" not in str(error)
        if broken is None:
            assert 'where="jpg is not null"' in str(error)
        assert ('bad_images="replace"' in str(error)) == (broken is not None)


def test_a_broken_image_of_a_tar_file_is_named_by_its_key(tmp_path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i in range(3):
            member = tarfile.TarInfo(f"n0{i}/cat-{i}.jpg")
            image = jpeg(i) if i != 1 else b"<html>403 Forbidden</html>"
            member.size = len(image)
            tar.addfile(member, io.BytesIO(image))
    with (
        DataLoader(tmp_path / "a.tar", 3, transforms={"jpg": CROP}) as loader,
        pytest.raises(ImageError, match=r"row 1 \(__key__ 'n01/cat-1'\).*HTML page") as caught,
    ):
        next(iter(loader))
    assert caught.value.key == "n01/cat-1"
    where = re.search(r"without this row: where=\"(.*)\"\)", str(caught.value))
    assert where is not None
    with DataLoader(tmp_path / "a.tar", 3, transforms={"jpg": CROP}, where=where[1]) as loader:
        assert next(iter(loader))["__key__"] == ["n00/cat-0", "n02/cat-2"]


BAD = {3: b"garbage", 14: None, 17: jpeg(17)[:200], 45: b""}


def instead_of(number: int) -> int:
    """Return the row that stands for a bad one, in blocks of 10 and shards of 30, with seed 3."""
    bad = {one % 10 for one in BAD if one // 10 == number // 10}
    return number // 10 * 10 + substitute(3, number // 30, number % 30, 10, bad)


def test_other_rows_take_the_places_of_images_that_cannot_be_decoded(tmp_path, monkeypatch) -> None:
    """All columns of them, the same for every dp size, worker count and resume point; nothing else
    moves.
    """
    images = [BAD.get(i, jpeg(i)) for i in range(COUNT)]
    table = pa.table(
        {
            "id": pa.array(range(COUNT), pa.int64()),
            "jpg": pa.array(images, pa.binary()),
            "text": [f"no. {i}" for i in range(COUNT)],
        }
    )
    for i, start in enumerate(range(0, COUNT, 30)):
        path = tmp_path / f"{i}.parquet"
        pq.write_table(table.slice(start, 30), path, row_group_size=10, use_dictionary=False)
    options = {"global_batch_size": GLOBAL_BATCH, "shuffle": True, "seed": 3}
    asked = {**options, "transforms": {"jpg": [CenterCrop(16)]}, "bad_images": "replace"}
    with DataLoader(tmp_path, columns=["id"], **options) as loader:
        planned = [number for batch in loader for number in batch["id"].tolist()]
    expected = [instead_of(number) if number in BAD else number for number in planned]
    launched(monkeypatch, "bad-one", 1)
    with DataLoader(tmp_path, **asked) as loader:
        batches = list(loader)
    numbers = [number for batch in batches for number in batch["id"].tolist()]
    assert numbers == expected
    assert [text for batch in batches for text in batch["text"]] == [f"no. {i}" for i in expected]
    pixels = [one.numpy() for batch in batches for one in batch["jpg"]]
    for number, found in zip(numbers, pixels, strict=True):
        of = by_torchvision(jpeg(number), asked["transforms"]["jpg"])
        assert np.abs(found - of).max() <= 2
    launched(monkeypatch, "bad-three", 3)
    with DataLoader(tmp_path, **{**asked, "bad_images": "raise"}) as loader:
        with pytest.raises(ImageError, match=r'bad_images="replace"'):
            list(loader)
        state = loader.state_dict()
    ranks = [DataLoader(tmp_path, name="job", dp_rank=i, dp_size=3, **asked) for i in range(3)]
    parts = []
    for loader in ranks:
        loader.load_state_dict(state)
        parts.append([number for batch in loader for number in batch["id"].tolist()])
        loader.close()
    assert state["cursor"] == GLOBAL_BATCH, "the second batch has the first bad row"
    rest = expected[GLOBAL_BATCH:]
    assert [number for numbers in zip(*parts, strict=True) for number in numbers] == rest


def test_where_no_row_can_take_a_place_the_error_does_not_advise_to_replace(tmp_path) -> None:
    pq.write_table(pa.table({"jpg": [b"no", b"neither"]}), tmp_path / "a.parquet")
    options = {"transforms": {"jpg": CROP}, "bad_images": "replace"}
    none_left = pytest.raises(ImageError, match="none of the 2 rows of its block")
    with DataLoader(tmp_path, 2, **options) as loader, none_left as caught:
        list(loader)
    assert "bad_images" not in str(caught.value)


def test_bad_images_is_raise_or_replace(shards) -> None:
    for wrong in ("skip", None, True):
        with pytest.raises(ConfigError, match=r'choose "raise".*or "replace"') as caught:
            DataLoader(shards, 5, transforms={"jpg": CROP}, bad_images=wrong)
        assert caught.value.field == "bad_images"
    with pytest.raises(ConfigError, match="without transforms"):
        DataLoader(shards, 5, bad_images="replace")
    options: dict[str, Any] = {"name": "bad", "dp_size": 2, "transforms": {"jpg": CROP}}
    with DataLoader(shards, 5, dp_rank=0, bad_images="replace", **options) as loader:
        len(loader)
        other = DataLoader(shards, 5, dp_rank=1, **options)
        with other, pytest.raises(SpecMismatch, match="bad_images=raise") as caught:
            len(other)
        assert caught.value.field == "bad_images"


def test_other_transforms_are_another_job(shards) -> None:
    with DataLoader(shards, 5, name="job", transforms={"jpg": CROP}) as loader:
        state = loader.state_dict()
        other = DataLoader(shards, 5, name="job", transforms={"jpg": [CenterCrop(16)]})
        with other, pytest.raises(SpecMismatch, match="transforms") as caught:
            len(other)
        assert caught.value.field == "transforms"
        assert "transforms=jpg: cut=center, " in str(caught.value)
    with (
        DataLoader(shards, 5, transforms={"jpg": [RandomResizedCrop(16)]}) as loader,
        pytest.raises(SpecMismatch, match="transforms"),
    ):
        loader.load_state_dict(state)


def test_a_column_without_images_is_refused_at_opening(shards) -> None:
    what = {"id": "int64", "text": "text", "tokens": "lists", "png": "they have.*jpg"}
    for column, match in what.items():
        with (
            DataLoader(shards, 5, transforms={column: CROP}) as loader,
            pytest.raises(ConfigError, match=match) as caught,
        ):
            len(loader)
        assert caught.value.field == "transforms"
        assert repr(column) in str(caught.value)
