"""A real service: its token is found by both sides, and shown to nobody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fleet import Service

from dataplane.cli import run

TOKEN = "a-token-that-nobody-else-may-read-0123"


def test_the_token_is_found_by_the_same_user_and_stands_in_no_log_and_no_argv(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.delenv("DATAPLANE_STATE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = (*("--log-level", "debug"), *("--listen", "127.0.0.1:0"))
    log = tmp_path / "log"
    # `env` runs it: its command line is no other process's.
    with Service("--coordinator", *given, log=log, within=("env",)) as service:
        own = (tmp_path / ".local/state/dataplane/token").read_text().strip()
        assert run(["status", service.address]) == 0
        monkeypatch.setenv("HOME", "/nowhere")
        assert run(["status", service.address]) == 3
        alone = capfd.readouterr().err
        assert "This process has no token: set DATAPLANE_TOKEN, or --token-file" in alone
        monkeypatch.setenv("DATAPLANE_TOKEN", TOKEN)
        assert run(["status", service.address]) == 3
        refused = capfd.readouterr().err
        assert "the token is not the coordinator's" in refused
        assert "the token of $DATAPLANE_TOKEN" in refused
        argv = Path(f"/proc/{service.process.pid}/cmdline").read_bytes().decode()
        told = log.read_text()
        assert told.count("call refused") == 2
        for text in (argv, told, alone, refused):
            assert own not in text
            assert TOKEN not in text


EMBEDDED = """
import sys, dataplane.node.server, dataplane.node.__main__, dataplane.client.session
import dataplane.coordinator.front, dataplane.settings, dataplane.cli
ours = ("dataplane.security.", "grpc", "jwt", "cryptography")
every = [one for one in sys.modules if one.startswith(ours)]
# Workers need the one, the node's own socket the other.
print([one for one in every if not one.endswith((".environment", ".admission"))])
"""


def test_what_stays_on_one_host_imports_nothing_of_it():
    done = subprocess.run(
        [sys.executable, "-c", EMBEDDED], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
