"""Workers that crash, hang or are killed: the error and the log name what they were at."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from bombs import BOMBS
from pictures import drawn, encoded
from pool_bench import MIB, ROOM, SLAB, Bench, arrow_shards, instead_of_workers, on_bench
from undead import undead

from dataplane.arena.memfd import Arena
from dataplane.base import machine
from dataplane.base.trace import Trace
from dataplane.model.errors import (
    BudgetTooSmall,
    CorruptShard,
    DataplaneError,
    DataStallError,
    FunctionError,
)
from dataplane.model.records import Cut, ImageSpec, Region
from dataplane.node.pool import WorkerPool
from dataplane.node.pool_worker import PoolWorker
from dataplane.rpc import tasks
from dataplane.worker import process as processes
from dataplane.worker.death import (
    NOT_STARTED,
    Cause,
    ProcessEnd,
    WorkerBytes,
    WorkerPlace,
    blame,
    end_of,
    nobody_alive,
)
from dataplane.worker.forking import fork_server
from dataplane.worker.process import WorkerProcess, kill_all

START = "from dataplane.worker import worker\n"
SERVE = "worker.main(fd, 1 << 30)\n"


def test_a_crash_while_decoding_names_shard_and_block_in_the_error_and_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code = START + "worker._decode = lambda *_: os.kill(os.getpid(), 11)\n" + SERVE
    url = arrow_shards(tmp_path, 3)
    instead_of_workers(monkeypatch, tmp_path, tmp_path / "mark", code)

    async def scene(bench: Bench) -> None:
        error = await bench.decode(2, ROOM)
        assert isinstance(error, CorruptShard)
        assert (error.shard, error.block) == (bench.dataset.url(2), 0)
        assert "was ended by SIGSEGV" in str(error)
        assert caplog.text.count("task=Decode") == 2
        assert caplog.text.count(f"shard={bench.dataset.url(2)} block=0") == 2

    on_bench(url, scene)


GATHERS = """
whole = worker.Gather.into
def into(self, *args):
    if any(CRASH in block.batch.column("x").to_pylist() for block in self._blocks):
        os.kill(os.getpid(), 7)
    return whole(self, *args)
worker.Gather.into = into
"""


def test_a_crash_over_many_blocks_names_the_one_that_did_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 5 has the row whose value is 22."""
    code = START + GATHERS.replace("CRASH", "22") + SERVE
    url = arrow_shards(tmp_path, 9)
    instead_of_workers(monkeypatch, tmp_path, tmp_path / "mark", code)

    async def scene(bench: Bench) -> None:
        sources = tuple(bench.mapped(i) for i in range(9))
        error = await bench.assemble(sources, [(i, i % 4) for i in range(9)], SLAB)
        assert isinstance(error, CorruptShard)
        assert (error.shard, error.block) == (bench.dataset.url(5), 0)
        assert "005.arrow, block 0: 2 worker processes ended while reading its rows" in str(error)
        assert "SIGBUS" in str(error)

    on_bench(url, scene)


SIZES = """
whole = worker.Gather.__init__
def begin(self, specs, blocks, rows, *args, **named):
    for block, row in rows.tolist():
        if blocks[block].batch.column("x")[row].as_py() == 22:
            os.kill(os.getpid(), 7)
    whole(self, specs, blocks, rows, *args, **named)
worker.Gather.__init__ = begin
"""


def test_a_crash_over_a_row_of_another_piece_of_a_slab_names_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece finds out how long all rows are: here that of block 5 cannot be read."""
    url = arrow_shards(tmp_path, 9)
    instead_of_workers(monkeypatch, tmp_path, tmp_path / "mark", START + SIZES + SERVE)

    async def scene(bench: Bench) -> None:
        sources, rows = tuple(bench.mapped(i) for i in range(9)), [(i, 2) for i in range(9)]
        error = await bench.assemble(sources, rows, SLAB, part=slice(0, 3))
        assert isinstance(error, CorruptShard)
        assert (error.shard, error.block) == (bench.dataset.url(5), 0)

    on_bench(url, scene)


def test_a_block_that_crashes_when_it_is_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        START
        + "whole = worker.canonical_batch\n"
        + "def crash(dataset, raw, *memory):\n"
        + "    if raw.url.endswith('007.arrow'):\n"
        + "        os.kill(os.getpid(), 11)\n"
        + "    return whole(dataset, raw, *memory)\n"
        + "worker.canonical_batch = crash\n"
        + SERVE
    )
    url = arrow_shards(tmp_path, 9)
    instead_of_workers(monkeypatch, tmp_path, tmp_path / "mark", code)

    async def scene(bench: Bench) -> None:
        sources = tuple(bench.mapped(i) for i in range(9))
        error = await bench.assemble(sources, [(i, 0) for i in range(9)], SLAB)
        assert isinstance(error, CorruptShard)
        assert error.shard == bench.dataset.url(7)

    on_bench(url, scene)


RENDERS = """
from dataplane.transforms import pixels
whole = pixels.render
def render(images, *args, **named):
    if 65432 in images[:, 1].tolist():
        os.kill(os.getpid(), 6)
    return whole(images, *args, **named)
