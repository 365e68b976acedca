"""One rank of a job over several hosts: reads epochs at a given pace, and writes what it got.

    hosts_rank.py '{"host": […], "url": …, "options": …, "step_s": …, "out": …}'

Ranks with a file `together` wait for each other, as those of a training job do: none is more than
AHEAD_STEPS ahead of any other.

Two files grow with each batch: OUT.ids has the ids of its samples (int64), OUT.steps one entry of
`STEP`. A line on stdin says after how many epochs to end.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from pathlib import Path

import numpy as np
from dataplane_torch import DataLoader
from hosts_namespaces import enter

_pause = threading.Event()

STEP = np.dtype([("time", "f8"), ("epoch", "i4"), ("count", "i4")])


RANK = int(os.environ.get("RANK", "0"))
AHEAD_STEPS = 2
WAIT_S = 0.002


def main() -> None:
    given = json.loads(sys.argv[1])
    enter(*given["host"])
    counts = _counts(given["together"])
    path, epoch, ends = Path(given["out"]), 0, sys.maxsize
    with (
        DataLoader(given["url"], **given["options"]) as loader,
        path.with_suffix(".ids").open("wb", buffering=0) as ids,
        path.with_suffix(".steps").open("wb", buffering=0) as steps,
    ):
        while epoch < ends:
            for batch in loader:
                got = time.monotonic()
                # Each write is whole: a process that is killed leaves no part of an entry.
                ids.write(batch["id"].numpy().tobytes())
                steps.write(np.array((got, epoch, len(batch["id"])), STEP).tobytes())
                del batch
                _pause.wait(max(0.0, got + given["step_s"] - time.monotonic()))
                _wait_for_others(counts)
            epoch += 1
            ends = _last_order(ends)
    if counts is not None:
        counts[RANK] = np.iinfo(np.int64).max


def _counts(path: str) -> np.ndarray | None:
    """How many steps each rank has taken."""
    return np.memmap(path, np.int64, "r+") if path else None


def _wait_for_others(counts: np.ndarray | None) -> None:
    if counts is None:
        return
    counts[RANK] += 1
    while counts.min() < counts[RANK] - AHEAD_STEPS:
        _pause.wait(WAIT_S)


def _last_order(ends: int) -> int:
    while select.select([0], [], [], 0)[0] and (lines := os.read(0, 4096).split()):
        ends = int(lines[-1])
    return ends


if __name__ == "__main__":
    main()
