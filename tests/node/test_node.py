"""A node process over its real protocol: right bytes, clear errors, and a clean end."""

from __future__ import annotations

import contextlib
import re
import select
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_trainer import ROWS, Node, Trainer, expected, raw_socket, rows_of, table
from servers import S3Server

from dataplane.model.config import PROTOCOL_VERSION, VERSION
from dataplane.model.errors import (
    BudgetTooSmall,
    ConfigError,
    VersionMismatch,
)
from dataplane.model.records import ColumnOptions, End
from dataplane.rpc import messages

# -- the protocol ----------------------------------------------------------------------------


def test_a_trainer_of_another_protocol_is_refused_by_name_and_of_another_version_is_not(
    tmp_path: Path,
) -> None:
    with Node(tmp_path) as node, Trainer(node, greet=False) as trainer:
        with pytest.raises(VersionMismatch, match="install one version in both") as caught:
            trainer.call(messages.Hello("0.0.0", PROTOCOL_VERSION + 1, 1))
        assert caught.value.expected == PROTOCOL_VERSION
        assert caught.value.found == PROTOCOL_VERSION + 1
        assert f"runs Dataplane {VERSION} " in str(caught.value)
        assert isinstance(
            trainer.call(messages.Hello("9.9.9", PROTOCOL_VERSION, 1)), messages.Welcome
        )


def test_what_is_asked_out_of_turn_is_refused_and_the_connection_lives(
    tmp_path: Path, arrow: str
) -> None:
    with Node(tmp_path) as node, Trainer(node, greet=False) as trainer:
        with pytest.raises(ConfigError, match="Hello first"):
            trainer.open(arrow)
        trainer.call(messages.Hello(VERSION, PROTOCOL_VERSION, 1))
        with pytest.raises(ConfigError, match="has not opened job 'j'"):
            trainer.call(messages.OpenStream("j", 0, 0))
        with pytest.raises(ConfigError, match="stream 77 is not open"):
            trainer.call(messages.NextSlab(77, 0, 0.0))
        trainer.tell(messages.Release("j", (1, 2)))
        trainer.tell(messages.CloseStream(9))
        trainer.tell(messages.CloseJob("j"))
        trainer.open(arrow)
        trainer.tell(messages.Release("j", (1, 2)))
        with pytest.raises(ConfigError, match="cursor 91"):
            trainer.call(messages.OpenStream("j", 0, 91))
        with pytest.raises(ConfigError, match="step_stride"):
            trainer.call(messages.OpenStream("j", 0, 0, 0, 0))
        stream = trainer.call(messages.OpenStream("j", 0, 8, 2)).stream_id
        for cursor in (17, (1 << 64) - 1):
            with pytest.raises(ConfigError, match="was sent batches up to sample 16"):
                trainer.call(messages.NextSlab(stream, cursor))
        assert trainer.call(messages.NextSlab(stream, 16)).batches[0].step == 2
        assert len(trainer.batches()) == 23


def test_nonsense_ends_its_connection_and_delays_no_other_nor_does_a_silent_one(
    tmp_path: Path, arrow: str
) -> None:
    with Node(tmp_path) as node, raw_socket(node), Trainer(node) as other:
        other.open(arrow)
        for packet in (b"\xff" * 40, b"\x08\x01", b"x" * (192 * 1024 + 1)):
            with Trainer(node) as trainer:
                trainer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                trainer.sock.send(packet)
                assert trainer.is_hung_up()
        assert len(other.batches()) == 23


@pytest.mark.parametrize("holds_slabs", [False, True])
def test_a_trainer_that_closes_is_not_lost_even_with_unread_messages(
    tmp_path: Path, arrow: str, holds_slabs: bool
) -> None:
    with Node(tmp_path, log_level="info") as node, Trainer(node) as trainer:
        trainer.open(arrow)
        stream = trainer.call(messages.OpenStream("j", 2, 0)).stream_id
        trainer.ask(messages.NextSlab(stream, 0, 0.0))
        assert select.select([trainer.sock], [], [], 60)[0], "the answer lies there"
        trainer.tell(messages.CloseJob("j", 2, 8, holds_slabs=holds_slabs))
        trainer.close()
        node.process.wait(60)
        log = node.errors.read_text()
    assert "job closed job=j rank=0 epoch=2 cursor=8" in log
    assert "rank lost" not in log


# -- what may be opened ----------------------------------------------------------------------


