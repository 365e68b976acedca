"""Each of six faults is named rightly by metrics, status, doctor and alerts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[1] / "faults.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_fault_is_named_by_metrics_status_doctor_and_the_alert_that_fires(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "slow-store.png"
    command = [sys.executable, FAULTS, "--picture", picture]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.stat().st_size < 150_000
