"""Fixtures of runs over a store: see remote_epoch.py. Trainers are forked: see warm.py."""

from __future__ import annotations

import pytest
from remote_epoch import bucket, manifest, proxy, whole
from warm import WarmPython

__all__ = ["bucket", "manifest", "proxy", "whole"]


@pytest.fixture(scope="session", autouse=True)
def warm_trainers(warm_torch: WarmPython) -> None:
    """Trainers have torch when they start."""
