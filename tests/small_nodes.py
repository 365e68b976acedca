"""Embedded nodes with little memory, for loaders of our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataplane.client import identity

LAUNCHED = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders of this process, and of those that it starts, find no service, and no node but their
    own. Ranks without a run share a node with those of all processes that have the same parent,
    which here run other tests.
    """
    for name in ("DATAPLANE_SERVICE", *LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(identity, "_starter", lambda: (str(os.getpid()),))


def alone_and_small(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have loaders alone, as `alone` does, with nodes whose budgets a test can fill."""
    alone(monkeypatch)
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("DATAPLANE_WORKER_COUNT", "1")
    monkeypatch.setenv("DATAPLANE_BLOCK_ARENA_BYTES", "64MiB")
    monkeypatch.setenv("DATAPLANE_DELIVERY_BYTES_PER_RANK", "2MiB")
    monkeypatch.setenv("DATAPLANE_SLAB_BYTES", "64KiB")
    monkeypatch.setenv("DATAPLANE_LINGER_S", "0.2")


def tiny_budgets(monkeypatch: pytest.MonkeyPatch, folder: Path, **others: object) -> None:
    """Nodes and services have an arena for a fraction of the dataset, and these other settings."""
    settings = {
        "CACHE_DIR": folder / "cache", "STATE_DIR": folder / "state", "WORKER_COUNT": 1,
        "BLOCK_ARENA_BYTES": "1MiB", "DELIVERY_BYTES_PER_RANK": "64KiB", "SLAB_BYTES": "8KiB",
    }  # fmt: skip
    for name, value in {**settings, **others}.items():
        monkeypatch.setenv(f"DATAPLANE_{name}", str(value))
