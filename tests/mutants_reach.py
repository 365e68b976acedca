"""Which tests run which lines of a room, and how tests are chosen by it. Plugins of pytest."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import Phase, settings

HISTORIES = "tests/scheduler/test_histories.py::"


@dataclass(slots=True)
class Reached:
    """The lines that one test ran, as (file, line), and its CPU seconds."""

    lines: set[tuple[str, int]] = field(default_factory=set)
    cpu_s: float = 0.0


class Reach:
    """Records the lines that each test reaches. Lines run by other processes are not seen."""

    def __init__(self, tree: Path, room: str) -> None:
        self._tree = f"{tree}/"
        self._room = f"{tree}/dataplane/{room}/"
        self.tests: dict[str, Reached] = {}
        self._lines: set[tuple[str, int]] = set()
        self._names: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Trace only one history, since all reach the same lines."""
        histories = [each for each in items if each.nodeid.startswith(HISTORIES)]
        items[:] = [each for each in items if each not in histories[1:]]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Trace one test, with its fixtures."""
        reached = self.tests[nodeid] = Reached(cpu_s=-time.process_time())
        self._lines = reached.lines
        threading.settrace(self._call)
        sys.settrace(self._call)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """It has ended."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self.tests[nodeid].cpu_s += time.process_time()

    def _call(self, frame: FrameType, _event: str, _value: object) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(self._room):
            return None
        name = self._names.setdefault(path, path.removeprefix(self._tree))
        self._lines.add((name, frame.f_lineno))

        def line(frame: FrameType, _event: str, _value: object) -> Any:
            self._lines.add((name, frame.f_lineno))
            return line

        return line


class Chosen:
    """Runs these tests, in this order, and ends the process where one takes far longer than
    usual. What fails is not made smaller first.
    """

    def __init__(self, limits: dict[str, float]) -> None:
        self._limits = limits
        self.lacking: Sequence[str] = ()

    def pytest_configure(self) -> None:
        """After the settings of conftest.py were loaded."""
        settings.register_profile(
            "mutants", settings(), phases=[Phase.explicit, Phase.reuse, Phase.generate]
        )
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the others."""
        found = {each.nodeid: each for each in items}
        self.lacking = [name for name in self._limits if name not in found]
        items[:] = [found[name] for name in self._limits if name in found]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Let SIGPROF end the process, as by default."""
        signal.setitimer(signal.ITIMER_PROF, self._limits[nodeid])

    def pytest_runtest_logfinish(self) -> None:
        """It has ended in time."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
