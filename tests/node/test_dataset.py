"""A dataset reports the same facts of each block as its shard."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from manifests import small

from dataplane.config import JobSpec
from dataplane.model import Region
from dataplane.node.dataset import Dataset, dataset_of

SCHEMA = pa.schema([("x", pa.int64())]).serialize().to_pybytes()


@pytest.fixture
def dataset() -> Dataset:
    shards = [
        replace(shard, url=f"file:///data/{number}") if number == 2 else shard
        for number, shard in enumerate(small().shards)
    ]
    manifest = small(schema=SCHEMA, shards=shards)
    return dataset_of(1, manifest, JobSpec(manifest.fingerprint))


def test_a_block_comes_with_facts_about_its_shard(dataset: Dataset) -> None:
    manifest = dataset.manifest
    for block in range(manifest.block_count):
        shard = manifest.shards[int(manifest.block_shard[block])]
        raw = dataset.raw_block(block, None)
        assert (raw.url, raw.etag, raw.shard_bytes) == (shard.url, shard.etag, shard.size_bytes)
        assert raw.preamble_place == shard.preamble
        assert raw.index == manifest.block_in_shard(block)
        assert raw.rows == manifest.block_rows[block]
        place = Region(int(manifest.block_offset[block]), int(manifest.block_length[block]))
        assert raw.place == place
        assert dataset.url(block) == shard.url
        assert dataset.blocks.needs_decode(block) == (not shard.zero_copy)


def test_a_block_of_a_local_file_is_not_fetched(dataset: Dataset) -> None:
    assert [dataset.path(block) for block in range(3)] == [None, None, "/data/2"]
    assert [dataset.blocks.needs_fetch(block) for block in range(3)] == [True, True, False]
    assert dataset.raw_block(2, None).path == "/data/2"
    assert dataset.raw_block(2, Region(0, 56)).path is None
    assert (dataset.blocks.marks.raw > 0).tolist() == [True, True, False]


def test_samples_are_counted_from_the_beginning_of_their_shard(dataset: Dataset) -> None:
    assert [dataset.place(block).first_row for block in range(3)] == [0, 10, 0]


def test_the_block_that_takes_most_is_known() -> None:
    sizes = np.array([80, 100_000, 56])
    manifest = small(schema=SCHEMA, block_rows=np.array([1, 1, 1]), block_decoded=sizes)
    dataset = dataset_of(1, manifest, JobSpec(manifest.fingerprint))
    needs = dataset.blocks.marks.raw + dataset.blocks.marks.decoded
    assert dataset.largest_block == 1
    assert needs[1] == needs.max()
