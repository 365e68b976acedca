"""A folder of twelve small shards, and a cache folder."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from shards import parquet_bytes


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Ten rows in each shard, four in a row group."""
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(12):
        table = pa.table({"id": range(i * 10, i * 10 + 10), "text": ["x"] * 10})
        (folder / f"{i:03d}.parquet").write_bytes(parquet_bytes(table, row_group_size=4))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
