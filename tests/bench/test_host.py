"""benchmarks/host.py runs each of its parts, and goes on if one fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "host.py"


def parts(folder: Path, *names: str, status: int = 0, **environment: str) -> dict:
    """What it writes for these parts, by their name."""
    found = folder / "found.json"
    command = [
        sys.executable,
        "-W",
        "error",
        str(SCRIPT),
        "--quick",
        "--json",
        str(found),
        "--part",
    ]
    done = subprocess.run(
        [*command, *names],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    rows = json.loads(found.read_text())["rows"]
    assert all(f"| {row['part']} | {row['what'].split()[0]}" in done.stdout for row in rows)
    return {name: [row for row in rows if row["part"] == name] for name in names}


def test_a_quick_run_has_a_row_for_each_number_of_workers_and_says_what_it_lacks(tmp_path) -> None:
    found = parts(tmp_path, "workers", "scaling", "device", CUDA_VISIBLE_DEVICES="")
    assert [row["what"] for row in found["scaling"]] == ["collate, 2 workers"]
    assert len(found["workers"]) >= 1
    assert all(row["figure"].endswith(" images/s") for row in found["workers"])
    assert [row["what"] for row in found["device"]] == ["there is no CUDA device"]


@pytest.mark.slow
def test_the_parts_that_run_the_benchmark_have_its_cases_or_say_why_they_failed(tmp_path) -> None:
    found = parts(tmp_path, "local", "s3")
    assert [row["what"] for row in found["local"]] == ["images, local", "tokens, local"]
    assert [row["what"] for row in found["s3"]] == [
        "tokens, s3-cold 20 ms",
        "images, s3-cold 20 ms",
    ]
    broken = parts(tmp_path, "workers", "device", status=1, DATAPLANE_SLAB_BYTES="none")
    assert broken["workers"][0]["what"].startswith("failed: RuntimeError: exit status 1")
    assert broken["device"]
