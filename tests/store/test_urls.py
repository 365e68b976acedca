"""How users may name shards, and how these names are resolved."""

from __future__ import annotations

import fnmatch
import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.model.errors import ConfigError
from dataplane.store.urls import (
    base_of,
    braces,
    compile_glob,
    folder_of,
    is_glob,
    is_hidden,
    key_of,
    literal_prefix,
    local_path,
    normalise,
)

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1)


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("/data/a b%20#?.bin", "file:///data/a b%20#?.bin"),
        ("/data/../data/x/", "file:///data/x/"),
        ("//data//x", "file:///data/x"),
        ("/", "file:///"),
        (Path("/data/x"), "file:///data/x"),
        ("file:///data/x", "file:///data/x"),
        ("file:/data/x", "file:///data/x"),
        ("file://localhost/data/x", "file:///data/x"),
        ("s3://bucket/a b+%20.bin", "s3://bucket/a b+%20.bin"),
        ("S3://Bucket/Key", "s3://Bucket/Key"),
        ("s3a://bucket/key", "s3://bucket/key"),
        ("gcs://bucket/key", "gs://bucket/key"),
        ("az://container/key", "az://container/key"),
        ("abfss://c@account.dfs.core.windows.net/k", "abfss://c@account.dfs.core.windows.net/k"),
        ("https://host/a%20b?x=1", "https://host/a%20b?x=1"),
        ("memory://a/b", "memory://a/b"),
        ("s3://bucket/a::b", "s3://bucket/a::b"),
        ("hf://datasets/org/name", "hf://datasets/org/name"),
    ],
)
def test_every_url_has_one_form(written: str | Path, url: str) -> None:
    assert normalise(written) == url
    assert normalise(url) == url


def test_relative_paths_and_homes_become_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    assert normalise("a/b") == f"file://{tmp_path}/a/b"
    assert normalise("./a/") == f"file://{tmp_path}/a/"
    assert normalise("~/a") == f"file://{tmp_path}/a"
    assert normalise(".") == f"file://{tmp_path}"


@pytest.mark.parametrize(
    "written",
    [
        "",
        "  ",
        "s3://",
        "s3:///key",
        "file://host/x",
        "file:x",
        "a\0b",
        "zip://a::file:///b",
        "filecache::s3://b/k",
    ],
)
def test_what_names_nothing_is_refused(written: str) -> None:
    with pytest.raises(ConfigError):
        normalise(written)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("s3:/lab", "s3://lab"),
        ("s3:lab/train/*.parquet", "s3://lab/train/*.parquet"),
        ("S3A:/lab", "s3a://lab"),
        ("gs:/lab/x", "gs://lab/x"),
        ("gcs:/lab", "gcs://lab"),
        ("az:/lab", "az://lab"),
        ("abfss:/lab", "abfss://lab"),
        ("http:/host/x.tar", "http://host/x.tar"),
        ("https:host/x.tar", "https://host/x.tar"),
        ("hf:/datasets/a/b", "hf://datasets/a/b"),
    ],
)
def test_a_url_that_lacks_a_slash_is_a_typo_and_no_local_path(written: str, meant: str) -> None:
    with pytest.raises(ConfigError, match="did you mean") as raised:
        normalise(written)
    assert f"{meant}?" in str(raised.value)
    assert f"./{written}" in str(raised.value)


def test_a_local_path_that_looks_like_such_a_typo_is_taken_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "lab").mkdir(parents=True)
    assert normalise("s3:/lab") == f"file://{tmp_path}/s3:/lab"
    assert normalise("./gs:/lab") == f"file://{tmp_path}/gs:/lab"
    assert normalise("C:/lab") == f"file://{tmp_path}/C:/lab"


def test_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="bytes"):
        normalise(b"s3://bucket/key")  # type: ignore[arg-type]


@given(st.lists(NAMES.filter(lambda name: name not in (".", "..")), min_size=1, max_size=4))
def test_any_local_path_round_trips(names: list[str]) -> None:
    path = Path("/", *names)

    assert local_path(normalise(path)) == path


