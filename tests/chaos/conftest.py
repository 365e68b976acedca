"""What a run over a store needs: see remote_epoch.py. Trainers are forked: see warm.py."""

from __future__ import annotations

from collections.abc import Iterator

import fleet
import pytest
from remote_epoch import bucket, manifest, proxy, whole
from warm import warm_python

__all__ = ["bucket", "manifest", "proxy", "whole"]


@pytest.fixture(scope="session", autouse=True)
def warm_trainers(run_mark: str) -> Iterator[None]:
    """Trainers have torch when they start."""
    with warm_python("dataplane_torch") as python:
        fleet.WARM.append(python)
        yield
        fleet.WARM.remove(python)
