"""Loaders over real nodes: embedded ones, shared by the ranks of a host."""

from __future__ import annotations

import decimal
import itertools
import json
import os
import signal
import sys
import threading
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_torch import DataLoader, Ragged, ShardedIterableDataset, Stack, bound_of
from fleet import own_nodes
from warm import WarmPython

from dataplane.model.errors import BudgetTooSmall, ConfigError, SpecMismatch

COUNT = 700
# On a machine with fewer processors than workers.
pytestmark = [
    pytest.mark.usefixtures("shared_node"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Three Parquet shards of every kind of column."""
    folder = tmp_path / "shards"
    folder.mkdir()
    table = table_of(range(COUNT))
    for i, start in enumerate(range(0, COUNT, 250)):
        pq.write_table(table.slice(start, 250), folder / f"{i}.parquet", row_group_size=60)
    return str(folder)


def table_of(numbers: range) -> pa.Table:
    rows = list(numbers)
    return pa.table(
        {
            "i": pa.array(rows, pa.int64()),
            "tokens": pa.array([[k] * 32 for k in rows], pa.list_(pa.int32(), 32)),
            "maybe": pa.array([None if k % 5 == 0 else k / 2 for k in rows], pa.float32()),
            "odd": pa.array([k % 2 == 1 for k in rows]),
            "text": pa.array([None if k % 9 == 0 else f"row {k}" for k in rows]),
            "some": pa.array([list(range(k % 4)) for k in rows], pa.list_(pa.int16())),
            "price": pa.array([decimal.Decimal(k) / 4 for k in rows]),
            "meta": pa.array([{"a": k, "b": {"c": b"x" * (k % 3)}} for k in rows]),
        }
    )


@pytest.mark.parametrize("lists", ["padded", "ragged"])
def test_every_kind_of_column_arrives_as_it_was_written(shards, lists) -> None:
    want = table_of(range(COUNT)).to_pydict()
    with DataLoader(shards, batch_size=48, lists=lists) as loader:
        batches = list(loader)
    assert [len(batch["i"]) for batch in batches] == [48] * 14 + [28]
    assert torch.cat([batch["i"] for batch in batches]).tolist() == want["i"]
    assert torch.cat([batch["tokens"] for batch in batches]).tolist() == want["tokens"]
    maybe = torch.cat([batch["maybe"] for batch in batches])
    assert [None if v != v else v for v in maybe.tolist()] == want["maybe"]
    assert torch.cat([batch["odd"] for batch in batches]).tolist() == want["odd"]
    assert [v for batch in batches for v in batch["text"]] == want["text"]
    assert [v for batch in batches for v in batch["price"]] == want["price"]
    assert torch.cat([batch["meta.a"] for batch in batches]).tolist() == list(range(COUNT))
    assert [v for batch in batches for v in batch["meta.b.c"]] == [
        b"x" * (k % 3) for k in range(COUNT)
    ]
    assert [v for batch in batches for v in lists_of(batch["some"], batch)] == want["some"]


def lists_of(found, batch) -> list[list[int]]:
    if isinstance(found, Ragged):
        ends = found.offsets.tolist()
        return [found.values[a:b].tolist() for a, b in itertools.pairwise(ends)]
    lengths = batch["some.length"].tolist()
    return [row[:length].tolist() for row, length in zip(found, lengths, strict=True)]


def test_shuffled_batches_are_the_same_for_torchs_workers_and_after_a_resume(shards) -> None:
    order = {"shuffle": True, "seed": 5, "columns": ["i", "text"]}
    with DataLoader(shards, 16, **order) as loader:
        iterator, whole, states = iter(loader), [], []
        for batch in iterator:
            whole.append((batch["i"].tolist(), batch["text"]))
            states.append(loader.state_dict())
        loader.load_state_dict(states[20])
        assert [(b["i"].tolist(), b["text"]) for b in loader] == whole[21:]
    assert sorted(k for batch, _ in whole for k in batch) == list(range(COUNT))
    dataset = ShardedIterableDataset(shards, 16, **order)
    torchs = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    assert [(b["i"].tolist(), b["text"]) for b in torchs] == whole
    dataset.close()


@pytest.mark.usefixtures("own_node")
def test_a_killed_node_costs_no_batch(shards) -> None:
    others = set(own_nodes())
    with DataLoader(shards, 16, shuffle=True, columns=["i"]) as loader:
        want = [batch["i"].tolist() for batch in loader]
        loader.set_epoch(0)
        held, seen = [], []
        for step, batch in enumerate(loader):
            held.append(batch)
            seen.append(batch["i"].tolist())
            if step in (3, 20):
                (node,) = set(own_nodes()) - others
                os.kill(node.pid, signal.SIGKILL)
        assert seen == want
        assert [batch["i"].tolist() for batch in held] == want


RANK = """
import json, os, sys
import dataplane_torch
loader = dataplane_torch.DataLoader(
    sys.argv[1], global_batch_size=12, shuffle=True, seed=3, columns=["i"], end="drop"
)
state = json.loads(sys.argv[2])
if state:
    loader.load_state_dict(state)
steps = []
for batch in loader:
    steps.append(batch["i"].tolist())
node = loader._shards._session.mount().node_id
print(json.dumps({"steps": steps, "state": loader.state_dict(), "node": node}), flush=True)
sys.stdin.read()
"""


def launch(python: WarmPython, script: Path, shards: str, size: int, state: dict) -> list[dict]:
    """So many ranks of one launch of a run."""
    script.write_text(RANK)
    launched = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": script.name,
    }  # fmt: skip
    ranks = [
        python.run(
            [str(script), shards, json.dumps(state)],
            {**os.environ, **launched, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            sys.stderr.fileno(),
        )
        for rank in range(size)
    ]
    # No rank ends before all have read: a node ends with its last rank, and a late rank would
    # start another.
    told = [rank.stdout.readline() for rank in ranks]
    for rank in ranks:
        rank.stdin.close()
        rank.stdout.close()
        assert rank.wait(60) == 0
    found = [json.loads(line) for line in told]
    assert len({one["node"] for one in found}) == 1
    assert all(one["state"] == found[0]["state"] for one in found)
    return found


def test_two_ranks_share_a_node_and_go_on_where_one_stopped(shards, tmp_path, warm_torch) -> None:
    order = {"shuffle": True, "seed": 3, "columns": ["i"], "drop_last": True}
    with DataLoader(shards, 12, **order) as loader:
        steps, states = [], []
        for batch in loader:
            steps.append(sorted(batch["i"].tolist()))
            states.append(loader.state_dict())
        ended = loader.state_dict()
    found = launch(warm_torch, tmp_path / "rank.py", shards, 2, states[19])
    parts = zip(*(one["steps"] for one in found), strict=True)
    assert [sorted(k for part in step for k in part) for step in parts] == steps[20:]
    assert found[0]["state"] == ended
    assert {**ended, "digest": None} == {**states[0], "epoch": 1, "cursor": 0, "digest": None}


def test_threads_that_share_an_iterator_get_each_batch_once(shards) -> None:
    with DataLoader(shards, 16, shuffle=True, columns=["i"]) as loader:
        iterator, found = iter(loader), []

        def take() -> None:
            found.extend(batch["i"].tolist() for batch in iterator)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(i for batch in found for i in batch) == list(range(COUNT))


def test_a_batch_size_far_above_the_dataset_takes_no_more_than_the_dataset(shards) -> None:
    with DataLoader(shards, 2**31 - 1, columns=["i"]) as loader:
        assert [batch["i"].tolist() for batch in loader] == [list(range(COUNT))]
    with (
        pytest.raises(BudgetTooSmall, match=r"make the batch.*DATAPLANE_DELIVERY_BYTES_PER_RANK="),
        DataLoader(shards, 2**31 - 1, columns=["i"], end="pad") as loader,
    ):
        next(iter(loader))


def test_statistics_split_the_time_of_the_loop(shards) -> None:
    with DataLoader(shards, batch_size=16, shuffle=True) as loader:
        assert loader.statistics().samples == 0
        batches = sum(1 for _ in loader)
        first = loader.statistics()
        assert (first.batches, first.samples) == (batches, COUNT)
        assert first.worker_count == 1
        assert first.assembling_s > 0
        assert first.decoding_s > 0  # Parquet
        assert first.read_bytes == 0  # local files are mapped
        assert sum(1 for _ in loader) == batches
        assert loader.statistics().since(first).samples == COUNT
    bound = bound_of(loader.statistics())
    assert bound is not None
    assert bound.samples_per_s > 0


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
def test_stacked_columns_come_as_one_tensor_in_the_order_given(tmp_path, form) -> None:
    rows = np.arange(900)
    columns = {f"f{i}": (rows * (i + 1)).astype(np.float32) for i in range(5)}
    table = pa.table({"i": rows, **columns, "maybe": [k if k % 3 else None for k in rows.tolist()]})
    path = str(tmp_path / f"a.{form}")
    if form == "parquet":
        pq.write_table(table, path, row_group_size=100)
    elif form == "jsonl":
        Path(path).write_text("\n".join(map(json.dumps, table.to_pylist())))
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    order = ["f3", "f0", "f4"]
    stack = {"x": order, "all": Stack(["maybe", "f1"], dtype="float64")}
    how = {"shuffle": True, "seed": 3, "fill_null": {"maybe": 7}}
    with DataLoader(path, 64, **how) as plain, DataLoader(path, 64, stack=stack, **how) as loader:
        for apart, batch in zip(plain, loader, strict=True):
            assert list(batch) == ["i", "f2", "all", "x"]
            assert batch["x"].is_contiguous()
            assert torch.equal(batch["i"], apart["i"])
            assert torch.equal(batch["x"], torch.stack([apart[name] for name in order], 1))
            both = torch.stack([apart["maybe"].double(), apart["f1"].double()], 1)
            assert torch.equal(batch["all"], both)
        with pytest.raises(SpecMismatch, match="stack"):
            loader.load_state_dict(plain.state_dict())
    wrong = DataLoader(path, 64, stack={"x": ["i", "f0"]})
    with wrong, pytest.raises(ConfigError, match="dtype"):
        len(wrong)


REOPENING = """
import sys
import threading
from dataplane_torch import DataLoader


def read(rank):
    for turn in range(6):
        batch = 16 if turn % 2 else 8
        place = {"name": "reopened", "dp_rank": rank, "dp_size": 2}
        loader = DataLoader(sys.argv[1], global_batch_size=batch, columns=["i"], **place)
        held = next(iter(loader))["i"]  # until the next loader has its first batch
        assert len(held) == batch / 2
        if turn == 0:  # a rank that never was in the job does not reopen it
            print("joined", flush=True)
            have_joined.wait()
        loader.close()
        seen.append(turn)


seen, have_joined = [], threading.Event()
readers = [threading.Thread(target=read, args=(int(rank),)) for rank in sys.argv[2:]]
for reader in readers:
    reader.start()
sys.stdin.readline()
have_joined.set()
for reader in readers:
    reader.join()
sys.exit(len(seen) != 6 * len(readers))
"""


@pytest.mark.parametrize("ranks", [("01",), ("0", "1")], ids=["threads", "processes"])
def test_ranks_reopen_a_job_with_another_batch_while_they_hold_one_of_the_old(
    shards: str, tmp_path: Path, warm_torch: WarmPython, ranks: tuple[str, ...]
) -> None:
    script = tmp_path / "reopening.py"
    script.write_text(REOPENING)
    environ = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": uuid.uuid4().hex}
    runs = [
        warm_torch.run([str(script), shards, *of_one], environ, sys.stderr.fileno())
        for of_one in ranks
    ]
    try:
        for run, of_one in zip(runs, ranks, strict=True):
            assert [run.stdout.readline() for _ in of_one] == ["joined\n"] * len(of_one)
        for run in runs:
            run.stdin.write("\n")
            run.stdin.flush()
        assert [run.wait(300) for run in runs] == [0] * len(runs)
    finally:
        for run in runs:
            run.kill()
            run.wait()
            run.stdin.close()
            run.stdout.close()


def test_a_replayed_slab_takes_every_step_of_an_epoch_and_leaves_no_state(shards: str) -> None:
    with DataLoader(shards, 64, shuffle=True) as real:
        first = next(iter(real))["i"].tolist()
        steps, state = len(real), real.state_dict()
    with DataLoader(shards, 64, shuffle=True, name="replay", replay_first_slab=True) as loader:
        replayed = 0
        for epoch in range(2):
            with pytest.warns(UserWarning, match="no real epoch"):
                batches = [batch["i"].tolist() for batch in loader]
            in_slab = len(set(map(tuple, batches)))
            assert 0 < in_slab < steps
            assert batches == (batches[:in_slab] * steps)[:steps]
            replayed += steps - in_slab
            assert (batches[0] == first) == (epoch == 0)
        counts = loader.statistics()
        assert (counts.batches, counts.replayed_batches) == (2 * steps, replayed)
        assert counts.scalars()["dataplane/replayed_batches"] == replayed
        of_replay = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)  # the first batch is that of another place, then
        with pytest.warns(UserWarning, match="no real epoch"):
            assert next(iter(loader))["i"].tolist() not in (first, batches[0])
        with pytest.raises(ConfigError, match="no record of what it read"):
            loader.ledger()
    with (
        DataLoader(shards, 64, shuffle=True) as real,
        pytest.raises(ConfigError, match="resume from a state of a run without it"),
    ):
        real.load_state_dict(of_replay)
    with pytest.raises(ConfigError, match=r"an option of dataplane_torch\.DataLoader: use that"):
        ShardedIterableDataset(shards, 64, replay_first_slab=True)
