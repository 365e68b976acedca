"""Advice of `dataplane doctor`: only steps that would help with a dataset of this size."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec import structs

from dataplane.client.statistics import Bound, Stage, Statistics
from dataplane.commands.doctor_checks import Probe, disk
from dataplane.commands.doctor_run import TrialSetup, advice, verdict
from dataplane.model.config import NodeConfig
from dataplane.node.stored import open_cache_folder
from dataplane.settings import default_node_config

MIB = 1 << 20
CONFIG = NodeConfig("/c", 64 * MIB, 128 * MIB, 16 * MIB, 2, 16, 30.0, 120.0, 30.0)
RUN = Statistics(slabs=9, batches=9, samples=90, worker_count=2, consumed_s=1.0, waited_s=9.0)


def advised(
    stage: Stage,
    dataset_bytes: int,
    block_count: int,
    *,
    has_all_columns: bool = True,
    can_skip_columns: bool = True,
    **probe: float,
) -> list[str]:
    at = TrialSetup(
        CONFIG,
        cpu_count=8,
        probe=Probe(**{"is_local": True, "latency_s": 0.0, "bytes_per_s": 1e9,
                       "bytes_per_s_of_more": 9e9, **probe}),  # type: ignore[arg-type]
        open_window_bytes=dataset_bytes,
        dataset_bytes=dataset_bytes,
        block_count=block_count,
        has_images=False,
        has_all_columns=has_all_columns,
        can_skip_columns=can_skip_columns,
        is_shuffled=True,
        is_compressed=False,
    )  # fmt: skip
    return advice(Bound(stage, 10.0, None, 0.9, ()), RUN, at)


@pytest.mark.parametrize(("waited_s", "told"), [(18.0, "2,000.0 ms"), (126e-6, "0.014 ms")])
def test_the_verdict_says_how_much_longer_steps_may_take(waited_s: float, told: str) -> None:
    run = structs.replace(RUN, waited_s=waited_s)
    said = verdict(Bound(Stage.NODE, 10.0, None, 0.9, ()), run)
    assert f"If steps took {told} longer" in said


@pytest.mark.parametrize("stage", [one for one in Stage if one is not Stage.CONSUMER])
def test_for_a_few_kilobytes_no_setting_of_memory_workers_or_reads_is_advised(stage: Stage) -> None:
    told = advised(stage, 19 << 10, 1)
    settings = ("slab_bytes", "delivery_bytes", "block_arena", "worker_count", "fetch_count")
    assert not [one for one in told if one.startswith(("more ", *settings))]
    assert any("an epoch is 19.0 KiB, less than one slab" in one for one in told)


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (Stage.NODE, "slab_bytes 32.0 MiB"),
        (Stage.ROOM, "delivery_bytes_per_rank 256.0 MiB"),
        (Stage.ASSEMBLE, "worker_count 8"),
        (Stage.STORAGE, "fetch_count 64"),
    ],
)
def test_for_many_gigabytes_settings_are_advised(stage: Stage, says: str) -> None:
    told = advised(stage, 1 << 40, 1 << 16)
    assert any(one.startswith(says) for one in told)
    assert not any("an epoch is" in one for one in told)


@pytest.mark.parametrize(
    ("has_all_columns", "can_skip_columns", "says"),
    [
        (True, True, "columns=[…]: leave out unused columns, which are then not read"),
        (True, False, None),
        (False, True, None),
        (False, False, "Parquet or Arrow shards"),
    ],
)
def test_advice_on_storage_knows_which_columns_are_read(
    has_all_columns: bool, can_skip_columns: bool, says: str | None
) -> None:
    told = advised(
        Stage.STORAGE, 1 << 40, 1 << 16,
        has_all_columns=has_all_columns, can_skip_columns=can_skip_columns,
    )  # fmt: skip
    about = [one for one in told if "columns" in one]
    assert len(about) == (says is not None)
    assert all(says is not None and one.startswith(says) for one in about)


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
