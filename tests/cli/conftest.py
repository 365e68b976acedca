"""The command line without the settings of the person who runs the tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("DATAPLANE_", "XDG_"))]:
        if not name.startswith("DATAPLANE_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    # Where a service and the commands that ask it find their token.
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
