"""What the processes of a trial cost: CPU time and memory of whole process trees, from outside.

A trial's processes are reapers of all that they start, so nothing leaves its tree. CPU time of a
tree is that of its processes and of those that they have waited for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

SAMPLE_S = 0.25
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def cpu_s(roots: Sequence[int]) -> float:
    """CPU seconds that these process trees have used so far, user and system, ended ones included."""
    return sum(_cpu_ticks(pid) for pid in _tree(roots)) / _TICKS_PER_S


def memory(roots: Sequence[int]) -> tuple[int, int]:
    """Proportional set size of these trees, bytes: in all, and without pages of files.

    Memory that several processes map counts once. Source: smaps_rollup in proc(5).
    """
    total = files = 0
    for pid in _tree(roots):
        with contextlib.suppress(OSError):
            for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name == "Pss":
                    total += int(rest.split()[0])
                elif name == "Pss_File":
                    files += int(rest.split()[0])
    return total * 1024, (total - files) * 1024


def _tree(roots: Sequence[int]) -> set[int]:
    found = set(roots)
    for root in roots:
        with contextlib.suppress(psutil.Error):
            found.update(one.pid for one in psutil.Process(root).children(recursive=True))
    return found


def _cpu_ticks(pid: int) -> int:
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    # utime, stime, cutime, cstime: fields 14 to 17, of which the 3rd is the first here.
    return sum(int(field) for field in fields[11:15])


@dataclass(slots=True)
class MemoryWatch:
    """Samples the memory of trees until it is closed.

    Shapes:  seen: [monotonic s, bytes, bytes without files] of every sample.
    """

    seen: list[tuple[float, int, int]] = field(default_factory=list)
    _roots: list[int] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def watch(self, roots: Sequence[int]) -> None:
        """From now on these too."""
        self._roots += roots
        if self._thread is None:
            self._thread = threading.Thread(target=self._sample, name="memory-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        while not self._over.is_set():
            now = time.monotonic()
            self.seen.append((now, *memory(tuple(self._roots))))
            self._over.wait(max(SAMPLE_S - (time.monotonic() - now), SAMPLE_S / 5))
