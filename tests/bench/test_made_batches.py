"""Mixtures, packs and tokenised texts: what is checked of them, and what loaders deliver."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch
from dataplane_bench import bounds
from dataplane_bench.contest import Contest, Entry
from dataplane_bench.model import BatchKind, BenchCase, DatasetPlace, Mode, StorageKind, TrialTask
from dataplane_bench.peers import documents, reference
from dataplane_bench.peers.registry import adapter
from dataplane_bench.peers.torch_datasets import mixed
from dataplane_bench.trial.checksum import BatchRefused, Sum
from dataplane_bench.trial.launch import Timing
from dataplane_bench.trial.made_sums import MixtureSum, PackSum
from dataplane_bench.workloads.generate import RECIPES, generated

SMALL = 0.001
MADE = [name for name, recipe in RECIPES.items() if recipe.delivery is not BatchKind.STORED]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def workloads(root):
    return {name: generated(name, root, SMALL) for name in MADE}


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
    """What an adapter adds to the environment is gone after the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("name", ["torch", "dataplane"])
def test_texts_become_the_same_tokens_in_every_loader(name, workloads, tmp_path):
    workload = workloads["tokenise"]
    truth = summed(Sum(workload), reference.batches(workload))
    found = summed(Sum(workload), epoch_of(name, workload, tmp_path / name))
    assert (found.digest, found.sample_count) == (truth.digest, workload.sample_count)


def test_tokens_are_cut_and_padded_and_told(workloads):
    workload = workloads["tokenise"]
    for batch in reference.batches(workload):
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


def test_a_mixture_by_hand_ends_with_its_first_source():
    parts = RECIPES["mixture"].parts(2000)
    first, second = mixed(parts, 1), mixed(parts, 2)
    assert len(np.unique(first)) == len(first) > 1500
    assert set(first.tolist()) != set(second.tolist())


def all_of_the_source(workload):
    return list(reference.batches(workload))


def web_only(workload):
    count = workload.parts[0].sample_count
    return [
        {name: column[batch["id"] < count] for name, column in batch.items()}
        for batch in reference.batches(workload)
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
    truth = summed(PackSum(workload), reference.batches(workload))
    found = summed(PackSum(workload), epoch_of("dataplane", workload, tmp_path / "packs"))
    assert found.digest == truth.digest
    assert found.facts()["documents"] == truth.facts()["documents"] > workload.sample_count
    assert found.facts()["waste"] < truth.facts()["waste"]


def pack(*parts, length=2048):
    """A pack of documents, each the tokens from 1 on."""
    sizes = np.array(parts)
    tokens = np.concatenate([np.arange(1, size + 1, dtype=np.int32) for size in parts])
    return documents.pack_batch([tokens], [sizes], length)


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
    starts, ends = documents.pieces(np.array([0, 5, 5, 13, 17]), 4)
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
