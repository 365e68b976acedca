"""Real worker processes: a task is done once, whatever dies, and a worker leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from pathlib import Path

import pytest
from no_forks import no_forks
from pool_bench import (
    OTHER,
    ROOM,
    SLAB,
    arrow_shards,
    bench_on,
    instead_of_workers,
)

from dataplane.model.errors import ClosedError, CorruptShard, DataplaneError, DatasetChangedError
from dataplane.model.records import Region
from dataplane.rpc import tasks
from dataplane.worker.forking import ForkedProcess

TIMEOUT_S = 60.0


async def test_a_job_whose_worker_is_killed_is_done_by_another_and_reported_once(
    tmp_path: Path,
) -> None:
    async with bench_on(arrow_shards(tmp_path, 2)) as bench:
        await bench.decode(0, ROOM)
        (pid,) = bench.pool.pids
        os.kill(pid, signal.SIGSTOP)
        result = bench.decode(1, ROOM)
        os.kill(pid, signal.SIGKILL)
        assert isinstance(await result, tasks.Decoded)
        assert len(bench.reports) == 2
        assert pid not in bench.pool.pids
        # The new worker has received all that it needs.
        found = await bench.assemble((bench.decoded(ROOM),), [(0, 3), (0, 0)], SLAB)
        assert isinstance(found, tasks.Assembled)
        assert bench.values(SLAB, 2) == [7, 4]


async def test_a_task_begins_when_its_worker_knows_all_that_it_needs(tmp_path: Path) -> None:
    """Time before that, such as the start of the process, is a wait for a worker."""

    async with bench_on(arrow_shards(tmp_path, 1)) as bench:
        await bench.decode(0, ROOM)
        (worker,) = bench.pool._workers
        os.kill(bench.pool.pids[0], signal.SIGSTOP)
        result = bench.assemble((bench.decoded(ROOM),), [(0, 3), (0, 0)], SLAB)
        task = worker.task
        assert task is not None
        assert task.sent == 0.0
        assert task.started > 0.0
        before = time.monotonic()
        os.kill(bench.pool.pids[0], signal.SIGCONT)
        assert isinstance(await result, tasks.Assembled)
        assert task.began == task.sent >= before


async def test_tasks_go_to_workers_whose_process_ids_are_not_known_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask for one would hold the event loop until the fork server has started."""
    known: list[bool] = []
    waiting = ForkedProcess.pid.fget

    def pid(process: ForkedProcess) -> int:
        known.append(process.has_started)
        return int(waiting(process))

    monkeypatch.setattr(ForkedProcess, "pid", property(pid))

    async with bench_on(arrow_shards(tmp_path, 2)) as bench:
        assert isinstance(await bench.decode(0, ROOM), tasks.Decoded)
        assert all(known)


async def test_a_job_at_which_two_workers_die_is_quarantined_and_the_next_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    code = (
        "from dataplane.worker import worker\n"
        "worker._decode = lambda *_: os._exit(4)\n"
        "worker.main(fd, 1 << 30)\n"
    )
    url = arrow_shards(tmp_path, 2)
    instead_of_workers(monkeypatch, tmp_path, mark, code)

    async with bench_on(url) as bench:
        blamed = await bench.decode(1, ROOM)
        assert isinstance(blamed, CorruptShard)
        assert "001.arrow, block 0: 2 worker processes ended while decoding it" in str(blamed)
        assert "the last one ended with status 4" in str(blamed)
        assert (blamed.shard, blamed.block) == (bench.dataset.url(1), 0)
        mark.unlink()
        # The worker that is there may have been started before the mark was gone.
        os.kill(bench.pool.pids[0], signal.SIGKILL)
        assert isinstance(await bench.decode(0, ROOM), tasks.Decoded)
        assert len(bench.reports) == 2


