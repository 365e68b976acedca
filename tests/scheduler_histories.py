"""Many histories of the scheduler, on all processors: `python tests/scheduler_histories.py`.

Exit status 1 means that an invariant did not hold: the command that repeats the history is printed.
With --workers, the histories are those of hosts whose trainer waits, and no worker may be idle.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from functools import partial

import scheduler_workers
from scheduler_scenes import history

_TOGETHER = 20


def failure(seed: int, *, of_workers: bool = False) -> str:
    """The traceback of the history of this seed, or "" if it holds."""
    try:
        if of_workers:
            scheduler_workers.history(seed)
        else:
            history(seed)
    except Exception:  # noqa: BLE001 - whatever goes wrong is what is looked for
        return traceback.format_exc()
    return ""


def _failures(seeds: range, *, of_workers: bool) -> tuple[int, list[tuple[int, str]]]:
    found = [(seed, failure(seed, of_workers=of_workers)) for seed in seeds]
    return len(found), [(seed, what) for seed, what in found if what]


def _parts(first: int, count: int) -> list[range]:
    end = first + count
    return [range(at, min(at + _TOGETHER, end)) for at in range(first, end, _TOGETHER)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    parser.add_argument("--seed", type=int, help="only this one, in this process")
    parser.add_argument("--workers", action="store_true", help="hosts whose trainer waits")
    args = parser.parse_args()
    if args.seed is not None and args.workers:
        sys.stdout.write(f"seed {args.seed}: {scheduler_workers.history(args.seed)}, no failure\n")
        return 0
    if args.seed is not None:
        run = history(args.seed)
        consumers = len(run.consumers)
        sys.stdout.write(f"seed {args.seed}: {run.acts} acts, {consumers} consumers, no failure\n")
        return 0
    begin, done, failed = time.monotonic(), 0, 0
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        failures = partial(_failures, of_workers=args.workers)
        for count, found in pool.imap_unordered(failures, _parts(args.first, args.count)):
            done += count
            failed += len(found)
            for seed, what in found:
                which = "--workers " if args.workers else ""
                again = f"python tests/scheduler_histories.py {which}--seed {seed}"
                sys.stdout.write(f"\n{what}again: {again}\n")
            took = time.monotonic() - begin
            line = f"\r{done} of {args.count} histories, {failed} failed, {took:.0f} s"
            sys.stderr.write(line)
    sys.stderr.write("\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
