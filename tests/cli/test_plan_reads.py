"""`dataplane plan` predicts what hosts read from storage."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import S3Server
from small_nodes import alone_and_small

from dataplane.cli import run

SHARDS, BLOCKS, ROWS, ROW_BYTES = 2, 32, 16, 512
STORED = SHARDS * BLOCKS * ROWS * ROW_BYTES


@pytest.fixture
def url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Blocks of 8 KiB, and a node with room for half of them."""
    alone_and_small(monkeypatch, tmp_path)
    monkeypatch.setenv("DATAPLANE_BLOCK_ARENA_BYTES", str(STORED // 2))
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    random, objects = np.random.default_rng(1), {}
    for shard in range(SHARDS):
        rows = [random.bytes(ROW_BYTES) for _ in range(BLOCKS * ROWS)]
        body, table = io.BytesIO(), pa.table({"x": pa.array(rows, pa.binary(ROW_BYTES))})
        pq.write_table(table, body, row_group_size=ROWS, compression="none", use_dictionary=False)
        objects[f"{shard}.parquet"] = body.getvalue()
    name = s3_server.bucket()
    s3_server.put(name, objects)
    return f"s3://{name}/"


def planned(capsys: pytest.CaptureFixture[str], url: str, *options: str) -> dict[str, Any]:
    job = ("--seed", "3", "--lanes", "2", "--window", "32", "--global-batch", "8")
    assert run(["plan", url, *job, *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["reads"]
    return found


def test_the_memory_of_neighbours_counts_as_one(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ("--dp-size", "2", "--ranks-per-host", "1")
    found = planned(capsys, url, *hosts, "--block-arena-bytes", str(STORED * 4))
    alone, together = ([e["hit_rate"] for e in found[way]["epochs"]] for way in (
        "alone", "with_neighbours",
    ))  # fmt: skip
    assert alone[0] == together[0] == 0
    assert together[1:] == [1, 1]  # both hold the dataset
    assert max(alone[1:]) < 0.9  # half of what a host has read is now read by the other
    assert run(["plan", url, "--global-batch", "8", *hosts]) == 0
    shown = capsys.readouterr().out
    assert "with neighbours" in shown
    assert "blocks in memory" in shown


def test_the_disk_saves_reads_from_storage(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def later(*options: str) -> dict[str, Any]:
        epoch: dict[str, Any] = planned(capsys, url, *options)["alone"]["epochs"][-1]
        return epoch

    without, half, whole = (
        later(), later("--cache-bytes", str(STORED)), later("--cache-bytes", str(STORED * 2)),
    )  # fmt: skip
    assert not without["disk_bytes"]
    # A file of a small block takes up to twice its size.
    assert 0 < half["disk_bytes"] < STORED
    assert half["origin_bytes"] < 0.7 * without["origin_bytes"]
    assert not whole["origin_bytes"]
    assert run(["plan", url, "--global-batch", "8", "--cache-bytes", "1GiB"]) == 0
    assert "1.0 GiB of disk" in " ".join(capsys.readouterr().out.split())