async def test_a_job_is_not_blamed_for_workers_that_are_killed_while_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    code = (
        "with mark.open('a') as deaths:\n"
        "    deaths.write('x')\n"
        "if len(mark.read_text()) == 3:\n"
        "    mark.unlink()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    url = arrow_shards(tmp_path, 2)
    instead_of_workers(monkeypatch, tmp_path, mark, code)
    async with bench_on(url) as bench:
        assert isinstance(await bench.decode(0, ROOM), tasks.Decoded)
        assert not mark.exists()
        assert len(bench.reports) == 1


async def test_killing_all_workers_at_once_blames_no_job(
    tmp_path: Path,
) -> None:
    async with bench_on(arrow_shards(tmp_path, 3), workers=3) as bench:
        await asyncio.gather(bench.decode(0, ROOM), bench.decode(0, SLAB), bench.decode(0, OTHER))
        pids = bench.pool.pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        results = [bench.decode(1, ROOM), bench.decode(2, OTHER)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for result in results:
            assert isinstance(await result, tasks.Decoded)
        assert len(bench.reports) == 5
        assert len(bench.pool.pids) == 3
        assert not set(pids) & set(bench.pool.pids)


@pytest.mark.parametrize("garbage", ["b'garbage' * 9", "b''", "b'\\x0a\\x00' * 2"])
async def test_a_worker_that_answers_nonsense_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, garbage: str
) -> None:
    mark = tmp_path / "mark"
    code = (
        "sock = socket.socket(fileno=fd)\n"
        "sock.recv(1 << 20)\n"
        "mark.unlink()\n"
        f"sock.send({garbage})\n"
        "sock.recv(1 << 20)\n"
    )
    url = arrow_shards(tmp_path, 2)
    instead_of_workers(monkeypatch, tmp_path, mark, code)

    async with bench_on(url) as bench:
        (pid,) = bench.pool.pids
        assert isinstance(await bench.decode(0, ROOM), (tasks.Decoded, DataplaneError))
        assert isinstance(await bench.decode(1, ROOM), tasks.Decoded)
        assert len(bench.reports) == 2
        assert pid not in bench.pool.pids


async def test_workers_that_cannot_start_are_an_error_and_are_tried_again_with_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    url = arrow_shards(tmp_path, 2)
    instead_of_workers(monkeypatch, tmp_path, mark, "os._exit(3)")

    async with bench_on(url) as bench:
        failed = await bench.decode(0, ROOM)
        assert isinstance(failed, DataplaneError)
        assert "status 3" in str(failed) or "died" in str(failed)
        while bench.pool.pids:  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0)
        mark.unlink()
        assert isinstance(await bench.decode(1, ROOM), tasks.Decoded)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
async def test_a_machine_that_starts_no_process_is_to_blame_and_not_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    mark = tmp_path / "mark"
    url = arrow_shards(tmp_path, 2)
    no_forks(monkeypatch, tmp_path, mark, number)

    async with bench_on(url) as bench:
        failed = await bench.decode(0, ROOM)
        assert type(failed) is DataplaneError
        assert os.strerror(number) in str(failed)
        assert "reached its limit of processes and threads" in str(failed)
        assert "pids.max" in str(failed)
        assert "lower worker_count" in str(failed)
        assert ".arrow" not in str(failed)
        while bench.pool.pids:  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0)
        mark.unlink()
        assert isinstance(await bench.decode(1, ROOM), tasks.Decoded)


async def test_detaching_an_arena_while_a_job_runs_does_not_complete_the_job(
    tmp_path: Path,
) -> None:
    async with bench_on(arrow_shards(tmp_path, 2)) as bench:
        await bench.decode(0, ROOM, (0, 5))
        (pid,) = bench.pool.pids
        os.kill(pid, signal.SIGSTOP)
        result = bench.decode(1, ROOM)
        bench.pool.detach_arena(5)
        os.kill(pid, signal.SIGCONT)
        assert isinstance(await result, tasks.Decoded)
        assert isinstance(await bench.decode(0, ROOM), tasks.Decoded)
        assert len(bench.reports) == 3


async def test_waiting_slabs_of_a_closed_arena_keep_no_worker_and_blocks_are_decoded_all_the_same(
    tmp_path: Path,
) -> None:
    async with bench_on(arrow_shards(tmp_path, 3)) as bench:
        await bench.decode(0, ROOM)
        (pid,) = bench.pool.pids
        os.kill(pid, signal.SIGSTOP)
        running = bench.decode(1, OTHER)
        slabs = [bench.assemble((bench.decoded(ROOM),), [(0, 3)], SLAB) for _ in range(3)]
        decoding = bench.decode(2, OTHER)
        bench.pool.forget_slabs(bench.dataset.dataset_id, 0)
        bench.pool.forget_dataset(bench.dataset.dataset_id)
        assert [type(await slab) for slab in slabs] == [ClosedError] * 3
        os.kill(pid, signal.SIGCONT)
        assert isinstance(await running, tasks.Decoded)
        assert isinstance(await decoding, tasks.Decoded)


