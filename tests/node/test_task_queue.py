"""The task queue: no job waits for another job's long tasks to end."""

from __future__ import annotations

import fcntl
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_bench import ROOM, arrow_shards, bench_on, instead_of_workers

from dataplane.model.records import Region
from dataplane.node.pool_worker import AHEAD, LIVE_S, LONG_S, SPREAD_S, PoolTask, TaskQueue
from dataplane.rpc import tasks
from dataplane.worker.death import WorkerPlace

WIDE, OTHER_WIDE, NARROW = 1, 2, 3


def task_of(dataset_id: int, shard: str = "a") -> PoolTask:
    raw = tasks.RawBlockRef(shard, 0, 1, Region(0, 0), Region(0, 0), 0)
    return PoolTask(
        tasks.Decode(dataset_id, raw, Region(0, 0)),
        tasks.OpenDataset(dataset_id, "arrow", b""),
        (),
        lambda _: None,
        lambda: WorkerPlace("a"),
    )


class Workers:
    """A queue and this many workers, on a clock that the test sets."""

    def __init__(self, count: int) -> None:
        self.queue, self.count, self.now = TaskQueue(), count, 100.0
        self.tasks: list[PoolTask] = []
        self.at: dict[int, PoolTask] = {}
        """What each worker is at."""

    def queued(self, dataset_id: int, urgency: int = 0, shard: str = "a") -> PoolTask:
        task = task_of(dataset_id, shard)
        self.queue.add(task, urgency, self.now)
        return task

    def queued_slab(self, dataset_id: int, delivery_id: int) -> PoolTask:
        task = task_of(dataset_id)
        task.body = tasks.CopySlab(Region(0, 0), delivery_id, Region(0, 0))
        self.queue.add(task, 0, self.now)
        return task

    def begun_slab(self, dataset_id: int, delivery_id: int) -> PoolTask:
        task = self.queued_slab(dataset_id, delivery_id)
        assert self.begun() == [dataset_id]
        return task

    def begun(self) -> list[int]:
        """Datasets of the tasks that workers begin with now, each of them as long as it is idle."""
        return list(self._begin())

    def done(self, task: PoolTask, after_s: float) -> None:
        self.now += after_s
        self.tasks.remove(task)
        del self.at[self.worker_of(task)]
        self.queue.ended(task, self.now)

    def worker_of(self, task: PoolTask) -> int:
        return next(worker for worker, at in self.at.items() if at is task)

    def knows(self, dataset_id: int, took_s: float) -> None:
        """A task of this dataset has ended."""
        task = self.queued(dataset_id)
        assert self.begun() == [dataset_id]
        self.done(task, took_s)

    def _begin(self) -> Iterator[int]:
        while len(self.tasks) < self.count:
            idle = [worker for worker in range(self.count) if worker not in self.at]
            found = self.queue.take(idle, self.at, self.count, self.now)
            if found is None:
                return
            task, worker = found
            self.at[worker] = task
            task.started = self.now
            self.tasks.append(task)
            yield task.dataset.dataset_id


def test_the_most_urgent_job_goes_first_and_then_the_oldest() -> None:
    workers = Workers(4)
    for dataset_id, urgency in [(WIDE, 1), (NARROW, 1), (NARROW, 0), (OTHER_WIDE, 0)]:
        workers.queued(dataset_id, urgency)
    assert workers.begun() == [NARROW, OTHER_WIDE, WIDE, NARROW]


def test_a_worker_that_is_idle_gets_blocks_of_the_shard_that_it_decoded_last() -> None:
    workers = Workers(3)
    first = [workers.queued(WIDE, shard=shard) for shard in "abc"]
    workers.begun()
    of = {task: workers.worker_of(task) for task in first}
    for task in first:
        workers.done(task, 0.01)
    again = [workers.queued(WIDE, shard=shard) for shard in "cab"]
    workers.begun()
    assert [workers.worker_of(task) for task in again] == [of[first[at]] for at in (2, 0, 1)]


