"""Every mistake that a user can make raises its own error within seconds: invariant 9.

The suite's fixture proves after each of these that nothing is left running.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import fleet
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from fleet import DATAPLANE, Service

from dataplane.model.errors import (
    BudgetTooSmall,
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
    found = tmp_path / "shards"
    found.mkdir()
    write(found / "0.parquet", range(50))
    return found


def write(path: Path, ids: Sequence[object], kind: pa.DataType | None = None) -> None:
    column = pa.array(list(ids), kind or pa.int64())
    pq.write_table(pa.table({"id": column, "x": column}), path, row_group_size=10)


def wrong(url: str, **options: object) -> DataplaneError:
    """The error that the first use of a loader raises."""
    with (
        pytest.raises(DataplaneError) as caught,
        DataLoader(url, **{"batch_size": 4, **options}) as loader,
    ):
        len(loader)
    return caught.value


def test_a_missing_folder_is_reported(tmp_path):
    error = wrong(str(tmp_path / "nowhere"))
    assert type(error) is ShardNotFound
    assert "nowhere" in str(error)


def test_a_pattern_that_matches_nothing_names_what_is_near(folder):
    error = wrong(f"{folder}/*.parqet")
    assert type(error) is ShardNotFound
    assert ".parquet" in str(error)


def test_an_empty_shard(folder):
    (folder / "1.parquet").touch()
    error = wrong(str(folder))
    assert type(error) is CorruptShard
    assert "1.parquet" in str(error)


def test_shards_of_two_schemas(folder):
    write(folder / "1.parquet", [f"{at}" for at in range(5)], pa.string())
    error = wrong(str(folder))
    assert type(error) is SchemaMismatch
    assert "1.parquet" in str(error)
    assert error.expected
    assert error.found


def test_an_unknown_column_is_refused_and_known_ones_are_listed(folder):
    error = wrong(str(folder), columns=["id", "y"])
    assert type(error) is ConfigError
    assert "'y'" in str(error)
    assert "id, x" in str(error)


def test_a_batch_larger_than_the_dataset_is_refused_with_drop_last(folder):
    error = wrong(str(folder), batch_size=51, drop_last=True)
    assert type(error) is ConfigError
    assert "51" in str(error)
    assert "50" in str(error)
    with DataLoader(str(folder), batch_size=51) as loader:
        assert [len(batch["id"]) for batch in loader] == [50]


def test_a_budget_too_small_for_one_block_is_refused_with_what_to_set(tmp_path, monkeypatch):
    rows = np.zeros((1000, 2048), np.int32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), 2048)
    pq.write_table(pa.table({"x": column}), tmp_path / "big.parquet")
    monkeypatch.setenv("DATAPLANE_BLOCK_ARENA_BYTES", "4MiB")
    error = wrong(str(tmp_path / "big.parquet"))
    assert type(error) is BudgetTooSmall
    assert "block_arena_bytes" in str(error)
    assert "big.parquet" in str(error)


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


def test_a_port_that_is_taken():
    with Service("--coordinator", "--listen", "127.0.0.1:0") as first:
        port = first.address.rpartition(":")[2]
        second = subprocess.run(
            [*DATAPLANE, "serve", "--coordinator", "--listen", f"127.0.0.1:{port}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "DATAPLANE_STATE_DIR": os.environ["DATAPLANE_STATE_DIR"] + "-2"},
        )
        assert second.returncode == 2
        assert port in second.stderr
