"""Attacks by name: what a trainer, a ledger or a manifest may name, and what that must not reach."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.node.own_reads import check_allowed
from dataplane.rpc.bounds import check_name
from dataplane.rpc.codec import encode
from dataplane.rpc.messages import DatasetSource
from dataplane.store.connect import open_store
from dataplane.store.policy import UrlPolicy
from dataplane.store.urls import normalise
from dataplane.transforms.functions import function_name
from dataplane.worker.functions import loaded

NODE = NodeConfig("/c", 1 << 26, 1 << 27, 1 << 24, 2, 16, 30.0, 120.0, 30.0)

GOOD = """
import functools, importlib, os, subprocess
from pathlib import Path
from subprocess import Popen, getoutput

letters_of = getoutput
tool = functools.partial(getoutput, "touch {marker}")
dump = Path("{marker}").write_text


@functools.wraps(os.system)
def disguised(columns):
    return os.system("touch {marker}")


def letters(columns):
    return columns


class Tokenise:
    run = staticmethod(getoutput)

    def __call__(self, columns):
        return columns


ready = Tokenise()


def __getattr__(name):
    return importlib.import_module(name).system
"""


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that its operator trusts, which imports what he does not mean."""
    name = f"good_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(GOOD.replace("{marker}", str(tmp_path / "marker")))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "path",
    [
        "subprocess.getoutput",  # through a module that it imports
        "subprocess",
        "getoutput",  # a function that it imports
        "letters_of",  # under another name
        "Popen",  # a class that it imports, and a worker would make one
        "Path",
        "tool",  # what stands for one of another module
        "dump",  # a method of an object of another module's class
        "disguised",  # it says itself that it is another's
        "Tokenise.run",  # through a class of its own
        "letters.__globals__",
        "letters.__call__",
        "__builtins__",
        "__getattr__",  # calls that make names up
        "os",
        "antigravity",
        "nothing:subprocess.getoutput",
    ],
)
def test_a_module_gives_only_what_it_defines(good: str, path: str) -> None:
    with pytest.raises(ConfigError, match=r"does not define|has no") as caught:
        loaded("map", f"{good}:{path}")
    assert caught.value.field == "map"
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("path", ["letters", "Tokenise", "ready"])
def test_functions_classes_and_objects_of_a_module_are_called(good: str, path: str) -> None:
    assert loaded("map", f"{good}:{path}").call({"a": 1}) == {"a": 1}


def test_the_error_says_where_a_function_is_at_home(good: str) -> None:
    with pytest.raises(ConfigError, match=r"it is getoutput of 'subprocess'\. Workers call only"):
        loaded("collate", f"{good}:letters_of")


@pytest.mark.parametrize(
    "name",
    [
        "mine.text_of_others:f",
        "mine.textual.more:f",
        "mine:f",
        "mine.text:_shell",
        "mine.text:__getattr__",
        "mine.text.__main__:f",
        "mine.audio:decode_and_run",
        "mine.audio:decode.f",
        "mine.audio.more:decode",
        "mine.text:os.system",
        "mine.text::f",
        "mine.text:f:g",
        "mine.pack.../x:f",
        "mine.pack./../../x:f",
        "mine.pack:f\n",
        " mine.text:f",
        "mine.text",
        "",
    ],
)
def test_an_entry_of_allowed_functions_has_nothing_beside_it(name: str) -> None:
    config = structs.replace(NODE, allowed_functions="mine.text: mine.audio:decode mine.pack.")
    with pytest.raises(
        ConfigError, match=r"this node runs only those that it lists: mine\.text:, mine\.audio"
    ):
        check_allowed(config, "map", name)


@pytest.mark.parametrize(
    "name", ["mine.text:f", "mine.audio:decode", "mine.pack:f", "mine.pack.deep.er:f"]
)
def test_an_entry_of_allowed_functions_has_a_module_a_function_or_a_package(name: str) -> None:
    config = structs.replace(NODE, allowed_functions="mine.text: mine.audio:decode mine.pack.")
    check_allowed(config, "map", name)
    check_allowed(structs.replace(NODE, allowed_functions="mine.text:_f"), "map", "mine.text:_f")


def test_a_trainer_sends_no_name_of_several_steps() -> None:
    with pytest.raises(ConfigError, match="one name after the colon"):
        function_name("good.mod:subprocess.getoutput", "map")
    with pytest.raises(ConfigError, match="is part of a class"):
        function_name(UrlPolicy.check, "map")


@pytest.mark.parametrize(
    "url",
    [
        "zip://x/a.parquet",
        "reference://x/a.parquet",
        "generic://file:///etc/passwd",
        "asynclocal:///etc/passwd",
        "git:///srv/repository:main@a.parquet",
        "simplecache::file:///etc/passwd",
        "memory://a::simplecache/x.parquet",
        "zip://x.parquet::archive/x.parquet",
        "reference://x::references.json/a.parquet",
        "memory://a::zip",
    ],
)
def test_no_url_reaches_a_file_system_through_another(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read by range|names no bucket"):
        open_store(normalise(url).rpartition("/x.parquet")[0] or normalise(url), 1.0, UrlPolicy())


@pytest.mark.parametrize(
    "base",
    [
        *("s3://evil.example#", "s3://evil.example?x=", "s3://u@evil.example\\", "s3://a b"),
        *("gs://evil.example#", "gs://%2e%2e", "abfss://c@evil.example/x?", "s3://..%2fother"),
        "az://a@b@c",
    ],
)
def test_no_bucket_is_named_as_a_server(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    with pytest.raises(ConfigError, match="cannot be the name of a bucket"):
        open_store(base, 1.0, UrlPolicy())


@pytest.mark.parametrize(
    "url",
    [
        "s3://good/train/../../other/x",
        "s3://good/train/..\\x",
        "S3A://good/train-2/x",
        "s3://good/train{,/../../other}/x",
        "file:///data/../etc/passwd",
        "local:///etc/passwd",
        "file://localhost/etc/passwd",
        "/data/../etc/passwd",
        "http://good.example@169.254.169.254/train/x",
        "http://good.example\\@evil.example/train/x",
        "http://good.example.evil.example/train/x",
        "http://good.example:80#@evil.example/train/x",
        "http://good.example/train/%2E%2e/x",
        "https://good.example/train/x",
        "memory://good/train/x",
    ],
)
def test_no_spelling_of_a_url_leaves_the_prefixes(url: str) -> None:
    prefixes = ("s3://good/train", "file:///data", "http://good.example/train")
    with pytest.raises(DataplaneError):
        UrlPolicy(prefixes).check_names([url])
    with pytest.raises(DataplaneError):
        UrlPolicy(prefixes).check(normalise(url))


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "\ud800", "\u202eb", "a\x00", "\x9b1m"])
def test_a_name_has_nothing_that_a_terminal_acts_on(name: str) -> None:
    with pytest.raises(ConfigError, match=r"job_id .* has the character") as caught:
        check_name("job_id", name)
    assert name not in str(caught.value)
    check_name("job_id", "größe 火 pretrain-7/é")


def test_text_that_cannot_be_sent_is_refused_by_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"'where \\ud800 here' has half of a surrogate pair"):
        encode(DatasetSource(("where \ud800 here",)))
