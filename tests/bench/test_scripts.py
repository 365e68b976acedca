"""The scripts in benchmarks: each measures what it names, says which bars it missed, and goes on if a
part fails.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pictures import drawn, encoded

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ("--blocks", "2000", "--rows", "50")
# Very generous: a test must not depend on the machine's load.
EASY = ("--plan-s-max", "1e9", "--plan-mb-max", "1e9", "--seek-ms-max", "1e9")
Rows = dict[str, dict[str, Any]]


def run(
    name: str, *arguments: str, status: int | None = 0, **environment: str
) -> tuple[Rows, subprocess.CompletedProcess[str]]:
    """The rows that a command of a script writes, by their name; of any status if it is None."""
    command = [sys.executable, "-W", "error", SCRIPTS / f"{name}.py", arguments[0], "--json"]
    done = subprocess.run(
        [*command, *arguments[1:]],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == status or (status is None and done.stdout), done.stderr
    rows = json.loads(done.stdout)["rows"] if done.stdout else []
    return {row["name"]: row for row in rows}, done


def value(row: dict[str, Any]) -> float:
    return next(iter(row["values"].values()))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Load a script into this process; the environment is what it was afterwards."""
    monkeypatch.syspath_prepend(SCRIPTS)
    before, loaded = dict(os.environ), set(sys.modules)

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    yield load
    os.environ.clear()
    os.environ.update(before)
    for name in {path.stem for path in SCRIPTS.glob("*.py")} - loaded:
        sys.modules.pop(name, None)


def test_a_script_measures_and_says_which_bars_are_met() -> None:
    rows, _ = run("plans", "scale", *SMALL, *EASY, "--seek-ms-max", "0", status=1)
    assert value(rows["samples"]) == 100_000
    missed = [name for name, row in rows.items() if row["missed"]]
    assert missed == ["seek, slowest", "seek in windows of 65,536, slowest"]


def test_the_plan_of_a_mixture_is_measured(script) -> None:
    easy = {"plan_s_max": 1e9, "plan_mb_max": 1e9, "seek_ms_max": 1e9}
    rows = {
        row.name: row for row in script("plans").mixtures(sources=5, blocks=2000, rows=50, **easy)
    }
    assert 90_000 < rows["samples"].value <= 100_000
    assert rows["counts of a lane, away from exact, at most"].value < 3.4


def test_every_part_of_manifests_is_measured(script, tmp_path) -> None:
    indexing = script("indexing")
    indexing._CALLS, indexing._OTHER_BYTES = 3, 1 << 10
    saved = tmp_path / "small.manifest"
    rows = [*indexing.written(saved, 40, 100)]
    for part in (indexing.loaded, indexing.listed, indexing.opened, indexing.called):
        rows += part(saved)
    assert all(row.value >= 0 for row in rows)
    assert {"manifest, loaded", "block_in_shard", "raw_block"} <= {row.name for row in rows}


def test_lists_and_decisions_and_pixels_are_measured(script, tmp_path) -> None:
    alone, node = script("indexing").listing(objects=2000, delay_ms=0.0, rounds=1)
    assert alone.values["pages"] >= 2
    assert node.values["pages"] >= 2
    worker = script("worker")
    decided = [*worker.scheduling(largest=1000)]
    assert [row.values.keys() for row in decided] == [{"us a block"}]
    for seed in range(2):
        (tmp_path / f"{seed}.jpg").write_bytes(encoded(drawn(120, 160, seed=seed)))
    worker.on_one_core = lambda: None
    made = {row.name: row for row in worker.pixels(tmp_path, rounds=1)}
    assert made["ours, again"].values["images/s a core"] > 0


def test_the_cpu_of_a_loader_is_that_of_its_processes(script, tmp_path) -> None:
    pq.write_table(pa.table({"x": np.arange(1000)}), tmp_path / "0.parquet")
    rows = {row.name: row for row in script("reading").cpu(str(tmp_path), seconds=0.1)}
    assert {"trainer", "node", "workers"} <= rows.keys()
    assert rows["loader"].value > 0


def test_both_loaders_pass_over_a_dataset(script) -> None:
    datasets = script("torch_datasets")
    (row,) = datasets.speed("strings-0", rounds=1)
    assert row.values.keys() >= {"s torch", "s ours", "CPU s ours"}
    assert datasets.used_bytes(os.getpid()) > 1 << 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_copied_and_the_script_says_so(script) -> None:
    with pytest.raises(SystemExit, match="there is no CUDA device"):
        next(script("device").copies())


@pytest.mark.slow
def test_a_quick_run_has_a_row_for_each_number_of_workers_and_says_what_it_lacks(
    script, tmp_path, warm_torch, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "executable", str(warm_torch.executable(tmp_path)))
    rows = script("host").measure("workers", "waits", "copies", quick=True)
    names = [row.name for row in rows]
    assert names[0] == "workers: 1 workers"
    waits = ["waits: collate, 2 workers", "waits: collate, 2 / 2 workers"]
    assert names[-3:] == [*waits, "copies: there is no CUDA device"]


def host(folder: Path, *parts: str, status: int = 0, **environment: str) -> dict[str, list[str]]:
    """The names of a quick run's rows, by part."""
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    rows, _ = run("host", "measure", "--quick", *parts, status=status, **cache, **environment)
    of_part = {
        part: [name.partition(": ")[2] for name in rows if name.startswith(part)] for part in parts
    }
    assert sum(map(len, of_part.values())) == len(rows)
    return of_part


@pytest.mark.slow
def test_the_parts_that_run_the_benchmark_have_its_cases_or_say_why_they_failed(tmp_path) -> None:
    names = host(tmp_path, "local", "s3", "store")
    assert names["local"] == ["images, local", "tokens, local"]
    assert names["s3"] == ["tokens, s3-cold 20 ms"]
    assert names["store"][0] == "50 ms"
    broken = host(tmp_path, "workers", "copies", status=1, DATAPLANE_SLAB_BYTES="none")
    assert broken["workers"][0].startswith("failed: RuntimeError: exit status 1")
    assert broken["copies"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "plans packing",
        "worker gather --rounds 1",
        "torch_datasets memory expanded-collate --rounds 1",
        "stalls slow --rows 640 --rounds 1 --step-ms 1",
        "stalls restart --rows 640 --rounds 1",
        "device training --seconds 0.1 --models transformer",
        "nodes lines --mib 16 --rounds 1 --tls",
        "nodes lending --mib 32 --block-kib 512 --epochs 2",
        "nodes making --samples 256 --rounds 1",
        "reading readers --mib 32 --rounds 1",
        "reading columns --rounds 1 --latency-ms 1 --forms arrow",
        "reading small-blocks --mib 2 --rounds 1",
        "reading peers --samples 256 --rounds 1 --tp 2",
        "indexing shards --count 40 --rounds 1",
        "indexing wide --columns 200 --forms arrow",
    ],
)
def test_every_other_command_has_rows(command: str, tmp_path: Path) -> None:
    """Its bars are not for a busy machine."""
    rows, _ = run(*command.split(), status=None, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert rows
