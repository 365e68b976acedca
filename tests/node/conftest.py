"""Datasets of 90 rows, each with its row number as value."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_trainer import table
from small_engine import SmallEngine

from dataplane.base.units import IMPORT_PATH_VARIABLE
from dataplane.worker.forking import fork_server


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    """Three shards of six row groups: 90 rows."""
    for i in range(3):
        pq.write_table(table(30 * i, 30), tmp_path / f"{i}.parquet", row_group_size=5)
    return f"{tmp_path}/*.parquet"


@pytest.fixture
def arrow(tmp_path: Path) -> str:
    """Three mapped shards, each of one block that needs no decoding."""
    for i in range(3):
        whole = table(30 * i, 30).select(["x"])
        with pa.ipc.new_file(str(tmp_path / f"{i}.arrow"), whole.schema) as writer:
            writer.write_table(whole)
    return f"{tmp_path}/*.arrow"


@pytest.fixture
def small() -> Iterator[SmallEngine]:
    """An engine without data. Closing it needs an event loop."""
    engine = SmallEngine(5)
    yield engine

    async def close() -> None:
        engine.close()

    asyncio.run(close())


@pytest.fixture(scope="module")
def importing_fork_server(run_mark: str) -> Iterator[None]:
    """A fork server for all tests of a module, whose workers find the modules of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(IMPORT_PATH_VARIABLE, json.dumps(sys.path))
        with fork_server.held():
            yield
