"""Datasets in buckets that have more than their shards: folders that consoles make, and odd keys."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from awry import Awry, Mood
from shards import json_lines, parquet_bytes

from dataplane.index.indexing import index_dataset
from dataplane.model.errors import CorruptShard, DatasetChangedError, ShardNotFound, StoreError
from dataplane.store.connect import Stores

A, B = (parquet_bytes(pa.table({"id": [n] * 10})) for n in (0, 1))
LINES = json_lines([{"id": 0}])


@pytest.fixture
def stores() -> Iterator[Stores]:
    opened = Stores()
    yield opened
    opened.close()


def shards_of(stores: Stores, *urls: str, format_name: str = "") -> list[str]:
    manifest = index_dataset(urls, format_name=format_name, connect=stores.connect)
    return [shard.url.removeprefix("s3://bucket/") for shard in manifest.shards]


def test_nothing_is_asked_about_empty_objects_that_cannot_be_shards(
    awry: Awry, stores: Stores
) -> None:
    names = [f"{i:03d}" for i in range(300)]
    empty = [form.format(name) for name in names for form in ("{}/", "{}/_SUCCESS", "{}/.a.crc")]
    awry.objects = dict.fromkeys((f"bucket/t/{name}" for name in empty), b"")
    awry.objects |= {"bucket/t/000/a.parquet": A, "bucket/t/299/b.parquet": B}
    for url in ("s3://bucket/t/", "s3://bucket/t/**/*", "s3://bucket/t/*/*.parquet"):
        assert shards_of(stores, url) == ["t/000/a.parquet", "t/299/b.parquet"]
    assert "HEAD" not in {method for method, _ in awry.seen}


def test_one_of_many_checks_that_fails_is_repeated_alone(awry: Awry, stores: Stores) -> None:
    folders = {f"bucket/t/{i:02d}.parquet/": b"" for i in range(50)}
    awry.objects = {**folders, **{f"{name}part.parquet": A for name in folders}}
    awry.be(Mood.WELL, *[Mood.INTERNAL, Mood.LATE, Mood.WELL] * 3)
    assert shards_of(stores, "s3://bucket/t/") == [
        f"t/{i:02d}.parquet/part.parquet" for i in range(50)
    ]
    assert [method for method, _ in awry.seen].count("HEAD") == 50 + 6


@pytest.mark.parametrize(
    ("keys", "url", "format_name", "found"),
    [
        (("p.parquet/", "p.parquet/0.parquet"), "t/", "", ["t/p.parquet/0.parquet"]),
        (("p.parquet/", "p.parquet/0.parquet"), "t/p.parquet", "", ["t/p.parquet/0.parquet"]),
        (("p.parquet/", "q.parquet"), "t/*.parquet", "", ["t/q.parquet"]),
        (("p.parquet/", "p.parquet"), "t/", "", ["t/p.parquet"]),
        (("p.jsonl/", "q.parquet"), "t/", "", ["t/q.parquet"]),
        (("p.jsonl/", "p.jsonl/0", "p.jsonl/1"), "t/", "jsonl", ["t/p.jsonl/0", "t/p.jsonl/1"]),
        (("p/", "p/0"), "t/", "jsonl", ["t/p/0"]),
        (("p/", "p/0.json"), "t/", "jsonl", ["t/p/0.json"]),
    ],
)
def test_a_folder_is_no_shard_whatever_its_name(
    awry: Awry, stores: Stores, keys: tuple[str, ...], url: str, format_name: str, found: list[str]
) -> None:
    body = LINES if format_name else A
    awry.objects = {f"bucket/t/{key}": b"" if key.endswith("/") else body for key in keys}
    assert shards_of(stores, f"s3://bucket/{url}", format_name=format_name) == found


@pytest.mark.parametrize("url", ["t/", "t/*.parquet", "t/b.parquet", "t/{a,b}.parquet"])
def test_an_empty_shard_is_refused_however_it_is_named(
    awry: Awry, stores: Stores, url: str
) -> None:
    awry.objects = {"bucket/t/a.parquet": A, "bucket/t/b.parquet": b"", "bucket/t/c.parquet/": b""}
    with pytest.raises(CorruptShard, match=r"t/b\.parquet: byte 0: the shard is empty"):
        shards_of(stores, f"s3://bucket/{url}")


@pytest.mark.parametrize("format_name", ["", "jsonl"])
def test_folders_without_an_object_are_no_dataset(
    awry: Awry, stores: Stores, format_name: str
) -> None:
    awry.objects = {"bucket/t/": b"", "bucket/t/a/": b"", "bucket/t/b.jsonl/": b""}
    with pytest.raises(ShardNotFound, match="only empty folders: s3://bucket/t/a, s3://bucket/t/b"):
        shards_of(stores, "s3://bucket/t/", format_name=format_name)


@pytest.mark.parametrize(
    "key",
    ["t//_SUCCESS", "t/./a", "t/../a", "t/logs//run.txt", "t/junk\n.txt", "t/ta\tb", 't/"\x7f'],
)
def test_a_key_that_ends_a_list_is_named_whole_with_what_to_do(
    awry: Awry, stores: Stores, key: str
) -> None:
    awry.objects = {f"bucket/{key}": b"", "bucket/t/0.parquet": A, "bucket/t/1.parquet": B}
    for url in ("t/", "t/*.parquet"):
        with pytest.raises(StoreError) as raised:
            shards_of(stores, f"s3://bucket/{url}")
        assert f"the object with the key {key!r} is in the way" in str(raised.value)
        assert "braces such as {000..127}, need no list" in str(raised.value)
    for urls in (["t/0.parquet", "t/1.parquet"], ["t/{0..1}.parquet"]):
        named = [f"s3://bucket/{url}" for url in urls]
        assert shards_of(stores, *named) == ["t/0.parquet", "t/1.parquet"]


def test_a_key_that_cannot_be_read_is_named_whole(stores: Stores) -> None:
    for url in ("s3://bucket/t/junk\n.txt", "s3://bucket/t//a"):
        with pytest.raises(StoreError, match="cannot be read; copy the object") as raised:
            shards_of(stores, url)
        assert repr(url) in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (("/t/a.parquet", "t/a.parquet"), DatasetChangedError),
        (("/t/a.parquet",), ShardNotFound),
        (("t/a.parquet/", "t/b.parquet"), ShardNotFound),
    ],
)
def test_an_object_that_is_not_as_listed_may_have_another_key(
    awry: Awry, stores: Stores, keys: tuple[str, ...], kind: type[Exception]
) -> None:
    awry.objects = {f"bucket/{key}": body for key, body in zip(keys, (A, B), strict=False)}
    with pytest.raises(kind, match=r"/t/a\.parquet.* with a slash before or after it") as raised:
        shards_of(stores, "s3://bucket/")
    assert raised.value.nouns["shard"] == "s3://bucket/t/a.parquet"  # type: ignore[attr-defined]