def _of_columns(**options: Any) -> dict[str, object]:
    return {"column_options": ColumnOptions(**options)}


IMPOSSIBLE: tuple[tuple[dict[str, object], str], ...] = (
    (_of_columns(columns=("nix",)), "no column 'nix'; the dataset has: x, v, s"),
    (_of_columns(columns=("x", "x")), "'x' occurs twice"),
    ({"global_batch": 91, "end": End.DROP}, "larger than the dataset"),
    ({"global_batch": 0}, "global batch of 0"),
    ({"dp_rank": 2, "dp_size": 2}, "dp_rank 2"),
    (_of_columns(fill_null=(("y", 0.0),)), "fill_null names 'y'"),
    (_of_columns(fill_null=(("s", 0.0),)), "its nulls arrive as None"),
    (_of_columns(fill_null=(("v", 0.5),)), "column 'v' cannot hold 0.5"),
    (_of_columns(fill_null=(("x", 2.0**40),)), "column 'x' cannot hold"),
)


def test_an_impossible_job_is_refused_and_the_next_one_is_not(tmp_path: Path, parquet: str) -> None:
    with Node(tmp_path, worker_count=1) as node, Trainer(node) as trainer:
        for request, message in IMPOSSIBLE:
            with pytest.raises(ConfigError, match=message):
                trainer.open(parquet, **request)
        trainer.open(parquet)
        assert len(trainer.batches()) == 23


def test_a_budget_below_one_block_is_refused_and_the_advised_one_is_enough(
    tmp_path: Path, parquet: str
) -> None:
    with Node(tmp_path, block_arena_bytes="4KiB") as node, Trainer(node) as trainer:
        with pytest.raises(BudgetTooSmall, match=r"raise block_arena_bytes") as caught:
            trainer.open(parquet)
        assert caught.value.budget == 4096
        assert "0.parquet" in str(caught.value)
    told = re.search(
        r"DATAPLANE_BLOCK_ARENA_BYTES=(\w+).*--block-arena-bytes \1", str(caught.value)
    )
    assert told is not None
    with Node(tmp_path, block_arena_bytes=told[1]) as node, Trainer(node) as trainer:
        trainer.open(parquet)
        assert len(trainer.batches()) == 23, "what is advised is enough"


# -- the bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "sizes"), [(1, (1, 3)), (2, (2,)), (4, (4, 1))])
def test_global_batches_are_the_same_for_every_world_and_number_of_workers(
    tmp_path: Path, parquet: str, workers: int, sizes: tuple[int, ...]
) -> None:
    found = []
    with (
        Node(tmp_path, worker_count=workers, slab_bytes="4KiB") as node,
        contextlib.ExitStack() as stack,
    ):
        stay = stack.enter_context(Trainer(node))
        order = stay.open(parquet, job="lone", seed=5, shuffle=True, global_batch=7)
        alone = stay.batches("lone", epoch=3)
        for dp_size in sizes:
            job = f"of {dp_size}"
            trainers = [stack.enter_context(Trainer(node)) for _ in range(dp_size)]
            for rank, trainer in enumerate(trainers):
                trainer.open(parquet, job=job, dp_rank=rank, dp_size=dp_size, seed=5, shuffle=True, global_batch=7)  # fmt: skip
            found.append([t.batches(job, epoch=3) for t in trainers])
    assert order.sample_count == ROWS
    rows = rows_of(alone)
    assert sorted(rows, key=str) == sorted((expected(i) for i in range(ROWS)), key=str)
    for dp_size, ranks in zip(sizes, found, strict=True):
        position = 0
        for step, whole in enumerate(alone):
            count = len(whole[0])
            parts = [iter(rows_of([rank[step]])) for rank in ranks]
            joined = [next(parts[t % dp_size]) for t in range(position, position + count)]
            assert joined == rows_of([whole])
            position += count


def test_a_stream_from_a_cursor_or_of_some_steps_is_part_of_the_whole(
    tmp_path: Path, parquet: str
) -> None:
    with Node(tmp_path) as node, Trainer(node) as trainer:
        trainer.open(parquet, shuffle=True, seed=1)
        whole = trainer.batches(epoch=1)
        assert trainer.batches(epoch=1, cursor=40) == whole[10:]
        halves = [trainer.batches(epoch=1, first=i, stride=2) for i in (0, 1)]
        assert (halves[0], halves[1]) == (whole[0::2], whole[1::2])
        assert trainer.batches(epoch=1, cursor=ROWS) == []


