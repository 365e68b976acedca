"""Arguments of loaders over urls: what they are called, and what others call them."""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataplane_torch import DataLoader, Mixture, ShardedIterableDataset, Source
from dataplane_torch.arguments import names_shards
from dataplane_torch.options import DEFAULTS, OTHER_NAMES, UrlOptions
from dataplane_torch.shards import Shards

from dataplane.client.topology import find_topology
from dataplane.model.errors import ConfigError, DataplaneError, ShardNotFound
from dataplane.model.records import Topology
from dataplane.rpc.messages import OpenJob

LOADERS = pytest.mark.parametrize("loader", [DataLoader, ShardedIterableDataset])


@LOADERS
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("delivery_bytes_per_rank", "DATAPLANE_DELIVERY_BYTES_PER_RANK=.*dataplane.toml"),
        ("slab_bytes", "dataplane serve --slab-bytes"),
        ("column", "did you mean 'columns'"),
        ("fillnull", "did you mean 'fill_null'"),
        ("qqq", "docs/migrate/names.md those of other loaders"),
        ("shuffle_seed", r"Use seed=, which decides the whole order \(docs/migrate/names.md"),
        ("handler", r'Use on_bad="replace" \(docs/formats.md#runs-over-damaged-data\), which'),
        ("prefetch", "Leave it out: the node reads ahead while it has memory"),
        ("num_canonical_nodes", "Leave it out: the order is the same for any number of ranks"),
    ],
)
def test_the_error_about_an_unknown_argument_says_what_to_use(loader, name, says):
    with pytest.raises(TypeError, match=rf"{loader.__name__}\(\) has no argument '{name}'.*{says}"):
        loader("s3://bucket/", **{name: [0.7, 0.3]})


def test_all_unknown_arguments_are_named_at_once_and_no_row_names_an_argument():
    with pytest.raises(TypeError, match=r"'take'\. Use limit=.*\n.*'urls'\. Pass a url"):
        DataLoader("s3://bucket/", take=3, urls="x")
    rows = re.split(r"\n(?=\w)", OTHER_NAMES)
    names = {name for row in rows for name in row.partition(": ")[0].split()}
    assert names.isdisjoint(inspect.signature(DataLoader).parameters)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("iterate_over_all", 'use exhausted="stop", "renormalise" or "cycle"'),
        ("weights", r"give Mixture\(\{name: Source\(url, weight=…\), …\}\)"),
        ("exhaust", "did you mean 'exhausted'"),
    ],
)
def test_an_unknown_argument_of_a_mixture_is_answered_as_one_of_the_loader(name, says):
    with pytest.raises(TypeError, match=rf"Mixture\(\) has no argument '{name}'.*{says}.*names.md"):
        Mixture({"a": Source("s3://bucket/", weight=1)}, **{name: True})


@pytest.mark.parametrize(
    ("name", "says"),
    [("weights", "did you mean 'weight'"), ("shuffle", "pass it to DataLoader")],
)
def test_an_unknown_argument_of_a_source_is_answered_as_one_of_the_loader(name, says):
    with pytest.raises(TypeError, match=rf"Source\(\) has no argument '{name}'.*{says}.*names.md"):
        Source("s3://bucket/", **{name: 1})


