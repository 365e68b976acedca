"""Processes of trials that have torch when they start."""

from __future__ import annotations

import sys

import pytest
from dataplane_bench.trial import keeper, launch
from warm import WarmPython


@pytest.fixture
def forked(warm_torch: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes in our environment: to start one by exec takes 2.5 s of CPU."""

    def start(python, folder, environ, log):
        if python != sys.executable:
            return executed(python, folder, environ, log)
        return warm_torch.run([keeper.__file__], environ, log.fileno(), folder)

    executed = launch.executed
    monkeypatch.setattr(launch, "executed", start)
