"""Nodes and commands have many remote shards indexed in batches, and read none of them."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from counted import Counted
from msgspec.structs import replace
from shards import parquet_bytes

from dataplane.commands import datasets
from dataplane.index import batches, processes
from dataplane.index.indexing import index_dataset, open_manifest
from dataplane.rpc.messages import DatasetSource
from dataplane.settings import default_node_config

SHARDS = {
    f"{number:03}.parquet": parquet_bytes(pa.table({"id": range(number, number + 9)}))
    for number in range(20)
}


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_BATCHED_MIN", len(SHARDS))
    monkeypatch.setattr(batches, "_SHARDS_MAX", 4)


@pytest.mark.parametrize("is_embedded", [True, False])
def test_a_node_reads_no_shard(
    put: Callable[[dict[str, bytes]], str], *, is_embedded: bool
) -> None:
    url, counted = put(SHARDS), Counted()
    config = replace(default_node_config(), embedded=is_embedded, cache_dir="", allowed_urls=url)
    found = open_manifest(config, counted, DatasetSource((url,)))
    assert counted.read_urls == []
    assert found.to_bytes() == index_dataset(url).to_bytes()


def test_neither_does_a_command(
    put: Callable[[dict[str, bytes]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, counted = put(SHARDS), Counted()
    monkeypatch.setattr(datasets, "STORES", counted)
    config = replace(default_node_config(), cache_dir="", allowed_urls="s3://another/")
    found = datasets.opened([url], "", 8, config)
    assert counted.read_urls == []
    assert found.to_bytes() == index_dataset(url).to_bytes()


def test_of_few_shards_a_node_reads_them(put: Callable[[dict[str, bytes]], str]) -> None:
    url, counted = put(dict([*SHARDS.items()][1:])), Counted()
    config = replace(default_node_config(), cache_dir="")
    open_manifest(config, counted, DatasetSource((url,)))
    assert len(counted.names) == len(SHARDS) - 1
