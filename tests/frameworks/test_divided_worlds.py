"""Megatron-Core and DeepSpeed themselves, where they are installed: CONTRIBUTING.md says how."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANKS = Path(__file__).parent / "ranks"
pytestmark = pytest.mark.slow


def told_by(script: str, package: str, folder: Path) -> Any:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = [sys.executable, str(RANKS / script)]
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
    environ = {**os.environ, **{name: str(folder / name) for name in caches}}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_megatron_tells_every_rank_its_batch_and_its_place_within(tmp_path) -> None:
    found = told_by("on_megatron.py", "megatron", tmp_path)
    assert {one["source"] for one in found} == {"Megatron-Core: dp=2 tp=2 cp=2 pp=2"}
    # In its order tp-cp-ep-dp-pp, tensor-parallel ranks lie next to one another.
    assert [one["dp_rank"] for one in found] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [one["cp_rank"] for one in found] == [0, 0, 1, 1] * 4
    assert [one["pp_rank"] for one in found] == [0] * 8 + [1] * 8
    places = {(one["dp_rank"], one["tp_rank"], one["cp_rank"], one["pp_rank"]) for one in found}
    assert len(places) == 16


def test_deepspeed_tells_every_rank_its_batch_and_its_stage(tmp_path) -> None:
    found = told_by("on_deepspeed.py", "deepspeed", tmp_path)
    pipeline = found["pipeline"]
    assert {one["source"] for one in pipeline} == {"DeepSpeed: mpu PipelineParallelGrid, dp=2 pp=2"}
    assert [one["dp_rank"] for one in pipeline] == [0, 0, 1, 1] * 2
    assert [one["pp_rank"] for one in pipeline] == [0] * 4 + [1] * 4
    assert {(one["dp_size"], one["pp_size"]) for one in pipeline} == {(2, 2)}
    assert [one["dp_rank"] for one in found["sequence"]] == [0] * 4 + [1] * 4
    assert [one["cp_rank"] for one in found["sequence"]] == [0, 1, 2, 3] * 2
    assert [one["dp_rank"] for one in found["tensor"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {one["dp_size"] for one in found["tensor"]} == {4}
