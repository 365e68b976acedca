"""A manifest to compare others with."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataplane.model.records import Region
from dataplane.plan.manifest import Manifest
from dataplane.plan.shards import Shard


def small(**change: Any) -> Manifest:
    """Three shards with three blocks; the second shard has no samples."""
    shards = (
        Shard("s3://b/0", 100, "e0", 2, Region(90, 10), False, (1,)),
        Shard("s3://b/1", 80, "e1", 0, Region(0, 0), True, (0,)),
        Shard("s3://b/2", 60, "e2", 1, Region(0, 4), True),
    )
    columns = {
        "block_shard": np.array([0, 0, 2], np.int32),
        "block_rows": np.array([10, 20, 30]),
        "block_offset": np.array([0, 40, 4]),
        "block_length": np.array([40, 50, 56]),
        "block_decoded": np.array([80, 100, 56]),
    }
    given_fields = {"urls": ("s3://b/",), "format": "parquet", "schema": b"sch", "shards": shards}
    return Manifest(**{**given_fields, **columns, **change})
