"""How the suites of others are run: our loader is in every process that they start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from upstream import run, with_ours

_IS_OURS = """
import torch
from torch.utils.data import DataLoader

assert DataLoader.__module__ == "dataplane_torch.loader", DataLoader.__module__
"""

_SUITE = """
import subprocess
import sys

import torch
from torch import multiprocessing as mp
from torch.utils.data import DataLoader


def check():
    assert DataLoader.__module__ == "dataplane_torch.loader", DataLoader.__module__
    assert torch.utils.data.DataLoader is DataLoader


def test_here():
    check()


def test_started_in_every_way():
    for how in ("fork", "spawn", "forkserver"):
        process = mp.get_context(how).Process(target=check)
        process.start()
        process.join()
        assert process.exitcode == 0, how
    program = "import test_dataloader; test_dataloader.check()"
    assert subprocess.call([sys.executable, "-c", program]) == 0


def test_workers():
    batches = DataLoader(range(4), 2, num_workers=1, multiprocessing_context="spawn")
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]
"""


def test_every_import_of_torch_gets_our_loader(tmp_path) -> None:
    environ = {**with_ours(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([environ["PYTHONPATH"], *sys.path])
    subprocess.run([sys.executable, "-c", _IS_OURS], env=environ, check=True, timeout=100)


@pytest.mark.slow
def test_processes_of_a_suite_have_ours_too(tmp_path) -> None:
    suite = tmp_path / "test_dataloader.py"
    suite.write_text(_SUITE)
    assert run([suite], None, ["-q"]) == 0
