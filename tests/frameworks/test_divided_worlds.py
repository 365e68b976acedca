"""Megatron-Core, DeepSpeed and torchtitan themselves, where they are installed:

pip install --no-deps megatron-core torchtitan spmd_types tyro docstring_parser typeguard shtab
DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed
"""

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


def test_torchtitan_has_a_mesh_for_batches_and_its_others_are_refused(tmp_path) -> None:
    for backend, ranks in told_by("on_torchtitan.py", "torchtitan", tmp_path).items():
        # Its order is pp, dp_replicate, dp_shard, cp, tp.
        batch = [rank["batch"] for rank in ranks]
        assert [one["dp_rank"] for one in batch] == [rank // 4 for rank in range(16)]
        assert {(one["dp_size"], one["source"]) for one in batch} == {
            (4, "DeviceMesh(batch=4), batch axes: batch")
        }
        if backend != "partial_dtensor":
            assert [rank["both"]["dp_rank"] for rank in ranks] == [i // 4 for i in range(16)]
        if backend == "spmd_types":
            assert [rank["dp"]["dp_rank"] for rank in ranks] == [i // 4 for i in range(16)]
        for rank in ranks:
            others = set(rank) - {"batch", "dp", "both"}
            assert {"dp_replicate", "cp", "tp"} < others
            assert all(isinstance(rank[name], str) for name in others), "it was accepted"
            assert "get_mesh('batch')" in rank["dp_replicate"]
            assert "get_mesh('batch')" in rank["fsdp" if "fsdp" in rank else "dp_shard"]
