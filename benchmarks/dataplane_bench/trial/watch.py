"""The cost of a trial's processes: CPU time and memory of whole process trees, from outside.

The root of each tree is its keeper, to which all come that lose their parent, so nothing leaves
the tree. CPU time of a tree is that of its processes and of those that they have waited for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_S = 0.25
_LOOKS_MAX = 5
_PAUSE_SHARE = 19
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def cpu_s(roots: Sequence[int]) -> float:
    """CPU seconds that these process trees have used so far, user and system, with what has ended.

    A process that ends while we look counts twice or not at all; then we look again.
    """
    ticks = tree(roots)
    for _ in range(_LOOKS_MAX):
        before, ticks = ticks, tree(roots)
        if before.keys() == ticks.keys():
            break
    return sum(ticks.values()) / _TICKS_PER_S


def memory(roots: Sequence[int]) -> tuple[int, int]:
    """Proportional set size of what is below these processes, bytes: in all, and without pages of
    files. Memory that several of them map counts once.

    Source:  smaps_rollup in proc(5).
    """
    total = files = 0
    for pid in tree(roots).keys() - set(roots):
        # The file of a process that is ending can be opened, and then not be read.
        with contextlib.suppress(OSError):
            for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name == "Pss":
                    total += int(rest.split()[0])
                elif name == "Pss_File":
                    files += int(rest.split()[0])
    return total * 1024, (total - files) * 1024


def tree(roots: Sequence[int]) -> Mapping[int, int]:
    """These processes and all below them: process id -> CPU ticks, with children waited for."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir(_PROC):  # noqa: PTH208 - names are all that is needed
        if name.isdigit() and (fields := _stat(name)):
            pid = int(name)
            # Fields 4 (parent) and 14 to 17 (utime, stime, cutime, cstime); field 3 is our first.
            ticks[pid] = sum(map(int, fields[11:15]))
            children.setdefault(int(fields[1]), []).append(pid)
    in_tree: dict[int, int] = {}
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in ticks and pid not in in_tree:
            in_tree[pid] = ticks[pid]
            waiting += children.get(pid, ())
    return in_tree


def _stat(pid: str) -> list[str]:
    try:
        # The name in parentheses may contain any character.
        return (_PROC / pid / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


@dataclass(slots=True)
class MemoryWatch:
    """Samples the memory of trees until it is closed; takes a twentieth of a core at most.

    Shapes:  seen: [monotonic s, bytes, bytes without files] of every sample.
    """

    look: Callable[[Sequence[int]], tuple[int, int]] = memory
    seen: list[tuple[float, int, int]] = field(default_factory=list)
    _roots: tuple[int, ...] = ()
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def watch(self, root: int) -> None:
        """From now on this tree too."""
        self._roots += (root,)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
            self._thread.start()

    def sample(self) -> None:
        """Look now."""
        self.seen.append((time.monotonic(), *self.look(self._roots)))

    def forget(self, root: int) -> None:
        """Stop sampling a tree that has ended: the kernel may reuse its process id."""
        self._roots = tuple(pid for pid in self._roots if pid != root)

    def close(self) -> None:
        """May be called twice."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            now = time.monotonic()
            self.sample()
            took = time.monotonic() - now
            # Reading smaps holds a lock of the process that is read, so it must be rare.
            self._over.wait(max(SAMPLE_S - took, _PAUSE_SHARE * took))
