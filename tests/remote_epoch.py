"""A dataset in a bucket behind a proxy, and its first epoch in planned order."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from away import Proxy, proxy_before
from servers import S3Server, reach

from dataplane.index.indexing import index_dataset
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order

COUNT = 1200
OPTIONS = {"global_batch_size": 8, "shuffle": True, "seed": 3, "lanes": 2, "window": 64}


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Three shards of 20 blocks."""
    reach(s3_server, monkeypatch)
    name, objects = s3_server.bucket(), {}
    for shard in range(3):
        ids = range(shard * COUNT // 3, (shard + 1) * COUNT // 3)
        table = pa.table({"id": list(ids), "x": [payload(i) for i in ids]})
        body = io.BytesIO()
        pq.write_table(table, body, row_group_size=20, compression="none", use_dictionary=False)
        objects[f"{shard}.parquet"] = body.getvalue()
    s3_server.put(name, objects)
    return name


@pytest.fixture
def manifest(bucket: str) -> Manifest:
    return index_dataset(f"s3://{bucket}/")


@pytest.fixture
def whole(manifest: Manifest) -> list[list[object]]:
    """The epoch in planned order."""
    order = Order(manifest.block_rows, 3, shuffle=True, lanes=2, window=64, epoch=0)
    blocks, rows = order.locate(np.arange(COUNT))
    first = np.cumsum(manifest.block_rows) - manifest.block_rows
    return [[i, payload(i)] for i in (first[blocks] + rows).tolist()]


@pytest.fixture
def proxy(
    s3_server: S3Server, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    with proxy_before(s3_server.server.port) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


def payload(i: int) -> str:
    return f"{i:04d}" * 500
