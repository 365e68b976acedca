"""How users may name shards, and how these names are resolved."""

from __future__ import annotations

import fnmatch
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import S3Server, reach

from dataplane.model.errors import ConfigError, ShardNotFound, StoreError
from dataplane.model.records import ObjectInfo
from dataplane.store.base import Store
from dataplane.store.connect import Stores, connect, forget
from dataplane.store.expand import expand, missing
from dataplane.store.urls import (
    base_of,
    braces,
    canonical,
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


STORES = Stores()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    names = [
        *(f"train-{i:03d}.parquet" for i in range(4)),
        "web.parquet",
        "notes.txt",
        "empty.bin",
        "_SUCCESS",
        ".train-000.parquet.crc",
        "date=1/part.parquet",
        "date=1/_temporary/part.parquet",
        "date=2/part.parquet",
        "odd {0} [x]*.bin",
    ]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if name.startswith("empty") else name.encode())
    return tmp_path


def names(root: Path, *urls: str) -> list[str]:
    return [
        info.url.removeprefix(f"file://{root}/")
        for info in expand([f"{root}/{url}" for url in urls], STORES.connect)
    ]


def test_a_glob_is_sorted(root: Path) -> None:
    assert names(root, "*.parquet") == [
        *(f"train-{i:03d}.parquet" for i in range(4)),
        "web.parquet",
    ]
    assert names(root, "**/part.parquet") == ["date=1/part.parquet", "date=2/part.parquet"]
    assert names(root, "train-00[12]*") == ["train-001.parquet", "train-002.parquet"]


def test_names_keep_the_order_in_which_they_are_given(root: Path) -> None:
    assert names(root, "web.parquet", "train-{002..001}.parquet", "date=*/*") == [
        "web.parquet",
        "train-001.parquet",
        "train-002.parquet",
        "date=1/part.parquet",
        "date=2/part.parquet",
    ]


def test_a_folder_is_all_below_it_but_what_is_hidden(root: Path) -> None:
    shown = names(root, "")

    assert shown == sorted(shown)
    assert set(shown) == {
        *(f"train-{i:03d}.parquet" for i in range(4)),
        *("web.parquet", "notes.txt", "empty.bin", "odd {0} [x]*.bin"),
        *("date=1/part.parquet", "date=2/part.parquet"),
    }
    assert names(root, "date=1") == names(root, "date=1/") == ["date=1/part.parquet"]
    assert [info.url for info in expand(root, STORES.connect)] == [
        f"file://{root}/{n}" for n in shown
    ]


def test_an_existing_name_is_taken_literally_even_with_glob_characters(root: Path) -> None:
    assert names(root, "odd {0} [x]*.bin") == ["odd {0} [x]*.bin"]
    assert names(root, "_SUCCESS", ".train-000.parquet.crc") == [
        "_SUCCESS",
        ".train-000.parquet.crc",
    ]


def test_an_empty_object_is_listed(root: Path) -> None:
    (info,) = expand(root / "empty.bin", STORES.connect)
    assert info.size_bytes == 0


@pytest.mark.parametrize(
    "urls",
    [("train-000.parquet", "train-*.parquet"), ("web.parquet",) * 2, ("{web,web}.parquet",)],
)
def test_an_object_named_twice_is_refused(root: Path, urls: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="listed twice") as raised:
        names(root, *urls)
    assert str(raised.value.shard) in str(raised.value)
    assert all(url in str(raised.value) for url in urls)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("*.parq", r"but none matches .*/\*\.parq; did you mean .*/\*\.parquet\?"),
        ("*.arrow", "but none matches .*there is file://"),
        ("train-{000..004}.parquet", r"no file file://.*train-004\.parquet.*train-00"),
        ("trian-000.parquet", r"did you mean .*train-000\.parquet"),
        ("trian-*.parquet", r"did you mean .*/train-000\.parquet\?"),
        ("date=*/*.arrow", "to choose by keys of folders, pass the folder above, and where="),
        ("nothing/here/*.x", "no url starts with .*nothing/here/"),
        ("nothing/here/x", "nothing is not a folder"),
        ("web.parquet/", "nothing below"),
        ("date=1/_temporary/../_x*", "none matches|no url starts"),
    ],
)
def test_an_error_for_a_missing_shard_lists_what_is_there(root: Path, url: str, says: str) -> None:
    with pytest.raises(ShardNotFound, match=says):
        names(root, url)


