"""Folders as other programs write them give what their owners' readers give, or an error."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from servers import S3Server, reach
from shards import arrow_bytes, parquet_bytes

from dataplane.commands.datasets import read_block, schema_of
from dataplane.index.indexing import index_dataset
from dataplane.index.viewing import said_of_folders
from dataplane.model.errors import ConfigError, ShardNotFound
from dataplane.model.records import ObjectInfo
from dataplane.plan.manifest import Manifest
from dataplane.plan.views import identity_of
from dataplane.store.base import Store
from dataplane.store.connect import connect, forget
from dataplane.store.expand import expand

Files = Mapping[str, bytes]


def parquet(*ids: int) -> bytes:
    return parquet_bytes(pa.table({"x": list(ids)}))


def arrow(*ids: int) -> bytes:
    return arrow_bytes(pa.table({"x": list(ids)}), rows=8)


def saved(*names: str, **more: object) -> bytes:
    return json.dumps({"_data_files": [{"filename": name} for name in names], **more}).encode()


def rows(manifest: Manifest) -> list[int]:
    schema = schema_of(manifest)
    batches = [
        read_block(manifest, block, schema, ["x"], connect) for block in range(manifest.block_count)
    ]
    return [value for batch in batches for value in batch.column(0).to_pylist()]


DELTA = {
    "t/_delta_log/00000000000000000000.json": b"{}",
    "t/part-0.snappy.parquet": parquet(1),
    "t/day=1/part-1.snappy.parquet": parquet(2),
}
ICEBERG = {
    "t/metadata/00001-6e1f.metadata.json": b"{}",
    "t/metadata/snap-1-0-6e1f.avro": b"avro",
    "t/data/day=1/00000-0-6e1f.parquet": parquet(1),
    "t/data/00000-1-6e1f.parquet": parquet(2),
}
HUDI = {
    "t/.hoodie/hoodie.properties": b"",
    "t/.hoodie/20240402123035233.commit": b"{}",
    "t/2024/05/.hoodie_partition_metadata": b"#",
    "t/2024/05/6e1f-0_0-7-24_20240402123035233.parquet": parquet(1),
    "t/6e1f-0_0-7-25_20240402123035233.parquet": parquet(2),
}
LANCE = {
    "d/t.lance/_versions/1.manifest": b"m",
    "d/t.lance/data/6e1f.lance": b"lance",
    "d/a.parquet": parquet(1),
}
HIVE = {
    f"t/year={year}/month={month}/part-0.parquet": parquet(year * 100 + month)
    for year in (1, 2)
    for month in (1, 2, 10)
}
HUB = {
    "README.md": b"---",
    "data/train-00000-of-00002.parquet": parquet(0),
    "data/train-00001-of-00002.parquet": parquet(1),
    "data/validation-00000-of-00001.parquet": parquet(2),
    "data/test-00000-of-00001.parquet": parquet(3),
    "data/unsupervised-00000-of-00001.parquet": parquet(4),
}
DICT = {
    "d/dataset_dict.json": b'{"splits": ["first", "second"]}',
    **{
        f"d/{split}/{name}": content
        for split, ids in (("first", (1, 2)), ("second", (3,)))
        for name, content in {
            "data-00000-of-00001.arrow": arrow(*ids),
            "cache-6e1f.arrow": arrow(9),
            "state.json": saved("data-00000-of-00001.arrow"),
            "dataset_info.json": b"{}",
        }.items()
    },
}
SAVED = {
    "s/data-00000-of-00002.arrow": arrow(1, 2),
    "s/data-00001-of-00002.arrow": arrow(3),
    "s/cache-0123456789abcdef.arrow": arrow(9),
    "s/cache-0123456789abcdef_00000_of_00002.arrow": arrow(9),
    "s/state.json": saved("data-00000-of-00002.arrow", "data-00001-of-00002.arrow"),
    "s/dataset_info.json": b"{}",
}
SPARK = {
    "t/_SUCCESS": b"",
    "t/._SUCCESS.crc": b"crc",
    "t/.part-00000.snappy.parquet.crc": b"crc",
    "t/_temporary/0/task_1/part-00001.snappy.parquet": parquet(9),
    "t/_metadata": b"PAR1",
    "t/_common_metadata": b"PAR1",
    "t/_old.parquet": parquet(9),
    "t/.hidden/a.parquet": parquet(9),
    "t/__MACOSX/._a.parquet": b"x",
    "t/part-00002.parquet._COPYING_": parquet(9),
    "t/day=1_$folder$": b"",
    "t/_day=1/part-00000.snappy.parquet": parquet(2),
    "t/part-00000.snappy.parquet": parquet(1),
}
BY_FOLDER = {
    "d/train/a.parquet": parquet(1),
    "d/train/b.parquet": parquet(2),
    "d/test/a.parquet": parquet(3),
    "d/README.md": b"",
}


class Case(NamedTuple):
    """The rows, or what the error says."""

    files: Files
    name: str
    rows: list[int] | str


CASES = {
    "delta": Case(DELTA, "t", r"/t is a Delta table.* pass 'delta\+.*/t'"),
    "delta below": Case({f"lake/{key}": each for key, each in DELTA.items()}, "lake", "Delta"),
    "delta, a pattern": Case(DELTA, "t/*.parquet", "Delta table"),
    "delta, a pattern without its log": Case(DELTA, "t/part-*", "/t is a Delta table"),
    "delta, a partition": Case(DELTA, "t/day=1", "/t is a Delta table"),
    "delta, of partitions": Case(DELTA, "t/day=*/part-*", "/t is a Delta table"),
    "delta, its files": Case(DELTA, "t/{day=1/part-1,part-0}.snappy.parquet", [2, 1]),
    "beside delta": Case(DELTA | {"u/a.parquet": parquet(5)}, "u/*.parquet", [5]),
    "iceberg": Case(ICEBERG, "t", r"/t is an Iceberg table.*pass 'iceberg\+'"),
    "iceberg, its data": Case(ICEBERG, "t/data", "/t is an Iceberg table"),
    "iceberg, a partition": Case(ICEBERG, "t/data/day=1/*", "/t is an Iceberg table"),
    "no iceberg": Case({"metadata/a.json": b"{}", "a.parquet": parquet(1)}, "", [1]),
    "hudi": Case(HUDI, "t", r"/t is a Hudi table.*HudiTableBuilder\.from_base_uri\('.*/t'\)"),
    "hudi, a partition": Case(HUDI, "t/2024/05/", "is a Hudi table"),
    "hudi, a pattern": Case(HUDI, "t/6e1f*", "is a Hudi table"),
    "hudi, a pattern in a partition": Case(HUDI, "t/2024/05/6e1f*", "is a Hudi table"),
    "lance": Case(LANCE, "d", r"/d/t\.lance is a Lance dataset.*lance\.dataset\('.*/t\.lance'\)"),
    "lance, itself": Case(LANCE, "d/t.lance", "is a Lance dataset"),
    "beside lance": Case(LANCE, "d/*.parquet", [1]),
    "hive with two keys": Case(HIVE, "t", [101, 110, 102, 201, 210, 202]),
    "hub": Case(
        HUB,
        "",
        (
            r"several splits.*: train \(.*/data/train-0000\*\.parquet\), validation "
            r"\(.*/data/validation-00000-of-00001\.parquet\), test \(.*\), unsupervised "
        ).replace(r"0000\*", r"\*"),
    ),
    "hub, one folder": Case(HUB, "data/*.parquet", "several splits"),
    "hub, one split": Case(HUB, "data/train-*", [0, 1]),
    "hub, one split anywhere": Case(HUB, "**/validation*", [2]),
    "hub, two splits": Case(HUB, "data/{train,unsupervised}-*.parquet", [0, 1, 4]),
    "train and test": Case(BY_FOLDER, "d", r"train \(.*/d/train/\), test \(.*/d/test/a\.parquet\)"),
    "train": Case(BY_FOLDER, "d/train", [1, 2]),
    "train by a pattern": Case(BY_FOLDER, "d/train/*", [1, 2]),
    "names with words": Case(
        {"my_training_0.parquet": parquet(1), "Eval1.parquet": parquet(2)},
        "",
        r"train \(.*my_training_0\.parquet\), test \(.*Eval1\.parquet\)",
    ),
    "splits of each language": Case(
        {
            f"{at}/{n}.parquet": parquet(1)
            for at in ("en/dev", "en/train", "de/train")
            for n in "ab"
        },
        "",
        r"train \(.*/\*\*/train/\*\*\), validation \(.*/en/dev/\)",
    ),
    "a class called test": Case(
        {"bus/a.parquet": parquet(1), "test/a.parquet": parquet(2)}, "", [1, 2]
    ),
    "parts of one split": Case(
        {"train-clean/a.parquet": parquet(1), "train-other/a.parquet": parquet(2)}, "", [1, 2]
    ),
    "words within words": Case(
        {
            "latest.parquet": parquet(1),
            "trainer.parquet": parquet(2),
            "devices.parquet": parquet(3),
        },
        "",
        [3, 1, 2],
    ),
    "other files of a split": Case(
        {"train.parquet": parquet(1), "test.txt": b"x", "eval/metrics.csv": b"x"}, "", [1]
    ),
    "saved manifests of splits": Case(
        {"a.parquet": parquet(1), "train.manifest": b"x", "test.manifest": b"x"}, "", [1]
    ),
    "dataset dict": Case(DICT, "d", r"several splits.*first \(.*/first/data.*second \(.*/second"),
    "dataset dict, one split": Case(DICT, "d/first", [1, 2]),
    "dataset dict, a pattern": Case(DICT, "d/*/data-*.arrow", "several splits"),
    "saved": Case(SAVED, "s", [1, 2, 3]),
    "saved, a pattern": Case(SAVED, "s/*.arrow", [1, 2, 3]),
    "saved, below": Case({f"a/{key}": each for key, each in SAVED.items()}, "a", [1, 2, 3]),
    "saved, a cache by name": Case(SAVED, "s/cache-0123456789abcdef.arrow", [9]),
    "saved, a file less": Case(
        {key: each for key, each in SAVED.items() if "00001-of" not in key},
        "s",
        r"s/state\.json names data-00001-of-00002\.arrow, which is not there",
    ),
    "saved, with indices": Case(
        SAVED | {"s/state.json": saved("a", _indices_data_files=[{"filename": "i.arrow"}])},
        "s",
        r"state\.json names a file of indices",
    ),
    "not saved": Case({"state.json": b'{"step": 1}', "a.arrow": arrow(1)}, "", [1]),
    "a cache of datasets": Case(
        {"imdb.arrow": arrow(1), "cache-6e1f.arrow": arrow(9), "dataset_info.json": b"{}"}, "", [1]
    ),
    "revisions": Case(
        {f"datasets--u--n/snapshots/{at * 40}/a.parquet": parquet(int(at)) for at in "12"},
        "",
        r"datasets--u--n/snapshots holds several revisions.*1{40} and 2{40}",
    ),
    "spark": Case(SPARK, "t", [2, 1]),
    "spark, a pattern": Case(SPARK, "t/**", [2, 1]),
}


def check(case: Case, place: str) -> Manifest | None:
    url = f"{place}/{case.name}" if case.name else place
    if isinstance(case.rows, str):
        fault = ShardNotFound if "not there" in case.rows else ConfigError
        with pytest.raises(fault, match=case.rows) as raised:
            index_dataset(url)
        assert raised.value.shard
        return None
    manifest = index_dataset(url)
    assert rows(manifest) == case.rows
    return manifest


@pytest.mark.parametrize("name", CASES)
def test_a_layout_gives_what_its_owner_reads_or_is_refused(name: str, tmp_path: Path) -> None:
    put(tmp_path, CASES[name].files)
    check(CASES[name], str(tmp_path))


def test_layouts_in_a_bucket_are_read_as_on_a_disk(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(s3_server, monkeypatch)
    bucket = s3_server.bucket()
    folders = {id(case.files): f"f{at}" for at, case in enumerate(CASES.values())}
    every = {id(case.files): case.files for case in CASES.values()}
    s3_server.put(
        bucket,
        {
            f"{folders[at]}/{key}": each
            for at, files in every.items()
            for key, each in files.items()
        },
    )
    try:
        for case in CASES.values():
            check(case, f"s3://{bucket}/{folders[id(case.files)]}")
    finally:
        forget()


def put(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def folder_columns(manifest: Manifest) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema_of(manifest) if field.name != "x"}


def test_keys_of_folders_are_columns_unless_shards_have_them_or_they_were_named(
    tmp_path: Path,
) -> None:
    put(tmp_path, HIVE)
    both = {"year": "int32", "month": "int32"}
    assert folder_columns(index_dataset(tmp_path / "t")) == both
    assert folder_columns(index_dataset(f"{tmp_path}/t/year=*/*/*.parquet")) == both
    assert folder_columns(index_dataset(f"{tmp_path}/t/year=1")) == {"month": "int32"}
    assert folder_columns(index_dataset(f"{tmp_path}/t/year=1/month=1/")) == {}
    named = [f"{tmp_path}/t/year={year}/month=1/part-0.parquet" for year in (1, 2)]
    assert folder_columns(index_dataset(named)) == {"year": "int32"}
    put(tmp_path / "u", {"x=7/a.parquet": parquet(1)})
    assert rows_of(index_dataset(tmp_path / "u")) == [{"x": 1}]


def rows_of(manifest: Manifest) -> list[dict[str, object]]:
    schema = schema_of(manifest)
    blocks = range(manifest.block_count)
    return [
        row for at in blocks for row in read_block(manifest, at, schema, schema.names).to_pylist()
    ]


KEYS = {
    "integers": ["1", "-02", "2147483647"],
    "long integers": ["1", "2147483648"],
    "too long": ["1", "9223372036854775808"],
    "dates": ["2026-01-01", "2026-01-02"],
    "nulls": ["__HIVE_DEFAULT_PARTITION__", "7"],
    "encoded": ["a%20b%2Fc", "é", "a=b"],
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_keys_of_folders_have_the_values_that_pyarrow_reads(
    tmp_path: Path, name: str, suffix: str
) -> None:
    content = parquet(1, 2) if suffix == "parquet" else b'{"x": 1}\n{"x": 2}\n'
    put(tmp_path, {f"k={key}/a.{suffix}": content for key in KEYS[name]})
    manifest = index_dataset(tmp_path)
    kind = suffix.removesuffix("l")
    theirs = ds.dataset(tmp_path, format=kind, partitioning="hive")
    got = pa.Table.from_pylist(rows_of(manifest), schema_of(manifest)).select(["k", "x"])
    expected = theirs.to_table().select(["k", "x"])
    if name == "long integers":  # pyarrow reads these as texts
        expected = expected.cast(got.schema)
    assert got.schema.types == expected.schema.types
    by_key = [("k", "ascending"), ("x", "ascending")]
    assert got.sort_by(by_key).to_pylist() == expected.sort_by(by_key).to_pylist()


def test_columns_of_folders_change_no_identity_and_stay_in_a_saved_manifest(
    tmp_path: Path,
) -> None:
    put(tmp_path, {f"k={key}/a.parquet": parquet(1) for key in ("x", "y")})
    saved, manifest = tmp_path / "a.manifest", index_dataset(tmp_path)
    without = dataclasses.replace(manifest, schema=manifest.stored_schema, stored_schema=b"")
    assert without.fingerprint != manifest.fingerprint
    assert identity_of(without) == identity_of(manifest)
    for each in (manifest, without):
        saved.write_bytes(each.to_bytes())
        assert rows_of(index_dataset(saved)) == [{"x": 1, "k": "x"}, {"x": 1, "k": "y"}]


SERIES = {
    "two": (["en-00000-of-00002", "en-00001-of-00002", "de-00000-of-00001"], "", ["de-*", "en-*"]),
    "a pattern": (["en-00000-of-00001", "de-00000-of-00001"], "*.parquet", ["de-*", "en-*"]),
    "in a folder": (
        ["default-00000-of-00001", "other.00000-of-00001"],
        "",
        ["default-*", "other.*"],
    ),
    "with hashes": (["a-00000-of-00001-6e1f", "b-00000-of-00001-6e20"], "", ["a-*", "b-*"]),
    "beside others": (["a-00000-of-00001", "b-00000-of-00001", "c"], "", ["a-*", "b-*"]),
    "one": (["part-00000-of-00002", "part-00001-of-00002"], "", []),
    "one of a long name": (["c4-af.tfrecord-00000-of-00001", "readme"], "", []),
    "one named": (["en-00000-of-00001", "de-00000-of-00001"], "en-*", []),
    "all named": (["en-00000-of-00001", "de-00000-of-00001"], "{en,de}-*.parquet", []),
    "parts of a split": (["train.clean-00000-of-00001", "train.other-00000-of-00001"], "", []),
    "folders": (["en/x-00000-of-00001", "de/y-00000-of-00001"], "", []),
    "not whole": (["en-00000-of-00002", "de-00000-of-00002"], "", []),
    "other numbers": (["000_00000", "001_00000", "c4-0000", "books-0000", "arxiv_6e1f"], "", []),
}


@pytest.mark.parametrize("name", SERIES)
def test_several_series_of_shards_in_one_folder_are_named(tmp_path: Path, name: str) -> None:
    shards, pattern, patterns = SERIES[name]
    put(tmp_path, {f"data/{shard}.parquet": parquet(1) for shard in shards})
    said = said_of_folders(index_dataset(f"{tmp_path}/data/{pattern}"))
    for each in patterns:
        assert re.search(rf"{re.escape(str(tmp_path))}/data/{re.escape(each)} \(\d shard", said)
    assert said.startswith("2 series of shards in one folder are read as one") == bool(patterns)
    assert bool(said) == bool(patterns)


@pytest.mark.parametrize(
    ("files", "pattern", "strays"),
    [
        ("a/1.jpg b/2.jpg x.jpg y.jpg", "", "x.jpg, y.jpg"),
        ("a/1.jpg b/2.jpg x.jpg", "**/*.jpg", "x.jpg"),
        ("a/1.jpg b/2.jpg x.jpg", "*/**", ""),
        ("1.jpg 2.jpg", "", ""),
        ("photos/1.jpg a/2.jpg", "", ""),  # a class with the name of the folder
    ],
)
def test_images_beside_the_folders_of_classes_are_named(
    tmp_path: Path, files: str, pattern: str, strays: str
) -> None:
    put(tmp_path, {f"photos/{name}": b"image" for name in files.split()})
    url = f"file://{tmp_path}/photos/"
    assert said_of_folders(index_dataset(f"{url}{pattern}")) == (
        strays
        and f"images that lie beside the folders in {url} form a class of their own, with the label"
        f" 'photos': {strays}. Move them into the folder of their class, or leave them out by the"
        f" pattern {url}*/**"
    )


@pytest.mark.parametrize("target", ["nowhere", "a.parquet/b", "loop"])
def test_a_link_that_leads_nowhere_counts_only_if_it_has_the_name_of_a_shard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    put(tmp_path, {"a.parquet": parquet(1)})
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "latest").symlink_to(tmp_path / target)
    (tmp_path / ".#lock").symlink_to("nobody@host")
    with caplog.at_level(logging.WARNING, "dataplane.index"):
        assert rows(index_dataset(tmp_path)) == [1]
    (line,) = [one.getMessage() for one in caplog.records if "latest" in one.getMessage()]
    assert "leads nowhere" in line
    assert target in line
    assert "lock" not in caplog.text
    (tmp_path / "b.parquet").symlink_to(tmp_path / target)
    for name in (tmp_path, tmp_path / "*.parquet"):
        with pytest.raises(ShardNotFound, match=rf"b\.parquet is a symbolic link to .*{target}"):
            index_dataset(name)
    assert rows(index_dataset(tmp_path / "a.parquet")) == [1]


def test_a_link_of_shards_without_suffix_is_one_of_them(tmp_path: Path) -> None:
    put(tmp_path, {"train-00000-of-00002": b'{"x": 1}\n'})
    (tmp_path / "train-00001-of-00002").symlink_to(tmp_path / "gone")
    with pytest.raises(ShardNotFound, match="00001-of-00002 is a symbolic link"):
        index_dataset(tmp_path, format_name="jsonl")


def test_splits_of_shards_without_suffix_are_refused(tmp_path: Path) -> None:
    names = [f"{split}-0000{n}-of-00002" for split in ("train", "validation") for n in (0, 1)]
    put(tmp_path, dict.fromkeys(names, b'{"x": 1}\n'))
    with pytest.raises(ConfigError, match=re.escape(f"train (file://{tmp_path}/train-*)")):
        index_dataset(tmp_path, format_name="jsonl")
    assert rows(index_dataset(tmp_path / "train-*", format_name="jsonl")) == [1, 1]


class Requests:
    """Stores that note what they are asked to list, and how many single objects."""

    def __init__(self) -> None:
        self.lists: list[str] = []
        self.heads = 0

    def connect(self, url: str) -> Store:
        self._store = connect(url)
        return cast(Store, self)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.lists.append(prefix)
        return self._store.list(prefix)

    def head(self, url: str) -> ObjectInfo:
        self.heads += 1
        return self._store.head(url)


@pytest.mark.parametrize(
    ("name", "lists", "heads"),
    [
        ("t/", 1, 0),
        ("t", 1, 1),
        ("t/*/*.parquet", 1, 0),
        ("t/day=*/part-*", 1 + 3, 1),  # whether t is a table
        ("t/day=1", 1 + 3, 1 + 1),
        ("t/day={1..9}/part-*", 9 + 3, 1),
        ("t/day={1..9}/part-00{00..19}.parquet", 0, 180),
    ],
)
def test_what_folders_are_takes_a_few_requests_for_a_name_and_none_for_a_shard(
    tmp_path: Path, name: str, lists: int, heads: int
) -> None:
    put(
        tmp_path / "t",
        {f"day={day}/part-{n:04d}.parquet": b"x" for day in range(1, 10) for n in range(20)},
    )
    requests = Requests()
    expand(f"{tmp_path}/{name}", requests.connect)
    assert (len(requests.lists), requests.heads) == (lists, heads)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["bus/a.parquet", "test/a.parquet"], "a split are read together with others.*split=test"),
        (["train.parquet", "other.parquet"], "a split are read together with others.*split=train"),
        (["a.parquet", "_b.parquet"], "an underscore are left out.*count=1 such_as=_b.parquet"),
        (["a.parquet", "x/_y/b.parquet"], "an underscore are left out.*such_as=x/_y/b.parquet"),
        (["train/a.parquet", "train/test.csv", "notes.txt", "_SUCCESS", "_metadata"], ""),
        (["a.parquet", "_temporary/0/b.parquet", "._b.parquet", ".x/_b.parquet"], ""),
    ],
)
def test_what_other_readers_would_leave_out_or_read_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: list[str], says: str
) -> None:
    put(tmp_path, {name: parquet(1) for name in files})
    with caplog.at_level(logging.WARNING, "dataplane.store"):
        index_dataset(tmp_path)
    assert re.search(says, caplog.text) if says else not caplog.records


def test_a_file_name_that_is_not_utf_8_counts_only_if_it_is_a_shard(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(arrow(1, 2))
    for name in (b"no\xfftes.txt", b"no\xffsuffix", b".hidden\xff.arrow"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"x")
    for url in (f"{tmp_path}", f"{tmp_path}/*.arrow", f"{tmp_path}/**"):
        assert rows(index_dataset(url)) == [1, 2]
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff.arrow")).write_bytes(arrow(3))
    with pytest.raises(ConfigError, match=r"b\\xff\.arrow' is not UTF-8: rename it"):
        index_dataset(f"{tmp_path}")
    assert rows(index_dataset(f"{tmp_path}/a*.arrow")) == [1, 2]
