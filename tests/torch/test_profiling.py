"""Ranges in profiles: where a trainer waits for slabs, and where copies begin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_torch import DataLoader
from dataplane_torch.torch_private import profiling
from fake_device import FakeDevice

pytestmark = pytest.mark.usefixtures("shared_node")


def test_a_profile_shows_waits_and_copies(tmp_path: Path, onto: Callable[..., FakeDevice]) -> None:
    pq.write_table(pa.table({"x": range(64)}), tmp_path / "a.parquet")
    onto()
    with (
        DataLoader(tmp_path / "a.parquet", batch_size=8, device="cuda") as loader,
        torch.autograd.profiler.profile() as profile,
    ):
        assert len(list(loader)) == 8
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["dataplane.copy"] == 8
    assert 1 <= counts["dataplane.wait"] <= 8


def test_without_a_profiler_there_is_no_range() -> None:
    assert profiling.in_profile("dataplane.wait") is profiling.in_profile("dataplane.copy")


def test_a_profiler_that_reads_nvtx_gets_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(profiling, "_HAS_NVTX", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", names.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: names.append("end"))
    with profiling.in_profile("dataplane.wait"):
        assert names == ["dataplane.wait"]
    assert names == ["dataplane.wait", "end"]
