"""`dataplane trace`, `where` and `replay` over urls, saved ledgers and live jobs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader, Pack
from small_nodes import alone_and_small
from trusted import TOKEN, TRUSTED

from dataplane.cli import run
from dataplane.commands.datasets import shown
from dataplane.coordinator.front import CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.model.config import PROTOCOL_VERSION, VERSION
from dataplane.model.ledger import Ledger, LedgerPosition
from dataplane.model.records import Topology
from dataplane.rpc.membership import (
    HeartbeatRequest,
    JoinRequest,
    MemberProgress,
    RegisterNodeRequest,
)

SHARDS, ROWS, GROUP, BATCH = 3, 100, 20, 32
SEED = ("--seed", "3", "--lanes", "4", "--window", "16")


@pytest.fixture
def shards(tmp_path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(SHARDS):
        ids = range(shard * ROWS, (shard + 1) * ROWS)
        table = pa.table({"id": pa.array(ids, pa.int64()), "text": [f"text {row}" for row in ids]})
        pq.write_table(table, folder / f"s{shard}.parquet", row_group_size=GROUP)
    return folder


@pytest.fixture
def saved(shards, monkeypatch, tmp_path):
    """The ids of each step of an epoch, and the ledger that the loader saved in its middle."""
    alone_and_small(monkeypatch, tmp_path)
    options = {"shuffle": True, "seed": 3, "lanes": 4, "window": 16}
    with DataLoader(str(shards), BATCH, **options) as loader:
        ids = []
        for step, batch in enumerate(loader):
            ids.append(batch["id"].tolist())
            if step == 3:
                (tmp_path / "ledger.jsonl").write_text(loader.ledger())
    return ids, str(tmp_path / "ledger.jsonl")


def asked(capsys, *arguments: str):
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def id_of(row) -> int:
    return int(row["shard"].removesuffix(".parquet")[-1]) * ROWS + row["row"]


def test_replay_and_trace_tell_what_the_loader_delivered(saved, shards, capsys):
    ids, ledger = saved
    for step, expected in ((0, ids[0]), (len(ids) - 1, ids[-1])):
        traced = asked(capsys, "trace", ledger, "--step", f"{step}")
        assert [id_of(row) for row in traced] == expected
        replayed = asked(capsys, "replay", ledger, "--step", f"{step}")
        assert [row["values"]["id"] for row in replayed] == expected
        assert [row["values"]["text"] for row in replayed] == [f"text {one}" for one in expected]
    of_urls = ("trace", str(shards), "--global-batch", f"{BATCH}", *SEED, "--step", "1")
    assert [id_of(row) for row in asked(capsys, *of_urls)] == ids[1]


def test_a_step_is_counted_over_epochs(saved, capsys):
    _, ledger = saved
    steps = -(-SHARDS * ROWS // BATCH)
    for epoch, step in ((0, 0), (0, steps - 1), (1, 0), (8130, 3)):
        named = asked(capsys, "trace", ledger, "--epoch", f"{epoch}", "--step", f"{step}")
        count = f"{epoch * steps + step}"
        for command in ("trace", "replay"):
            rows = asked(capsys, command, ledger, "--global-step", count)
            assert [row["row"] for row in rows] == [row["row"] for row in named]
    for wrong in (
        [],
        ["--step", "1", "--global-step", "1"],
        ["--global-step", "1", "--epoch", "1"],
    ):
        assert run(["trace", ledger, *wrong]) == 2
        assert "give --step N" in capsys.readouterr().err


def test_replay_shows_what_a_map_made_if_it_may_call_it(shards, tmp_path, monkeypatch, capsys):
    alone_and_small(monkeypatch, tmp_path)
    (tmp_path / "maps_of_steps.py").write_text(
        "def doubled(columns):\n    return {'twice': columns['id'].to_numpy() * 2}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    ledger = str(tmp_path / "mapped.jsonl")
    options = {"shuffle": True, "seed": 3, "map": "maps_of_steps:doubled"}
    with DataLoader(str(shards), BATCH, **options) as loader:
        batch = next(iter(loader))
        Path(ledger).write_text(loader.ledger())
    step = ("replay", ledger, "--step", "0")
    rows = asked(capsys, *step, "--allowed-functions", "maps_of_steps:")
    assert [row["values"] for row in rows] == [{"twice": n} for n in batch["twice"].tolist()]
    assert run([*step, "--json"]) == 0
    said = capsys.readouterr()
    assert [row["values"]["id"] * 2 for row in json.loads(said.out)] == batch["twice"].tolist()
    assert "these are the stored columns" in said.err
    assert "--allowed-functions maps_of_steps:doubled" in said.err
    assert run([*step, "--columns", "id", "--allowed-functions", "maps_of_steps:"]) == 2
    assert "no column ['id']: there are twice" in capsys.readouterr().err


def test_a_rank_gets_its_part_of_the_step(saved, capsys):
    ids, ledger = saved
    for rank in range(3):
        parts = ("--step", "2", "--dp-size", "3", "--dp-rank", f"{rank}")
        found = asked(capsys, "trace", ledger, *parts)
        start = (rank - 2 * BATCH) % 3
        assert [id_of(row) for row in found] == ids[2][start::3]
    assert run(["trace", ledger, "--step", "2", "--dp-rank", "1"]) == 2
    assert "ranks run from 0 to 0" in capsys.readouterr().err


def test_where_tells_the_steps_of_a_row_and_whether_it_was_seen(saved, capsys):
    ids, ledger = saved
    for sample, shard in ((5, "s0.parquet"), (137, "1"), (299, "shards/s2.parquet")):
        found = asked(capsys, "where", ledger, "--row", f"{shard}:{sample % ROWS}")
        (step,) = [step for step, batch in enumerate(ids) if sample in batch]
        assert [one["epoch"] for one in found] == [0, 1]
        assert (found[0]["step"], found[0]["seen"]) == (step, step < 4)
        assert not found[1]["seen"]
        next_step = asked(capsys, "trace", ledger, "--epoch", "1", "--step", f"{found[1]['step']}")
        assert sample in [id_of(row) for row in next_step]
    some = asked(capsys, "where", ledger, "--row", "0:5", "--epochs", "3:5")
    assert [one["epoch"] for one in some] == [3, 4]
    for wrong, why in (
        (("--row", "5"), "SHARD:ROW"),
        (("--row", "0:100"), "has no row 100: it has 100"),
        (("--row", "0:1", "--epochs", "2:2"), "FIRST:STOP"),
    ):
        assert run(["where", ledger, *wrong]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("view", "options"),
    [
        ({"where": "id % 3 != 0", "sample": 0.8},
         ("--where", "id % 3 != 0", "--sample", "0.8")),
        ({"split": ("train", 0.7), "limit": 150}, ("--split", "train:0.7", "--limit", "150")),
        ({"limit": 170}, ("--limit", "170")),
    ],
)  # fmt: skip
def test_the_rows_of_a_view_are_traced_and_found(
    shards, capsys, monkeypatch, tmp_path, view, options
):
    alone_and_small(monkeypatch, tmp_path)
    job = {"shuffle": True, "seed": 3, "lanes": 4, "window": 16}
    with DataLoader(str(shards), BATCH, **job, **view) as loader:
        ids = [batch["id"].tolist() for batch in loader]
        (tmp_path / "ledger.jsonl").write_text(loader.ledger())
    ledger, urls = str(tmp_path / "ledger.jsonl"), (str(shards), "--global-batch", f"{BATCH}")
    for target in ((ledger,), (*urls, *SEED, *options)):
        traced = asked(capsys, "trace", *target, "--step", "1", "--epoch", "0")
        assert [id_of(row) for row in traced] == ids[1]
    replayed = asked(capsys, "replay", ledger, "--step", "2", "--epoch", "0")
    assert [row["values"]["id"] for row in replayed] == ids[2]
    assert [id_of({"shard": row["shard"], "row": row["row"]}) for row in replayed] == ids[2]
    sample = ids[1][7]
    row = f"s{sample // ROWS}.parquet:{sample % ROWS}"
    found = asked(capsys, "where", ledger, "--row", row, "--epochs", "0:1")
    assert [one["step"] for one in found] == [1]
    left = {one for batch in ids for one in batch}
    (other, *_) = [one for one in range(SHARDS * ROWS) if one not in left]
    assert run(["where", ledger, "--row", f"{other // ROWS}:{other % ROWS}"]) == 2
    assert "is not in the view" in capsys.readouterr().err


def test_replay_writes_an_arrow_file_of_the_columns_asked_for(saved, capsys, tmp_path):
    ids, ledger = saved
    out = tmp_path / "step.arrow"
    assert run(["replay", ledger, "--step", "4", "--columns", "id", "--out", str(out)]) == 0
    assert "32 rows" in capsys.readouterr().out
    with pa.ipc.open_file(out) as reader:
        table = reader.read_all()
    assert table["id"].to_pylist() == ids[4]
    assert table["dataplane.position"].to_pylist() == list(range(4 * BATCH, 5 * BATCH))
    assert run(["replay", ledger, "--step", "4", "--columns", "nothing"]) == 2
    assert "there are id, text" in capsys.readouterr().err


def test_rows_that_arrow_cannot_take_are_replayed(tmp_path, capsys):
    texts = pa.array(["a", None, "ccc"])
    columns = {
        "view": texts.cast(pa.string_view()),
        "views": pa.array([["a"], None, ["b", "c"]], pa.list_(pa.binary_view())),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), texts[:2]),
        "union": pa.UnionArray.from_sparse(
            pa.array([0, 1, 0], pa.int8()), [texts, pa.array([0, 1, 2])]
        ),
        "known": texts.dictionary_encode(),
    }
    path = str(tmp_path / "s0.arrow")
    table = pa.table({"id": range(3), **columns})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, 2)
    step = ("replay", path, "--global-batch", "3", "--seed", "1", "--step", "0")
    found = asked(capsys, *step)
    assert sorted(row["row"] for row in found) == [0, 1, 2]
    for name, column in columns.items():
        stored = shown(column)
        assert [row["values"][name] for row in found] == [
            json.loads(json.dumps(stored[row["row"]], default=str)) for row in found
        ], name
    out = tmp_path / "out.arrow"
    assert run([*step, "--columns", "id,view,id", "--out", str(out)]) == 0
    with pa.ipc.open_file(out) as written:
        assert written.read_all().column_names[-2:] == ["id", "view"]


def test_replay_reads_only_the_blocks_of_the_step(saved, shards, capsys):
    _, ledger = saved
    rows = asked(capsys, "trace", ledger, "--step", "9")
    needed = {(row["shard"][-len("s0.parquet") :], row["row"] // GROUP) for row in rows}
    spared = {(f"s{s}.parquet", b) for s in range(SHARDS) for b in range(ROWS // GROUP)} - needed
    for name, block in spared:
        path = shards / name
        state, content = path.stat(), bytearray(path.read_bytes())
        group = pq.ParquetFile(path).metadata.row_group(block)
        start = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
        content[start : start + group.total_byte_size // 2] = bytes(group.total_byte_size // 2)
        path.write_bytes(content)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert spared
    replayed = asked(capsys, "replay", ledger, "--step", "9")
    assert [row["values"]["id"] for row in replayed] == [id_of(row) for row in rows]


def test_a_copy_of_the_dataset_serves_if_its_user_says_so(saved, shards, capsys, tmp_path):
    ids, ledger = saved
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in sorted(shards.iterdir()):
        (copy / path.name).write_bytes(path.read_bytes())
    here = ("trace", ledger, "--step", "1", "--data", str(copy))
    assert run([*here]) == 1
    assert "--dataset-moved" in capsys.readouterr().err
    assert [id_of(row) for row in asked(capsys, *here, "--dataset-moved")] == ids[1]
    (copy / "s2.parquet").unlink()
    assert run([*here, "--dataset-moved"]) == 1
    assert "is not the dataset" in capsys.readouterr().err


def test_what_names_no_job_is_refused(saved, shards, capsys, tmp_path):
    _, ledger = saved
    (tmp_path / "damaged").write_text('{"ledger":1}')
    (tmp_path / "newer").write_text('{"ledger":9}')
    for arguments, why in (
        ((str(shards),), "--global-batch is needed for urls"),
        ((str(shards), "--global-batch", "32"), "epoch 0 has 10 steps, counted from 0"),
        ((ledger, "--seed", "4"), "--seed is for urls"),
        (("one", "two"), "the urls of one dataset, a ledger, or a job"),
        ((str(tmp_path / "damaged"),), "is not a ledger, or damaged"),
        ((str(tmp_path / "newer"),), "ledger of version 9"),
        (("gone.jsonl",), "there is no file gone.jsonl"),
    ):
        assert run(["trace", *arguments, "--step", "10"]) == 2
        assert why in capsys.readouterr().err


@contextmanager
def live(ledger: Ledger, dp_size: int):
    """A coordinator, in a thread, with this job in it; its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def done(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    server = CoordinatorServer(CoordinatorConfig(VERSION), "127.0.0.1:0", TRUSTED)
    try:
        address = done(server.start())
        node = RegisterNodeRequest("node-1", "host-1", 17, VERSION, PROTOCOL_VERSION)
        done(server.coordinator.register_node(node))
        place = Topology(dp_size=dp_size, world_size=dp_size)
        joined = done(
            server.coordinator.join(
                JoinRequest("pretrain-7", "urls", ledger.spec, place, "one", "m", "node-1",
                            ledger.sample_count, urls=ledger.urls)
            )
        )  # fmt: skip
        began = LedgerPosition(2, 32)
        progress = MemberProgress("pretrain-7", "m", joined.generation, 2, 64, began=began)
        done(server.coordinator.heartbeat(HeartbeatRequest(node, (progress,))))
        yield address
    finally:
        done(server.stop(0.0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_live_job_is_named_at_its_coordinator(saved, capsys, monkeypatch, tmp_path):
    ids, ledger = saved
    monkeypatch.setenv("DATAPLANE_TOKEN", TOKEN)
    known = Ledger.from_lines(Path(ledger).read_text(), ledger)
    with live(known, 4) as address:
        job = ("pretrain-7", "--join", address)
        found = asked(capsys, "trace", *job, "--epoch", "0", "--step", "1")
        assert [id_of(row) for row in found] == ids[1]
        assert [row["dp_rank"] for row in found] == [at % 4 for at in range(BATCH)]
        seen = asked(capsys, "where", *job, "--row", "0:5")
        assert [one["epoch"] for one in seen] == [0, 1, 2, 3]
        assert [one["seen"] for one in seen[:2]] == [True, True]
        assert run(["trace", "pretrain-8", "--step", "1", "--join", address]) == 2
        assert "no job is called 'pretrain-8'" in capsys.readouterr().err
        text = exported(capsys, "pretrain-7", address)
    (tmp_path / "exported.jsonl").write_text(text)
    path = str(tmp_path / "exported.jsonl")
    assert [
        id_of(row) for row in asked(capsys, "trace", path, "--epoch", "0", "--step", "1")
    ] == ids[1]
    (start,) = asked(capsys, "ledger", "show", path)
    assert (start["kind"], start["position"]) == ("start", {"cursor": 32, "epoch": 2})
    assert asked(capsys, "ledger", "verify", path)["ok"]
    assert run(["ledger", "show", path]) == 0
    assert "dp_size=4" in capsys.readouterr().out
    (tmp_path / "exported.jsonl").write_text(text.replace('"dp_size":4,"gen', '"dp_size":8,"gen'))
    assert run(["ledger", "verify", path]) == 1
    assert "DAMAGED: 1 entry" in capsys.readouterr().out


def exported(capsys, job: str, address: str) -> str:
    assert run(["ledger", "export", job, "--join", address]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("policy", "size", "length"),
    [("best_fit", 4, 32), ("pad", None, 32), ("wrap", 4, 8)],  # the last: more packs than rows
)
def test_a_step_of_packs_shows_their_documents(tmp_path, monkeypatch, capsys, policy, size, length):
    alone_and_small(monkeypatch, tmp_path)
    rows = [[number] * (1 + number % 23) for number in range(200)]
    for shard in range(2):
        some = rows[shard * 100 : (shard + 1) * 100]
        table = pa.table({"tokens": some, "even": [row[0] % 2 == 0 for row in some]})
        pq.write_table(table, tmp_path / f"{shard}.parquet", row_group_size=30)
    options = {"shuffle": True, "seed": 3, "window": 16, "where": "even"}
    if policy == "pad":
        options["balance"] = "cost"
    pack, batch_size = Pack("tokens", length, policy, outputs=[], pad_value=-1), size or 1
    with DataLoader(str(tmp_path / "*.parquet"), size, pack=pack, **options) as loader:
        steps = [batch["tokens"].reshape(batch_size, -1).tolist() for batch in loader]
        (tmp_path / "ledger.jsonl").write_text(loader.ledger())
    ledger = str(tmp_path / "ledger.jsonl")
    for step, tokens in enumerate(steps[:3]):
        found = asked(capsys, "trace", ledger, "--epoch", "0", "--step", f"{step}")
        made = [[-1] * len(tokens[0]) for _ in tokens]
        for one in found:
            number = int(one["shard"].removesuffix(".parquet")[-1]) * 100 + one["row"]
            begin, end = one["first_token"], one["first_token"] + one["tokens"]
            pack_of = made[one["position"] - batch_size * step]
            pack_of[one["place"] : one["place"] + one["tokens"]] = rows[number][begin:end]
        assert made == tokens
        replayed = asked(capsys, "replay", ledger, "--epoch", "0", "--step", f"{step}")
        assert {one.pop("instead_of") for one in found} == {None}
        places = [{name: one[name] for name in found[0]} for one in replayed]
        assert places == found
        for one in replayed:
            (values,) = one["values"].values()
            pack_of = tokens[one["position"] - batch_size * step]
            assert pack_of[one["place"] : one["place"] + one["tokens"]] == values
    out = str(tmp_path / "step.arrow")
    step_0 = ["replay", ledger, "--epoch", "0", "--step", "0"]
    assert run([*step_0, "--columns", "even,tokens", "--out", out]) == 0
    table = pa.ipc.open_file(out).read_all()
    assert table.column_names[-2:] == ["even", "tokens"]
    assert all(table["even"].to_pylist())
    lengths = [len(each) for each in table["tokens"].to_pylist()]
    assert lengths == table["dataplane.tokens"].to_pylist() != []
    assert run([*step_0, "--columns", "odd"]) == 2
    assert "no column ['odd']: there are tokens, even" in capsys.readouterr().err
    for shard, row in ((0, 44), (1, 2), (1, 0)):
        for one in asked(capsys, "where", ledger, "--row", f"{shard}:{row}", "--epochs", "0:1"):
            pack_of = steps[one["step"]][one["position"] - batch_size * one["step"]]
            tokens = rows[100 * shard + row][one["first_token"] :][: one["tokens"]]
            assert tokens
            assert pack_of[one["place"] : one["place"] + one["tokens"]] == tokens
            assert one["seen"]
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "another"))
    assert run(["trace", ledger, "--step", "0"]) == 2
    assert f"--pack tokens,length={length}" in capsys.readouterr().err
