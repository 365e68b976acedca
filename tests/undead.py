"""A process that was killed and does not go away, like one that sleeps in the kernel.

The kernel reports the end of a process to its tracer before its parent: until the tracer ends, the
parent waits in vain.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

_TRACER = """
import ctypes, os, sys
PTRACE_SEIZE = 0x4206
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), 0, 0):
    print(os.strerror(ctypes.get_errno()), flush=True)
else:
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def undead(pid: int) -> Iterator[None]:
    """Within this block, the process cannot be reaped, however it dies."""
    tracer = subprocess.Popen(
        [sys.executable, "-c", _TRACER, str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert tracer.stdout is not None
        told = tracer.stdout.readline().strip()
        if told != "held":
            pytest.skip(f"this machine lets nobody trace a process: {told}")
        yield
    finally:
        tracer.communicate(timeout=60)
