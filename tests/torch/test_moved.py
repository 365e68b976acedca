"""A dataset is copied elsewhere in the middle of an epoch, and the run goes on over the copy."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader, ShardedIterableDataset
from hub import hub_server
from servers import S3Server, reach

from dataplane.model.errors import SpecMismatch

pytestmark = pytest.mark.usefixtures("small_node")
ORDER = {"batch_size": 16, "shuffle": True, "seed": 5}


@pytest.fixture
def train(tmp_path: Path) -> Path:
    folder = tmp_path / "bucket-1" / "train"
    for i in range(3):
        (folder / f"part-{i}").mkdir(parents=True)
        table = pa.table({"i": range(i * 100, i * 100 + 100)})
        pq.write_table(table, folder / f"part-{i}" / "0.parquet", row_group_size=30)
    return folder


def taken(url: object, steps: int = 7, **how) -> tuple[dict, list[list[int]]]:
    """A state after some steps, and the steps that follow."""
    with DataLoader(url, **ORDER, **how) as loader:
        iterator = iter(loader)
        for _ in range(steps):
            next(iterator)
        return loader.state_dict(), [batch["i"].tolist() for batch in iterator]


def resumed(url: object, state: dict, **how) -> list[list[int]]:
    with DataLoader(url, **ORDER, **how) as loader:
        loader.load_state_dict(state)
        return [batch["i"].tolist() for batch in loader]


def test_a_copy_that_kept_its_modification_times_resumes(train: Path, tmp_path: Path) -> None:
    state, rest = taken(train)
    shutil.copytree(train, tmp_path / "bucket-2" / "deeper" / "train")
    shutil.rmtree(train)
    assert resumed(tmp_path / "bucket-2/deeper/train/part-*/0.parquet", state) == rest


def test_a_copy_with_new_modification_times_needs_dataset_moved(
    train: Path, tmp_path: Path
) -> None:
    state, rest = taken(train)
    copy = shutil.copytree(train, tmp_path / "copy")
    for i, path in enumerate(copy.glob("*/*")):
        os.utime(path, (1e9 + i, 1e9 + i))
    with pytest.raises(SpecMismatch, match="dataset_moved=True"):
        resumed(copy, state)
    with pytest.warns(UserWarning, match="Remove the argument"):
        assert resumed(copy, state, dataset_moved=True) == rest
    state, rest = taken(copy, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dataset_moved is no longer needed, and there is no warning
        assert resumed(copy, state, dataset_moved=True) == rest
    dataset = ShardedIterableDataset(copy, **ORDER, dataset_moved=True)
    dataset.load_state_dict(state)
    assert [batch["i"].tolist() for batch in dataset] == rest
    dataset.close()


def test_a_dataset_that_grew_resumes_over_the_shards_that_it_had(train: Path) -> None:
    state, rest = taken(train)
    had = sorted(train.glob("*/*"))
    (train / "part-3").mkdir()
    pq.write_table(pa.table({"i": range(300, 400)}), train / "part-3" / "0.parquet")
    with pytest.raises(SpecMismatch, match=r"had 300 .* now has 400.*a list of their urls"):
        resumed(train, state)
    assert resumed(had, state) == rest


def test_rewritten_shards_are_refused_even_with_dataset_moved(train: Path, tmp_path: Path) -> None:
    state, _ = taken(train)
    table = pa.table({"i": range(100)})
    pq.write_table(table, train / "part-0" / "0.parquet", row_group_size=50)
    with pytest.raises(SpecMismatch, match="but other shards"):
        resumed(train, state, dataset_moved=True)


def test_a_dataset_moves_to_another_bucket(
    train: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(s3_server, monkeypatch)
    old, new = s3_server.bucket(), s3_server.bucket()
    keys = [str(path.relative_to(train)) for path in sorted(train.glob("*/*"))]
    s3_server.put(old, {f"train/{key}": (train / key).read_bytes() for key in keys})
    state, rest = taken(f"s3://{old}/train/")
    for key in keys:
        source = {"Bucket": old, "Key": f"train/{key}"}
        s3_server.client.copy_object(Bucket=new, Key=f"of-2026/{key}", CopySource=source)
        s3_server.client.delete_object(**source)
    assert resumed(f"s3://{new}/of-2026/", state) == rest


def test_a_push_to_the_hub_reaches_the_next_run_and_is_never_mixed_into_one(
    train: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, plain = {}, {"use_dictionary": False, "compression": "none", "row_group_size": 30}
    for i in (0, 1, 2, 7):
        path = train / f"{i}.parquet"
        pq.write_table(pa.table({"i": range(i * 100, i * 100 + 100)}), path, **plain)
        files[f"data/{i}.parquet"] = path.read_bytes()
    changed = files.pop("data/7.parquet")
    assert len(changed) == len(files["data/1.parquet"])
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        url = "hf://datasets/org/name/data"
        first = hub.push(files)
        with DataLoader(url, **ORDER) as loader:
            iterator = iter(loader)
            head = [next(iterator)["i"].tolist() for _ in range(7)]
            state = loader.state_dict()
            hub.push({**files, "data/1.parquet": changed})
            rest = [batch["i"].tolist() for batch in iterator]
        assert sorted(i for batch in (*head, *rest) for i in batch) == list(range(300))
        assert set(hub.seen) == {first}
        with pytest.raises(SpecMismatch, match="copied or rewritten"):
            resumed(url, state)
        assert resumed(f"hf://datasets/org/name@{first}/data", state) == rest
        hub.push({**files, "README.md": b"only this is new"})
        assert resumed(url, state) == rest
