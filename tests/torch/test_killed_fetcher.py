"""A fetcher that is killed in the middle of a block loses nothing of an epoch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from awry import Awry, Mood, awry_server
from dataplane_torch import DataLoader
from device_steps import wait_until
from numpy.typing import NDArray
from servers import reach
from shards import arrow_bytes

from dataplane.arena.pages import shared_huge_pages

SHARDS, BLOCKS, BLOCK_ROWS, WIDTH = 4, 6, 256, 1024


def _values(shard: int) -> NDArray[np.int32]:
    """Distinct rows, which rise in their first column."""
    rows = np.arange(BLOCKS * BLOCK_ROWS, dtype=np.int32) + shard * BLOCKS * BLOCK_ROWS
    return (rows[:, None] * 7 + np.arange(WIDTH, dtype=np.int32)) % 65_521


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch, small_node: None) -> Iterator[Awry]:
    """A server of 24 blocks of 1 MiB, for nodes that hold a third of them."""
    monkeypatch.setenv("DATAPLANE_BLOCK_ARENA_BYTES", "8MiB")
    objects = {}
    for shard in range(SHARDS):
        column = pa.FixedSizeListArray.from_arrays(pa.array(_values(shard).reshape(-1)), WIDTH)
        table = pa.table({"x": column})
        objects[f"bucket/{shard}.arrow"] = arrow_bytes(table, rows=BLOCK_ROWS, file=True)
    with awry_server(objects) as server:
        reach(server, monkeypatch)
        yield server


def _in_splice(pid: int) -> bool:
    """Whether the process has both ends of a pipe, as it does only while it moves bytes."""
    folder, links = Path(f"/proc/{pid}/fd"), Counter[str]()
    for descriptor in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            links[str(descriptor.readlink())] += 1
    return any(link.startswith("pipe:") and count > 1 for link, count in links.items())


def _fetchers() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.name() == "dp-fetcher"]


@pytest.mark.parametrize("order", [{"shuffle": False}, {"lanes": 1, "window": 1024}])
def test_a_fetcher_that_is_killed_in_the_middle_of_a_block_loses_nothing(
    awry: Awry, order: dict[str, Any]
) -> None:
    killed: list[int] = []

    def kill() -> None:
        """Kill the fetcher once it has half of a block, and waits for the other half."""
        can_splice = shared_huge_pages() in {"never", "deny"}
        wait_until(lambda: awry.seen and (not can_splice or any(map(_in_splice, _fetchers()))))
        killed.extend(_fetchers())
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        awry.be()

    with DataLoader("s3://bucket/", 32, seed=5, **order) as loader:
        assert loader.schema  # the dataset is indexed, and no block is read
        awry.be(then=Mood.STALL)
        killer = threading.Thread(target=kill)
        killer.start()
        rows = [batch["x"].numpy().copy() for batch in loader]
        killer.join()
    assert killed
    read = np.concatenate(rows)
    assert len(read) == SHARDS * BLOCKS * BLOCK_ROWS
    if "window" in order:
        read = read[np.argsort(read[:, 0])]
    assert np.array_equal(read, np.concatenate([_values(shard) for shard in range(SHARDS)]))