@pytest.mark.parametrize("written", ["empty", "empty/"])
def test_an_empty_folder_is_reported_as_empty_and_not_suggested(
    tmp_path: Path, written: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardNotFound, match="is an empty folder") as raised:
        expand(f"{tmp_path}/{written}", connect)
    assert "did you mean" not in str(raised.value)
    (tmp_path / "empty" / "2026").mkdir()
    with pytest.raises(ShardNotFound, match=r"has folders \(2026, …\), but there is no file"):
        expand(f"{tmp_path}/{written}", connect)


def test_a_folder_of_hidden_files_says_so(root: Path) -> None:
    hidden = root / "only"
    hidden.mkdir()
    (hidden / "_SUCCESS").touch()

    with pytest.raises(ShardNotFound, match=r"all 1 objects below .* are hidden"):
        names(root, "only")


def test_no_urls_are_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        expand([], STORES.connect)


def test_a_loop_of_links_ends(root: Path) -> None:
    (root / "loop").symlink_to(root)
    assert not [name for name in names(root, "") if name.startswith("loop/loop")]


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("urls", [[""], ["*.parquet"], ["web.parquet", "again.parquet"]])
def test_a_file_and_a_link_to_it_are_refused_together(
    root: Path, link: Callable[[Path, Path], None], urls: list[str]
) -> None:
    link(root / "web.parquet", root / "again.parquet")
    assert names(root, "again.parquet", "train-*.parquet")[0] == "again.parquet"
    with pytest.raises(
        ConfigError, match=r"again.parquet and .*web.parquet are the same .*Mixture"
    ):
        names(root, *sorted(urls))


def test_a_folder_and_a_link_to_it_are_refused_together(root: Path) -> None:
    (root / "latest").symlink_to(root / "date=2")
    with pytest.raises(
        ConfigError, match=r"date=2/part\.parquet and .*latest/part\.parquet are the same file"
    ):
        names(root, "")
    assert names(root, "latest") == ["latest/part.parquet"]
    with pytest.raises(ConfigError, match="are the same file"):
        names(root, "date=2", "latest")


def test_files_of_one_size_and_time_are_not_one(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(b"same")
        os.utime(tmp_path / name, (1e9, 1e9))
    assert names(tmp_path, "") == ["a.bin", "b.bin"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a.parquet", "./a.parquet"),
        ("a.parquet", "sub/..//a.parquet"),
        ("a.parquet", "file:a.parquet"),
    ],
)
def test_two_spellings_of_a_path_are_one_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: str, other: str
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"listed twice.*source of a Mixture"):
        expand([one, other.replace("file:", f"file://{tmp_path}/")], STORES.connect)


def test_two_spellings_of_a_web_url_are_one_shard() -> None:
    plain = "http://host/data/a.parquet"
    spellings = ["HTTP://HOST/data/a.parquet", "http://host:80/data//./%61.parquet", f"{plain}#x"]
    assert {canonical(normalise(url)) for url in spellings} == {plain}
    assert canonical(f"{plain}?part=1") != canonical(f"{plain}?part=2")
    assert canonical("s3://B/a//b") == "s3://B/a//b"
    assert canonical("memory:///a//./b") == canonical("memory://a/b") == "memory://a/b"
    assert canonical("sftp://host//a/../b") == "sftp://host/b"


@given(st.sets(st.integers(0, 20), min_size=1), st.integers(0, 20), st.integers(0, 20))
def test_a_range_of_names_is_all_of_them_or_an_error(
    present: set[int], first: int, last: int
) -> None:
    stores = Stores()
    stores.connect("memory://")._inner._files.pipe(  # type: ignore[attr-defined]
        {f"/range/{n:02d}": b"x" for n in present}
    )
    wanted = set(range(min(first, last), max(first, last) + 1))
    try:
        infos = expand(f"memory://range/{{{first:02d}..{last:02d}}}", stores.connect)
        assert [info.url for info in infos] == [f"memory://range/{n:02d}" for n in sorted(wanted)]
        assert wanted <= present
    except ShardNotFound:
        assert not wanted <= present
    finally:
        stores.connect("memory://")._inner._files.rm("/range", recursive=True)  # type: ignore[attr-defined]


