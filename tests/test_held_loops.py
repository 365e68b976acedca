"""A test whose node holds its event loop fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import held_loops
import pytest

pytestmark = pytest.mark.may_hold_loop


def test_a_test_whose_node_holds_its_loop_fails() -> None:
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent / "node")]!r}
from test_watchdog import *
from dataplane.base.trace import configure
configure("warning", "text")
seen_of(lambda: compute_for(0.06))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=True, timeout=60
    )

    def report(marker: object) -> pytest.TestReport:
        told = [("Captured stderr call", done.stderr)]
        made = pytest.TestReport("one", ("", 1, ""), {}, "passed", None, "teardown", told)
        test: Any = SimpleNamespace(get_closest_marker=lambda name: marker)
        conftest.expect_no_hold(test, made)
        return made

    assert report(marker=None).failed
    assert "compute_for" in str(report(marker=None).longrepr)
    assert report(marker=held_loops.MAY_HOLD).passed


def test_a_hold_of_which_nobody_saw_the_place_has_a_higher_limit() -> None:
    def line(ran_ms: float, at: str) -> str:
        event = "a step of this node took long: please report this line"
        return f"WARNING dataplane.node: {event} took_ms=1 ran_ms={ran_ms} waited_ms=0 at={at}\n"

    assert held_loops.longest_hold([line(64.8, "unknown"), line(40.0, "walk:96")]) is None
    found = held_loops.longest_hold([line(260.0, "unknown"), line(64.8, "walk:96")])
    assert found is not None
    assert "at=unknown" in found