pixels.render = render
"""


def test_a_crash_over_an_image_names_its_row_and_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image whose encoding has 65432 bytes is row 6 of the shard, in its second block."""
    image = encoded(drawn(32, 32)).ljust(64_000, b"\0")  # smaller batches would be one block
    images = [image] * 6 + [image.ljust(65432, b"\0")] + [image] * 3
    schema = pa.schema([("jpg", pa.large_binary()), ("x", pa.int64())])
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), schema) as writer:
        for at in (0, 5):
            values = [pa.array(images[at : at + 5], pa.large_binary()), pa.array(range(at, at + 5))]
            writer.write_batch(pa.record_batch(values, schema=schema))
    code = START + RENDERS + SERVE
    instead_of_workers(monkeypatch, tmp_path, tmp_path / "mark", code)
    render = tasks.Render((ImageSpec("jpg", 8, 8, Cut.WHOLE),), 0, 0)

    async def scene(bench: Bench) -> None:
        sources = tuple(bench.mapped(i) for i in range(bench.dataset.manifest.block_count))
        assert len(sources) == 2
        rows = [(i // 5, i % 5) for i in range(10)]
        error = await bench.assemble(sources, rows, Region(2 * MIB, MIB), render)
        assert isinstance(error, CorruptShard)
        assert (error.shard, error.block) == (bench.dataset.url(0), 1)
        assert (error.row, error.column) == (6, "jpg")

    on_bench(str(tmp_path / "a.arrow"), scene, arena_bytes=4 * MIB)


@pytest.mark.parametrize("stuck", ["while True: pass", "import time; time.sleep(3600)"])
def test_a_worker_that_hangs_is_killed_and_its_block_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    mark = tmp_path / "mark"
    code = f"{START}def endless(*_):\n    {stuck}\nworker._decode = endless\n{SERVE}"
    url = arrow_shards(tmp_path, 2)
    instead_of_workers(monkeypatch, tmp_path, mark, code)

    async def scene(bench: Bench) -> None:
        error = await bench.decode(1, ROOM)
        assert isinstance(error, DataStallError)
        assert (error.shard, error.block) == (bench.dataset.url(1), 0)
        assert error.stage == "decoding it"
        assert "2 s of its own time" in str(error)
        assert "stall_timeout_s" in str(error)
        mark.unlink()
        for pid in bench.pool.pids:  # it may have been started before the mark was gone
            os.kill(pid, signal.SIGKILL)
        assert isinstance(await bench.decode(0, ROOM), tasks.Decoded)

    on_bench(url, scene, task_timeout_s=2.0)


@pytest.mark.parametrize("calls_function", [False, True])
def test_a_worker_that_waits_for_a_processor_is_not_stuck_unless_it_calls_a_function(
    monkeypatch: pytest.MonkeyPatch, *, calls_function: bool
) -> None:
    waited = 7.0
    monkeypatch.setattr(machine, "waited_for_processor_s", lambda _pid: waited)

    class Process:
        pid, has_started, is_ending = 1, True, False

    worker = PoolWorker(Process(), 0, 1)  # type: ignore[arg-type]
    task = SimpleNamespace(unwanted_since=None, calls_function=calls_function)
    worker.task = task  # type: ignore[assignment]
    assert not worker.is_stuck(100.0, 10.0)
    waited = 30.0
    assert worker.is_stuck(132.0, 10.0) == calls_function  # 23 of 32 s it could not run
    assert worker.is_stuck(134.0, 10.0)
    task.unwanted_since = 133.5
    assert not worker.is_stuck(134.0, 50.0)
    assert worker.is_stuck(135.0, 50.0)


def test_what_a_worker_last_wrote_tells_a_crash_from_a_lack_of_memory() -> None:
    def cause(status: int, words: str = "", *, short: bool = False) -> Cause:
        return end_of(status, words, is_machine_short=short).cause

    assert cause(-signal.SIGABRT) is Cause.CRASHED
    assert cause(-signal.SIGSEGV, "Fatal Python error: Segmentation fault") is Cause.CRASHED
    for words in ("terminate called after throwing an instance of 'std::bad_alloc'", "MemoryError"):
        assert cause(-signal.SIGABRT, f"one\n{words}\n") is Cause.OUT_OF_MEMORY
    assert cause(-signal.SIGKILL) is Cause.KILLED
    assert cause(-signal.SIGKILL, short=True) is Cause.MACHINE_SHORT


def test_a_process_that_was_never_started_says_nothing_about_the_data() -> None:
    no_memory = f"{NOT_STARTED}[Errno 12] Cannot allocate memory\n"
    end = end_of(1, no_memory, has_started=False)
    assert end.cause is Cause.NOT_STARTED
    assert end.words == "could not be started: [Errno 12] Cannot allocate memory"
    error = blame("decoding it", WorkerPlace("s3://b/0.arrow", 3), [end], 1 << 30)
    assert type(error) is DataplaneError
    assert "0.arrow" not in str(error)
    assert "limit of processes" in str(error)
    missing = end_of(1, f"{NOT_STARTED}No module named 'x'\n", has_started=False)
    assert "No module named 'x'. Look at the node's output" in str(nobody_alive(missing))
    # What a worker writes itself is no such thing, nor is the end of a fork server.
    assert end_of(1, no_memory).cause is Cause.OUT_OF_MEMORY
    assert end_of(-signal.SIGKILL, "", has_started=False).cause is Cause.KILLED


@pytest.mark.parametrize(
    ("cause", "kind", "why"),
    [
        (
            Cause.CRASHED,
            FunctionError,
            "The function, or a library that it calls, ends the process",
        ),
        (Cause.STUCK, DataStallError, "If the function does not hang, but takes this long"),
        (Cause.OUT_OF_MEMORY, BudgetTooSmall, "If the function needs that much, raise worker_mem"),
    ],
)
def test_a_users_function_is_blamed_for_the_end_of_workers_that_called_it(
    cause: Cause, kind: type[DataplaneError], why: str
) -> None:
    place, ends = WorkerPlace("a.parquet", 3), [ProcessEnd(cause, "did so")] * 2
    error = blame("decoding it", place, ends, MIB, "mine:f")
    assert type(error) is kind
    assert "decoding it and calling 'mine:f'" in str(error)
    assert why in str(error)
    assert error.block == 3


def test_two_kills_from_outside_are_reported_as_such_and_blame_no_shard(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        await bench.decode(0, ROOM)
        result = asyncio.ensure_future(bench.decode(1, ROOM))
        killed: set[int] = set()
        while not result.done():
            # Only workers that are up and have the job: the others are replaced without blame.
            for worker in bench.pool._workers:
                pid = worker.process.pid
                if worker.task is not None and worker.is_up and pid not in killed:
                    os.kill(pid, signal.SIGSTOP)
                    if worker.task is not None:
                        killed.add(pid)
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0)
        error = await result
        if isinstance(error, tasks.Decoded):
            pytest.skip("it was faster than its killer")
        assert isinstance(error, DataplaneError)
        assert not isinstance(error, CorruptShard | BudgetTooSmall)
        assert "was killed by SIGKILL" in str(error)
        assert error.shard == bench.dataset.url(1)

    on_bench(arrow_shards(tmp_path, 2), scene)


def test_the_loop_turns_while_a_killed_worker_does_not_die() -> None:
    async def play() -> None:
        process, ended, statuses = WorkerProcess.start(None), asyncio.Event(), []

        def on_end(status: int) -> None:
            statuses.append(status)
            ended.set()

        with undead(process.pid):
            process.end(on_end)  # returns at once
            for _ in range(1000):
                await asyncio.sleep(0)
            assert not statuses
        async with asyncio.timeout(60):
            await ended.wait()
        assert statuses == [-signal.SIGKILL]

    with fork_server.held():
        asyncio.run(play())


def test_messages_that_a_socket_has_no_room_for_arrive_later_with_their_descriptors() -> None:
    count, large = 60, bytes(100_000)

    async def play() -> None:
        process, heard = WorkerProcess.start(None), asyncio.Event()
        answers: list[tasks.Result] = []

        def hear(answer: tasks.Result) -> None:
            answers.append(answer)
            if len(answers) == count:
                heard.set()

        process.listen(tasks.Result, hear, heard.set)
        os.kill(process.pid, signal.SIGSTOP)
        for number in range(count // 3):
            part = tasks.OpenDataset(number, "arrow", large, more=True)
            process.send(tasks.Task(part))
            arena = Arena.create("sent", 4096)
            process.send(tasks.Task(tasks.AttachArena(number)), (arena.fd,))
            arena.close()
            process.send(tasks.Task(tasks.DetachArena(number)))
        assert process._unsent
        os.kill(process.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            await heard.wait()
        assert {type(answer.body) for answer in answers} == {tasks.Done}
        kill_all([process], Trace("test"))

    with fork_server.held():
        asyncio.run(play())


def test_a_worker_that_does_not_die_keeps_its_place_until_it_does() -> None:
    async def play() -> None:
        pool = WorkerPool(2, Trace("test"))
        pool.start()
        try:
            first, second = pool.pids
            with undead(first):
                os.kill(first, signal.SIGKILL)
                while first in pool.pids:  # noqa: ASYNC110 - the pool has no event for it
                    await asyncio.sleep(0)
                assert pool.pids == (second,)
                pool.start()  # as with every job that is submitted
                assert pool.pids == (second,)
            async with asyncio.timeout(60):
                while len(pool.pids) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        finally:
            pool.close()

    asyncio.run(play())


def test_a_node_ends_although_a_worker_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_CLOSE_S", 0.1)

    async def play() -> None:
        pool = WorkerPool(1, Trace("test"))
        pool.start()
        (process,) = [worker.process for worker in pool._workers]
        with undead(process.pid):
            pool.close()
        assert str(process.pid) in caplog.text
        assert process.wait(60)

    asyncio.run(play())


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
