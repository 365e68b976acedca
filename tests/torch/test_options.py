"""Arguments of loaders over urls: what they are called, and what others call them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from dataplane_torch import DataLoader, ShardedIterableDataset
from dataplane_torch.options import DEFAULTS, UrlOptions

from dataplane.errors import ConfigError

LOADERS = pytest.mark.parametrize("loader", [DataLoader, ShardedIterableDataset])


@LOADERS
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("weights", "pass Mixture"),
        ("streams", "pass Mixture"),
        ("predownload", "the node reads ahead"),
        ("batching_method", "leave it out"),
        ("shuffle_seed", "use seed="),
        ("num_parallel_calls", "the node chooses the number of its workers"),
        ("drop_remainder", "use drop_last=True"),
        ("num_epochs", "each pass over the loader is one epoch"),
        ("num_replicas", "use dp_rank="),
        ("remote", "as the first argument"),
        ("nodesplitter", "every rank gets its own part"),
        ("epoch", r"set_epoch\(epoch\)"),
        ("subset", "sample=0.1"),
        ("filter_fn", "use where="),
        ("val_split", 'split=."train", 0.99'),
        ("max_samples", "use limit="),
        ("storage_options", "AWS_ENDPOINT_URL"),
        ("delivery_bytes_per_rank", "DATAPLANE_DELIVERY_BYTES_PER_RANK=.*dataplane.toml"),
        ("slab_bytes", "dataplane serve --slab-bytes"),
        ("column", "did you mean 'columns'"),
        ("fillnull", "did you mean 'fill_null'"),
    ],
)
def test_the_error_about_an_argument_of_another_loader_says_what_to_use_here(loader, name, says):
    with pytest.raises(TypeError, match=rf"{loader.__name__}\(\) has no argument '{name}'.*{says}"):
        loader("s3://bucket/", **{name: [0.7, 0.3]})


@LOADERS
def test_an_unknown_argument_raises_a_type_error(loader):
    with pytest.raises(TypeError, match=r"has no argument 'qqqqqq'$"):
        loader("s3://bucket/", qqqqqq=1)


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