def test_a_sample_of_shards_is_refused_with_the_way_to_a_batch(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n')
    refusal = pytest.raises(ConfigError, match=r"dataset\[0\] does not exist: take a batch, next")
    with DataLoader(str(tmp_path), 1) as loader, refusal:
        loader.dataset[0]


def test_every_option_has_a_line_in_the_docstring():
    text = str(DataLoader.__doc__)
    assert [name for name in DEFAULTS if not re.search(rf"\b{name}\b", text)] == []


@LOADERS
def test_a_signature_spells_out_every_option_with_its_default(loader):
    parameters = inspect.signature(loader).parameters
    assert not any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS
    assert DEFAULTS.keys() == UrlOptions.__annotations__.keys()


def test_the_service_that_the_configuration_file_names_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATAPLANE_SERVICE", raising=False)
    (tmp_path / "dataplane.toml").write_text('service = "10.0.0.1:7077"')
    monkeypatch.chdir(tmp_path)
    for given, address in ((None, "10.0.0.1:7077"), ("10.0.0.2:7077", "10.0.0.2:7077")):
        with DataLoader("s3://bucket/a.parquet", service=given) as loader:
            assert loader._shards is not None
            assert loader._shards._session.endpoint.address == address


@LOADERS
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("name", (7, "", "x" * 257, ["job"])),
        ("service", (7, "x" * 257, ["10.0.0.1:7077"])),
        ("format", (7, b"parquet", ["parquet"])),
        ("columns", (7, "text", b"text", ["text", 7])),
        ("codes", (7, b"text", [7])),
        ("end", (7, [], {})),
        ("bad_images", (7, [], {})),
        ("timeout", (-1, "5", None, float("nan"), float("inf"), 3e6)),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_that_names_the_argument(loader, name, values):
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{name}=.*: (pass|choose) ") as caught:
            loader("s3://bucket/a.parquet", 4, **{name: value})
        assert caught.value.field == name


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


def test_folders_that_exist_and_paths_are_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "train").mkdir(parents=True)
    for given in (
        [str(tmp_path)],
        ["data/train"],
        ["data"],
        [tmp_path / "whatever.xyz", Path("b")],
    ):
        assert is_shards(given)
    for other in (
        ["date"],
        [1, 2],
        [{"a": 1}, {"a": 2}],
        [torch.ones(2), torch.zeros(2)],
        ["a", 1],
    ):
        assert not is_shards(other)


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
def test_any_collection_of_paths_is_a_list_of_them(fake, collected):
    node, paths = fake(), [f"/{at}.parquet" for at in range(3)]
    with DataLoader(collected(paths), batch_size=6) as loader:
        assert isinstance(loader.dataset, Shards)
        assert len(loader) == 17
    with contextlib.closing(ShardedIterableDataset(collected(paths), batch_size=6)) as dataset:
        assert len(dataset) == 17
    assert [sorted(one.source.urls) for one in node.seen if isinstance(one, OpenJob)] == [paths] * 2


def test_other_collections_are_datasets_as_they_were():
    for given in (np.arange(4), np.array(["a b", "c d"]), Configured("a b", "c")):
        assert DataLoader(given).dataset is given
    with pytest.raises(ConfigError, match="nothing to load"):
        DataLoader(Path("/nowhere").glob("*.parquet"))


class Counting(Sequence[Any]):
    """A dataset that counts the samples that were read."""

    def __init__(self, sample: Any) -> None:
        self._sample, self.reads = sample, 0

    def __getitem__(self, at: Any) -> Any:
        if at >= 8:
            raise IndexError(at)
        self.reads += 1
        return self._sample

    def __len__(self) -> int:
        return 8


def test_samples_of_a_sequence_are_not_read_when_the_loader_is_made():
    numbers, texts = Counting(1), Counting("/data/a.parquet")
    for dataset, given in ((numbers, {}), (texts, {"collate_fn": list})):
        loader = DataLoader(dataset, batch_size=4, **given)
        assert loader.dataset is dataset
        assert dataset.reads <= 1
        assert len(list(loader)) == 2


def test_an_iterator_of_samples_is_read_no_further_than_to_its_first():
    samples = itertools.count()
    with pytest.raises(TypeError, match="has no len"):
        DataLoader(samples, shuffle=True)
    assert next(samples) == 1


