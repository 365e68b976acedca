"""A host whose block arena is smaller than one batch's blocks gives the same batches."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_torch import DataLoader, RandomHorizontalFlip, RandomResizedCrop
from fleet import worker_processes
from pictures import drawn, encoded

from dataplane.model.errors import BudgetTooSmall

ROWS, BLOCKS, BLOCK_ROWS = 768, 24, 32
BATCH = 48
LARGE, SMALL = "64MiB", "1MiB"

pytestmark = [
    pytest.mark.usefixtures("small_node"),
    pytest.mark.filterwarnings("ignore:the shuffle keeps:UserWarning"),
]


def _table() -> pa.Table:
    """Fixed, string, list and image columns, about 3 KiB a row; and small ones, which are packed."""
    chance = np.random.default_rng(1)
    numbers = np.arange(ROWS)
    texts = ["é" * int(n) if n % 9 else None for n in chance.integers(0, 900, ROWS)]
    lists = [chance.integers(0, 9, int(n)).tolist() for n in chance.integers(0, 60, ROWS)]
    pictures = [encoded(drawn(40, 40, seed=seed)) for seed in range(16)]
    vectors = chance.standard_normal((ROWS, 128)).astype(np.float32)
    small = {f"c{i}": numbers.astype(kind) + i for i, kind in enumerate(["i2", "f4", "i4", "f8"])}
    return pa.table(
        {
            "i": numbers,
            "v": pa.FixedSizeListArray.from_arrays(vectors.reshape(-1), 128),
            "s": pa.array(texts),
            "l": pa.array(lists, pa.list_(pa.int32())),
            "jpg": pa.array([pictures[i % 16] for i in range(ROWS)], pa.binary()),
            **small,
        }
    )


@pytest.fixture(params=["parquet", pytest.param("arrow", marks=pytest.mark.slow)])
def shards(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    folder, table = tmp_path / "shards", _table()
    folder.mkdir()
    for start in range(0, ROWS, ROWS // 3):
        part = table.slice(start, ROWS // 3)
        if request.param == "parquet":
            pq.write_table(part, folder / f"{start}.parquet", row_group_size=BLOCK_ROWS)
            continue
        with pa.ipc.new_file(folder / f"{start}.arrow", part.schema) as writer:
            writer.write_table(part, max_chunksize=BLOCK_ROWS)
    return str(folder)


def _plain(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return list(value)
    return [each.tolist() for each in value.unbind()] if value.is_nested else value.tolist()


def _batches(shards: str, *, kills: bool = False) -> list[dict[str, object]]:
    found = []
    with DataLoader(
        shards,
        BATCH,
        shuffle=True,
        seed=3,
        lanes=8,
        window=96,
        transforms={"jpg": [RandomResizedCrop(16), RandomHorizontalFlip()]},
    ) as loader:
        for batch in loader:
            found.append({name: _plain(value) for name, value in batch.items()})
            if kills and len(found) == 5:
                _kill_one()
    return found


def _kill_one() -> None:
    workers = worker_processes(psutil.Process())
    assert workers
    with contextlib.suppress(psutil.NoSuchProcess):
        workers[0].kill()


def test_batches_are_the_same_where_their_blocks_do_not_fit_together(
    shards: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATAPLANE_WORKER_COUNT", "2")
    monkeypatch.setenv("DATAPLANE_SLAB_BYTES", "256KiB")
    monkeypatch.setenv("DATAPLANE_DELIVERY_BYTES_PER_RANK", "4MiB")
    found = []
    for room in (LARGE, SMALL):
        monkeypatch.setenv("DATAPLANE_BLOCK_ARENA_BYTES", room)
        # Each has a node of its own.
        run_id = f"{room}-{os.getpid()}-{Path(shards).parent.name}"
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": run_id}.items():
            monkeypatch.setenv(name, value)
        found.append(_batches(shards, kills=room == SMALL))
        told = capfd.readouterr().err.count("blocks are read several times")
        assert told == (room == SMALL)
    assert len(found[0]) == ROWS // BATCH
    assert found[1] == found[0]


def test_a_batch_whose_rows_do_not_fit_beside_a_block_is_an_error_with_the_numbers(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_BLOCK_ARENA_BYTES", "640KiB")
    with pytest.raises(BudgetTooSmall, match=r"rows of one batch take .* raise block_arena_bytes"):
        _batches(shards)
