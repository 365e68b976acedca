"""The scripts of examples/ train, and go on after their last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if "def main" in path.read_text())


def run(folder: Path, script: str, *command: str, steps: int, into: str = "run") -> str:
    """Run a script, and return its output."""
    done = subprocess.run(
        [*command, str(EXAMPLES / f"{script}.py"), "--folder", into, "--steps", str(steps)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_an_example_goes_on_after_its_last_checkpoint(tmp_path, warm_torch):
    python = str(warm_torch.executable(tmp_path))
    assert "step 5:" in run(tmp_path, "recommender", python, steps=5)
    printed = run(tmp_path, "recommender", python, steps=8)
    assert "goes on after step 5" in printed
    assert "step 8:" in printed


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_trains_and_its_second_rank_joins_later(script, tmp_path):
    alone, ranks = [sys.executable], [str(Path(sys.executable).with_name("torchrun"))]
    run(tmp_path, script, *alone, steps=10)
    # A Trainer of transformers continues only with as many steps an epoch as before.
    into = "ranks" if script == "finetune" else "run"
    run(tmp_path, script, *ranks, "--nproc-per-node", "2", "--standalone", steps=20, into=into)


def test_examples_are_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert max(lengths.values()) <= 150
    assert len(SCRIPTS) == 5
