"""Shards are indexed in separate processes with limited memory."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import fsspec
import psutil
import pyarrow as pa
import pytest
from bombs import MIB, long_line
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from no_forks import NO_MORE, no_forks
from shards import MemoryShard, arrow_bytes, json_lines, parquet_bytes, tar_bytes
from typing_extensions import Buffer

from dataplane.formats import registry
from dataplane.formats.base import Format, ShardIndex
from dataplane.index.indexing import index_dataset
from dataplane.index.processes import IndexProcesses
from dataplane.index.run import BatchEnd, StoredShard
from dataplane.model.errors import (
    BudgetTooSmall,
    CorruptShard,
    DataplaneError,
    DataStallError,
    StoreUnavailable,
)
from dataplane.model.records import ObjectInfo, Region
from dataplane.plan.manifest import Manifest
from dataplane.rpc import local, tasks
from dataplane.store.local import LocalStore
from dataplane.worker.death import WorkerBytes
from dataplane.worker.forking import fork_server

LIMIT = 256 * MIB
HARD = WorkerBytes(LIMIT, 0)
TABLE = pa.table({"id": range(50), "text": ["x" * 20] * 50})


@pytest.fixture
def processes() -> Iterator[IndexProcesses]:
    with IndexProcesses(HARD, 60.0, 2) as made:
        yield made


def children() -> list[psutil.Process]:
    """The processes that index for this one."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "dp-worker":
                found.append(child)
    return found


def written(folder: Path, shards: dict[str, bytes]) -> str:
    folder.mkdir(exist_ok=True)
    for name, content in shards.items():
        (folder / name).write_bytes(content)
    return str(folder)


LARGE = pa.table({"x": range(450_000)})
SHARDS: dict[str, dict[str, bytes]] = {
    "parquet": {f"{i}.parquet": parquet_bytes(TABLE, row_group_size=20) for i in range(5)},
    "arrow": {f"{i}.arrow": arrow_bytes(TABLE, rows=20) for i in range(3)},
    "arrow in large batches": {"0.arrow": arrow_bytes(LARGE, rows=150_000, file=True)},
    "jsonl": {"0.jsonl": json_lines(TABLE.to_pylist())},
    "jsonl.gz": {"0.jsonl.gz": gzip.compress(json_lines(TABLE.to_pylist()))},
    "tar": {"0.tar": tar_bytes([(f"{i}.txt", b"abc") for i in range(9)])},
}
READ_IN_STEPS = SHARDS["jsonl"]["0.jsonl"]
"""A shard that the node does not read before a process asks for it."""


@pytest.mark.parametrize("kind", SHARDS)
def test_the_manifest_is_the_one_that_indexing_here_gives(
    tmp_path: Path, kind: str, processes: IndexProcesses
) -> None:
    folder = written(tmp_path / kind, SHARDS[kind])
    here = index_dataset(folder)
    found = index_dataset(folder, index_shard=processes.index)
    assert found == here
    assert found.schema == here.schema
    assert found.to_bytes() == here.to_bytes()  # fields outside of the fingerprint, too


@pytest.mark.parametrize("kind", SHARDS)
def test_an_indexing_process_asks_the_node_for_bytes_of_remote_shards(
    kind: str, processes: IndexProcesses
) -> None:
    """The store is in the memory of this process, so no other process can read it."""
    files, folder = fsspec.filesystem("memory"), f"/indexing/{kind}"
    for name, content in SHARDS[kind].items():
        files.pipe_file(f"{folder}/{name}", content)
    try:
        url = f"memory://{folder}/"
        assert index_dataset(url, index_shard=processes.index).to_bytes() == (
            index_dataset(url).to_bytes()
        )
    finally:
        files.rm(folder, recursive=True)


@pytest.mark.parametrize("kind", SHARDS)
def test_preambles_that_are_read_while_indexing_are_handed_on(kind: str) -> None:
    files, folder = fsspec.filesystem("memory"), f"/preambles/{kind}"
    for name, content in SHARDS[kind].items():
        files.pipe_file(f"{folder}/{name}", content)
    kept: dict[tuple[str, str], tuple[Region, bytes]] = {}

    def keep(url: str, etag: str, place: Region, content: bytes) -> None:
        kept[url, etag] = place, content

    try:
        with IndexProcesses(HARD, 60.0, 2, keep) as processes:
            manifest = index_dataset(f"memory://{folder}/", index_shard=processes.index)
        for shard in manifest.shards:
            place = shard.preamble
            if place.length:
                content = SHARDS[kind][shard.url.rpartition("/")[2]]
                expected = content[place.offset : place.offset + place.length]
                assert kept[shard.url, shard.etag] == (place, expected)
        assert len(kept) == sum(bool(shard.preamble.length) for shard in manifest.shards)
    finally:
        files.rm(folder, recursive=True)


