"""Who gets a worker: nobody waits for the end of somebody else's long tasks."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_bench import ROOM, Bench, arrow_shards, instead_of_workers, on_bench

from dataplane.model import Region
from dataplane.node.pool_worker import PoolTask
from dataplane.node.task_queue import LIVE_S, LONG_S, TaskQueue
from dataplane.rpc import tasks
from dataplane.worker.death import WorkerPlace

WIDE, OTHER_WIDE, NARROW = 1, 2, 3


def task_of(dataset_id: int) -> PoolTask:
    raw = tasks.RawBlockRef("a", 0, 1, Region(0, 0), Region(0, 0), 0)
    return PoolTask(
        tasks.Decode(dataset_id, raw, Region(0, 0)),
        tasks.OpenDataset(dataset_id, "arrow", b""),
        (),
        lambda _: None,
        lambda: WorkerPlace("a"),
    )


class Workers:
    """A queue, and so many workers, at a time that the test sets."""

    def __init__(self, count: int) -> None:
        self.queue, self.count, self.now = TaskQueue(), count, 100.0
        self.tasks: list[PoolTask] = []

    def queued(self, dataset_id: int, urgency: int = 0) -> PoolTask:
        task = task_of(dataset_id)
        self.queue.add(task, urgency, self.now)
        return task

    def begun(self) -> list[int]:
        """Datasets of the tasks that workers begin with now, each of them as long as it is idle."""
        return list(self._begin())

    def done(self, task: PoolTask, after_s: float) -> None:
        self.now += after_s
        self.tasks.remove(task)
        self.queue.ended(task, self.now)

    def knows(self, dataset_id: int, took_s: float) -> None:
        """A task of this dataset has ended."""
        task = self.queued(dataset_id)
        assert self.begun() == [dataset_id]
        self.done(task, took_s)

    def _begin(self) -> Iterator[int]:
        while len(self.tasks) < self.count:
            task = self.queue.take(self.tasks, self.count, self.now)
            if task is None:
                return
            task.started = self.now
            self.tasks.append(task)
            yield task.dataset.dataset_id


def test_the_most_urgent_job_goes_first_and_then_the_oldest() -> None:
    workers = Workers(4)
    for dataset_id, urgency in [(WIDE, 1), (NARROW, 1), (NARROW, 0), (OTHER_WIDE, 0)]:
        workers.queued(dataset_id, urgency)
    assert workers.begun() == [NARROW, OTHER_WIDE, WIDE, NARROW]


def test_a_dataset_alone_has_all_workers_however_long_its_jobs_take() -> None:
    workers = Workers(3)
    workers.knows(WIDE, 2 * LONG_S)
    for _ in range(4):
        workers.queued(WIDE)
    assert workers.begun() == [WIDE] * 3


def test_long_jobs_leave_a_worker_to_a_dataset_that_has_short_ones() -> None:
    workers = Workers(3)
    workers.knows(NARROW, LONG_S / 2)
    workers.knows(WIDE, 2 * LONG_S)
    workers.knows(OTHER_WIDE, 2 * LONG_S)
    for _ in range(2):
        workers.queued(WIDE)
        workers.queued(OTHER_WIDE)
    assert workers.begun() == [WIDE, OTHER_WIDE]
    workers.queued(NARROW)
    assert workers.begun() == [NARROW]


def test_jobs_of_which_nobody_knows_how_long_they_take_leave_a_worker_as_well() -> None:
    workers = Workers(2)
    workers.knows(NARROW, LONG_S / 2)
    first = workers.queued(WIDE)
    workers.queued(WIDE)
    assert workers.begun() == [WIDE]
    workers.done(first, LONG_S / 2)  # they are short
    workers.queued(WIDE)
    assert workers.begun() == [WIDE, WIDE]


def test_a_dataset_whose_jobs_become_long_is_known_by_those_under_way() -> None:
    workers = Workers(2)
    workers.knows(NARROW, LONG_S / 2)
    workers.knows(WIDE, LONG_S / 2)
    workers.queued(WIDE)
    assert workers.begun() == [WIDE]
    workers.now += LONG_S
    workers.queued(WIDE)
    assert workers.begun() == []


def test_short_jobs_of_several_datasets_share_all_workers() -> None:
    workers = Workers(2)
    workers.knows(NARROW, LONG_S / 2)
    workers.knows(WIDE, LONG_S / 2)
    for _ in range(2):
        workers.queued(WIDE)
    assert workers.begun() == [WIDE] * 2


def test_datasets_with_long_jobs_share_all_workers_among_themselves() -> None:
    workers = Workers(2)
    workers.knows(WIDE, 2 * LONG_S)
    workers.knows(OTHER_WIDE, 2 * LONG_S)
    workers.queued(WIDE)
    workers.queued(WIDE)
    assert workers.begun() == [WIDE]
    workers.queued(OTHER_WIDE)
    assert workers.begun() == [OTHER_WIDE]


def test_a_new_dataset_does_not_wait_until_somebody_elses_long_jobs_are_done() -> None:
    workers = Workers(3)
    workers.knows(NARROW, LONG_S / 2)
    workers.knows(WIDE, 2 * LONG_S)
    for _ in range(3):
        workers.queued(WIDE)
    assert workers.begun() == [WIDE, WIDE]
    workers.queued(OTHER_WIDE)
    assert workers.begun() == [OTHER_WIDE]


def test_a_worker_is_kept_free_only_for_datasets_that_were_at_work_lately() -> None:
    workers = Workers(2)
    workers.knows(NARROW, LONG_S / 2)
    workers.knows(WIDE, 2 * LONG_S)
    for _ in range(2):
        workers.queued(WIDE)
    assert workers.begun() == [WIDE]
    workers.now += 2 * LIVE_S
    assert workers.begun() == [WIDE]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_there_is_always_a_job_under_way_while_some_wait(workers: int) -> None:
    """So that the end of one is when the next is looked for."""
    pool = Workers(workers)
    for dataset_id, took_s in [(NARROW, 0.0), (WIDE, 9.0), (OTHER_WIDE, 9.0)]:
        pool.knows(dataset_id, took_s)
    for _ in range(3):
        pool.queued(WIDE)
        pool.queued(OTHER_WIDE)
    left = 6
    while left:
        pool.begun()
        assert pool.tasks
        left -= 1
        pool.done(pool.tasks[0], 9.0)


def test_a_block_is_decoded_while_decodings_of_another_dataset_do_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    code = (
        "import fcntl\n"
        "from dataplane.worker import worker\n"
        "decode = worker._decode\n"
        "def slow(state, body):\n"
        "    if body.dataset_id == 7:\n"
        f"        fcntl.flock(os.open({str(held)!r}, os.O_RDWR), fcntl.LOCK_SH)\n"
        "    return decode(state, body)\n"
        "worker._decode = slow\n"
        "worker.main(int(sys.argv[-1]), 1 << 30)\n"
    )
    held.touch()
    url = arrow_shards(tmp_path, 4)
    instead_of_workers(monkeypatch, tmp_path, tmp_path / "mark", code)

    async def scene(bench: Bench) -> None:
        other = bench.another(8)
        assert isinstance(await other.decode(3, ROOM), tasks.Decoded)
        with held.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            slow = [bench.decode(i, Region(i << 17, ROOM.length)) for i in range(3)]
            for _ in range(3):
                assert isinstance(
                    await other.decode(3, Region(1 << 20, ROOM.length)), tasks.Decoded
                )
            assert not bench.reports
        for result in slow:
            assert isinstance(await result, tasks.Decoded)

    on_bench(url, scene, workers=2)