def test_an_encoded_path_in_a_url_is_an_error_that_has_the_path(tmp_path):
    (tmp_path / "a b.parquet").touch()
    url = (tmp_path / "a b.parquet").as_uri()
    with pytest.raises(ShardNotFound, match=r"are not decoded, so pass .*/a b\.parquet"):
        DataLoader(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3:bucket/x.parquet", "did you mean s3://bucket/x.parquet"),
        ("pipe:curl https://h/a.tar", "is a command, which is not run: pass the urls"),
        ("a\udcff.parquet", "is not valid UTF-8"),
        ("a\0.parquet", "NUL|no file"),
        ("x" * 300 + ".parquet", "there is no file"),
    ],
)
def test_names_that_no_shard_has_are_refused_with_what_to_pass(shared_node, url, says):
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
    given = {"format": "tfrecord", "service": "127.0.0.1:1"}
    with DataLoader(list(map(str, paths)), **given) as loader:
        assert isinstance(loader.dataset, Shards)
    for name, value in (("num_workers", 2), ("sampler", np.array([1, 0]))):
        with pytest.raises(ConfigError, match=f"{name}=.* does not apply"):
            DataLoader(["/data/a.parquet"], columns=["x"], **{name: value})


@pytest.mark.parametrize("empty", [[], ()])
def test_an_empty_list_that_may_be_of_urls_is_an_error_and_not_an_empty_run(empty):
    with pytest.raises(ConfigError, match=r"nothing to load.*glob.*pass collate_fn"):
        DataLoader(empty, batch_size=4)
    for of_torch in ({}, {"collate_fn": list}):
        with pytest.raises(ConfigError, match=r"nothing to load.*glob"):
            DataLoader(empty, columns=["x"], **of_torch)
    with pytest.raises(ConfigError, match="pass one url or a list of urls"):
        ShardedIterableDataset(empty)


@pytest.mark.parametrize(
    ("empty", "argument"),
    [
        ([], {"collate_fn": list}),
        ((), {"num_workers": 2, "batch_size": None}),
        (range(0), {}),
        (range(0), {"drop_last": True, "batch_size": 4}),
        (Configured(), {"batch_size": None}),
        (np.array([], "U4"), {}),
    ],
)
def test_an_empty_list_of_samples_is_an_empty_epoch_as_torchs_whose_state_works(empty, argument):
    for loader in (torch.utils.data.DataLoader(empty, **argument), DataLoader(empty, **argument)):
        assert (len(loader), list(loader), list(loader)) == (0, [], [])
    with DataLoader(empty, **argument) as resumed:
        resumed.load_state_dict(loader.state_dict())
        assert list(resumed) == []
    with pytest.raises(ConfigError, match=r"0 samples.*3|3 samples.*0"):
        DataLoader([1, 2, 3], **argument).load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match="nothing to load"):
        DataLoader(empty, seed=1)


def test_a_dataset_where_urls_are_expected_says_where_it_goes():
    said = re.escape("expected the urls of shards, got a torch Dataset (TensorDataset)")
    with pytest.raises(ConfigError, match=said):
        ShardedIterableDataset(torch.utils.data.TensorDataset(torch.ones(2)))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"seed": 3}, "generator=torch.Generator().manual_seed(3)"),
        ({"collate": "a:b"}, "collate_fn="),
        ({"map": "a:b"}, "__getitem__"),
        ({"where": "x > 1"}, "Subset"),
        ({"columns": ["x"]}, "its Dataset, sampler and collate_fn decide that"),
    ],
)
def test_what_a_torch_dataset_takes_instead_of_an_option_of_urls_is_said(option, said) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        DataLoader(torch.utils.data.TensorDataset(torch.ones(2)), **option)


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "\ud800"])
def test_names_of_jobs_are_plain_text(name):
    for argument in ("name", "sharing"):
        with pytest.raises(ConfigError, match=f"{argument} .* has the character"):
            DataLoader("x.parquet", batch_size=1, **{argument: name})


@LOADERS
@pytest.mark.parametrize("name", ["", "x" * 201, 7])
def test_a_group_has_a_name(loader, name):
    with pytest.raises(ConfigError, match="sharing="):
        loader("x.parquet", 4, sharing=name)