@pytest.mark.parametrize("rows", [10, 4_000, 400_000])
@pytest.mark.parametrize("name", ["arrow", "parquet"])
def test_what_a_format_names_as_its_first_reads_is_what_it_reads(name: str, rows: int) -> None:
    """Or the node would read it for nothing."""
    table = pa.table({"id": range(rows), "other": range(rows)})
    shard = MemoryShard(arrow_bytes(table, file=True) if name == "arrow" else parquet_bytes(table))
    format_ = registry.by_name(name)
    format_.index(shard)
    named: tuple[Region, ...] = format_.first_reads(shard.size_bytes)  # type: ignore[attr-defined]
    places = [(place.offset, place.offset + place.length) for place in named]
    read = [(at, at + length) for at, length in shard.reads]
    for start, end in places:
        assert any(start <= at and stop <= end for at, stop in read)
    if rows == 10:
        assert all(any(start <= at and stop <= end for start, end in places) for at, stop in read)


def own_peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def test_a_shard_that_takes_too_much_memory_is_named_and_the_node_is_not_harmed(
    tmp_path: Path, processes: IndexProcesses
) -> None:
    """Invariant 6 of the project: a node never exceeds its memory budget."""
    long_line(tmp_path)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far
    before = own_peak_bytes()
    bomb, sound = sorted(tmp_path.iterdir())
    with pytest.raises(BudgetTooSmall) as caught:
        index_dataset(str(bomb), index_shard=processes.index)
    assert own_peak_bytes() < before + 32 * MIB
    assert (caught.value.shard, caught.value.budget) == (bomb.as_uri(), LIMIT)
    assert "256 MiB" in str(caught.value)
    assert "DATAPLANE_WORKER_MEMORY_BYTES=512MiB" in str(caught.value)
    assert index_dataset(str(sound), index_shard=processes.index).sample_count == 1


class Held:
    """A store of local files whose first read waits for the test."""

    def __init__(self) -> None:
        self.is_read, self.may_go_on = threading.Event(), threading.Event()
        self.fault: Exception | None = None

    def connect(self, _url: str) -> Held:
        return self

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (self._named(found) for found in LocalStore().list(prefix.replace(*HELD)))

    def head(self, url: str) -> ObjectInfo:
        return self._named(LocalStore().head(url.replace(*HELD)))

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        self.is_read.set()
        assert self.may_go_on.wait(60)
        if self.fault is not None:
            raise self.fault
        return LocalStore().read(url.replace(*HELD), offset, length, etag)

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        return LocalStore().stream(url.replace(*HELD), etag)

    @staticmethod
    def _named(found: ObjectInfo) -> ObjectInfo:
        return replace(found, url=found.url.replace(*HELD[::-1]))


HELD = ("s3://held/", "file:///")


@contextlib.contextmanager
def indexing(folder: Path, held: Held, processes: IndexProcesses) -> Iterator[Future[Manifest]]:
    """A run whose first read waits."""
    url = folder.as_uri().replace(*HELD[::-1]) + "/"
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(index_dataset, url, connect=held.connect, index_shard=processes.index)
        assert held.is_read.wait(60)
        try:
            yield run
        finally:
            held.may_go_on.set()


def test_a_process_that_is_killed_costs_time_and_nothing_else(
    tmp_path: Path, processes: IndexProcesses
) -> None:
    written(tmp_path, {f"{i}.jsonl": READ_IN_STEPS for i in range(5)})
    held = Held()
    with indexing(tmp_path, held, processes) as run:
        assert children()
        for child in children():
            child.kill()
        held.may_go_on.set()
        assert run.result(60).sample_count == 5 * TABLE.num_rows


def test_a_shard_that_ends_two_processes_is_blamed(
    tmp_path: Path, processes: IndexProcesses
) -> None:
    written(tmp_path, {"0.jsonl": READ_IN_STEPS})
    held = Held()
    with indexing(tmp_path, held, processes) as run:
        while not run.done():
            for child in children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGSEGV)
    with pytest.raises(CorruptShard, match=r"0\.jsonl: 2 worker processes ended while indexing"):
        run.result(60)


