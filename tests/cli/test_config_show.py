"""The command line itself, and `dataplane config show`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from msgspec import structs

from dataplane import settings
from dataplane.cli import run
from dataplane.model.config import VERSION
from dataplane.transforms.pixels_library import maker


def shown(capsys, *arguments: str):
    assert run(["config", "show", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_value_says_where_it_came_from(capsys, monkeypatch, tmp_path):
    (tmp_path / "dataplane.toml").write_text('slab_bytes = "2MiB"\nfetch_count = 5\n')
    monkeypatch.setenv("DATAPLANE_FETCH_COUNT", "6")
    found = shown(capsys, "--worker-count", "7")
    assert found["worker_count"] | {"variable": ""} == {
        "value": 7,
        "source": "--worker-count",
        "variable": "",
    }
    assert (found["fetch_count"]["value"], found["fetch_count"]["source"]) == (
        6,
        "$DATAPLANE_FETCH_COUNT",
    )
    assert found["slab_bytes"]["value"] == 2 << 20
    assert found["slab_bytes"]["source"].endswith("dataplane.toml")
    assert found["lease_s"]["source"] == "default"


def test_config_may_stand_before_or_after_the_command(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('listen = "127.0.0.1:7"\n')
    assert shown(capsys, "--config", str(path))["listen"]["value"] == "127.0.0.1:7"
    assert run(["--config", str(path), "config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["listen"]["source"] == str(path)


def test_the_table_shows_sizes_as_people_write_them(capsys):
    assert run(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("slab_bytes ")]
    assert row[2:4] == ["MiB", "default"]


def test_a_misspelt_variable_is_reported(capsys, monkeypatch):
    monkeypatch.setenv("DATAPLANE_SLAP_BYTES", "1")
    assert run(["config", "show"]) == 0
    assert "DATAPLANE_SLAP_BYTES" in capsys.readouterr().err


def test_a_wrong_setting_is_one_block_without_a_traceback(capsys, tmp_path):
    (tmp_path / "dataplane.toml").write_text("slab_byte = 1\n")
    assert run(["config", "show"]) == 2
    told = capsys.readouterr().err
    assert "did you mean slab_bytes?" in told
    assert "what to do:" in told
    assert "Traceback" not in told


def test_debug_shows_the_traceback_too(capsys, tmp_path):
    (tmp_path / "dataplane.toml").write_text("slab_byte = 1\n")
    assert run(["--debug", "config", "show"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "what to do:" in told


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False)])
def test_debug_may_be_a_variable(value, shown, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DATAPLANE_DEBUG", value)
    (tmp_path / "dataplane.toml").write_text("slab_byte = 1\n")
    assert run(["config", "show"]) == 2
    assert ("Traceback" in capsys.readouterr().err) is shown


@pytest.mark.parametrize("arguments", [["nonsense"], ["config", "show", "--nonsense"]])
def test_what_is_no_command_is_a_usage_error(arguments, capsys):
    assert run(arguments) == 2
    assert "No such" in capsys.readouterr().err


def test_help_teaches_by_example(capsys):
    assert run(["--help"]) == 0
    assert "Exit status:" in capsys.readouterr().out


CLIENTS = (
    "status", "mix", "skip", "tombstone", "trace", "where", "replay", "ledger show",
    "ledger export", "ledger verify", "ledger diff",
)  # fmt: skip
FOR_SERVERS = ("jwt_key", "tls_peers", "allowed_urls", "peer_tls")
CALLS_FUNCTIONS = {"tombstone", "trace", "where", "replay"}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_command_that_connects_has_the_flags_that_act_there_and_no_others(name, capsys):
    given = name.split()
    assert run([*given, "--help"]) == 0
    words = set(capsys.readouterr().out.split())
    for setting in ("join", "token_file", "tls_ca", "tls_cert", "tls_key", "insecure"):
        assert settings.BY_NAME[setting].flag in words
    assert ("--allowed-functions" in words) == (name in CALLS_FUNCTIONS)
    for setting in FOR_SERVERS:
        flag = settings.BY_NAME[setting].flag
        assert flag not in words
        assert run([*given, flag]) == 2
        assert "No such option" in capsys.readouterr().err


def test_index_tells_who_counts_without_it(capsys):
    assert run(["index", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the first node that opens such a job counts for all nodes of its launch" in told


def test_version_is_one_line(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"dataplane {VERSION}\n"


def test_the_module_runs_as_a_program_with_its_exit_status():
    program = [sys.executable, "-m", "dataplane"]
    good = subprocess.run([*program, "--version"], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout) == (0, f"dataplane {VERSION}\n")
    wrong = subprocess.run([*program, "nonsense"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "No such command" in wrong.stderr


def test_a_reader_that_stops_reading_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "dataplane", "config", "show"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert told == b""


def test_a_missing_libjpeg_is_reported_in_one_line_that_says_what_to_install(capsys, monkeypatch):
    without = structs.replace(maker(), missing="libpixels.so: compiled without the headers")
    monkeypatch.setattr("dataplane.transforms.pixels_library.maker", lambda: without)
    assert run(["config", "show"]) == 0
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "Pillow" in one]
    assert "Pillow decodes JPEGs, several times slower: libpixels.so" in line
    for package in ("libjpeg-dev", "libjpeg-turbo-devel", "conda-forge"):
        assert package in line
