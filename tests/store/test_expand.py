"""From names to objects, over real files."""

from __future__ import annotations

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
from dataplane.store.urls import canonical, normalise

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
    with pytest.raises(ConfigError, match=r"again.parquet and .*web.parquet are one file.*Mixture"):
        names(root, *sorted(urls))


def test_a_folder_and_a_link_to_it_are_refused_together(root: Path) -> None:
    (root / "latest").symlink_to(root / "date=2")
    with pytest.raises(
        ConfigError, match=r"date=2/part\.parquet and .*latest/part\.parquet are one"
    ):
        names(root, "")
    assert names(root, "latest") == ["latest/part.parquet"]
    with pytest.raises(ConfigError, match="are one file"):
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