URL = "s3://bucket/shards/*.parquet"
KINDS = pytest.mark.parametrize("kind", [np.int64, np.uint16, np.int8, torch.tensor])


def request_of(node) -> OpenJob:
    return [one for one in node.seen if isinstance(one, OpenJob)][-1]


@KINDS
def test_every_count_that_a_loader_takes_may_be_of_any_kind(fake, kind):
    node = fake()
    with DataLoader(
        URL, kind(8), shuffle=True, seed=kind(3), lanes=kind(4), window=kind(64),
        dp_rank=kind(0), dp_size=kind(2),
    ) as loader:  # fmt: skip
        assert len(loader) == 7
        loader.set_epoch(kind(5))
        assert type(loader.epoch) is int
        next(iter(loader))
        state = loader.state_dict()
        assert state["epoch"] == 5
        loader.load_state_dict({name: _as(kind, value) for name, value in state.items()})
        assert loader.state_dict() == state
    request = request_of(node)
    spec = request.spec
    assert (spec.seed, spec.lanes, spec.window, spec.global_batch) == (3, 4, 64, 16)
    assert request.topology == Topology(0, 2, 0, 1)
    with DataLoader(URL, global_batch_size=kind(12)) as loader:
        len(loader)
    assert request_of(node).spec.global_batch == 12


def _as(kind, value):
    """The state's numbers as this kind has them, where they fit."""
    return kind(value) if isinstance(value, int) and value < 100 else value


def test_a_dataset_for_torchs_loader_takes_them_too(fake):
    fake()
    dataset = ShardedIterableDataset(URL, np.int64(8), seed=np.uint16(3))
    dataset.set_epoch(np.int8(2))
    assert dataset.state_dict()["epoch"] == 2
    dataset.load_state_dict(
        {**dataset.state_dict(), "step": np.int64(1), "step_stride": torch.tensor(1)}
    )
    dataset.close()


@pytest.mark.parametrize("wrong", [True, np.True_, 8.0, np.float64(8), "8", -1, 0, 1 << 40, None])
def test_what_is_not_a_count_is_refused_with_its_name(wrong):
    says = "Pass the samples of a rank's batch" if wrong is None else "a whole number from 1"
    with pytest.raises(ConfigError, match=f"batch_size=.*{says}"):
        DataLoader(URL, batch_size=wrong)


@pytest.mark.parametrize("wrong", [True, 1.0, "1", -1, 1 << 62, 1 << 64])
def test_what_is_not_an_epoch_is_refused(fake, wrong):
    fake()
    with DataLoader(URL) as loader, pytest.raises(ConfigError, match=r"epoch=.*: pass a whole"):
        loader.set_epoch(wrong)


def test_a_topology_accepts_integers_of_any_kind_and_nothing_else():
    given = Topology(*map(np.int64, (1, 2, 3, 8, 1, 4)))
    found = find_topology({}, explicit=given)
    assert found == Topology(1, 2, 3, 8, 1, 4)
    assert type(found.dp_rank) is int
    for wrong in (True, 1.0, "1"):
        with pytest.raises(ConfigError, match=r"dp_rank is .*: not a number"):
            find_topology({}, explicit=Topology(dp_rank=wrong, dp_size=2))


def test_states_over_a_dataset_may_hold_numpys_numbers():
    loader = DataLoader(list(range(40)), batch_size=4)
    iterator = iter(loader)
    taken = [next(iterator).tolist() for _ in range(3)]
    state = loader.state_dict()
    state = {n: np.int64(v) if type(v) is int else v for n, v in state.items()}
    state["sampler"] = {**state["sampler"], "drawn": np.int64(state["sampler"]["drawn"])}
    again = DataLoader(list(range(40)), batch_size=4)
    again.load_state_dict(state)
    assert taken + [batch.tolist() for batch in again] == torch.arange(40).view(10, 4).tolist()