def test_two_jobs_and_peers_of_one_rank_each_get_all_and_a_dead_one_frees_what_it_held(
    tmp_path: Path, parquet: str
) -> None:
    with (
        Node(tmp_path, slab_bytes="4KiB", delivery_bytes_per_rank="64KiB") as node,
        Trainer(node) as one,
        Trainer(node) as peer,
        Trainer(node) as dead,
    ):
        for trainer, member in ((one, "a"), (peer, "b"), (dead, "c")):
            trainer.open(parquet, member=member)
        one.open(parquet, job="k", seed=1, shuffle=True)
        held = dead.call(messages.OpenStream("j", 0, 0)).stream_id
        for _ in range(3):
            dead.call(messages.NextSlab(held, 0, 0.0))
        first = one.batches()
        dead.close()
        assert peer.batches() == first
        assert sorted(rows_of(one.batches("k")), key=str) == sorted(rows_of(first), key=str)
        assert one.batches() == first


def test_a_job_that_is_opened_again_starts_over(tmp_path: Path, parquet: str) -> None:
    with Node(tmp_path) as node, Trainer(node) as trainer:
        trainer.open(parquet)
        stream = trainer.call(messages.OpenStream("j", 0, 0)).stream_id
        trainer.call(messages.NextSlab(stream, 0, 0.0))
        for _ in range(3):
            trainer.open(parquet)
            with pytest.raises(ConfigError, match="is not open"):
                trainer.call(messages.NextSlab(stream, 0, 0.0))
            assert rows_of(trainer.batches()) == [expected(i) for i in range(ROWS)]


def test_tables_of_many_columns_in_tiny_batches_fit_their_packets(tmp_path: Path) -> None:
    wide = pa.table({f"c{i}": pa.array([[i, j] for j in range(300)]) for i in range(120)})
    pq.write_table(wide, tmp_path / "wide.parquet")
    with Node(tmp_path) as node, Trainer(node) as trainer:
        trainer.open(f"{tmp_path}/wide.parquet", global_batch=1)
        batches = trainer.batches()
    assert [[column[0] for column in batch] for batch in batches] == [
        [[i, j] for i in range(120)] for j in range(300)
    ]


def repetitive(path: Path, rows: int) -> str:
    """Rows of 4,000 bytes, 1,000 a block, in a file that has just one of them."""
    whole = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), [b"x" * 4000])
    pq.write_table(pa.table({"b": whole}), path, row_group_size=1000, store_schema=False)
    return str(path)


def test_a_job_whose_batches_come_from_few_blocks_says_so(tmp_path: Path) -> None:
    url = repetitive(tmp_path / "a.parquet", 80_000)
    poor = {"shuffle": True, "lanes": 1, "window": 1000, "global_batch": 256}
    with Node(tmp_path) as node, Trainer(node) as trainer:
        (said,) = trainer.open(url, **poor).advice
        assert "the samples of a batch come from about 1 of 80 blocks" in said
        assert trainer.open(url, job="k", dp_rank=1, dp_size=2, **poor).advice == ()
        assert trainer.open(url, job="l", **poor | {"shuffle": False}).advice == ()


def test_a_small_arena_over_s3_evicts_and_reloads_without_losing_samples(
    tmp_path: Path, s3_server: S3Server
) -> None:
    bucket = s3_server.bucket()
    for i in range(6):
        sink = pa.BufferOutputStream()
        blob = np.random.default_rng(i).bytes(30 * 1000)
        whole = table(30 * i, 30).append_column(
            "b", pa.array([blob[1000 * j : 1000 * j + 1000] for j in range(30)])
        )
        pq.write_table(whole, sink, row_group_size=10)
        s3_server.put(bucket, {f"d/{i}.parquet": sink.getvalue().to_pybytes()})
    environment = s3_server.environment()
    with (
        Node(tmp_path, block_arena_bytes="224KiB", slab_bytes="16KiB", **environment) as node,
        Trainer(node) as trainer,
    ):
        trainer.open(f"s3://{bucket}/d/", shuffle=True, seed=3, lanes=1, window=30, global_batch=8)
        for epoch in (0, 1):
            rows = rows_of(trainer.batches(epoch=epoch))
            found = sorted((row[:3] for row in rows), key=str)
            assert found == sorted((expected(i) for i in range(180)), key=str)
