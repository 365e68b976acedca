"""Passwords and signatures of urls never appear in output."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from manifests import small
from msgspec.structs import replace

from dataplane.client.identity import Launch, job_id
from dataplane.model import errors
from dataplane.model.errors import (
    ConfigError,
    DataplaneError,
    DataStallError,
    StoreUnavailable,
    rebuild,
)
from dataplane.model.redact import redacted, unsigned
from dataplane.node.jobs import shown

SECRET = "Zm9vYmFyYmF6"
AWS = (
    "https://lab.s3.amazonaws.com/train/a.parquet?X-Amz-Algorithm=AWS4-HMAC-SHA256"
    f"&X-Amz-Credential={SECRET}%2F20260101%2Fus-east-1%2Fs3%2Faws4_request"
    f"&X-Amz-Date=20260101T000000Z&X-Amz-Expires=900&X-Amz-Security-Token={SECRET}"
    f"&X-Amz-SignedHeaders=host&X-Amz-Signature={SECRET}"
)
AZURE = (
    f"https://a.blob.core.windows.net/c/x.tar?sv=2024-11-04&se=2026-01-01&sr=c&sp=rl&sig={SECRET}"
)
CLOUDFRONT = f"https://d1.cloudfront.net/x.tar?Expires=1&Signature={SECRET}&Key-Pair-Id=K{SECRET}"
SIGNED = [
    AWS,
    AZURE,
    CLOUDFRONT,
    f"https://storage.googleapis.com/b/x?X-Goog-Signature={SECRET}&X-Goog-Date=1",
    f"https://storage.googleapis.com/b/x?GoogleAccessId=a&Expires=1&Signature={SECRET}",
    f"https://host/x.parquet?token={SECRET}",
    f"https://host/x.parquet?access_token={SECRET}",
    f"https://user:{SECRET}@host/x.parquet",
    f"https://{SECRET}@host/x.parquet",
    f"http://user:{SECRET}@127.0.0.1:9000/x.parquet",
]


@pytest.mark.parametrize("url", [*SIGNED, f"sftp://user:{SECRET}@host/x", f"smb://u:{SECRET}@h/x"])
@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "read of {}: no",
        "{}, {}",
        "uri: Some(\n    {},\n)",
        "'{}' and \"{}\"",
        "({}).",
        "<{}>",
    ],
)
def test_no_secret_of_a_url_is_left_in_a_text(url: str, text: str) -> None:
    found = redacted(text.replace("{}", url))
    assert SECRET not in found
    assert "***" in found
    host = url.partition("://")[2].rpartition("@")[2].partition("?")[0]
    assert host.partition("/")[0] in found, "where it was is still told"


def test_punctuation_behind_a_url_stays() -> None:
    assert redacted(f"({AZURE}).").endswith("&sig=***).")
    assert redacted(f"{AZURE}, s3://b/k").endswith("&sig=***, s3://b/k")


def test_a_value_that_is_long_is_taken_for_a_secret_whatever_its_name() -> None:
    assert SECRET * 2 not in redacted(f"https://host/x?h={SECRET * 2}")


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a b?c#d",
        "https://host/get?id=17&download=true",
        "abfs://container@account.dfs.core.windows.net/x",
        "sftp://me@host/x",
        "a=b; c=d",
        "mail me@host",
        "",
        "raise stall_timeout_s (now 120), or batch_size=4",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize("url", SIGNED)
def test_the_identity_of_an_object_has_nothing_that_signs(url: str) -> None:
    assert SECRET not in unsigned(url)
    assert "?" not in unsigned(url)
    assert unsigned(unsigned(url)) == unsigned(url)


def test_the_identity_does_not_depend_on_the_signing() -> None:
    again = AWS.replace(SECRET, "another").replace("20260101", "20270202")
    assert again != AWS
    assert unsigned(again) == unsigned(AWS)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a?token=b",
        "https://host/get?id=17",
        "file:///a?sig=1",
        "abfs://container@account.dfs.core.windows.net/x",
        "hf://datasets/a/b@main/x.parquet",
    ],
)
def test_the_identity_of_other_urls_is_the_url(url: str) -> None:
    assert unsigned(url) == url


def test_what_tells_two_objects_apart_stays_in_their_identities() -> None:
    one, two = (f"https://host/get?id={i}&token={SECRET}" for i in (1, 2))
    assert [unsigned(one), unsigned(two)] == ["https://host/get?id=1", "https://host/get?id=2"]


def test_the_names_of_jobs_and_datasets_do_not_depend_on_signatures_in_urls() -> None:
    launch = Launch("run", "launch", shared=True)
    names, fingerprints = set(), set()
    for secret in ("one", "two"):
        url = AWS.replace(SECRET, secret)
        names.add(job_id(launch, [url], None).rpartition("-")[0])
        shards = tuple(replace(shard, url=url) for shard in small().shards)
        fingerprints.add(small(shards=shards).fingerprint)
    assert len(names) == len(fingerprints) == 1


def test_the_coordinator_receives_urls_without_their_secrets() -> None:
    told = shown([*SIGNED, *(f"s3://b/{i}" for i in range(100))])
    assert SECRET not in told
    assert told.endswith(f"s3://b/5, and {len(SIGNED) + 100 - 16} more")


@pytest.mark.parametrize("url", SIGNED)
def test_an_error_has_no_secret_wherever_it_goes(url: str) -> None:
    error = StoreUnavailable(f"{url}: gone", shard=url, attempts=3)
    sent = rebuild(type(error).__name__, str(error), error.nouns)
    for one in (error, sent, pickle.loads(pickle.dumps(error))):
        assert SECRET not in str(one)
        assert SECRET not in repr(one)
        assert SECRET not in str(one.nouns)
        assert one.attempts == 3


def test_every_class_of_error_redacts() -> None:
    assert SECRET not in str(ConfigError(f"no {AZURE}"))
    assert SECRET not in str(DataplaneError(f"no {AZURE}", url=AZURE).nouns)


ROOT = Path(__file__).resolve().parents[1]
CLASSES = errors._tree(DataplaneError)


def known(cls: type[DataplaneError]) -> set[str]:
    return {noun for each in cls.__mro__ for noun in vars(each).get("known", ())}


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_a_noun_that_the_raiser_left_out_is_none(cls: type[DataplaneError]) -> None:
    bare = cls("it failed")
    assert known(cls)
    assert {getattr(bare, noun) for noun in known(cls)} == {None}
    for noun in sorted(known(cls)):
        assert getattr(cls("it failed", **{noun: "x"}), noun) == "x"
    assert not hasattr(bare, "no_such_noun")
    for same in (pickle.loads(pickle.dumps(bare)), copy.copy(bare)):
        assert (type(same), str(same), same.nouns) == (cls, "it failed", {})


def test_a_stall_that_names_no_shard_has_none() -> None:
    error = DataStallError("no batch within 3 s", stage="node")
    assert (error.stage, error.shard, error.node) == ("node", None, None)


def _raised() -> Iterator[tuple[str, str, str]]:
    """(class, noun, place) of each error that is made by name."""
    for path in [*(ROOT / "dataplane").rglob("*.py"), *(ROOT / "loaders").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        has_some = any(name in text for name in CLASSES)
        for node in ast.walk(ast.parse(text if has_some else "")):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                for keyword in node.keywords if name in CLASSES else ():
                    if keyword.arg is not None:
                        yield name, keyword.arg, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_class_knows_the_nouns_that_it_is_raised_with() -> None:
    unknown = [
        f"{place}: {name} is raised with {noun!r}, which it does not know"
        for name, noun, place in _raised()
        if noun not in known(CLASSES[name])
    ]
    assert not unknown, "\n".join(unknown)
