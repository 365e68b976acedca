"""Generated workloads: the same rows everywhere, complete or absent; colours identify labels."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_bench import bounds
from dataplane_bench.contest import Contest, Entry
from dataplane_bench.model import (
    CROP,
    BatchKind,
    BenchCase,
    ColumnType,
    DatasetPlace,
    Mode,
    StorageKind,
    TrialTask,
    Workload,
)
from dataplane_bench.peers import harness, samples
from dataplane_bench.peers.base import adapter
from dataplane_bench.peers.samples import random_resized_crop_flip
from dataplane_bench.peers.torch_datasets import mixed
from dataplane_bench.trial.checksum import BatchRefused, MixtureSum, PackSum, Sum
from dataplane_bench.trial.launch import Timing
from dataplane_bench.workloads import images
from dataplane_bench.workloads.generate import BATCHES_MIN, RECIPES, SHARD_COUNT, generated

SMALL = 0.001
SHAPES = {"mixture": "tokens", "rows": "tokens", "packed": "text", "tokenise": "text"}
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
    if name != "rows":
        assert rows["id"].to_pylist() == list(range(workload.sample_count))
    assert rows.num_rows == workload.sample_count >= BATCHES_MIN * workload.batch_size
    assert workload.shape == SHAPES.get(name, name)
    assert not workload.urls


@pytest.mark.parametrize("name", ["tokens", "tabular", "text", "tokenise"])
def test_the_same_name_and_scale_give_the_same_bytes(name, root, tmp_path):
    first, second = generated(name, root, SMALL), generated(name, tmp_path, SMALL)
    for path in sorted(first.source.iterdir()):
        assert path.read_bytes() == (second.source / path.name).read_bytes()


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


def test_the_mean_of_any_crop_tells_the_label(root):
    total, worst = Sum(generated("images", root, SMALL)), 0.0
    for batch in crops(generated("images", root, SMALL), 256):
        total.add(batch)
        means = batch["image"].numpy().mean(axis=(1, 2))
        colours = images.colour_of_label(batch["label"].numpy())
        worst = max(worst, float(np.abs(means - colours).max()))
    assert total.sample_count == 256
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


MADE = [name for name, recipe in RECIPES.items() if recipe.delivery is not BatchKind.STORED]


@pytest.fixture(scope="module")
def batches_root(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def workloads(batches_root):
    return {name: generated(name, batches_root, SMALL) for name in MADE}


def summed(total, batches):
    for batch in batches:
        total.add(batch)
    return total


def epoch_of(name, workload, folder, number=0):
    """An epoch of a loader, in this process."""
    system = adapter(name)
    if not folder.exists():
        folder.mkdir()
        system.prepare(workload, folder)
    case = BenchCase("here", workload.name, Mode.VERIFY)
    place = DatasetPlace(folder, str(folder))
    settings = {"num_workers": 0, "fetch": "batch"} if name == "torch" else {}
    task = TrialTask(name, case, workload, place, settings, folder.parent, f"run-{os.getpid()}")
    loader = system.open(task)
    yield from loader.epoch(number)
    loader.close()


@pytest.fixture
def own_environment():
    """Restore the environment that an adapter changes."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("name", ["torch", "dataplane"])
def test_texts_become_the_same_tokens_in_every_loader(name, workloads, tmp_path):
    workload = workloads["tokenise"]
    truth = summed(Sum(workload), harness.batches(workload))
    found = summed(Sum(workload), epoch_of(name, workload, tmp_path / name))
    assert (found.digest, found.sample_count) == (truth.digest, workload.sample_count)


def test_tokens_are_cut_and_padded_and_told(workloads):
    workload = workloads["tokenise"]
    for batch in harness.batches(workload):
        tokens, counts = batch["tokens"].numpy(), batch["token_count"].numpy()
        assert tokens.shape[1] == workload.length
        inside = np.arange(workload.length) < counts[:, None]
        assert not tokens[~inside].any()
        assert tokens[inside].all(), "the tokenizer's padding is no token"


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("name", ["torch", "dataplane"])
def test_a_mixture_has_its_shares_and_repeats_nothing(name, workloads, tmp_path):
    workload = workloads["mixture"]
    found = summed(MixtureSum(workload), epoch_of(name, workload, tmp_path / name))
    assert found.facts()["fault"] == ""
    assert list(found.facts()["shares"]) == [part.name for part in workload.parts]


