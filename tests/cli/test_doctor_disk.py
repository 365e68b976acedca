"""`dataplane doctor` looks at the disk on which blocks are kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec import structs

from dataplane.commands.doctor_checks import disk
from dataplane.model.config import NodeConfig
from dataplane.node.stored import open_cache_folder
from dataplane.settings import default_node_config

MIB = 1 << 20


def config(folder: Path, cache_bytes: int) -> NodeConfig:
    settings = {"cache_dir": str(folder), "cache_bytes": cache_bytes}
    return structs.replace(default_node_config(), **settings)


def test_nothing_is_said_of_a_disk_that_is_not_used(tmp_path: Path) -> None:
    assert disk(config(tmp_path, 0)) == []
    assert not [*tmp_path.iterdir()]


def test_a_disk_with_room_is_well(tmp_path: Path) -> None:
    (found,) = disk(config(tmp_path, MIB))
    assert not found.advice
    assert found.found.startswith(f"1.0 MiB for blocks in {tmp_path}/blocks, and room for")


def test_too_little_room_is_told_before_training(tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    if usage.free > usage.total - (64 << 20):
        pytest.skip("an empty disk has room for all of it")
    (found,) = disk(config(tmp_path, usage.total - (32 << 20)))
    assert "lower cache_bytes" in found.advice


def test_why_a_disk_cannot_be_used_is_told(tmp_path: Path) -> None:
    folder = open_cache_folder(str(tmp_path), MIB)
    (taken,) = disk(config(tmp_path, MIB))
    folder.close()
    assert "another node" in taken.advice
    (tmp_path / "blocks").chmod(0o755)
    (wrong,) = disk(config(tmp_path, MIB))
    assert "open to other users" in wrong.advice