def test_a_machine_that_starts_no_process_is_to_blame_and_not_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: IndexProcesses
) -> None:
    mark, folder = tmp_path / "mark", written(tmp_path / "shards", SHARDS["parquet"])
    no_forks(monkeypatch, tmp_path, mark)
    with pytest.raises(DataplaneError, match="reached its limit of processes") as caught:
        index_dataset(folder, index_shard=processes.index)
    assert type(caught.value) is DataplaneError
    assert NO_MORE in str(caught.value)
    assert ".parquet" not in str(caught.value)
    mark.unlink()
    assert index_dataset(folder, index_shard=processes.index) == index_dataset(folder)


def test_a_fork_server_that_cannot_be_started_is_an_error_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: IndexProcesses
) -> None:
    folder, executable = written(tmp_path / "shards", SHARDS["parquet"]), sys.executable
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(DataplaneError, match="a process of the node cannot be started"):
        index_dataset(folder, index_shard=processes.index)
    monkeypatch.setattr(sys, "executable", executable)
    assert index_dataset(folder, index_shard=processes.index) == index_dataset(folder)


class Suspending(Held):
    """A store that suspends each process that reads, before it has the bytes."""

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        for child in children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.suspend()
        return super().read(url, offset, length, etag)


def test_a_shard_at_which_processes_hang_is_named(tmp_path: Path) -> None:
    written(tmp_path, {"0.jsonl": READ_IN_STEPS})
    held = Suspending()
    with (
        IndexProcesses(HARD, 0.5, 1) as processes,
        indexing(tmp_path, held, processes) as run,
    ):
        held.may_go_on.set()
        with pytest.raises(DataStallError, match="indexing it did not end within"):
            run.result(60)


def test_what_a_store_says_is_what_is_raised(tmp_path: Path, processes: IndexProcesses) -> None:
    written(tmp_path, SHARDS["parquet"])
    held = Held()
    held.fault = StoreUnavailable("the store is away", url="s3://held/")
    with indexing(tmp_path, held, processes) as run:
        held.may_go_on.set()
        with pytest.raises(StoreUnavailable, match="the store is away"):
            run.result(60)


def test_a_damaged_shard_raises_the_same_error_in_another_process(
    tmp_path: Path, processes: IndexProcesses
) -> None:
    folder = written(tmp_path, {"0.parquet": b"PAR1" + bytes(100)})
    with pytest.raises(CorruptShard) as here:
        index_dataset(folder)
    with pytest.raises(CorruptShard) as there:
        index_dataset(folder, index_shard=processes.index)
    assert str(there.value) == str(here.value)
    assert there.value.nouns == here.value.nouns


# -- The messages of a worker that indexes shards, and of its node


WAIT_S = 60.0
LINES = gzip.compress(b'{"id": 1}\n' * 1000)
DAMAGED = LINES[:10] + b"\xff" * 1000
"""The header of a gzip stream, and what no inflater takes."""


@pytest.fixture
def indexer() -> Iterator[socket.socket]:
    """The node's end of its socket."""
    ours, theirs = local.pair()
    ours.settimeout(WAIT_S)
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    try:
        with fork_server.held(), ours:
            with theirs:
                process = fork_server.start("worker", theirs, stderr, 1 << 30)
            try:
                yield ours
            finally:
                process.kill()
                assert process.wait(WAIT_S)
    finally:
        os.close(stderr)


def ask(sock: socket.socket, task: int, size_bytes: int) -> None:
    order = tasks.IndexShard("jsonl", f"s3://b/{task}.jsonl.gz", size_bytes, "etag")
    local.send(sock, tasks.Task(order, task))


def answered(
    sock: socket.socket, answer: Callable[[tasks.ReadShard], None]
) -> tuple[int, tasks.ResultBody]:
    """The task that ends next, and how; `answer` gets what is asked for until then."""
    while True:
        said, _ = local.receive(sock, tasks.Result)
        if not isinstance(said.body, tasks.ReadShard):
            return said.number, said.body
        answer(said.body)


def indexed(sock: socket.socket, task: int, shard: bytes) -> tasks.ResultBody:
    """How the indexing of a shard ends whose pieces come one request after the other."""
    pieces = iter((shard[:20], shard[20:]))

    def answer(asked: tasks.ReadShard) -> None:
        place = asked.place
        if place is None:
            piece = next(pieces, None)
            body = tasks.ShardBytes(asked.request, piece or b"", is_end=piece is None)
        else:
            body = tasks.ShardBytes(asked.request, _part(shard, place))
        local.send(sock, tasks.Task(body, task))

    ask(sock, task, len(shard))
    ended, outcome = answered(sock, answer)
    assert ended == task
    return outcome