def test_globs_and_braces_match_names_in_a_bucket(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(s3_server, monkeypatch)
    bucket = s3_server.bucket()
    keys = [f"data/train-{i:02d}.tar" for i in range(12)]
    s3_server.put(bucket, {**dict.fromkeys(keys, b"x"), "data/_SUCCESS": b"", "data/sub/": b""})
    base = f"s3://{bucket}"
    try:
        whole = [f"{base}/{key}" for key in keys]
        for written in (base, f"{base}/", f"{base}/data", f"{base}/data/train-{{00..11}}.tar"):
            listed = expand(written, connect)
            folders = missing((info for info in listed if not info.size_bytes), connect)
            assert folders <= {f"{base}/data/sub"}
            assert [info.url for info in listed if info.url not in folders] == whole
        assert [info.url for info in expand(f"{base}/data/*-0?.tar", connect)] == whole[:10]
        with pytest.raises(ShardNotFound, match=r"12 objects .* none matches"):
            expand(f"{base}/data/train-*.parquet", connect)
        with pytest.raises(ShardNotFound, match="train-12"):
            expand(f"{base}/data/train-{{00..12}}.tar", connect)
        brackets = {"data/a[1].tar": b"x", "data/a1.tar": b"x", "b[1]/a.tar": b"x"}
        s3_server.put(bucket, brackets)
        for key in ("data/a[1].tar", "b[1]/a.tar"):
            assert [info.url for info in expand(f"{base}/{key}", connect)] == [f"{base}/{key}"]
        for key in ("b[1]", "b[1]/"):
            assert [info.url for info in expand(f"{base}/{key}", connect)] == [f"{base}/b[1]/a.tar"]
        assert [info.url for info in expand(f"{base}/data/a[12].tar", connect)] == [
            f"{base}/data/a1.tar"
        ]
        with pytest.raises(StoreError, match="no bucket s3://no-such-bucket"):
            expand("s3://no-such-bucket/x", connect)
    finally:
        forget()


def test_the_real_folders_expand(data_dir: Path) -> None:
    infos = expand(data_dir / "**" / "*.parquet", STORES.connect)

    assert len(infos) == len({info.url for info in infos}) > 0
    assert all(info.etag for info in infos)


@pytest.mark.parametrize(
    ("url", "meant"),
    [("s4://bucket/a.parquet", "s3://bucket"), ("htps://host/a.parquet", "https://host")],
)
def test_an_unknown_scheme_suggests_the_nearest_one(url: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {meant}\?"):
        expand(url, STORES.connect)


@dataclass(frozen=True)
class Meeting:
    """A store whose lookups wait for each other: one after the other, they would fail."""

    store: Store
    barrier: threading.Barrier

    def head(self, url: str) -> ObjectInfo:
        self.barrier.wait()
        return self.store.head(url)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.barrier.wait()
        return self.store.list(prefix)


def test_the_urls_of_a_list_are_looked_up_at_once(root: Path) -> None:
    given = [f"{root}/{name}" for name in ("web.parquet", "[t]rain*", "date=1/part.parquet")]
    infos = expand(given, STORES.connect)
    barrier = threading.Barrier(3, timeout=30.0)
    assert expand(given, lambda url: cast(Store, Meeting(connect(url), barrier))) == infos


def test_what_may_be_missing_is_asked_for_at_once(root: Path) -> None:
    infos = [ObjectInfo(f"file://{root}/{name}", 0, "") for name in ("empty.bin", "gone", "date=1")]
    barrier = threading.Barrier(3, timeout=30.0)
    gone = missing(infos, lambda url: cast(Store, Meeting(connect(url), barrier)))
    assert gone == {f"file://{root}/gone", f"file://{root}/date=1"}


def test_an_empty_object_may_be_named_twice_since_it_may_be_a_folder(root: Path) -> None:
    assert names(root, "empty*", "*.bin") == ["empty.bin", "odd {0} [x]*.bin"]
