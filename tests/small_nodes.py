"""Embedded nodes with little memory, for loaders of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

LAUNCHED = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def alone_and_small(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Loaders of this process, and of those that it starts, are in no launch and find no service;
    their nodes have budgets that a test can fill.
    """
    for name in ("DATAPLANE_SERVICE", *LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("DATAPLANE_WORKER_COUNT", "1")
    monkeypatch.setenv("DATAPLANE_BLOCK_ARENA_BYTES", "64MiB")
    monkeypatch.setenv("DATAPLANE_DELIVERY_BYTES_PER_RANK", "2MiB")
    monkeypatch.setenv("DATAPLANE_SLAB_BYTES", "64KiB")
    monkeypatch.setenv("DATAPLANE_LINGER_S", "0.2")
