"""The format that a name selects."""

from __future__ import annotations

import gzip
import sys
import zlib
from pathlib import Path

import mutants
import pytest
from foreign_read import FAULTS, verdict
from hypothesis import given
from hypothesis import strategies as st

from dataplane.base import suffixes
from dataplane.formats import registry, source
from dataplane.formats.source import inflate
from dataplane.model.errors import ConfigError, CorruptShard


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://b/x.parquet", "parquet"),
        ("s3://b/X.PARQUET", "parquet"),
        ("https://h/x.tar?signature=a.b", "tar"),
        ("HTTPS://h/x.tar#part", "tar"),
        ("s3://b/part#1.parquet", "parquet"),
        ("file:///data/part?2.tar", "tar"),
        ("x.tar.gz", "tar"),
        ("x.tgz", "tar"),
        ("x.tfrecord.gz", "tfrecord"),
        ("x.json.gz", "jsonl"),
        ("x.jsonl", "jsonl"),
        ("x.arrow", "arrow"),
        ("x.arrows", "arrow"),
    ],
)
def test_a_suffix_names_a_format(url: str, name: str) -> None:
    format_ = registry.format_of_url(url)
    assert format_ is not None
    assert format_.name == name


def test_urls_without_a_known_suffix_have_no_format() -> None:
    for url in ("README.md", "x.gz", "state.json", "parquet", "x.tar.bz2", "s3://b/x.tar?a"):
        assert registry.format_of_url(url) is None


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="parquet, arrow, tfrecord, tar, jsonl"):
        registry.by_name("lance")


def test_formats_of_packages_are_looked_for_only_where_one_declares_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "absent"), str(tmp_path)])
    points = tmp_path / "odd-1.dist-info" / "entry_points.txt"
    points.parent.mkdir()
    assert not registry._is_declared(registry.GROUP)
    points.write_text("[console_scripts]\nodd = odd:main\n")
    assert not registry._is_declared(registry.GROUP)
    points.write_text("[dataplane.formats]\nodd = odd:Odd\n")
    assert registry._is_declared(registry.GROUP)
    (tmp_path / "packages.zip").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages.zip")])
    assert registry._is_declared(registry.GROUP)


