"""Measures how much of a task's time went into waiting for a disk, and for a processor."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from functools import cache

from msgspec.structs import replace

from dataplane.base.machine import ProcessorWaits
from dataplane.rpc import tasks

_FAULT_S_MAX = 0.02
"""Reading a page from a disk usually takes no longer than this."""


def timed(
    work: Callable[[], tasks.Assembled | tasks.Decoded | tasks.Extracted],
) -> tasks.Assembled | tasks.Decoded | tasks.Extracted:
    """Perform a task; return its answer, with the time spent waiting for a processor, and for the
    disk, if pages were read from one.
    """
    waits = _waits(os.getpid())
    before, began, waited_s = resource.getrusage(resource.RUSAGE_THREAD), time.monotonic(), waits()
    done = work()
    after = resource.getrusage(resource.RUSAGE_THREAD)
    done = replace(done, queued=max(round((waits() - waited_s) * 1e6), 0))
    if after.ru_majflt == before.ru_majflt:
        return done
    busy_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Attribute waiting to the disk by the share of voluntary context switches: a wait for a disk is
    # a voluntary one, sharing a processor causes involuntary ones.
    gave_up, was_made = after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw
    waited_s = (time.monotonic() - began - busy_s) * gave_up / max(gave_up + was_made, 1)
    most_s = (after.ru_majflt - before.ru_majflt) * _FAULT_S_MAX
    return replace(done, disk=round(min(max(waited_s, 0.0), most_s) * 1e6))


@cache
def _waits(pid: int) -> Callable[[], float]:
    """Return a function that reads how long this process has waited for a processor; its tasks run
    in its main thread.
    """
    return ProcessorWaits(pid).seconds
