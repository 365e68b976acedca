"""`dataplane plan` of a mixture says what a loader then reads."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader, Mixture, Source
from small_nodes import alone_and_small

from dataplane.cli import run

COUNTS = {"web": 1700, "code": 450, "math": 60}
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}
BATCH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The shards; only `math` has the column `proof`."""
    made: Path = tmp_path_factory.mktemp("sources")
    for at, (name, count) in enumerate(COUNTS.items()):
        columns = {"id": pa.array(range(10_000 * at, 10_000 * at + count), pa.int64())}
        columns |= {"proof": columns["id"]} if name == "math" else {}
        pq.write_table(pa.table(columns), made / f"{name}.parquet", row_group_size=32)
    return made


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch, folder):
    alone_and_small(monkeypatch, folder)  # shards are indexed once


def sources(folder: Path, **more: str) -> list[str]:
    """The command line's options for them."""
    texts = [
        f"{name}={folder}/{name}.parquet,weight={weight}{more.get(name, '')}"
        for name, weight in WEIGHTS.items()
    ]
    return [part for text in texts for part in ("--source", text)]


def planned(capsys, *arguments: str) -> Any:
    capsys.readouterr()
    batch = ("--global-batch", f"{BATCH}", "--columns", "id", "--json")
    assert run(["plan", *arguments, *batch]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "mixed"),
    [
        (("--exhausted", "renormalise", "--lanes", "4"), {"exhausted": "renormalise"}),
        (
            ("--exhausted", "cycle", "--length", "3000", "--end", "drop", "--seed", "9"),
            {"exhausted": "cycle", "length": 3000},
        ),
    ],
)
def test_the_plan_of_a_mixture_is_what_a_loader_reads(folder, capsys, options, mixed):
    more = {"code": ",where=id < 10300", "math": ",max_passes=9"}
    found = planned(capsys, *sources(folder, **more), *options)
    of_rows: dict[str, dict[str, Any]] = {
        "web": {}, "code": {"where": "id < 10300"}, "math": {"max_passes": 9}
    }  # fmt: skip
    mixture = Mixture(
        {
            name: Source(folder / f"{name}.parquet", weight=weight, **of_rows[name])
            for name, weight in WEIGHTS.items()
        },
        **mixed,
    )
    asked = dict(zip(options[::2], options[1::2], strict=True))
    loader_options: dict[str, Any] = {
        "lanes": int(asked["--lanes"]) if "--lanes" in asked else None,
        "seed": int(asked.get("--seed", 0)),
        "end": asked.get("--end", "ragged"),
    }
    with DataLoader(mixture, BATCH, shuffle=True, columns=["id"], **loader_options) as loader:
        steps = [[one // 10_000 for one in batch["id"].tolist()] for batch in loader]
    flat = [source for step in steps for source in step]
    assert found["step_count"] == len(steps)
    assert found["sample_count"] - found["samples_dropped"] == len(flat)
    counts, available = Counter(flat), {"web": 1700, "code": 300, "math": 60}
    for at, one in enumerate(found["sources"]):
        assert one["name"] == list(COUNTS)[at]
        assert one["asked_share"] == pytest.approx(WEIGHTS[one["name"]])
        # What is dropped at the end is planned, too.
        assert 0 <= one["samples"] - counts[at] <= found["samples_dropped"]
        assert one["available"] == available[one["name"]]
        assert one["passes"] == one["samples"] / one["available"]
        assert one["share"] == one["samples"] / found["sample_count"]
        limit = {"math": 9 * 60, "web": 1700, "code": 300}[one["name"]]
        has_no_limit = mixed.get("exhausted") == "cycle" and one["name"] != "math"
        is_exhausted = one["samples"] == limit and not has_no_limit
        assert (one["exhausted_position"] is not None) == is_exhausted
        if is_exhausted and one["samples"] == counts[at]:
            assert one["exhausted_position"] == len(flat) - flat[::-1].index(at)
            assert at in steps[one["exhausted_step"]]
            assert not any(at in step for step in steps[one["exhausted_step"] + 1 :])
    assert any(one["exhausted_position"] for one in found["sources"])
    whole = sum(one["open_window_bytes_per_host"] for one in found["sources"])
    assert found["open_window_bytes_per_host"] == whole > 0
    hosts = found["by_host_count"]
    assert [one["host_count"] for one in hosts] == [1 << power for power in range(11)]
    assert hosts[0]["open_window_bytes_per_host"] == whole
    assert all(one["reads_times_share"] <= one["host_count"] for one in hosts)


def test_the_plan_of_a_source_with_a_map_counts_its_packs(folder, capsys, monkeypatch):
    (folder.parent / "maps_of_plans.py").write_text(
        "def three(columns):\n"
        "    return {'id': columns['id'], 'ids': [[1, 2, 3]] * len(columns['id'])}\n"
    )
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr("sys.path", [str(folder.parent), *sys.path])
    of_map = ",map=maps_of_plans:three"
    some = sources(folder, **dict.fromkeys(COUNTS, of_map))
    assert planned(capsys, *some)["sample_count"] > 0
    found = planned(capsys, *some, "--pack", "ids,length=30", "--exhausted", "renormalise")
    # Of 32 rows, or 28, four packs can be needed, in some order of the documents; of 2 or 4, one.
    assert [one["available"] for one in found["sources"]] == [53 * 4 + 1, 14 * 4 + 1, 2 * 4]


def test_the_plan_of_an_epoch_has_the_weights_of_a_schedule(folder, capsys):
    other = {"web": 0.1, "code": 0.6, "math": 0.3}
    told = ",".join(f"{name}={weight}" for name, weight in other.items())
    options = ("--exhausted", "cycle", "--length", "6000", "--lanes", "2", "--seed", "4")
    mixture = Mixture(
        {name: Source(folder / f"{name}.parquet", weight=one) for name, one in WEIGHTS.items()},
        exhausted="cycle", length=6000, schedule=[(20, other)], source_column="of",
    )  # fmt: skip
    given: dict[str, Any] = {"lanes": 2, "seed": 4, "columns": ["id"]}
    with DataLoader(mixture, BATCH, shuffle=True, **given) as loader:
        epochs = [[one for batch in loader for one in batch["of"].tolist()] for _ in range(2)]
    for epoch, (flat, begin) in enumerate(zip(epochs, (2048, 0), strict=True)):
        found = planned(capsys, *sources(folder), *options, "--schedule", f"20:{told}", "--epoch",
                        f"{epoch}")  # fmt: skip
        counts = Counter(flat)
        for at, (name, one) in enumerate(zip(WEIGHTS, found["sources"], strict=True)):
            assert one["samples"] == counts[at]
            mean = (WEIGHTS[name] * begin + other[name] * (6000 - begin)) / 6000
            assert one["asked_share"] == pytest.approx(mean)
        shown = [(one["position"], one["step"], one["shares"]) for one in found["changes"]]
        changed = (2048, 42, [pytest.approx(share) for share in other.values()])
        assert shown == ([] if epoch else [changed])
        assert not found["warnings"] or all(
            "times in this epoch" in one for one in found["warnings"]
        )


def test_repeated_and_missing_samples_are_warned_of(folder, capsys):
    options = ("--columns", "id", "--global-batch", "48", "--exhausted", "cycle")
    given = sources(folder, code=",max_passes=1")
    assert run(["plan", *given, *options, "--length", "6000"]) == 0
    shown = capsys.readouterr()
    assert "450 of 450" in shown.out
    told = " ".join(shown.err.split())
    assert "source 'math' is read 26.4 times in this epoch: its 60 samples are" in told
    assert "source 'code' has 7.5% of the samples instead of 30.0%: it is exhausted at step" in told
    assert "source 'math' has 26.4% of the samples instead of 20.0%: other sources are" in told
    assert "'web' is read" not in told


def test_what_hosts_take_and_poor_mixing_are_shown(tmp_path, capsys):
    """Sources of 320 MB, all of whose rows are one in the file."""
    rows = pa.DictionaryArray.from_arrays(np.zeros(80_000, np.int32), [b"x" * 4000])
    for name in ("web", "code"):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"b": rows}), path, row_group_size=1000, store_schema=False)
    given = [f"--source={name}={tmp_path}/{name}.parquet,weight=1" for name in ("web", "code")]
    options = ("--global-batch", "512", "--lanes", "1", "--window", "1")
    assert run(["plan", *given, *options]) == 0
    shown = capsys.readouterr()
    assert "what each host takes, for so many hosts" in shown.out
    assert re.search(r"1,024 +8,192 ", shown.out)
    told = " ".join(shown.err.split())
    found = r"the samples of source 'web' in a batch come from about \d of 80 blocks"
    assert re.search(found, told)
    assert "1 more source is like that" in told


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "give the urls of one dataset, or --source"),
        (("{}/web.parquet", "--source", "web={}/web.parquet,weight=1"), "give the urls of one"),
        (("{}/web.parquet", "--length", "9"), "give the urls of one dataset"),
        (("--source", "{}/web.parquet"), "write NAME=URL,weight=0.7"),
        (("--source", "web={}/web.parquet,weight=much"), "write NAME=URL,weight=0.7"),
        (("--source", "web={}/web.parquet"), "a weight for each"),
        (("--source", "web={}/web.parquet,weight=-1"), "weight=-1.0: pass a number, 0 or more"),
        (("--source", "web={}/web.parquet,weight=1,where=idd > 1"), "idd"),
        (
            ("--source", "a={}/web.parquet,weight=1", "--source", "a={}/code.parquet,weight=1"),
            "two sources are called 'a'",
        ),
        (
            ("--source", "a={}/web.parquet,weight=1", "--source", "b={}/math.parquet,weight=1"),
            "proof (none) int64",
        ),
        (("--source", "a={}/web.parquet,weight=1", "--exhausted", "never"), "choose one of stop"),
        (("--source", "a={}/none.parquet,weight=1"), "none.parquet"),
        (("--source", "a={}/web.parquet,weight=1", "--schedule", "a=2"), "write STEP:NAME=WEIGHT"),
        (("--source", "a={}/web.parquet,weight=1", "--schedule", "9:b=2"), "no source 'b'"),
    ],
)
def test_what_is_no_mixture_is_refused_as_a_loader_does(folder, capsys, arguments, why):
    given = [one.format(folder) for one in arguments]
    assert run(["plan", *given, "--global-batch", "8"]) in {2, 3}
    assert why in " ".join(capsys.readouterr().err.split())
