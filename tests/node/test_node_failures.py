"""Failures around a node raise a clear error, or have no effect at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from awry import Mood, awry_server
from fleet import kill_workers
from raw_trainer import ROWS, Batches, Node, Trainer, expected, rows_of

from dataplane.model.errors import (
    CorruptShard,
    DatasetChangedError,
    DataStallError,
    PeerLost,
    StoreError,
    StoreUnavailable,
)
from dataplane.node.delivery import Called, stall_error, working
from dataplane.rpc import messages
from dataplane.rpc.messages import Working
from dataplane.scheduler.events import SlabProgress, Stalled
from dataplane.scheduler.records import BlockPhase


def test_a_killed_worker_is_not_noticed_by_the_trainer(tmp_path: Path, parquet: str) -> None:
    with Node(tmp_path, worker_count=1, slab_bytes="4KiB") as node, Trainer(node) as trainer:
        trainer.open(parquet, global_batch=1)
        batches: Batches = []
        for i, slab in enumerate(trainer.slabs()):
            batches += trainer.values(slab)
            # Not soon after one another: the same slab's second death would be blamed on its rows.
            if i in {0, ROWS // 2}:
                kill_workers(psutil.Process(node.process.pid))
        assert rows_of(batches) == [expected(i) for i in range(ROWS)]


def test_workers_end_with_a_node_that_is_killed(tmp_path: Path, arrow: str) -> None:
    with Node(tmp_path) as node, Trainer(node) as trainer:
        trainer.open(arrow)
        trainer.batches()
        workers = node.workers()
        assert len(workers) == 2
        os.kill(node.process.pid, signal.SIGKILL)
        with pytest.raises(PeerLost):
            trainer.call(messages.OpenStream("j", 0, 0))
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive


def _rewrite(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def _truncate(path: Path) -> None:
    os.truncate(path, 8)


@pytest.mark.parametrize("change", [_rewrite, _truncate])
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_shard_that_changes_during_the_run_is_an_error_and_no_sample(
    tmp_path: Path,
    form: str,
    change: Callable[[Path], None],
    request: pytest.FixtureRequest,
) -> None:
    url = request.getfixturevalue(form)
    with Node(tmp_path, slab_bytes="4KiB") as node, Trainer(node) as trainer:
        opened = trainer.open(url)
        path = tmp_path / f"1.{form}"
        times = path.stat()
        change(path)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
        found: Batches = []
        with pytest.raises(DatasetChangedError) as caught:
            found.extend(batch for slab in trainer.slabs() for batch in trainer.values(slab))
        assert caught.value.shard == f"file://{path}"
        names = len(opened.columns)
        rows = rows_of(found)
        assert rows == [expected(i)[:names] for i in range(len(rows))]
        assert len(rows) <= 30
        # The node still lives, and serves sound shards.
        trainer.open(f"{tmp_path}/0.{form}", job="k")
        assert len(rows_of(trainer.batches("k"))) == 30


def _written(path: Path, rows: int) -> str:
    table = pa.table({"x": pa.array(np.arange(rows), pa.int64())})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    return str(path)


def test_a_mapped_file_that_ends_before_its_size_kills_no_node(tmp_path: Path) -> None:
    """A file can shrink between the look at its size and the read: the worker gets SIGBUS."""
    path = tmp_path / "big.arrow"
    _written(path, 20_000)
    # Too little room to make every slab before the file shrinks.
    room = {"slab_bytes": "16KiB", "delivery_bytes_per_rank": "128KiB"}
    with Node(tmp_path, worker_count=1, **room) as node, Trainer(node) as trainer:
        trainer.open(str(path), global_batch=1000)
        slabs = trainer.slabs()
        next(slabs)
        os.truncate(path, 4096)
        with pytest.raises((DatasetChangedError, CorruptShard), match=r"big\.arrow"):
            list(slabs)
        trainer.open(_written(tmp_path / "sound.arrow", 10), job="k")
        assert len(rows_of(trainer.batches("k"))) == 10


def test_a_store_that_falls_silent_is_a_stall_that_names_the_shard(
    tmp_path: Path, parquet: str
) -> None:
    body = (tmp_path / "0.parquet").read_bytes()
    with (
        awry_server({"bucket/0.parquet": body}) as server,
        Node(tmp_path, stall_timeout_s=4, **server.environment()) as node,
        Trainer(node) as trainer,
    ):
        trainer.open("s3://bucket/0.parquet")
        server.be(then=Mood.HANG)
        with pytest.raises((DataStallError, StoreError), match=r"0\.parquet"):
            trainer.batches()


# -- What a rank hears that waits for a batch, or has waited too long


MAPPED = Called("mytext:Tokenise", "mytext:pad")
BLOCKS = "waiting for blocks"


def error_of(progress: SlabProgress, called: Called = MAPPED) -> DataStallError:
    url = ["s3://b/a.parquet"] if progress.stage == BLOCKS else []
    error = stall_error(Stalled(1, 1, 121.0, progress, ()), url, called, "n-1", lambda _: None)
    assert isinstance(error, DataStallError)
    assert error.stage == progress.stage
    assert "no batch for 121 s, and no progress" in str(error)
    assert "node n-1" in str(error)
    return error


@pytest.mark.parametrize(
    ("progress", "words", "advice"),
    [
        (SlabProgress(BLOCKS, 12, 40, BlockPhase.FETCHING), "reading blocks", "the store answers"),
        (SlabProgress(BLOCKS, 12, 40), "waiting for memory for blocks", "block_arena_bytes"),
        (
            SlabProgress("waiting for room in the delivery arena", 40, 40),
            "waiting for room in the delivery arena",
            "delivery_bytes_per_rank",
        ),
        (SlabProgress("plan"), "planning the batch", "log"),
        (SlabProgress("being made by node b"), "being made by node b", "dataplane status"),
    ],
)
def test_a_stall_names_its_stage_and_what_helps_there(
    progress: SlabProgress, words: str, advice: str
) -> None:
    error = error_of(progress)
    assert f"the node is {words}" in str(error)
    assert advice in str(error)
    assert error.nouns["function"] is None
    assert ("store" in advice) == ("store" in str(error))


def test_a_stall_names_the_function_and_how_many_blocks_are_done() -> None:
    error = error_of(SlabProgress(BLOCKS, 12, 40, BlockPhase.DECODING))
    assert "calling map='mytext:Tokenise' over blocks, 12 of 40 blocks are ready" in str(error)
    assert "first missing one of s3://b/a.parquet" in str(error)
    assert (error.nouns["function"], error.nouns["done"]) == ("mytext:Tokenise", 12)
    error = error_of(SlabProgress("assembling", 40, 40))
    assert "calling collate='mytext:pad'" in str(error)
    plain = error_of(SlabProgress(BLOCKS, 12, 40, BlockPhase.DECODING), Called())
    assert "decoding blocks" in str(plain)
    assert "making the batch" in str(error_of(SlabProgress("assembling", 40, 40), Called()))


def test_a_store_that_is_known_to_be_away_is_the_error() -> None:
    away = StoreUnavailable("it refuses connections", store="s3://b")
    progress = SlabProgress(BLOCKS, 12, 40, BlockPhase.FETCHING)
    stalled, urls = Stalled(1, 1, 121.0, progress, ()), ["s3://b/a.parquet"]
    error = stall_error(stalled, urls, MAPPED, "n-1", lambda _: away)
    assert isinstance(error, StoreUnavailable)
    assert "s3://b/a.parquet cannot be read: it refuses connections" in str(error)


def test_a_trainer_hears_what_its_node_does() -> None:
    progress = SlabProgress(BLOCKS, 12, 40, BlockPhase.DECODING)
    assert working(progress, Called("m:f")) == Working("calling map='m:f' over blocks", 12, 40)