def test_a_dataset_has_one_format() -> None:
    with pytest.raises(ConfigError, match=r"a.parquet is parquet, b.tar is tar"):
        registry.dataset_format(["a.parquet", "b.tar"])
    with pytest.raises(ConfigError, match="known suffixes"):
        registry.dataset_format(["a.qqq"])
    assert registry.dataset_format(["a.tgz", "b.tar"]).name == "tar"


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        (["d/n01/a.gif", "d/n01/b.GIF"], r"an image: convert them to JPEG, PNG or WebP"),
        (["d/shard.00000.mds.br"], r"MosaicML's MDS .*use zstd, gzip or none"),
        (
            ["s3://b/D/README.md", "s3://b/D/a.tar.gz"],
            r"list only the shards, for example s3://b/D/\*\.tar\.gz",
        ),
        (["d/a.json"], "JSON, which must have one object per line"),
        (["d/a.jsonl.xz"], "use zstd"),
        (["d/index.json"], "JSON, which must"),
    ],
)
def test_the_error_about_a_file_that_is_not_a_shard_names_its_kind(
    urls: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        registry.dataset_format(urls)
    assert caught.value.shard == urls[0]


def test_the_table_of_suffixes_agrees_with_the_formats() -> None:
    assert registry.BUILT_IN.keys() == suffixes.BY_FORMAT.keys()
    for name, known in suffixes.BY_FORMAT.items():
        assert (registry.by_name(name).name, registry.by_name(name).suffixes) == (name, known)


@given(
    st.lists(
        st.sampled_from(["a", ".", "/", "?", "#", "T", *(s for s, _ in registry._by_suffix())]),
        max_size=5,
    ).map("".join)
)
def test_the_longest_suffix_tells_the_format(url: str) -> None:
    path = suffixes.path_of(url)
    fitting = [(len(s), name) for s, name in registry._by_suffix() if path.endswith(s)]
    format_ = registry.format_of_url(url)
    expected = max(fitting, key=lambda pair: pair[0])[1] if fitting else None
    assert (format_ and format_.name) == expected


def whole(content: bytes, piece: int = 1000) -> bytes:
    pieces = [content[at : at + piece] for at in range(0, len(content), piece)]
    return b"".join(inflate("u", pieces))


@given(
    parts=st.lists(st.binary(max_size=3000), min_size=1, max_size=4),
    piece=st.integers(1, 500),
    padding=st.integers(0, 40),
)
def test_members_one_after_the_other_are_one_text(
    parts: list[bytes], piece: int, padding: int
) -> None:
    content = b"".join(gzip.compress(part, mtime=0) for part in parts) + bytes(padding)
    assert whole(content, piece) == b"".join(parts)


def test_zlib_data_is_read() -> None:
    assert whole(zlib.compress(b"text" * 1000)) == b"text" * 1000


def test_large_data_comes_in_bounded_pieces() -> None:
    content = gzip.compress(bytes(20 << 20), mtime=0)
    sizes = [len(piece) for piece in inflate("u", [content])]
    assert sum(sizes) == 20 << 20
    assert max(sizes) <= source.PIECE_BYTES


@pytest.mark.parametrize("cut", [1, 4, 8, 9, 20])
def test_truncation_is_named(cut: int) -> None:
    with pytest.raises(CorruptShard, match="truncated"):
        whole(gzip.compress(bytes(range(256)) * 10, mtime=0)[:-cut])


def test_damage_and_garbage_are_named() -> None:
    content = gzip.compress(b"text" * 1000, mtime=0)
    with pytest.raises(CorruptShard, match="damaged compressed data"):
        whole(content[:-6] + b"\x00\x01" + content[-4:])
    with pytest.raises(CorruptShard, match="damaged compressed data"):
        whole(content + b"garbage")


def test_a_bomb_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "RATIO_FLOOR_BYTES", 4 << 20)
    content = gzip.compress(bytes(64 << 20), mtime=0)
    made: list[int] = []
    with pytest.raises(CorruptShard, match=r"inflate to more than .* write smaller shards"):
        made.extend(len(piece) for piece in inflate("u", [content]))
    assert sum(made) <= 6 << 20


_COUNT = 36


@pytest.mark.parametrize("kind", mutants.WHOLE)
def test_a_damaged_shard_is_refused_or_has_the_values_that_other_readers_find(
    kind: str, tmp_path: Path
) -> None:
    whole = mutants.write_whole(tmp_path, kind)
    results = []
    for name, path in whole.items():
        assert verdict(path, mutants.FORMATS[kind], path) == ("equal", "")
        changed = path.with_suffix(".mutant")
        count = _COUNT // len(whole)
        for content in mutants.mutants(path.read_bytes(), kind, name, count, seed=0):
            changed.write_bytes(content)
            results.append((name, *verdict(changed, mutants.FORMATS[kind], path)))
    assert len(results) == _COUNT
    assert not [result for result in results if result[1] in FAULTS]
    assert any(word.startswith("refused") for _, word, _ in results)


def test_the_comparison_sees_one_value_that_differs(tmp_path: Path) -> None:
    path = mutants.write_whole(tmp_path, "jsonl")["plain"]
    changed = tmp_path / "changed"
    changed.write_bytes(path.read_bytes().replace(b'"id": 7,', b'"id": 8,'))
    assert verdict(changed, "jsonl", path) == ("equal", "")  # as Python's json reads it
    records = mutants.write_whole(tmp_path, "tfrecord")["plain"]
    written = records.with_suffix(".written")
    written.write_text(written.read_text().replace('"id": 7,', '"id": 8,'))
    assert verdict(records, "tfrecord")[0] == "DIFFERS"