def test_parts_of_a_url() -> None:
    assert base_of("s3://bucket/a/b") == base_of("s3://bucket") == "s3://bucket"
    assert base_of("file:///a/b") == "file://"
    assert key_of("s3://bucket/a/b") == "a/b"
    assert key_of("file:///a/b") == "a/b"
    assert folder_of("s3://bucket/a/b") == "s3://bucket/a/"
    assert folder_of("s3://bucket/a") == folder_of("s3://bucket") == "s3://bucket/"
    assert folder_of("file:///a") == "file:///"
    assert local_path("s3://bucket/a") is None


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("x-{000..003}", ["x-000", "x-001", "x-002", "x-003"]),
        ("x-{8..11}", ["x-8", "x-9", "x-10", "x-11"]),
        ("x-{08..11}", ["x-08", "x-09", "x-10", "x-11"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{0..9..4}", ["0", "4", "8"]),
        ("{a..c}", ["a", "b", "c"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{a,b}/{1,2}", ["a/1", "a/2", "b/1", "b/2"]),
        ("{a,b{1..2}}.x", ["a.x", "b1.x", "b2.x"]),
        ("{,x}y", ["y", "xy"]),
        ("{}{a}", ["{}{a}"]),
        ("a{b}{c,d}", ["a{b}c", "a{b}d"]),
        ("[{]a,b}", ["[{]a,b}"]),
        ("plain", ["plain"]),
    ],
)
def test_braces_expand_as_in_a_shell(pattern: str, names: list[str]) -> None:
    assert list(braces(pattern)) == names


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=3))
def test_ranges_multiply(ranges: list[tuple[int, int]]) -> None:
    pattern = "/".join(f"{{{low:03d}..{high:03d}}}" for low, high in ranges)
    runs = [
        [
            f"{n:03d}"
            for n in range(low, high + (1 if high >= low else -1), 1 if high >= low else -1)
        ]
        for low, high in ranges
    ]

    assert list(braces(pattern)) == ["/".join(parts) for parts in itertools.product(*runs)]


@pytest.mark.parametrize(
    "pattern", ["{000..127", "a{b{c,d}", "{0..99999999}", "{0..2000}{0..2000}"]
)
def test_braces_that_do_not_close_or_explode_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError):
        list(braces(pattern))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("s3://b/*.x", ["a.x", ".x"[1:] + ".x"], ["a.y", "d/a.x", ".hidden.x", "_part.x"]),
        ("s3://b/t-?.x", ["t-1.x"], ["t-.x", "t-12.x", "t-/.x"]),
        ("s3://b/t-[0-3a].x", ["t-0.x", "t-a.x"], ["t-4.x", "t-/.x"]),
        ("s3://b/t-[!0-3].x", ["t-4.x"], ["t-0.x", "t-/.x"]),
        ("s3://b/**/*.x", ["a.x", "d/a.x", "d/e/a.x"], ["d/a.y", "_tmp/a.x", ".git/a.x"]),
        ("s3://b/d/**", ["d/a", "d/e/a"], ["d", "d/", "e/a", "d/_SUCCESS", "d/.a.crc"]),
        ("s3://b/_*", ["_SUCCESS"], ["a"]),
        ("s3://b/.*", [".hidden"], ["a"]),
        ("s3://b/*/x", ["_date=1/x", "d/x"], ["_date/x", "d/e/x"]),
        ("s3://b/[[]1].x", ["[1].x"], ["1.x"]),
        ("s3://b/a.x*", ["a.x", "a.xy"], ["abx"]),
        ("s3://b/a[.x", ["a[.x"], ["a.x"]),
    ],
)
def test_globs_match_the_expected_names(pattern: str, yes: list[str], no: list[str]) -> None:
    matches = compile_glob(pattern).fullmatch

    assert [name for name in yes if not matches(f"s3://b/{name}")] == []
    assert [name for name in no if matches(f"s3://b/{name}")] == []
    assert all(f"s3://b/{name}".startswith(literal_prefix(pattern)) for name in yes)


@given(
    pattern=st.text("ab1*?[]-!.", min_size=1, max_size=8),
    name=st.text("ab1-.", min_size=1, max_size=6),
)
def test_within_a_folder_globs_are_those_of_fnmatch(pattern: str, name: str) -> None:
    if is_hidden(name) or pattern.startswith("[") or pattern == "**":
        return
    mine = compile_glob(f"s3://b/{pattern}").fullmatch(f"s3://b/{name}") is not None

    assert mine == fnmatch.fnmatchcase(name, pattern)


def test_a_question_mark_opens_the_query_of_an_http_url() -> None:
    assert not is_glob("https://host/a?b=1")
    assert is_glob("s3://bucket/a?")
    assert not is_glob("https://host/a?b=*[1]")
    assert is_glob("https://host/a*?b=1")
    assert literal_prefix("https://host/a*?b=1") == "https://host/a"
    assert compile_glob("https://host/a*?b=1").fullmatch("https://host/a2?b=1")
    assert not is_glob("s3://bucket/a{0..1}")
    assert os.sep == "/"


@given(st.text("a._=/\n", max_size=12))
def test_a_name_is_hidden_if_one_of_its_segments_is(name: str) -> None:
    segments = name.split("/")
    expected = any(s[:1] == "." or (s[:1] == "_" and "=" not in s) for s in segments)
    assert is_hidden(name) == expected
