"""A process that was killed and does not go away, as one that sleeps in the kernel.

Whoever traces a process is told of its end before its parent is: until the tracer ends, the parent
waits in vain.
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
    """While this lasts, nobody can collect the process, whatever it dies of."""
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
