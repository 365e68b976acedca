"""`dataplane bench` as a user runs it: a small one, from the command line to the page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dataplane_bench.peers.base import adapter
from dataplane_bench.run import Options, _scratch, chosen, scale_of
from dataplane_bench.scenarios import Scale, local_and_s3
from dataplane_bench.workloads.generate import generated

from dataplane.cli import run

BENCH = [sys.executable, "-m", "dataplane", "bench"]
SMALL = ["--scale", "0.02", "--window", "0.3"]
TIMEOUT_S = 280


@pytest.fixture
def environment(tmp_path):
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "200"}


def bench(environment, *arguments, status=0):
    done = subprocess.run(
        [*BENCH, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == status, done.stderr
    return done


def systems_of(report, scenario=0, case=0):
    found = report["scenarios"][scenario]["cases"][case]["systems"]
    return {system["name"]: system for system in found}


@pytest.mark.parametrize(
    ("scenarios", "given", "scale"),
    [
        (("tokens/s3-cold", "tokens/s3-steady", "images/local"), None, 8.0),
        (("tokens/s3-cold", "tokens/local"), None, 1.0),
        (("tokens/s3-cold", "first-batch/s3"), None, 1.0),
        (("tokens/s3-cold",), 0.5, 0.5),
        ((), None, 1.0),
    ],
)
def test_cases_that_read_s3_alone_have_ten_seconds_of_samples(scenarios, given, scale):
    options = Options(scenarios=scenarios, scale=given)
    assert scale_of("tokens", options, chosen(options, "")) == scale


def test_a_small_run_gives_a_table_json_and_a_page(tmp_path, monkeypatch, capsys, forked):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    asked = ("--scenario", "tokens/local", "--peers", "none", "--rounds", "1", *SMALL)
    assert run(["bench", *asked, "--json"]) == 0
    told = capsys.readouterr().out
    Path("small.json").write_text(told)
    report = json.loads(told)
    systems = systems_of(report)
    assert list(systems) == ["dataplane", "noop"]
    assert_measured(systems["dataplane"], rounds=1)
    (case,) = report["scenarios"][0]["cases"]
    assert case["load"].keys() == {"others", "steal"}, "what others did meanwhile is measured"
    assert "webdataset" in report["missing"], "what is not installed is listed"
    kept = next((tmp_path / "cache" / "dataplane" / "bench" / "reports").glob("*.json"))
    shown = ("--report", "small.json", "--html", "small.html")
    assert run(["bench", *shown, "--compare", str(kept)]) == 0
    assert "Dataplane" in capsys.readouterr().out
    assert "tokens" in Path("small.html").read_text()


@pytest.mark.slow
def test_a_peer_is_run_with_its_best_settings_and_takes_turns(environment, tmp_path):
    page = tmp_path / "report.html"
    asked = ["--scenario", "tokens/local", "--peers", "torch", "--rounds", "2"]
    done = bench(environment, *asked, *SMALL, "--json", "--html", str(page))
    systems = systems_of(json.loads(done.stdout))
    assert list(systems) == ["dataplane", "torch", "noop"]
    for name in ("dataplane", "torch"):
        assert_measured(systems[name], rounds=2)
    assert len(systems["torch"]["sweep"]) > 1
    assert "torch" in page.read_text()


def assert_measured(system, rounds):
    assert system["same_samples"] is True, "every byte of an epoch was compared"
    assert [trial["round"] for trial in system["trials"]] == list(range(rounds))
    for trial in system["trials"]:
        assert trial["samples_per_s"] > 0
        assert trial["cpu_s"] > 0
        assert trial["memory_peak"] > 0


@pytest.mark.slow
def test_starts_and_resumes_are_measured_too(environment):
    asked = ["--scenario", "first-batch/served", "--scenario", "resume/50%"]
    asked += ["--peers", "none", "--rounds", "1"]
    report = json.loads(bench(environment, *asked, *SMALL, "--json").stdout)
    first, resume = (systems_of(report, index)["dataplane"]["trials"][0] for index in range(2))
    assert first["first_batch_s"] > 0
    assert resume["by"] == "state"
    assert systems_of(report, 0)["noop"]["refused"]


@pytest.mark.slow
def test_cold_and_steady_epochs_from_s3_are_measured_near_and_far_plain_and_over_tls(environment):
    asked = ["--scenario", "tokens/s3-cold", "--scenario", "tokens/s3-steady"]
    asked += ["--s3-delay", "0,5", "--s3-tls", "--peers", "none", "--rounds", "1"]
    report = json.loads(bench(environment, *asked, *SMALL, "--scale", "0.1", "--json").stdout)
    cases = report["scenarios"][0]["cases"]
    assert len(cases) == 8
    for case in cases:
        (system,) = [one for one in case["systems"] if one["name"] == "dataplane"]
        assert_measured(system, rounds=1)
        assert system["trials"][0]["server_cpu_s"] >= 0
    lines = {"0_ms", "5_ms", "0_ms_tls", "5_ms_tls"}
    assert {f"s3_{line}_gb_per_s" for line in lines} <= report["bounds"].keys()


def test_a_case_from_s3_is_run_for_every_delay_and_with_tls_once_more():
    options = Options(
        scenarios=("text/s3-cold", "text/local"), s3_delay_ms=(0.0, 50.0, 50.0), s3_tls=True
    )
    ((_, cases),) = chosen(options, "")
    assert [(case.label, case.delay_ms, case.over_tls) for case in cases] == [
        ("s3-cold 0 ms", 0.0, False),
        ("s3-cold 50 ms", 50.0, False),
        ("s3-cold 0 ms TLS", 0.0, True),
        ("s3-cold 50 ms TLS", 50.0, True),
        ("local", 0.0, False),
    ]


@pytest.mark.parametrize("name", ["mosaic", "litdata"])
def test_a_peer_whose_cache_cannot_be_small_enough_takes_no_part(name, tmp_path):
    small = generated("text", tmp_path, 0.01)
    cold, steady = (case for case in local_and_s3(Scale("text", 1)) if case.label != "local")
    assert adapter(name).refuses(small, cold) == ""
    assert "more than 25% of these samples" in adapter(name).refuses(small, steady)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "tokkens"], ("tokkens", "tokens")),
        (["--scenario", "tokens/tape"], ("tokens/tape", "tokens/local")),
        (["--peers", "tourch"], ("tourch", "torch")),
        (["--scenario", "foreign/delta"], ("need it: --peers delta",)),
        (["--peers", "webdataset"], ("not installed", "--install-peer webdataset")),
        (["--limit", "many"], ("many",)),
        (["--s3-delay", "0,soon"], ("0,soon", "0,20,50")),
        (["--s3-delay", "-1"], ("-1", "milliseconds")),
        (["--report", "missing.json"], ("missing.json",)),
        (["--compare", "missing.json"], ("missing.json",)),
        (["--install-peer", "nobody"], ("nobody", "webdataset")),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *arguments]) == 2
    told = capsys.readouterr().err
    for word in words:
        assert word in told
    assert "Traceback" not in told


def test_the_list_names_every_scenario_and_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run(["bench", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"tokens", "ranks", "jobs", "resume"} <= set(listed["scenarios"])
    assert listed["peers"]["torch"] is True
    assert listed["peers"]["webdataset"] is False


@pytest.mark.slow
@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_run_and_leaves_nothing(environment, tmp_path, ends):
    running = subprocess.Popen(
        [*BENCH, "--scenario", "tokens/local", "--peers", "none", *SMALL],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if "round 1" in line:
            break
    running.send_signal(ends)
    _, said = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 130, said
    assert "interrupted" in said
    assert not list((tmp_path / "cache" / "dataplane" / "bench").glob("run-*"))


def test_the_folder_of_a_run_that_was_killed_is_removed_and_no_other(tmp_path):
    (tmp_path / "run-of-the-dead" / "trial").mkdir(parents=True)
    with _scratch(tmp_path) as first:
        assert [str(path) for path in tmp_path.iterdir()] == [first]
        with _scratch(tmp_path) as second:
            assert {str(path) for path in tmp_path.iterdir()} == {first, second}
    assert not list(tmp_path.iterdir())
