"""A folder of twelve small shards, a cache folder, and a bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from servers import S3Server, reach
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


@pytest.fixture
def put(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], str]:
    """Puts shards into a bucket, and gives its url."""
    reach(s3_server, monkeypatch)

    def stored(shards: dict[str, bytes]) -> str:
        bucket = s3_server.bucket()
        s3_server.put(bucket, shards)
        return f"s3://{bucket}/"

    return stored
