"""The root process of a trial's tree: it kills the rest of the tree before it ends.

    python -P -m dataplane_bench.trial.keeper     (stdin and stdout are those of process.py)

It is the reaper of all that is started below it, daemons included: whatever ended is waited for
here, so that its CPU time counts. When the process that loads ends, or the harness does or says
so with SIGTERM, the rest of the tree is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from dataplane_bench.trial import watch

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.005
_CLEANING_S = 1.0
_CLEANERS = (b"resource_tracker", b"torch_shm_manager")
"""Processes of Python and torch that remove what others forgot in /dev/shm when these end."""
TEMPORARY = "dataplane-trial-"
"""How the names of folders for temporary files begin."""
SIGNALLED = 128
"""Exit status of a process that a signal ended, less the signal's number."""


def main() -> int:
    """Exit status: that of the process that loads."""
    kernel, harness = ctypes.CDLL(None), os.getppid()
    kernel.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _on_term)
    kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    loading = os.fork()
    if not loading:
        return _load(kernel)
    # The pipes belong to the loading process: they close when it has ended.
    for descriptor in (0, 1):
        os.dup2(2, descriptor)
    # The harness may have ended before we asked the kernel for a signal at its death.
    if os.getppid() != harness:
        _on_term(signal.SIGTERM, None)
    status = _wait_for(loading)
    _kill_all()
    return status


def _on_term(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.SIG_IGN)
    _kill_all()
    # A harness that was killed can no longer remove the trial's temporary files.
    temporary = Path(os.environ.get("TMPDIR", ""))
    if temporary.name.startswith(TEMPORARY):
        shutil.rmtree(temporary, ignore_errors=True)
    os._exit(SIGNALLED + number)


def _load(kernel: ctypes.CDLL) -> int:
    """Become the process that loads, in a session of its own: it may signal its group."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    from dataplane_bench.trial import process

    return process.main()


def _wait_for(loading: int) -> int:
    for pid, status in _ended(0):
        if pid == loading:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else SIGNALLED - code
    raise AssertionError("a child ends before there is none")


def _kill_all() -> None:
    """Kill the rest of the tree; cleaners come last, after a grace period for their work."""
    _kill(lambda pid: not _is_cleaner(pid))
    deadline = time.monotonic() + _CLEANING_S
    while _below() and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    _kill(lambda _: True)


def _kill(wanted: Callable[[int], bool]) -> None:
    """Orphans become our children, so all processes are found sooner or later."""
    while doomed := [pid for pid in _below() if wanted(pid)]:
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _below() -> set[int]:
    for _ in _ended(os.WNOHANG):
        pass
    me = os.getpid()
    return watch.tree([me]).keys() - {me}


def _is_cleaner(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in _CLEANERS)


def _ended(options: int) -> Iterator[tuple[int, int]]:
    """Wait for children that ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, options))[0]:
            yield ended


if __name__ == "__main__":
    sys.exit(main())
