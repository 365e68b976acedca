"""The version of an object is identified by a commit of the Hub, a hash, or nothing but its size."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec.config
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_clock import Time
from fsspec.implementations.memory import MemoryFileSystem
from hub import Hub, hub_server

from dataplane.commands.datasets import facts
from dataplane.index.indexing import index_dataset
from dataplane.model.errors import ConfigError, DatasetChangedError, ShardNotFound, StoreDenied
from dataplane.model.redact import hub_parts
from dataplane.plan.texts import Texts
from dataplane.plan.views import relative_names
from dataplane.security.urls import covers
from dataplane.store.connect import Stores
from dataplane.store.url_policy import UrlPolicy

NAME = "hf://datasets/org/name"


def shard(first: int) -> bytes:
    body = io.BytesIO()
    pq.write_table(pa.table({"i": range(first, first + 100)}), body)
    return body.getvalue()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as server:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": server.endpoint})
        server.push({"data/a.parquet": shard(0), "data/b.bin": shard(100), "README.md": b"x"})
        yield server


@pytest.mark.parametrize("revision", ["", "@main"])
def test_shards_of_the_hub_are_read_at_the_commit_of_the_branch(hub: Hub, revision: str) -> None:
    commit = hub.commit_of("main")
    manifest = index_dataset(f"{NAME}{revision}/data", connect=Stores(1.0).connect)
    assert list(manifest.shards.urls) == [f"{NAME}@{commit}/data/a.parquet"]
    assert facts(manifest)["commits"] == f"{NAME}@{commit}"
    assert "identified only by size" not in facts(manifest)


def test_a_shard_without_a_suffix_and_patterns_are_pinned_too(hub: Hub) -> None:
    commit = hub.commit_of("main")
    connect = Stores(1.0).connect
    for name in ("data/{a.parquet,b.bin}", "data/*.bin", "data/b.bin"):
        found = index_dataset(f"{NAME}/{name}", format_name="parquet", connect=connect)
        assert found.sample_count == 100
        assert all(url.startswith(f"{NAME}@{commit}/") for url in found.shards.urls)
    for name in (f"{NAME}/data/*.none", f"{NAME}@branch/data", "hf://datasets/org/other/data"):
        with pytest.raises(ShardNotFound):
            index_dataset(name, connect=connect)


def test_a_branch_is_looked_up_again_for_each_dataset(hub: Hub) -> None:
    connect = Stores(1.0).connect
    before = index_dataset(f"{NAME}/data", connect=connect)
    hub.push({"data/a.parquet": shard(500), "data/b.bin": b""})
    after = index_dataset(f"{NAME}/data", connect=connect)
    assert list(before.shards.etags) != list(after.shards.etags)
    (old,), (new,) = before.shards, after.shards
    assert bytes(connect(old.url).read(old.url, 0, old.size_bytes, old.etag)) == shard(0)
    assert bytes(connect(new.url).read(new.url, 0, new.size_bytes, new.etag)) == shard(500)


def test_a_branch_that_is_read_after_a_push_is_a_changed_dataset(hub: Hub) -> None:
    store, url = Stores(1.0).connect(NAME), f"{NAME}/data/a.parquet"
    info = store.head(url)
    hub.push({"data/a.parquet": shard(500)})
    with pytest.raises(DatasetChangedError):
        store.read(url, 0, info.size_bytes, info.etag)


def test_a_private_repository_is_read_with_a_token_and_may_ask_to_come_later(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(StoreDenied, match="needs a token, in HF_TOKEN"):
        index_dataset(f"{NAME}/data", connect=Stores(1.0).connect)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.refusals = 1
    time = Time()
    connect = Stores(60.0, clock=time.clock()).connect
    assert index_dataset(f"{NAME}/data", connect=connect).sample_count == 100
    assert time.waited
    assert {place.partition("/resolve/")[0] for place in hub.refused} >= {
        "GET /api/datasets/org/name",
        "GET /datasets/org/name",
    }


def test_splits_of_the_hub_are_not_read_together(hub: Hub) -> None:
    hub.push({f"data/{name}-00000-of-00001.parquet": shard(0) for name in ("train", "test")})
    connect = Stores(1.0).connect
    with pytest.raises(ConfigError, match=r"several splits.*train \(hf:"):
        index_dataset(f"{NAME}/data", connect=connect)
    assert index_dataset(f"{NAME}/data/train-*", connect=connect).sample_count == 100


def test_a_policy_that_allows_a_folder_of_a_branch_allows_its_commits(hub: Hub) -> None:
    for prefix in (f"{NAME}/data/", f"{NAME}@main/data", "hf://datasets/org/"):
        connect = Stores(1.0, policy=UrlPolicy((prefix,))).connect
        name = f"{NAME}@main/data" if "@" in prefix else f"{NAME}/data"
        assert index_dataset(name, connect=connect).sample_count == 100
    other = Stores(1.0, policy=UrlPolicy((f"{NAME}/other/",))).connect
    with pytest.raises(StoreDenied):
        index_dataset(f"{NAME}/data", connect=other)
    with pytest.raises(StoreDenied):
        UrlPolicy((f"{NAME}/data/",)).check_names([f"{NAME}@{'a' * 40}/data/x"])


def test_names_of_shards_are_the_same_at_every_commit() -> None:
    pairs = [[f"{NAME}{at}/x", "hf://datasets/org/more/x"] for at in ("", f"@{'a' * 40}")]
    plain, pinned = (relative_names(Texts.of(pair)) for pair in pairs)
    assert plain.content.tobytes() == pinned.content.tobytes()


def test_only_commits_lie_where_their_branch_does() -> None:
    prefixes = (f"{NAME}/data/",)
    assert covers(f"{NAME}@{'a' * 40}/data/x", prefixes)
    for revision in ("main", "refs/pr/1", "a" * 39, "A" * 40):
        assert not covers(f"{NAME}@{revision}/data/x", prefixes)
    assert not covers(f"{NAME}@{'a' * 40}/data/../x", prefixes)
    assert not covers(f"{NAME}/data@{'a' * 40}/x", prefixes)
    assert hub_parts(f"{NAME}@refs/pr/12/a/b") == (NAME, "refs/pr/12", "/a/b")
    assert hub_parts("hf://buckets/org/name/a") is None


class Bare(MemoryFileSystem):
    """Knows names and sizes, and what `extra` says."""

    protocol = "bare"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    extra: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.removeprefix('bare://').strip('/')}"

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        known = super().info(path, **options)
        return {key: known[key] for key in ("name", "size", "type")} | self.extra

    def find(self, path: str, **options: Any) -> dict[str, Any]:
        return {name: self.info(name) for name in super().find(path)}


@pytest.fixture
def bare() -> Iterator[type[Bare]]:
    fsspec.register_implementation("bare", Bare, clobber=True)
    Bare().pipe("/place/a.parquet", shard(0))
    yield Bare
    Bare.store.clear()
    Bare.extra = {}


def test_objects_that_only_their_size_identifies_are_told_of(
    bare: type[Bare], caplog: pytest.LogCaptureFixture
) -> None:
    manifest = index_dataset("bare://place/", connect=Stores(1.0).connect)
    assert facts(manifest)["identified only by size"] == 1
    told = [one for one in caplog.messages if "only their size identifies" in one]
    assert len(told) == 1


@pytest.mark.parametrize(
    "extra",
    [
        {"blob_id": "b"},
        {"xet_hash": "x", "mtime": None},
        {"lfs": {"sha256": "s", "size": 3}},
        {"content_hash": "c"},
        {"modificationTime": 1234},
    ],
)
def test_what_a_store_knows_is_the_version(
    bare: type[Bare], extra: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    bare.extra = extra
    manifest = index_dataset("bare://place/", connect=Stores(1.0).connect)
    assert "identified only by size" not in facts(manifest)
    assert not [one for one in caplog.messages if "size" in one]
    (etag,) = manifest.shards.etags
    bare.extra = dict.fromkeys(extra, 5678)
    with pytest.raises(DatasetChangedError):
        Stores(1.0).connect("bare://place").read("bare://place/a.parquet", 0, 10, etag)
