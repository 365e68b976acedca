"""benchmarks/device.py says what it needs if it cannot measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "device.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_measured_and_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("there is no CUDA device")
