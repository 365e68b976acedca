"""Generated workloads: the same rows everywhere, complete or absent; colours identify labels."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_bench.model import CROP, ColumnType, Workload
from dataplane_bench.peers.images import random_resized_crop_flip
from dataplane_bench.trial.checksum import BatchRefused, Sum
from dataplane_bench.workloads import images
from dataplane_bench.workloads.generate import BATCHES_MIN, RECIPES, generated
from dataplane_bench.workloads.recipe import SHARD_COUNT

SMALL = 0.001
SHAPES = {"mixture": "tokens", "packed": "text", "tokenise": "text"}
GENERATE = """
import sys
from pathlib import Path
from dataplane_bench.workloads.generate import generated
print(generated("text", Path(sys.argv[1]), 0.02).source)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("workloads")


def table(workload: Workload) -> pa.Table:
    names = [path.name for path in workload.shards]
    if not workload.parts:
        assert names == [f"shard-{i:05d}.parquet" for i in range(SHARD_COUNT)]
    return pa.concat_tables(pq.read_table(path) for path in workload.shards)


def arrow_type(column):
    if column.kind is ColumnType.IMAGE:
        return pa.binary()
    if column.kind is ColumnType.STRING:
        return pa.string()
    number = pa.from_numpy_dtype(column.dtype)
    if column.kind is ColumnType.RAGGED:
        return pa.list_(number)
    return pa.list_(number, *column.shape) if column.shape else number


@pytest.mark.parametrize("name", RECIPES)
def test_the_source_has_just_the_columns_and_samples_that_the_workload_says(name, root):
    workload = generated(name, root, SMALL)
    rows = table(workload)
    assert rows.column_names == [column.name for column in workload.columns]
    assert [field.type for field in rows.schema] == [arrow_type(one) for one in workload.columns]
    assert all(column.null_count == 0 for column in rows.columns)
    assert rows["id"].to_pylist() == list(range(workload.sample_count))
    assert workload.sample_count >= BATCHES_MIN * workload.batch_size
    assert workload.shape == SHAPES.get(name, name)
    assert not workload.urls


@pytest.mark.parametrize("name", ["tokens", "tabular", "text", "tokenise"])
def test_the_same_name_and_scale_give_the_same_bytes(name, root, tmp_path):
    first, second = generated(name, root, SMALL), generated(name, tmp_path, SMALL)
    for path in sorted(first.source.iterdir()):
        assert path.read_bytes() == (second.source / path.name).read_bytes()


def test_samples_that_are_there_are_not_made_again(root):
    before = {
        path: path.stat().st_mtime_ns for path in generated("text", root, SMALL).source.iterdir()
    }
    again = generated("text", root, SMALL)
    assert {path: path.stat().st_mtime_ns for path in again.source.iterdir()} == before


def test_another_size_or_version_is_another_fingerprint(root, monkeypatch):
    recipe = RECIPES["text"]
    first, larger = generated("text", root, SMALL), generated("text", root, 0.01)
    assert larger.sample_count > first.sample_count
    monkeypatch.setitem(RECIPES, "text", dataclasses.replace(recipe, version=recipe.version + 1))
    newer = generated("text", root, SMALL)
    assert len({one.fingerprint for one in (first, larger, newer)}) == 3
    assert len({one.source for one in (first, larger, newer)}) == 3


def test_a_generator_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def broken(folder, count):
        (folder / "shard-00000.parquet").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(RECIPES, "text", dataclasses.replace(RECIPES["text"], write=broken))
    with pytest.raises(OSError, match="No space"):
        generated("text", tmp_path, SMALL)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_may_generate_at_once(tmp_path):
    command = [sys.executable, "-c", GENERATE, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = {one.communicate(timeout=120)[0].strip() for one in both}
    assert [one.returncode for one in both] == [0, 0]
    assert {str(path) for path in tmp_path.iterdir()} == told


def test_a_generated_table_is_like_real_tables(root):
    rows = table(generated("tabular", root, SMALL))
    assert len(rows.column_names) == 40
    kinds = [str(field.type) for field in rows.schema]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "int64": 3,
        "float": 29,
        "double": 2,
        "int32": 6,
    }
    for name in rows.column_names:
        values = np.asarray(rows[name].combine_chunks())
        assert np.isfinite(values).all()
        assert len(np.unique(values)) > 1


def test_texts_differ_in_length_as_texts_do(root):
    lengths = np.diff(
        np.asarray(table(generated("text", root, 0.02))["tokens"].combine_chunks().offsets)
    )
    assert 1 <= lengths.min() < 50
    assert 600 < lengths.max() <= 2048
    assert lengths.mean() == pytest.approx(200, rel=0.1)
    assert np.median(lengths) < lengths.mean()


# --- images -----------------------------------------------------------------------------------


def crops(workload, count):
    """Batches as a loader delivers them: another crop of the same images in each pass."""
    random = np.random.default_rng(7)
    rows = table(workload).to_pylist()
    for start in range(0, count, 64):
        taken = [rows[(start + i) % len(rows)] for i in range(64)]
        pixels = [random_resized_crop_flip(row["image"], random) for row in taken]
        yield {
            "id": torch.tensor([row["id"] for row in taken]),
            "label": torch.tensor([row["label"] for row in taken], dtype=torch.int32),
            "image": torch.from_numpy(np.stack(pixels)),
        }


def test_images_are_as_large_as_photographs(root):
    sizes = [len(one.as_py()) for one in table(generated("images", root, SMALL))["image"]]
    assert np.mean(sizes) == pytest.approx(97_000, rel=0.05)
    assert np.std(sizes) > 8_000


def test_every_label_has_a_colour_of_its_own():
    labels = np.arange(images.LABEL_COUNT)
    colours = images.colour_of_label(labels)
    assert len(np.unique(colours, axis=0)) == images.LABEL_COUNT == 125
    assert (images.label_of_colour(colours.astype(float)) == labels).all()
    off = np.array([[0.0, 0.0, 0.0], [255.0, 255.0, 255.0], [64.0, 64.0, 0.0]])
    assert (images.label_of_colour(off) == -1).all()


def test_the_mean_of_any_crop_tells_the_label(root):
    total, worst = Sum(generated("images", root, SMALL)), 0.0
    for batch in crops(generated("images", root, SMALL), 1088):
        total.add(batch)
        means = batch["image"].numpy().mean(axis=(1, 2))
        colours = images.colour_of_label(batch["label"].numpy())
        worst = max(worst, float(np.abs(means - colours).max()))
    assert total.sample_count == 1088
    assert worst < 3  # half the distance between two colours is 16


def test_labels_of_other_images_are_refused(root):
    workload = generated("images", root, SMALL)
    batch = next(crops(workload, 64))
    batch["label"] = batch["label"].roll(1)
    with pytest.raises(BatchRefused, match="label"):
        Sum(workload).add(batch)


def test_colours_in_another_order_are_refused(root):
    workload = generated("images", root, SMALL)
    batch = next(crops(workload, 64))
    batch["image"] = batch["image"].flip(-1)
    assert batch["image"].shape == (64, CROP, CROP, 3)
    with pytest.raises(BatchRefused, match="colour"):
        Sum(workload).add(batch)