def test_a_worker_takes_a_less_suitable_task_rather_than_stay_idle() -> None:
    workers = Workers(2)
    first = workers.queued(WIDE, shard="a")
    workers.begun()
    second = workers.queued(WIDE, shard="a")
    workers.begun()
    assert {workers.worker_of(first), workers.worker_of(second)} == {0, 1}


def test_a_task_is_passed_over_a_few_times_at_most() -> None:
    workers = Workers(1)
    workers.knows(WIDE, 0.01)
    stranger = workers.queued(WIDE, shard="stranger")
    begun: list[PoolTask] = []
    while stranger not in begun:
        workers.queued(WIDE, shard="a")
        workers.begun()
        begun += workers.tasks
        workers.done(workers.tasks[0], 0.01)
    assert len(begun) == AHEAD + 1


def test_each_worker_decodes_few_shards() -> None:
    """Blocks in random order, of more shards than a worker has open."""
    workers, chance = Workers(4), random.Random(1)
    blocks = [f"{shard}" for shard in range(100) for _ in range(20)]
    chance.shuffle(blocks)
    seen: dict[str, set[int]] = {}
    waiting = iter(blocks)
    for shard in itertools.islice(waiting, 64):
        workers.queued(WIDE, shard=shard)
    workers.begun()
    while workers.tasks:
        task = chance.choice(workers.tasks)
        assert isinstance(task.body, tasks.Decode)
        seen.setdefault(task.body.raw.url, set()).add(workers.worker_of(task))
        workers.done(task, 0.01)
        for shard in itertools.islice(waiting, 1):
            workers.queued(WIDE, shard=shard)
        workers.begun()
    assert len(seen) == 100
    assert sum(map(len, seen.values())) < 280, "taken as they come it is nearly 400"


LONG, SHORT = 2 * LONG_S, LONG_S / 2


@pytest.mark.parametrize(
    ("count", "known", "turns"),
    [
        (3, {WIDE: LONG}, [([WIDE] * 4, [WIDE] * 3)]),
        (2, {NARROW: SHORT, WIDE: SHORT}, [([WIDE] * 2, [WIDE] * 2)]),
        (2, {WIDE: LONG, OTHER_WIDE: LONG}, [([WIDE] * 2, [WIDE]), ([OTHER_WIDE], [OTHER_WIDE])]),
        (3, {NARROW: SHORT, WIDE: LONG}, [([WIDE] * 3, [WIDE] * 2), ([OTHER_WIDE], [OTHER_WIDE])]),
        (
            3,
            {NARROW: SHORT, WIDE: LONG, OTHER_WIDE: LONG},
            [([WIDE, OTHER_WIDE] * 2, [WIDE, OTHER_WIDE]), ([NARROW], [NARROW])],
        ),
    ],
    ids=["one dataset", "short jobs", "long jobs", "a new dataset", "long and short jobs"],
)
def test_datasets_share_workers_by_the_length_of_their_jobs(
    count: int, known: dict[int, float], turns: list[tuple[list[int], list[int]]]
) -> None:
    """Long jobs leave a worker to a dataset with short ones, or to one that is new."""
    workers = Workers(count)
    for dataset_id, took_s in known.items():
        workers.knows(dataset_id, took_s)
    for queued, begun in turns:
        for dataset_id in queued:
            workers.queued(dataset_id)
        assert workers.begun() == begun


def test_long_slabs_of_one_job_leave_a_worker_to_the_slabs_of_another_over_the_same_dataset() -> (
    None
):
    slow, quick = 1, 2
    workers = Workers(2)
    for delivery, took_s in ((slow, 2 * LONG_S), (quick, LONG_S / 2)):
        workers.done(workers.begun_slab(WIDE, delivery), took_s)
    for _ in range(2):
        workers.queued_slab(WIDE, slow)
    assert workers.begun() == [WIDE]
    workers.queued_slab(WIDE, quick)
    assert workers.begun() == [WIDE]
    assert sorted(task.body.arena_id for task in workers.tasks) == [slow, quick]