def all_of_the_source(workload):
    return list(harness.batches(workload))


def web_only(workload):
    count = workload.parts[0].sample_count
    return [
        {name: column[batch["id"] < count] for name, column in batch.items()}
        for batch in harness.batches(workload)
        if batch["id"][0] < count
    ]


def one_twice(workload):
    batches = by_shares(workload)
    return [*batches, {name: column[:1] for name, column in batches[0].items()}]


def another_value(workload):
    batches = by_shares(workload)
    batches[0]["tokens"][0, 0] += 1
    return batches


def by_shares(workload):
    ids = mixed(workload.parts, 0)
    every = all_of_the_source(workload)
    whole = {name: torch.cat([batch[name] for batch in every]) for name in every[0]}
    return [{name: column[torch.from_numpy(ids)] for name, column in whole.items()}]


@pytest.mark.parametrize(
    ("batches", "fault"),
    [
        (by_shares, ""),
        (web_only, "are web's"),
        (one_twice, "come again before"),
        (another_value, "1 samples are not the sources'"),
    ],
)
def test_what_is_wrong_with_a_mixture_is_told(batches, fault, workloads):
    workload = workloads["mixture"]
    told = summed(MixtureSum(workload), batches(workload)).facts()["fault"]
    assert told == fault if not fault else fault in told


@pytest.mark.usefixtures("own_environment")
def test_packs_have_all_tokens_of_all_documents_once(workloads, tmp_path):
    workload = workloads["packed"]
    truth = summed(PackSum(workload), harness.batches(workload))
    found = summed(PackSum(workload), epoch_of("dataplane", workload, tmp_path / "packs"))
    assert found.digest == truth.digest
    assert found.facts()["documents"] == truth.facts()["documents"] > workload.sample_count
    assert found.facts()["waste"] < truth.facts()["waste"]


def pack(*parts, length=2048):
    """A pack of documents, each the tokens from 1 on."""
    sizes = np.array(parts)
    tokens = np.concatenate([np.arange(1, size + 1, dtype=np.int32) for size in parts])
    return samples.pack_batch([tokens], [sizes], length)


def test_the_sum_of_packs_depends_on_their_documents_alone(workloads):
    workload = workloads["packed"]
    together = summed(PackSum(workload), [pack(3, 5, 7)])
    apart = summed(PackSum(workload), [pack(7, 3), pack(5)])
    others = summed(PackSum(workload), [pack(3, 5, 6)])
    assert together.digest == apart.digest != others.digest
    assert together.facts() == {"documents": 3, "waste": 1 - 15 / 2048}


def joined(batch):
    batch["document_ids"][batch["document_ids"] == 1] = 0


def later(batch):
    batch["position_ids"][batch["tokens"] != 0] += 1


def in_one(batch):
    batch["position_ids"][0, :8] = torch.arange(8)


@pytest.mark.parametrize("broken", [joined, later, in_one])
def test_packs_whose_documents_are_not_told_apart_are_refused(broken, workloads):
    batch = pack(3, 5)
    broken(batch)
    with pytest.raises(BatchRefused, match="_ids: "):
        PackSum(workloads["packed"]).add(batch)


def test_a_document_longer_than_a_pack_fills_whole_packs():
    starts, ends = samples.pieces(np.array([0, 5, 5, 13, 17]), 4)
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == [
        (0, 4), (4, 5), (5, 9), (9, 13), (13, 17),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["packed", "tokenise"])
def test_the_bounds_of_made_batches_are_measured(name, workloads):
    workload = workloads[name]
    names = bounds.names(workload, StorageKind.LOCAL)
    found = bounds.measure(names, workload, None, 0.01)
    ((_, limit),) = bounds.bound_of(workload, StorageKind.LOCAL, found)
    assert limit > 0


class Shown:
    def planned(self, trials):
        pass

    def trial(self, what):
        pass

    def note(self, text):
        pass


def test_a_loader_without_packing_takes_no_part_in_it(workloads, tmp_path):
    contest = Contest([Entry("torch", "python", {})], None, tmp_path, Timing(), 1, Shown())
    case = BenchCase("local", "packed")
    result = contest.run(dataclasses.replace(case, mode=Mode.FIRST), workloads["packed"])
    assert result.systems[0].refused == "it packs no documents"
