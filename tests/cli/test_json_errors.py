"""Errors for programs: with --json every error is one JSON object."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from dataplane.cli import cli, run
from dataplane.commands import inspect
from dataplane.model.config import VERSION

ROOT = Path(__file__).resolve().parents[2]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    status = run(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    return status, json.loads(err.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "status", "name"),
    [
        (("inspect", "{}/nowhere.parquet"), 3, "ShardNotFound"),
        (("index", "{}/nowhere.parquet", "-o", "{}/x.manifest"), 3, "ShardNotFound"),
        (("plan", "{}/nowhere.parquet", "--global-batch", "8"), 3, "ShardNotFound"),
        (("verify", "{}/nowhere.parquet"), 3, "ShardNotFound"),
        (("inspect", "{}/broken.parquet"), 1, "CorruptShard"),
        (("doctor", "{}/broken.parquet"), 1, "CorruptShard"),
        (("status", "127.0.0.1:1"), 3, "PeerLost"),
        (("config", "show", "--slab-bytes", "many"), 2, "ConfigError"),
        (("plan", "x.parquet"), 2, "MissingParameter"),
        (("plan", "x.parquet", "--global-batch", "none"), 2, "BadParameter"),
        (("inspect", "x.parquet", "--no-such-option"), 2, "NoSuchOption"),
    ],
)
def test_an_error_is_one_object_with_the_same_exit_status(
    capsys, tmp_path, monkeypatch, arguments, status, name
):
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 is how it begins, and not how it ends")
    given = [one.format(tmp_path) for one in arguments]
    assert run(given) == status
    capsys.readouterr()
    found, error = told(capsys, *given, "--json")
    assert (found, error["error"], error["exit_status"]) == (status, name, status)
    assert error["message"]
    if status in {1, 3} and name != "PeerLost":
        assert str(tmp_path) in error["nouns"]["shard"]


def test_a_bug_comes_with_its_traceback(capsys, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by nobody")

    monkeypatch.setattr(inspect.inspect, "callback", broken)
    status, error = told(capsys, "inspect", "x.parquet", "--json")
    assert (status, error["error"]) == (70, "ZeroDivisionError")
    assert "in broken" in error["traceback"]


def test_every_command_that_writes_json_reports_errors_as_json():
    commands = [cli.commands[name] for name in cli.commands]
    commands += [one for each in commands for one in getattr(each, "commands", {}).values()]
    options = [one for each in commands for one in each.params if "--json" in one.opts]
    assert len(options) >= 7
    assert all(one.callback is not None and one.is_eager for one in options)


def test_a_command_of_a_missing_package_says_how_to_install_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr("dataplane.cli.entry_points", lambda **_: ())
    assert run(["bench", "s3://bucket/", "--peers", "all", "--help"]) == 2
    assert f"pip install dataplane-bench=={VERSION}" in capsys.readouterr().err
    status, error = told(capsys, "bench", "--json")
    assert (status, error["error"]) == (2, "ConfigError")
    assert run(["--help"]) == 0
    assert "(not installed: pip install dataplane-bench" in capsys.readouterr().out
    assert run(["benches"]) == 2


def test_the_benchmark_is_of_this_version_and_needs_it() -> None:
    about = tomllib.loads((ROOT / "benchmarks" / "pyproject.toml").read_text())["project"]
    assert about["version"] == VERSION
    assert f"dataplane-loader[torch]=={VERSION}" in about["dependencies"]
