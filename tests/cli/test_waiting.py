"""Commands wait for a store that is away, say so at once, and end at once with Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from away import Away, Proxy, proxy_before
from awry import awry_server

from dataplane.commands import datasets

COMMANDS = [
    ("index",),
    ("inspect",),
    ("verify",),
    ("plan", "--global-batch", "4"),
]
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
