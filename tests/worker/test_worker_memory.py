"""A worker's private memory is bounded, whatever is in the shards that it decodes."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from bombs import BOMBS
from pool_bench import MIB, ROOM, Bench, on_bench

from dataplane.model.errors import BudgetTooSmall
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.worker.limits import WorkerBytes

LIMIT = 256 * MIB
# Libraries and mapped files, which are not private memory.
SHARED = 120 * MIB


def _peak_bytes(pids: tuple[int, ...]) -> int:
    """The most that any of these processes has had in memory so far."""
    peak = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            status = Path(f"/proc/{pid}/status").read_text()
            peak = max(peak, int(status.split("VmHWM:")[1].split()[0]) << 10)
    return peak


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_shard_that_unpacks_to_too_much_is_named_with_the_limit_and_others_go_on(
    tmp_path: Path, bomb: Callable[[Path], None]
) -> None:
    """Invariant 6 of the project: a node never exceeds its memory budget."""
    bomb(tmp_path)

    async def scene(bench: Bench) -> None:
        coming, peak = asyncio.ensure_future(bench.decode(0, Region(0, 2 << 30))), 0
        while not coming.done():
            peak = max(peak, _peak_bytes(bench.pool.pids))
            await asyncio.sleep(0)
        assert 0 < peak < LIMIT + SHARED
        error = coming.result()
        assert isinstance(error, BudgetTooSmall)
        assert (error.shard, error.block, error.budget) == (bench.dataset.url(0), 0, LIMIT)
        assert "256 MiB" in str(error)
        assert "DATAPLANE_WORKER_MEMORY_BYTES=" in str(error)
        assert isinstance(await bench.decode(1, ROOM), tasks.Decoded)

    on_bench(f"{tmp_path}/*", scene, arena_bytes=2 << 30, memory_bytes=LIMIT)


def test_a_dataset_of_larger_blocks_gives_its_workers_more(tmp_path: Path) -> None:
    """The same shard is a bomb to one dataset and a block to another."""
    BOMBS[1](tmp_path)

    async def scene(bench: Bench) -> None:
        larger = WorkerBytes(LIMIT, 8 << 30).for_blocks_of(
            int(bench.dataset.blocks.marks.decoded.max())
        )
        bench.allow(larger)
        assert isinstance(await bench.decode(0, Region(0, 2 << 30)), tasks.Decoded)

    on_bench(f"{tmp_path}/*", scene, arena_bytes=2 << 30, memory_bytes=LIMIT)


def test_what_a_worker_may_take_follows_from_the_largest_block() -> None:
    hard = WorkerBytes(LIMIT, 0)
    assert hard.for_blocks_of(0) == hard.for_blocks_of(1 << 40) == LIMIT
    soft = WorkerBytes(LIMIT, 1 << 30)
    assert soft.for_blocks_of(0) == LIMIT
    assert soft.for_blocks_of(100 * MIB + 1) == LIMIT + 301 * MIB
    assert soft.for_blocks_of(1 << 40) == 1 << 30


def test_this_process_has_no_limit_of_its_own() -> None:
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
