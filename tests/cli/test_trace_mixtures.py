"""`dataplane trace`, `where` and `replay` of jobs that mix several datasets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader, Mixture, Pack, Source
from small_nodes import alone_and_small

from dataplane.cli import run

COUNTS = {"web": 90, "code": 41}
FIRST = {"web": 0, "code": 1000}
BATCH = 12
OPTIONS = {"shuffle": True, "seed": 3, "lanes": 2, "window": 16}


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch, tmp_path):
    alone_and_small(monkeypatch, tmp_path)


def written(folder: Path) -> Mixture:
    """`code` is read about three times in an epoch."""
    for name, count in COUNTS.items():
        ids = range(FIRST[name], FIRST[name] + count)
        rows = [[one] * (1 + one % 23) for one in ids]
        table = pa.table({"id": pa.array(ids, pa.int64()), "tokens": rows})
        (folder / name).mkdir()
        pq.write_table(table.slice(0, 30), folder / name / "0.parquet", row_group_size=10)
        pq.write_table(table.slice(30), folder / name / "1.parquet", row_group_size=10)
    return Mixture({name: Source(folder / name, weight=0.5) for name in COUNTS}, exhausted="cycle")


def asked(capsys, *arguments: str):
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def id_of(row) -> int:
    return FIRST[row["source"]] + 30 * int(Path(row["shard"]).stem) + row["row"]


def test_the_rows_of_a_mixture_are_traced_found_and_replayed(tmp_path, capsys):
    mixture, ledger = written(tmp_path), str(tmp_path / "ledger.jsonl")
    options = {**OPTIONS, "columns": ["id"], "end": "pad"}
    with DataLoader(mixture, BATCH, **options) as loader:
        steps = []
        for batch in loader:
            steps.append(batch["id"].tolist())
            if len(steps) == 5:
                Path(ledger).write_text(loader.ledger())
    for step in (0, 4, len(steps) - 1):
        found = asked(capsys, "trace", ledger, "--step", f"{step}")
        assert [id_of(row) for row in found] == steps[step]
        replayed = asked(capsys, "replay", ledger, "--step", f"{step}")
        assert [row["values"] for row in replayed] == [{"id": one} for one in steps[step]]
        assert [id_of(row) for row in replayed] == steps[step]
    mine = asked(capsys, "trace", ledger, "--step", "2", "--dp-size", "3", "--dp-rank", "1")
    assert [id_of(row) for row in mine] == steps[2][1::3]
    places = [
        (one, step, 12 * step + at) for step, ids in enumerate(steps) for at, one in enumerate(ids)
    ]
    seen = Counter(one for one, _, _ in places)
    assert max(seen.values()) > 2
    for sample in (0, 29, 1000, max(seen, key=seen.__getitem__), places[-1][0]):
        name = "code" if sample >= 1000 else "web"
        shard, row = divmod(sample - FIRST[name], 30)
        row, shard = row + 30 * max(shard - 1, 0), min(shard, 1)
        named = ("--source", name, "--row", f"{shard}:{row}", "--epochs", "0:1")
        found = asked(capsys, "where", ledger, *named)
        assert sorted((one["step"], one["position"]) for one in found) == [
            place[1:] for place in places if place[0] == sample
        ]
        assert all(one["seen"] == (one["step"] < 5) for one in found)
    assert run(["replay", ledger, "--step", "1", "--out", str(tmp_path / "one.arrow")]) == 0
    table = pa.ipc.open_file(tmp_path / "one.arrow").read_all()
    assert set(table["dataplane.source"].to_pylist()) == set(COUNTS)
    assert table["id"].to_pylist() == steps[1]
    capsys.readouterr()
    assert run(["trace", ledger, "--step", "1"]) == 0
    assert "source" in capsys.readouterr().out


def test_rows_are_traced_where_weights_were_set(tmp_path, capsys):
    written(tmp_path)
    sources = {name: Source(tmp_path / name, weight=0.5) for name in COUNTS}
    mixture, ledger = Mixture(sources, exhausted="cycle", length=1200), tmp_path / "ledger.jsonl"
    with DataLoader(mixture, BATCH, **{**OPTIONS, "lanes": 1}, columns=["id"]) as loader:
        steps = []
        for batch in loader:
            steps.append(batch["id"].tolist())
            if len(steps) == 3:
                at = loader.set_weights({"web": 0.9, "code": 0.1})
        ledger.write_text(loader.ledger())
    assert 3 <= at.step < len(steps)
    for step in (2, at.step, len(steps) - 1):
        found = asked(capsys, "trace", str(ledger), "--epoch", "0", "--step", f"{step}")
        assert [id_of(row) for row in found] == steps[step]


def test_what_names_no_row_of_a_mixture_is_refused(tmp_path, capsys):
    mixture, ledger = written(tmp_path), tmp_path / "ledger.jsonl"
    with DataLoader(mixture, BATCH, **OPTIONS) as loader:
        ledger.write_text(loader.ledger())
    never = ("--source", "web", "--row", "1:40", "--epochs", "0:1")
    short = Mixture(mixture.sources, exhausted="cycle", length=4)
    with DataLoader(short, BATCH, **OPTIONS) as loader:
        (tmp_path / "short.jsonl").write_text(loader.ledger())
    assert run(["where", str(tmp_path / "short.jsonl"), *never]) == 0
    assert "is in no step of epochs 0 to 0" in " ".join(capsys.readouterr().out.split())
    for arguments, why in (
        (("where", "--row", "0:1"), "its sources are web, code"),
        (("where", "--row", "0:1", "--source", "math"), "no source 'math'"),
        (("trace", "--step", "0", "--data", str(tmp_path / "web")), "give NAME=URL"),
        (("trace", "--step", "0", "--data", f"web={tmp_path}/code"), "web may have other shards"),
    ):
        command, *more = arguments
        assert run([command, str(ledger), *more]) != 0
        assert why in " ".join(capsys.readouterr().err.split())
    first, *others = ledger.read_text().splitlines()
    unknown = json.dumps({**json.loads(first), "sources": []})
    ledger.write_text("\n".join([unknown, *others]) + "\n")
    assert run(["trace", str(ledger), "--step", "0"]) == 2
    assert "--data web=URL" in " ".join(capsys.readouterr().err.split())
    places = [f"--data={name}={tmp_path / name}" for name in COUNTS]
    assert len(asked(capsys, "trace", str(ledger), "--step", "0", *places)) == BATCH


def test_the_documents_of_packs_of_a_mixture_are_traced_and_found(tmp_path, capsys):
    mixture, ledger = written(tmp_path), str(tmp_path / "ledger.jsonl")
    pack = Pack("tokens", 32, outputs=[], pad_value=-1)
    with DataLoader(mixture, 4, pack=pack, **OPTIONS) as loader:
        steps = [batch["tokens"].tolist() for batch in loader]
        Path(ledger).write_text(loader.ledger())
    for step, tokens in enumerate(steps[:6]):
        made = [[-1] * 32 for _ in tokens]
        for one in asked(capsys, "trace", ledger, "--epoch", "0", "--step", f"{step}"):
            number = id_of(one)
            pack_of = made[one["position"] - 4 * step]
            pack_of[one["place"] : one["place"] + one["tokens"]] = [number] * one["tokens"]
        assert made == tokens
    for sample in (7, 1000, 1022):
        name = "code" if sample >= 1000 else "web"
        row = f"{(sample - FIRST[name]) // 30}:{(sample - FIRST[name]) % 30}"
        found = asked(capsys, "where", ledger, "--source", name, "--row", row, "--epochs", "0:1")
        counted = Counter()
        for one in found:
            pack_of = steps[one["step"]][one["position"] - 4 * one["step"]]
            assert pack_of[one["place"] :][: one["tokens"]] == [sample] * one["tokens"]
            counted[one["position"]] += one["tokens"]
        flat = [pack for tokens in steps for pack in tokens]
        expected = {at: pack.count(sample) for at, pack in enumerate(flat) if sample in pack}
        assert dict(counted) == expected
        assert expected


def test_documents_are_found_in_packs_over_a_map_that_the_command_line_allows(
    tmp_path, capsys, monkeypatch
):
    ledger = str(tmp_path / "ledger.jsonl")
    texts = [chr(0x100 + number) * (1 + number % 23) for number in range(90)]
    (tmp_path / "a").mkdir()
    pq.write_table(pa.table({"row": range(90), "txt": texts}), tmp_path / "a" / "0.parquet")
    mixture = Mixture({"a": Source(tmp_path / "a", weight=1, where="row % 2 == 1")})
    options = {**OPTIONS, "map": "user_functions:letters"}
    with DataLoader(mixture, 4, pack=Pack("ids", 32, outputs=[]), **options) as loader:
        steps = [batch["ids"].tolist() for batch in loader]
        Path(ledger).write_text(loader.ledger())
    named = ("where", ledger, "--source", "a", "--row", "0:45", "--epochs", "0:1")
    assert run([*named]) == 2
    assert "--allowed-functions user_functions:letters" in " ".join(capsys.readouterr().err.split())
    found = asked(capsys, *named, "--allowed-functions", "user_functions:")
    assert sum(one["tokens"] for one in found) == len(texts[45])
    for one in found:
        pack_of = steps[one["step"]][one["position"] - 4 * one["step"]]
        assert pack_of[one["place"] :][: one["tokens"]] == [0x100 + 45] * one["tokens"]
    # Another machine needs a manifest that knows the packs.
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "another"))
    named = (*named, "--allowed-functions", "user_functions:")
    assert run([*named]) == 2
    needed = "--map user_functions:letters --pack ids,length=32"
    assert needed in " ".join(capsys.readouterr().err.split())
    target = str(tmp_path / "a.manifest")
    index = ("index", str(tmp_path / "a"), "--where", "row % 2 == 1", *needed.split())
    assert run([*index, "-o", target]) == 0
    capsys.readouterr()
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "a third"))
    assert asked(capsys, *named, "--data", f"a={target}") == found
    with DataLoader(target, 4, pack=Pack("ids", 32, outputs=[]), where="row % 2 == 1",
                    map="user_functions:letters") as loader:  # fmt: skip
        assert len(list(loader)) == len(loader)
    assert not (tmp_path / "a third" / "packs").exists()
    # How many there are, and how often each source is read, is known before any run.
    ways = ("--global-batch", "4", *needed.split(), "--seed", "3")
    alone = asked(capsys, "plan", target, "--where", "row % 2 == 1", *ways)
    source = f"a={tmp_path}/a,weight=1,where=row % 2 == 1"
    mixed = asked(capsys, "plan", "--source", source, *ways)
    assert alone["step_count"] == mixed["step_count"] == len(steps)
    assert [one["passes"] for one in mixed["sources"]] == [1]