async def test_a_job_over_many_blocks_with_long_names_is_described_in_several_packets(
    tmp_path: Path,
) -> None:
    deep = tmp_path.joinpath(*["d" * 200] * 8)
    deep.mkdir(parents=True)

    async with bench_on(arrow_shards(deep, 300)) as bench:
        sources = tuple(bench.mapped(i) for i in range(300))
        rows = [(i, i % 4) for i in range(300)]
        assert isinstance(await bench.assemble(sources, rows, SLAB), tasks.Assembled)
        assert bench.values(SLAB, 300) == [4 * i + i % 4 for i in range(300)]


async def test_a_forgotten_block_is_not_confused_with_its_replacement(tmp_path: Path) -> None:
    async with bench_on(arrow_shards(tmp_path, 2)) as bench:
        for block in (0, 1, 0):
            await bench.decode(block, ROOM)
            source = bench.decoded(ROOM)
            await bench.assemble((source,), [(0, 1)], SLAB)
            assert bench.values(SLAB, 1) == [4 * block + 1]
            bench.pool.forget_block(source.key)


async def test_a_block_that_cannot_be_opened_fails_its_job_and_is_tried_again_for_the_next(
    tmp_path: Path,
) -> None:
    url, path = arrow_shards(tmp_path, 2), tmp_path / "000.arrow"
    content = path.read_bytes()
    times = path.stat()

    async with bench_on(url) as bench:
        source = bench.mapped(0)
        path.write_bytes(content[:100])
        failed = await bench.assemble((source,), [(0, 0)], SLAB)
        assert isinstance(failed, DatasetChangedError)
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert isinstance(await bench.assemble((source,), [(0, 2)], SLAB), tasks.Assembled)
        assert bench.values(SLAB, 1) == [2]


async def test_rows_of_a_file_that_is_written_after_it_was_opened_are_not_served(
    tmp_path: Path,
) -> None:
    url, path = arrow_shards(tmp_path, 2), tmp_path / "000.arrow"

    async with bench_on(url) as bench:
        source = bench.mapped(0)
        assert isinstance(await bench.assemble((source,), [(0, 0)], SLAB), tasks.Assembled)
        with path.open("r+b") as file:
            file.seek(200)
            file.write(b"changed")
        os.utime(path, ns=(1, 1))
        failed = await bench.assemble((source,), [(0, 0)], SLAB)
        assert isinstance(failed, DatasetChangedError)


async def test_more_workers_take_jobs_when_they_are_up_and_too_many_end_when_idle(
    tmp_path: Path,
) -> None:
    async with bench_on(arrow_shards(tmp_path, 4)) as bench:
        pool, rooms = bench.pool, [Region(i * (64 << 10), 64 << 10) for i in range(8)]
        await bench.decode(0, ROOM)
        pool.resize(3)
        had = pool.pids
        assert len(had) == 3
        assert pool.worker_count == 3
        for room in rooms:  # while the others start: not one of these waits for them
            await bench.decode(0, room)
        queued = [bench.decode(i % 4, room) for i, room in enumerate(rooms)]
        pool.resize(1)  # a worker with a task finishes it first
        for task in queued:
            result = await task
            assert isinstance(result, tasks.Decoded)
            assert result.stored
        while len(pool.pids) > 1:
            await bench.decode(0, ROOM)
        (left,) = pool.pids
        assert left in had
        os.kill(left, signal.SIGKILL)
        await bench.decode(0, ROOM)
        assert len(pool.pids) == 1
        assert all(isinstance(report, tasks.Decoded) for report in bench.reports)


async def test_a_look_returns_the_share_of_busy_workers_since_the_last_look(tmp_path: Path) -> None:
    async with bench_on(arrow_shards(tmp_path, 4)) as bench:
        bench.pool.tick()
        await bench.decode(0, ROOM)
        busy, bytes_per_s = bench.pool.tick()
        assert 0 < busy <= 1.01
        assert bytes_per_s == 0  # a block is no slab
        await bench.assemble((bench.mapped(1),), [(0, 0), (0, 1)], SLAB)
        assert bench.pool.tick()[1] > 0
