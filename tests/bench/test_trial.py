"""Every trial ends with figures or a reason and leaves nothing behind, whatever the loader does."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from dataplane_bench import processes
from dataplane_bench.model import (
    BenchCase,
    ColumnType,
    DatasetPlace,
    Mode,
    TrialTask,
    Workload,
    WorkloadColumn,
    json_line,
)
from dataplane_bench.peers.base import SYSTEMS, adapter, folder_of
from dataplane_bench.trial import launch, process
from dataplane_bench.trial.launch import Contestant, Timing, TrialFailed, run_order, run_trial

from dataplane.model.errors import ConfigError

AWRY = "bench_loaders:Loader"
EXECUTED = launch.executed
QUICK = Timing(settle_s=0.05, window_s=0.2, stall_window_s=0.1, epoch_s=20.0, timeout_s=60.0)
COLUMNS = (
    WorkloadColumn("id", ColumnType.FIXED, "int64"),
    WorkloadColumn("x", ColumnType.FIXED, "float32", (4,)),
)


@pytest.fixture
def workload(tmp_path):
    return Workload("mine", COLUMNS, 8, 100, tmp_path / "source", "mine-100", 5.0)


@pytest.fixture
def trial(tmp_path, workload, forked):
    """Runs one trial of the loader that a test scripts."""

    def run(
        mode=Mode.FIRST, system=AWRY, timing=QUICK, of=workload, settings=None, server=None, **case
    ):
        place = DatasetPlace(tmp_path / "prepared" / "awry", str(tmp_path / "prepared" / "awry"))
        who = Contestant(system, sys.executable, place, settings or {})
        asked = BenchCase("try", workload.name, mode, **case)
        try:
            return run_trial(who, asked, of, timing, tmp_path / "trials", server)
        finally:
            assert list((tmp_path / "trials").iterdir()) == []

    return run


def failure(trial, does, **more):
    settings = {"does": does, **more.pop("settings", {})}
    with pytest.raises(TrialFailed) as caught:
        trial(settings=settings, **more)
    return str(caught.value)


@pytest.mark.slow
def test_every_mode_names_its_figures(trial, workload):
    first = trial(Mode.FIRST)
    assert 0 < first["first_batch_s"] < 5
    assert first["cpu_s"] >= 0
    assert first["memory_peak"] > 10_000_000

    epoch = trial(Mode.EPOCH)
    assert epoch["sample_count"] == 100
    assert epoch["seconds"] >= epoch["first_batch_s"] > 0

    steady = trial(Mode.STEADY)
    assert steady["seconds"] == pytest.approx(0.2, abs=0.1)
    assert steady["samples_per_s"] > 1000
    assert steady["cpu_s_per_million"] > 0
    assert steady["step_ms"] == 5.0
    assert steady["stall_share"] < 0.5
    assert 0 < steady["trainer_cpu_share"] <= 1.1

    computing = trial(Mode.STEADY, step_ms=20.0)
    assert computing["step_ms"] == 20.0
    assert computing["stall_share"] == computing["wait_share"] < 0.5
    assert computing["samples_per_s"] == pytest.approx(8 / 0.02, rel=0.5)

    verify = trial(Mode.VERIFY)
    assert verify["sample_count"] == 100
    assert verify["byte_count"] == 100 * 24
    assert trial(Mode.VERIFY, ranks=3)["digest"] == verify["digest"]


@pytest.mark.slow
def test_a_resumed_loader_goes_on_from_its_state_or_reads_again(trial, tmp_path):
    journal = tmp_path / "journal"
    found = trial(Mode.RESUME, fraction=0.5, settings={"journal": str(journal)})
    assert found["by"] == "state"
    assert "resumed at 56" in journal.read_text()
    assert trial(Mode.RESUME, "bench_loaders:Stateless", fraction=0.5)["by"] == "replay"


@pytest.mark.slow
def test_ranks_and_jobs_are_added_up(trial):
    ranks = trial(Mode.EPOCH, ranks=2)
    assert ranks["sample_count"] == 100
    jobs = trial(Mode.EPOCH, jobs=2)
    assert jobs["sample_count"] == 200
    assert trial(Mode.STEADY, ranks=2)["samples_per_s"] > 1000


def test_no_rank_closes_before_the_others_have_what_they_need(trial, tmp_path):
    journal = tmp_path / "journal"
    settings = {"journal": str(journal), "pause_s": 0.1}
    assert trial(Mode.VERIFY, ranks=2, settings=settings)["sample_count"] == 100
    opened, closed = journal.read_text().split("closed", 1)
    assert opened.count("opened") == 2
    assert closed.count("closed") == 1


def test_a_loader_is_opened_again_by_a_rank_less_when_all_have_closed_theirs(trial, tmp_path):
    journal = tmp_path / "journal"
    settings = {"journal": str(journal)}
    found = trial(Mode.RESTART, ranks=2, settings=settings)
    assert found["first_batch_s"] > 0
    assert found["cpu_s"] >= 0
    before, after = journal.read_text().rsplit("opened", 1)
    assert (before.count("opened"), before.count("closed")) == (2, 2)
    assert (after.split()[0], after.count("closed")) == ("0", 1)


def test_an_epoch_ends_when_its_time_is_over(trial):
    timing = dataclasses.replace(QUICK, epoch_s=0.3)
    found = trial(Mode.EPOCH, timing=timing, settings={"pause_s": 0.1})
    assert 8 <= found["sample_count"] < 100
    assert found["seconds"] >= 0.3


def test_a_later_epoch_is_measured_after_those_before_it(trial, tmp_path):
    journal, server = tmp_path / "journal", iter([1.0, 2.0, 5.0])
    settings = {"journal": str(journal)}
    found = trial(Mode.EPOCH, epoch=2, settings=settings, server=lambda: next(server))
    told = [line for line in journal.read_text().splitlines() if line.startswith("epoch")]
    assert told == ["epoch 0", "epoch 1", "epoch 2"]
    assert found["sample_count"] == 100, "of the last one"
    assert found["first_batch_s"] > 0
    assert found["server_cpu_s"] == 3.0, "from its beginning on"
    assert found["server_cpu_s_per_million"] == pytest.approx(3.0 / 100 * 1e6)


def test_a_daemon_starts_before_the_loaders_and_all_find_it(trial, tmp_path):
    journal = tmp_path / "journal"
    settings = {"journal": str(journal)}
    trial(Mode.EPOCH, "bench_loaders:Daemon", jobs=2, served=True, settings=settings)
    served, *others = [one for one in journal.read_text().splitlines() if one[:6] == "opened"]
    assert served == "opened 0 "
    assert all(line.startswith("opened 0 daemon of ") for line in others)
    assert journal.read_text().count("closed") == 3
    # A system without a daemon runs the case without one.
    trial(Mode.FIRST, served=True)


@pytest.mark.parametrize(
    ("mode", "does", "says"),
    [
        (Mode.FIRST, "exit in open", "its process ended (exit status 7)"),
        (Mode.FIRST, "share memory and die in open", "its process ended (SIGKILL)"),
    ],
)
def test_errors_of_a_loader_are_reported(trial, mode, does, says):
    told = failure(trial, does, mode=mode)
    assert told.splitlines()[0].startswith(says)


@pytest.mark.parametrize(
    ("mode", "does", "says"),
    [
        (Mode.FIRST, "raise in close", "ValueError: not today"),
        (Mode.EPOCH, "empty epoch", "NoBatch: the epoch has no batch"),
        (Mode.STEADY, "empty second epoch", "NoBatch: epoch 1 has no batch"),
        (Mode.FIRST, "too many", "BatchRefused: 16 samples, not 8"),
        (Mode.STEADY, "other type", "BatchRefused: id: int32, not int64"),
        (Mode.RESUME, "no x", "BatchRefused: column x is missing"),
    ],
)
def test_what_a_loader_does_wrong_ends_the_order(workload, tmp_path, mode, does, says):
    over = threading.Event()
    case = BenchCase("try", "mine", mode, fraction=0.5)
    place = DatasetPlace(tmp_path, str(tmp_path))
    task = TrialTask(AWRY, case, workload, place, {"does": does}, tmp_path, "token")
    try:
        with pytest.raises(Exception, match=re.escape(says.partition(": ")[2])) as caught:
            process.run(task, lambda _: None, process.Ear(harness_words(over)))
    finally:
        over.set()
    assert caught.type.__name__ == says.partition(": ")[0]


def harness_words(over):
    """The messages of a harness until its answer."""
    yield from ("open\n", "go 1\n", "end\n")
    over.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "does", "says"),
    [
        (Mode.FIRST, "raise in open", "ValueError: not today"),
        (Mode.STEADY, "raise in epoch", "ValueError: not today"),
        (Mode.STEADY, "raise in second batch", "ValueError: not today"),
        (Mode.FIRST, "empty epoch", "NoBatch: the epoch has no batch"),
        (Mode.VERIFY, "empty epoch", "NoBatch: the epoch has no batch"),
        (Mode.EPOCH, "no x", "BatchRefused: column x is missing"),
        (Mode.VERIFY, "other type", "BatchRefused: id: int32, not int64"),
    ],
)
def test_errors_of_a_loader_are_reported_in_other_modes_too(trial, mode, does, says):
    assert failure(trial, does, mode=mode).splitlines()[0].startswith(says)


def test_the_error_has_the_end_of_a_loaders_output(trial):
    told = failure(trial, "raise in open")
    assert told.startswith("ValueError: not today")
    assert "its last words:\nTraceback" in told
    assert told.endswith("ValueError: not today")


@pytest.mark.parametrize("does", ["hang in open", "hang, hear no signal in second batch"])
def test_a_loader_that_hangs_is_ended_at_the_deadline(trial, does):
    timing = dataclasses.replace(QUICK, timeout_s=2.0)
    told = failure(trial, does, mode=Mode.STEADY, timing=timing)
    assert told.startswith("no answer within 2 s")


def test_a_failing_rank_is_reported_at_once_by_name(trial):
    settings = {"rank": 1, "pause_s": 60.0}
    told = failure(trial, "die in epoch", ranks=2, mode=Mode.VERIFY, settings=settings)
    assert told.startswith("job 1, rank 1: its process ended (SIGKILL)")


def test_output_of_a_loader_is_not_taken_for_an_answer(trial):
    settings = {"does": "print in open; print in second batch"}
    assert trial(Mode.EPOCH, settings=settings)["sample_count"] == 100


def test_a_loader_cannot_read_the_harness_messages_and_orders_may_be_long(trial, workload):
    many = tuple(f"s3://bucket/{number:0200d}" for number in range(2000))  # longer than a pipe
    settings = {"does": "read what the harness says in second batch"}
    trial(Mode.EPOCH, settings=settings, of=dataclasses.replace(workload, urls=many))


def test_a_daemon_that_a_loader_leaves_counts_and_is_ended(trial, tmp_path):
    journal = tmp_path / "journal"
    settings = {"journal": str(journal), "does": "leave a daemon in open", "burn_s": 0.3}
    found = trial(Mode.EPOCH, settings={**settings, "awaits": "burnt"})
    assert found["cpu_s"] >= 0.28
    pid = int(journal.read_text().partition("daemon ")[2].split()[0])
    assert not psutil.pid_exists(pid)


def test_a_loader_that_fails_takes_what_it_started_along(trial):
    # hygiene.py checks that nothing is left.
    told = failure(trial, "raise in second batch", mode=Mode.EPOCH, jobs=2)
    assert "job 1, rank 0" in told or "job 2, rank 0" in told


def test_a_failing_daemon_is_reported(trial):
    told = failure(trial, "raise in serve", system="bench_loaders:Daemon", served=True)
    assert told.startswith("ValueError: not today")


def test_an_interpreter_without_our_package_is_reported(tmp_path, workload):
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho no module named anything >&2\nexit 1\n")
    bare.chmod(0o755)
    who = Contestant(AWRY, str(bare), DatasetPlace(tmp_path / "x", "x"), {})
    with pytest.raises(TrialFailed, match=r"exit status 1[^\n]*\n[^\n]*named anything"):
        run_trial(who, BenchCase("try", "mine"), workload, QUICK, tmp_path / "trials")


def test_conversion_is_a_separate_order(tmp_path, workload, forked):
    folder = tmp_path / "awry"
    folder.mkdir()
    who = Contestant(AWRY, sys.executable, DatasetPlace(folder, str(folder)), {})
    case = BenchCase("prepare", "mine")
    assert run_order("prepare", who, case, workload, tmp_path / "trials", 60)["prepared"]
    assert (folder / "shard").read_text() == "mine-100"
    odd = dataclasses.replace(workload, name="unconvertible")
    with pytest.raises(TrialFailed, match="ValueError: cannot convert"):
        run_order("prepare", who, case, odd, tmp_path / "trials", 60)


def test_a_loader_receives_no_settings_or_credentials_of_the_user(trial, tmp_path, monkeypatch):
    for name in ("AWS_PROFILE", "DATAPLANE_WORKER_COUNT", "PYTHONPATH", "RANK", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    journal = tmp_path / "journal"
    settings = {"journal": str(journal), "does": "tell the environment in open"}
    found = []
    for cold in (False, True, True):
        with monkeypatch.context() as patch:
            if not cold:
                patch.setattr(launch, "executed", EXECUTED)
            trial(settings=settings, cold=cold)
        found.append(json.loads(journal.read_text().splitlines()[0]))
        journal.unlink()
    warm, cold, again = found
    assert not {"AWS_PROFILE", "DATAPLANE_WORKER_COUNT", "RANK", "SLURM_JOB_ID"} & warm.keys()
    assert warm["PYTHONPATH"] == str(Path(__file__).parents[1])
    # A warm start finds what an earlier run has kept; a cold one finds nothing.
    assert Path(warm["XDG_CACHE_HOME"]).parent == tmp_path / "prepared"
    assert cold["XDG_CACHE_HOME"] != again["XDG_CACHE_HOME"]
    assert warm["TMPDIR"] != cold["TMPDIR"]


HARNESS = """
import json, sys
from pathlib import Path
from dataplane_bench.model import BenchCase, DatasetPlace, Mode, Workload, from_plain
from dataplane_bench.trial import launch, process
from dataplane_bench.trial.launch import Contestant, Timing, run_trial
workload, journal, folder = from_plain(Workload, json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
settings = {"does": sys.argv[4], "journal": journal}
who = Contestant("bench_loaders:Loader", sys.executable, DatasetPlace(folder, "x"), settings)
case = BenchCase("try", "mine", Mode.STEADY, ranks=2)
run_trial(who, case, workload, Timing(window_s=100.0), folder)
"""


@pytest.mark.parametrize(
    ("number", "does"),
    [
        (signal.SIGINT, "hang, hear no signal in second batch"),
        (signal.SIGKILL, "hang in close"),
        pytest.param(signal.SIGINT, "hang in close", marks=pytest.mark.slow),
        pytest.param(
            signal.SIGKILL, "hang, hear no signal in second batch", marks=pytest.mark.slow
        ),
    ],
)
def test_nothing_outlives_the_harness(workload, tmp_path, number, does):
    journal = tmp_path / "journal"
    told = json_line(workload).strip()
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, told, journal, tmp_path, does],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        processes.wait_until(
            lambda: journal.exists() and journal.read_text().count("opened") == 2,
            harness,
            tmp_path / "none",
            60,
        )
        family = psutil.Process(harness.pid).children(recursive=True)
        assert len(family) >= 4
        harness.send_signal(number)
        _, said = harness.communicate(timeout=60)
    finally:
        harness.kill()
        harness.wait()
    if number == signal.SIGINT:
        assert said.rstrip().endswith("KeyboardInterrupt")
        assert not list(tmp_path.glob("trial-*"))
    assert psutil.wait_procs(family, timeout=60)[1] == []


def test_a_loader_of_a_user_is_found_by_module_and_class(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / "my_loaders_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("class Top: pass\n")
    (package / "deep.py").write_text("class Deep: pass\n")
    assert type(adapter("my_loaders_of_a_test:Top")).__name__ == "Top"
    assert type(adapter("my_loaders_of_a_test.deep:Deep")).__name__ == "Deep"
    assert folder_of("my_loaders_of_a_test:Top") == tmp_path
    assert folder_of("my_loaders_of_a_test.deep:Deep") == tmp_path
    for name, says in (
        ("my_loaders_of_a_test:Missing", "has no class"),
        ("no_such_module_of_a_test:Loader", "cannot be imported"),
        ("torchh", "there is no loader 'torchh'"),
    ):
        with pytest.raises(ConfigError, match=says):
            adapter(name)


def test_every_adapter_has_the_attributes_of_the_contract():
    for name in SYSTEMS:
        try:
            found = adapter(name)
        except ModuleNotFoundError:
            continue
        assert found.name == name
        assert folder_of(name) is None
        wanted = ("title", "requirements", "distribution", "layout", "describe")
        for attribute in (*wanted, "settings", "prepare", "open"):
            assert hasattr(found, attribute), f"{name} has no {attribute}"
