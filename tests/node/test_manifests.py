"""A dataset that is opened while its node starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from msgspec import structs
from shards import arrow_bytes

from dataplane.index.indexing import index_dataset
from dataplane.model.config import NodeConfig
from dataplane.model.errors import ShardNotFound
from dataplane.model.records import Region, View
from dataplane.node.manifests import EarlyOpening, ManifestSources
from dataplane.rpc.messages import DatasetSource
from dataplane.settings import default_node_config
from dataplane.store.connect import Stores
from dataplane.worker.forking import fork_server

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def one_fork_server() -> Iterator[None]:
    fork_server.acquire()
    yield
    fork_server.release()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for number in range(3):
        table = pa.table({"id": range(10 * number, 10 * number + 10)})
        (tmp_path / f"{number}.arrow").write_bytes(arrow_bytes(table))
    return str(tmp_path)


def config(tmp_path: Path) -> NodeConfig:
    cache = str(tmp_path / "cache")
    return structs.replace(default_node_config(), cache_dir=cache, embedded=True)


def ended(early: EarlyOpening) -> None:
    for thread in threading.enumerate():
        if thread.name == "dataplane-early":
            thread.join(TIMEOUT_S)
    early.stores.stores.close()


def test_what_was_begun_is_taken_once_and_is_what_opening_gives(
    folder: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings, source = config(tmp_path_factory.mktemp("cache")), DatasetSource((folder,))
    early, begun = EarlyOpening(settings, source), list[str]()
    opened = ManifestSources(settings, Stores(), lambda *_: None, begun.append, early).open
    assert begun == [folder]  # or nobody would start what reads the blocks
    assert early.take(DatasetSource((folder,), "arrow")) is None
    assert opened(source, View(), None).to_bytes() == index_dataset(folder).to_bytes()
    assert early.take(source) is None
    assert opened(source, View(), None).to_bytes() == index_dataset(folder).to_bytes()
    ended(early)


def test_the_mistake_of_a_dataset_is_told_to_who_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    settings, source = config(tmp_path), DatasetSource((str(tmp_path / "empty"),))
    early = EarlyOpening(settings, source)
    opened = ManifestSources(settings, Stores(), lambda *_: None, early=early).open
    with pytest.raises(ShardNotFound, match="empty"):
        opened(source, View(), None)
    ended(early)


@pytest.mark.parametrize("is_late", [True, False])
def test_preambles_are_handed_on_whenever_they_were_read(*, is_late: bool, tmp_path: Path) -> None:
    files, content = fsspec.filesystem("memory"), arrow_bytes(pa.table({"id": range(10)}))
    for number in range(3):
        files.pipe_file(f"/early/{number}.arrow", content)
    kept: dict[str, bytes] = {}

    def keep(url: str, _etag: str, place: Region, preamble: bytes) -> None:
        assert content[place.offset : place.offset + place.length] == preamble
        kept[url] = preamble

    try:
        early = EarlyOpening(config(tmp_path), DatasetSource(("memory:///early/",)))
        if is_late:
            ended(early)
        early.hand_on(keep)
        ended(early)
        assert len(kept) == 3
    finally:
        files.rm("/early", recursive=True)