def _part(shard: bytes, place: Region) -> bytes:
    return shard[place.offset : place.offset + place.length]


def test_bytes_of_a_shard_that_has_failed_do_not_end_the_process(indexer: socket.socket) -> None:
    """The next piece is on its way while the one before it is parsed."""
    late: list[int] = []
    streamed: list[int] = []

    def answer(asked: tasks.ReadShard) -> None:
        if asked.place is not None:
            body = tasks.ShardBytes(asked.request, _part(DAMAGED, asked.place))
        elif not streamed:
            streamed.append(asked.request)
            body = tasks.ShardBytes(asked.request, DAMAGED[:500])
        else:
            late.append(asked.request)
            return
        local.send(indexer, tasks.Task(body, 1))

    ask(indexer, 1, len(DAMAGED))
    ended, outcome = answered(indexer, answer)
    assert ended == 1
    assert isinstance(outcome, CorruptShard)
    assert len(late) == 1
    assert isinstance(indexed(indexer, 2, LINES), tasks.ShardIndexed)  # the first one is forgotten
    local.send(indexer, tasks.Task(tasks.ShardBytes(late[0], DAMAGED[500:]), 1))
    assert isinstance(indexed(indexer, 3, LINES), tasks.ShardIndexed)


# -- Whatever batches leave out is indexed one by one


class Leaving:
    """Batches that leave out what was drawn, and end as drawn: at once, or in a thread."""

    def __init__(
        self, format_: Format, left: Iterator[bool], later: Iterator[bool], shards: int, count: int
    ) -> None:
        self._format, self._left, self._later = format_, left, later
        self.shards_at_once, self._count = shards, count
        self._pool = ThreadPoolExecutor(1)
        self.is_closed = False

    @property
    def has_room(self) -> bool:
        return not self.is_over

    @property
    def is_over(self) -> bool:
        return self._count <= 0

    def send(
        self,
        shards: Sequence[int],
        listed: Sequence[ObjectInfo],
        tell: Callable[[BatchEnd], None],
    ) -> None:
        self._count -= 1
        found = dict(zip(shards, listed, strict=True))
        indexes = {at: self._index(one) for at, one in found.items() if not next(self._left)}
        if next(self._later):
            self._pool.submit(tell, BatchEnd(shards, indexes))
        else:
            tell(BatchEnd(shards, indexes))

    def close(self) -> None:
        self._pool.shutdown()
        self.is_closed = True

    def _index(self, listed: ObjectInfo) -> ShardIndex:
        return self._format.index(StoredShard(listed, LocalStore(), threading.Event()))


@pytest.fixture
def expected(dataset: Path) -> bytes:
    """The manifest without batches."""
    return index_dataset(dataset).to_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    left=st.lists(st.booleans(), min_size=12, max_size=12),
    later=st.lists(st.booleans(), min_size=12, max_size=12),
    shards=st.integers(1, 5),
    count=st.integers(0, 12),
    workers=st.integers(1, 3),
)
def test_no_shard_is_lost_whatever_batches_leave_out(
    dataset: Path,
    expected: bytes,
    left: list[bool],
    later: list[bool],
    shards: int,
    count: int,
    workers: int,
) -> None:
    made: list[Leaving] = []

    def begin(format_: Format, _listed: Sequence[ObjectInfo]) -> Leaving:
        made.append(Leaving(format_, iter(left), iter(later), shards, count))
        return made[0]

    found = index_dataset(dataset, workers=workers, begin_batches=begin)
    assert found.to_bytes() == expected
    assert made[0].is_closed


def test_batches_are_ended_when_a_shard_fails(dataset: Path) -> None:
    made: list[Leaving] = []

    def begin(format_: Format, listed: Sequence[ObjectInfo]) -> Leaving:
        left = iter([True, *[False] * len(listed)])
        made.append(Leaving(format_, left, iter([False] * len(listed)), 3, len(listed)))
        return made[0]

    def refuse(_format: Format, shard: StoredShard) -> ShardIndex:
        raise ZeroDivisionError(shard.url)

    with pytest.raises(ZeroDivisionError, match=r"000\.parquet"):
        index_dataset(dataset, index_shard=refuse, begin_batches=begin)
    assert made[0].is_closed
