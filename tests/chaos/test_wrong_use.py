"""Every mistake that a user can make raises its own error within seconds: invariant 9.

The suite's fixture proves after each of these that nothing is left running.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import fleet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader

from dataplane.model.errors import (
    ConfigError,
    CorruptShard,
    DataplaneError,
    SchemaMismatch,
    ShardNotFound,
    SpecMismatch,
    StoreUnavailable,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DATAPLANE_WORKER_COUNT", "1")
    monkeypatch.setenv("DATAPLANE_LINGER_S", "0.2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A shard of 50 integers."""
    found = tmp_path / "shards"
    found.mkdir()
    pq.write_table(pa.table({"id": range(50), "x": range(50)}), found / "0.parquet")
    return found


def wrong(url: str, **options: object) -> DataplaneError:
    """The error that the first use of a loader raises."""
    with (
        pytest.raises(DataplaneError) as caught,
        DataLoader(url, **{"batch_size": 4, **options}) as loader,
    ):
        len(loader)
    return caught.value


@pytest.mark.parametrize(
    ("second", "under", "options", "kind", "words"),
    [
        (None, "nowhere", {}, ShardNotFound, ["nowhere"]),
        (None, "*.parqet", {}, ShardNotFound, [".parquet"]),
        (b"", "", {}, CorruptShard, ["1.parquet"]),
        (
            pa.table({"id": ["0"], "x": [0]}),
            "",
            {},
            SchemaMismatch,
            ["1.parquet", "int64", "string"],
        ),
        (None, "", {"columns": ["id", "y"]}, ConfigError, ["'y'", "id, x"]),
        (None, "", {"batch_size": 51, "drop_last": True}, ConfigError, ["51", "50"]),
    ],
    ids=["no folder", "no match", "empty shard", "two schemas", "no column", "large batch"],
)
def test_a_dataset_that_cannot_be_read_as_asked(folder, second, under, options, kind, words):
    if isinstance(second, pa.Table):
        pq.write_table(second, folder / "1.parquet")
    elif second is not None:
        (folder / "1.parquet").write_bytes(second)
    error = wrong(f"{folder}/{under}", **options)
    assert type(error) is kind
    assert [word for word in words if word not in str(error)] == []


def test_a_setting_with_an_invalid_value_is_named(folder, monkeypatch):
    monkeypatch.setenv("DATAPLANE_BLOCK_ARENA_BYTES", "lots")
    error = wrong(str(folder))
    assert isinstance(error, ConfigError)
    assert "DATAPLANE_BLOCK_ARENA_BYTES" in str(error)


def test_a_store_that_never_answers_is_given_up_within_the_stall_timeout(monkeypatch):
    monkeypatch.setenv("DATAPLANE_STALL_TIMEOUT_S", "4")
    monkeypatch.setenv("DATAPLANE_FETCH_TIMEOUT_S", "1")
    # Connections wait in its backlog, and are never accepted.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        error = wrong(f"http://127.0.0.1:{port}/x.parquet")
    assert type(error) is StoreUnavailable
    assert "gave up after" in str(error)
    assert f"127.0.0.1:{port}" in str(error)


def test_a_missing_service_is_reported(folder, monkeypatch):
    monkeypatch.setenv("DATAPLANE_STALL_TIMEOUT_S", "2")
    error = wrong(str(folder), service="127.0.0.1:9", timeout=5)
    assert "dataplane serve" in str(error)


def test_two_ranks_with_different_seeds(tmp_path, folder):
    script = """
import json, sys
from dataplane.model.errors import DataplaneError
from dataplane.model.records import Topology
from dataplane_torch import DataLoader
rank = int(sys.argv[1])
with DataLoader(sys.argv[2], batch_size=4, shuffle=True, seed=rank,
                topology=Topology(rank, 2, rank, 2, rank, 2), name="seeds") as loader:
    try:
        len(loader)
        print("joined", flush=True)
    except DataplaneError as error:
        print(json.dumps([type(error).__name__, error.field, str(error)]), flush=True)
    sys.stdin.read()
"""
    (tmp_path / "rank.py").write_text(script)
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": f"seeds-{os.getpid()}", "WORLD_SIZE": "2"}
    ranks = [
        fleet.WARM[0].run(
            [str(tmp_path / "rank.py"), str(rank), str(folder)],
            {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            sys.stderr.fileno(),
        )
        for rank in range(2)
    ]
    told = [rank.stdout.readline().strip() for rank in ranks]
    for rank in ranks:
        rank.stdin.close()
        assert rank.wait(60) == 0
        rank.stdout.close()
    (refused,) = [json.loads(line) for line in told if line != "joined"]
    assert refused[:2] == [SpecMismatch.__name__, "seed"]
    assert "0" in refused[2]
    assert "1" in refused[2]
