"""A list of strings is a list of shards or a dataset of strings, and never the wrong one."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_torch import DataLoader, ShardedIterableDataset
from dataplane_torch.arguments import names_shards
from dataplane_torch.shards import Shards

from dataplane.model.errors import ConfigError, DataplaneError


def is_shards(given: object) -> bool:
    return names_shards(given, for_urls=False, for_torch=False)


@pytest.mark.parametrize(
    "name",
    [
        *("a.parq", "a.pqt", "A.PARQUET", "x.tfrec", "x.tfrec.gz", "a.manifest", "a.tar.gz"),
        *("a.jsonl.gz", "b.json.gz", "a.tgz", "c.feather", "d.ipc", "e.ndjson", "two words.tar"),
        *("s3://bucket/train/", "https://h/a.tar?sig=1", "memory://x", "train/", "/data/train-*"),
        *("data/part-[0-9]", "data/{a,b}/x", "/", "~/"),
    ],
)
def test_names_of_shards_are_urls_in_lists_as_they_are_alone(name):
    assert is_shards(name)
    assert is_shards([name])
    assert is_shards((name, "s3://bucket/b.parquet"))


def test_folders_that_exist_and_paths_are_urls(tmp_path):
    assert is_shards([str(tmp_path)])
    assert is_shards([tmp_path / "whatever.xyz", Path("b")])


def test_a_folder_in_a_list_is_one_of_shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "train").mkdir(parents=True)
    assert is_shards(["data/train"])
    assert is_shards(["data"])
    assert not is_shards(["date"])


class Configured(Sequence[str]):
    """A list of strings that is no list, as Hydra has them."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __getitem__(self, at: Any) -> Any:
        return self._names[at]

    def __len__(self) -> int:
        return len(self._names)


@pytest.mark.parametrize(
    "collected",
    [
        np.array,
        lambda paths: Configured(*paths),
        lambda paths: iter(map(Path, paths)),
        lambda paths: dict.fromkeys(paths).keys(),
        lambda paths: {*paths},
        collections.deque,
    ],
)
def test_any_collection_of_paths_is_a_list_of_them(tmp_path, collected):
    paths = [str(tmp_path / f"{at}.parquet") for at in range(3)]
    for path in paths:
        pq.write_table(pa.table({"id": [1, 2]}), path)
    with DataLoader(collected(paths), batch_size=6) as loader:
        assert isinstance(loader.dataset, Shards)
        assert len(loader.dataset) == 6
    assert sum(1 for _ in ShardedIterableDataset(collected(paths), batch_size=6)) == 1


def test_other_collections_are_datasets_as_they_were():
    for given in (np.arange(4), np.array(["a b", "c d"]), Configured("a b", "c")):
        assert DataLoader(given).dataset is given
    with pytest.raises(ConfigError, match="nothing to load"):
        DataLoader(Path("/nowhere").glob("*.parquet"))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3:bucket/x.parquet", "did you mean s3://bucket/x.parquet"),
        ("pipe:curl https://h/a.tar", "is a command, which is not run: pass the urls"),
        ("a\udcff.parquet", "is not UTF-8"),
        ("a\0.parquet", "NUL|no file"),
        ("x" * 300 + ".parquet", "there is no file"),
    ],
)
def test_names_that_no_shard_has_are_refused_with_what_to_pass(url, says):
    with pytest.raises(DataplaneError, match=says), DataLoader(url, batch_size=1) as loader:
        next(iter(loader))


@pytest.mark.parametrize(
    "samples", [["a", "b"], [""], ["and/or", "x.y"], ["1 * 2", "/ is a slash"]]
)
def test_a_list_of_texts_is_a_dataset(samples):
    assert [sample for batch in DataLoader(samples) for sample in batch] == samples


@pytest.mark.parametrize(
    "given",
    [
        ["/data/a.jpg", "/data/b.jpg"],
        ["./x"],
        ["train-*"],
        ["a.parquet", "hello"],
        ["hello", "world", "s3://b/a.tar"],
        ["/data/train-00000-of-01024"],
    ],
)
def test_for_ambiguous_lists_the_error_names_both_solutions_and_both_work(given):
    with pytest.raises(ConfigError, match=r'format="parquet".*collate_fn, or a Dataset'):
        DataLoader(given)
    assert names_shards(given, for_urls=True, for_torch=False)
    assert [one for batch in DataLoader(given, collate_fn=list) for one in batch] == given


@pytest.mark.parametrize(
    "argument",
    [
        {"collate_fn": list},
        {"sampler": [1, 0]},
        {"batch_sampler": [[1], [0]]},
        {"num_workers": 1},
        {"generator": torch.Generator()},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_arguments_of_torch_make_paths_samples(argument):
    paths = ["/data/b.parquet", "s3://bucket/a.tar"]
    with DataLoader(paths, **argument) as loader:
        assert loader.dataset is paths
        assert sorted(one for batch in loader for one in batch) == paths


def test_arguments_of_urls_make_paths_shards_and_refuse_those_of_torch(tmp_path):
    paths = [tmp_path / "train-0", tmp_path / "train-1"]
    for path in paths:
        path.touch()
    with DataLoader(list(map(str, paths)), format="tfrecord") as loader:
        assert isinstance(loader.dataset, Shards)
    for name, value in (("num_workers", 2), ("sampler", np.array([1, 0]))):
        with pytest.raises(ConfigError, match=f"{name}=.* does not apply"):
            DataLoader(["/data/a.parquet"], columns=["x"], **{name: value})


@pytest.mark.parametrize("empty", [[], ()])
def test_an_empty_list_is_an_error_and_not_an_empty_run(empty):
    with pytest.raises(ConfigError, match=r"nothing to load.*glob"):
        DataLoader(empty)
    with pytest.raises(ConfigError, match=r"nothing to load.*glob"):
        DataLoader(empty, collate_fn=list)
    with pytest.raises(ConfigError, match="pass one url or a list of urls"):
        ShardedIterableDataset(empty)


def test_lists_of_anything_else_are_datasets():
    for samples in ([1, 2], [{"a": 1}, {"a": 2}], [torch.ones(2), torch.zeros(2)], ["a", 1]):
        assert not is_shards(samples)


def test_a_dataset_where_urls_are_expected_says_where_it_goes():
    said = re.escape("expected the urls of shards, got a torch Dataset (TensorDataset)")
    with pytest.raises(ConfigError, match=said):
        ShardedIterableDataset(torch.utils.data.TensorDataset(torch.ones(2)))


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "\ud800"])
def test_names_of_jobs_are_plain_text(name):
    for argument in ("name", "sharing"):
        with pytest.raises(ConfigError, match=f"{argument} .* has the character"):
            DataLoader("x.parquet", batch_size=1, **{argument: name})
