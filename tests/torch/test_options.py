"""Arguments of loaders over urls: what they are called, and what others call them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from dataplane_torch import DataLoader, ShardedIterableDataset
from dataplane_torch.options import DEFAULTS, UrlOptions

from dataplane.model.errors import ConfigError

LOADERS = pytest.mark.parametrize("loader", [DataLoader, ShardedIterableDataset])


@LOADERS
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("delivery_bytes_per_rank", "DATAPLANE_DELIVERY_BYTES_PER_RANK=.*dataplane.toml"),
        ("slab_bytes", "dataplane serve --slab-bytes"),
        ("column", "did you mean 'columns'"),
        ("fillnull", "did you mean 'fill_null'"),
        ("shuffle_algo", "what those of other loaders are called here"),
    ],
)
def test_the_error_about_an_unknown_argument_says_what_to_use(loader, name, says):
    with pytest.raises(TypeError, match=rf"{loader.__name__}\(\) has no argument '{name}'.*{says}"):
        loader("s3://bucket/", **{name: [0.7, 0.3]})


def test_every_option_has_a_line_in_the_docstring_and_a_place_on_its_page():
    page = Path(__file__).parents[2] / "docs" / "arguments.md"
    for text in (str(DataLoader.__doc__), page.read_text()):
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