def test_long_slabs_of_the_only_job_may_use_all_workers_beside_its_blocks() -> None:
    workers = Workers(2)
    workers.knows(WIDE, LONG_S / 2)
    workers.done(workers.begun_slab(WIDE, 1), 2 * LONG_S)
    for _ in range(2):
        workers.queued_slab(WIDE, 1)
    assert workers.begun() == [WIDE] * 2


def test_jobs_of_unknown_length_leave_a_worker_free_too() -> None:
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


def test_a_worker_is_kept_free_only_for_datasets_that_were_at_work_lately() -> None:
    workers = Workers(2)
    workers.knows(NARROW, LONG_S / 2)
    workers.knows(WIDE, 2 * LONG_S)
    for _ in range(2):
        workers.queued(WIDE)
    assert workers.begun() == [WIDE]
    workers.now += 2 * LIVE_S
    assert workers.begun() == [WIDE]


def test_no_worker_is_kept_free_for_a_dataset_without_readers() -> None:
    """A node that has called a map over some rows, say, reads them as a dataset of its own."""
    workers = Workers(2)
    workers.knows(NARROW, LONG_S / 2)
    workers.knows(WIDE, 2 * LONG_S)
    for _ in range(2):
        workers.queued(WIDE)
    assert workers.begun() == [WIDE]
    workers.queue.forget(NARROW)
    assert workers.begun() == [WIDE]


def test_tasks_of_a_forgotten_dataset_still_go() -> None:
    workers = Workers(1)
    workers.queued(WIDE)
    workers.queue.forget(WIDE)
    assert workers.begun() == [WIDE]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_job_is_always_running_while_others_wait(workers: int) -> None:
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


async def test_a_block_is_decoded_while_decodings_of_another_dataset_do_not_end(
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
        "worker.main(fd, 1 << 30)\n"
    )
    held.touch()
    url = arrow_shards(tmp_path, 4)
    instead_of_workers(monkeypatch, tmp_path, tmp_path / "mark", code)

    async with bench_on(url, workers=2) as bench:
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


def slab_task(row_count: int = 0) -> PoolTask:
    task = task_of(NARROW)
    task.body = tasks.Assemble(NARROW, (), Region(0, 0), (), 1, Region(0, 0), row_count=row_count)
    return task


def test_undivided_slabs_are_left_for_a_while_to_as_many_workers_as_are_enough() -> None:
    queue, now = TaskQueue(), 100.0
    first, second, third = (slab_task() for _ in range(3))
    for task in (first, second, third):
        queue.add(task, 0, now)
    assert queue.take([1, 2], {}, 2, now, enough=1) == (first, 1)
    assert queue.take([2], {1: first}, 2, now, enough=1) is None
    assert queue.take([2], {1: first}, 2, now, enough=2) == (second, 2)
    assert queue.take([2], {1: task_of(WIDE)}, 2, now + SPREAD_S / 2, enough=1) == (third, 2)
    queue.add(first, 0, now)
    assert queue.take([2], {1: second}, 2, now + SPREAD_S, enough=1) == (first, 2)
    divided = slab_task(row_count=8)
    queue.add(divided, 0, now)
    assert queue.take([2], {1: second}, 2, now, enough=1) == (divided, 2)
    decoding = task_of(NARROW)
    queue.add(decoding, 0, now)
    assert queue.take([2], {1: second}, 2, now, enough=1) == (decoding, 2)


def test_the_own_time_of_a_task_leaves_out_what_its_worker_waited_for_a_processor() -> None:
    task = slab_task()
    task.sent = 100.0
    assert task.own_s(tasks.Assembled(1, queued=250_000), 101.0) == 0.75
    assert task.own_s(tasks.Done(), 101.0) == 1.0
