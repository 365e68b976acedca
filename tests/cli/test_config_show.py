"""The command line itself, and `dataplane config show`."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from away import Away, Proxy, proxy_before
from awry import awry_server
from msgspec import structs
from shards import parquet_bytes

from dataplane import settings
from dataplane.cli import cli, run
from dataplane.commands import datasets, inspect, output
from dataplane.model.config import VERSION
from dataplane.plan.manifest import Manifest
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
    assert "the first node of a launch counts them for all nodes" in told


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
        (("inspect",), 2, "MissingParameter"),
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


def said(script: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command through a shell that redirects its streams."""
    command = [sys.executable, "-P", "-m", "dataplane", *words]
    return subprocess.run(
        ["/bin/sh", "-c", f'"$@" {script}', "sh", *command],
        capture_output=True, text=True, timeout=60, check=False, cwd=folder,
    )  # fmt: skip


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "0.parquet").write_bytes(parquet_bytes(pa.table({"id": range(9)})))
    return folder


@pytest.mark.parametrize(("closed", "form"), [(">&-", ("--json",)), (">&- 2>&- <&-", ())])
def test_a_command_does_its_work_with_closed_streams(shards, closed, form) -> None:
    found = said(closed, shards, "index", str(shards), "-o", "whole.manifest", *form)
    assert (found.returncode, found.stdout) == (output.EXIT_OK, "")
    assert "bug" not in found.stderr
    content = (shards / "whole.manifest").read_bytes()
    assert Manifest.from_bytes(content, "whole.manifest").sample_count == 9


def test_output_that_cannot_be_written_is_no_bug(shards) -> None:
    found = said("> /dev/full", shards, "inspect", str(shards), "--json")
    assert found.returncode == output.EXIT_NOT_WRITTEN
    assert found.stderr.splitlines() == [
        "error: the output cannot be written: No space left on device"
    ]


COMMANDS = [("verify",), ("plan", "--global-batch", "4")]
URL = "s3://bucket/a.parquet"


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    body = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(40))}), body, row_group_size=10)
    with (
        awry_server({"bucket/a.parquet": body.getvalue()}) as server,
        proxy_before(server.port, Away.REFUSED) as made,
    ):
        environment = {**server.environment(), "AWS_ENDPOINT_URL": made.endpoint}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield made


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dataplane", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_store_that_is_away_is_waited_for(proxy: Proxy, command: tuple[str, ...]) -> None:
    with started(command[0], URL, *command[1:], "--json") as process:
        assert process.stderr is not None
        told = process.stderr.readline()
        for words in ("waiting for s3://bucket", f"{proxy.endpoint} refused", "Ctrl-C", "60 s"):
            assert words in told
        proxy.be(Away.WELL)
        out, rest = process.communicate(timeout=60)
        assert process.returncode == 0
        assert json.loads(out)
        assert rest.startswith("s3://bucket answers again, after ")
        assert len(rest.splitlines()) == 1


def test_ctrl_c_ends_the_waiting_at_once(proxy: Proxy) -> None:
    with started("index", URL) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=30)
        assert process.returncode == 130
        assert rest.strip() == "interrupted"


def test_a_store_that_goes_away_for_good_is_not_reported_as_damage(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataplane.cli import run

    monkeypatch.setattr(datasets.STORES, "_budget_s", 0.2)
    assert run(["verify", *(f"{URL}/{i}" for i in range(40))]) == 3
    told = capsys.readouterr()
    assert "StoreUnavailable" in told.err
    assert "gave up" in told.err
    assert told.out == ""


def test_ctrl_c_is_heard_though_another_thread_got_the_signal():
    # As when the kernel hands it to a thread of a library, which does not wake the main thread.
    script = """
import os, signal, time
from dataplane.commands.options import interruptible

@interruptible
def command():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    time.sleep(0.5)  # the main thread waits by then
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
try:
    command()
except KeyboardInterrupt:
    os._exit(130)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == 130
