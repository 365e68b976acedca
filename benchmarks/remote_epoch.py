"""One job's epoch over a url, as a process of its own, and what it took."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from dataplane_torch import DataLoader


def read(make: Callable[[], DataLoader], column: str) -> None:
    """Read an epoch, print {"rows", "bytes", "seconds", "first", "cpu_s"}, and end the process.
    `first`: seconds until the first batch. `cpu_s`: of this process and all below it.
    """
    began = time.perf_counter()
    loader = make()
    rows, first = 0, 0.0
    for batch in loader:
        rows += len(batch[column])
        first = first or time.perf_counter() - began
    seconds = time.perf_counter() - began
    found = {
        "rows": rows,
        "bytes": loader.statistics().read_bytes,
        "seconds": seconds,
        "first": first,
        "cpu_s": _cpu_s(),
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


def _cpu_s() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    process, total = psutil.Process(), ended.ru_utime + ended.ru_stime
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += each.cpu_times().user + each.cpu_times().system
    return total
