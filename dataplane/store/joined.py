"""Which of several waiting reads of one object go into one request. Pure.

A request costs as much CPU as three quarters of a MiB of its bytes, and a round trip. So reads of
neighbours are joined while they are small; from JOINED_BYTES_MAX on, a request of its own is no
worse, and more requests use more connections. Whoever joins reads must count requests, not reads,
where it limits what is in flight; else fewer of them hide the latency (benchmarks/joined_reads.py).

Invariants:
1. Each read is in exactly one request, whose bytes contain it.
2. A request of several reads has at most JOINED_BYTES_MAX, and no gap of GAP_BYTES_MIN or more
   between two of them. Its reads do not overlap, and lie in the order of their bytes.
3. Requests come in the order in which the first of their reads was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dataplane.model import Region

JOINED_BYTES_MAX = 1 << 20
GAP_BYTES_MIN = 256 << 10
"""Reading a smaller gap costs less than a request, as in node/projection.py."""


@dataclass(frozen=True, slots=True)
class JoinedRead:
    """One request: the bytes `place` of the object hold the reads with these indices."""

    place: Region
    reads: tuple[int, ...]


def joined_reads(wanted: Sequence[Region]) -> list[JoinedRead]:
    """The requests for these reads of one object.

    Takes n log n steps for n reads.
    """
    return sorted(_runs(wanted), key=lambda one: min(one.reads))


def _runs(wanted: Sequence[Region]) -> Iterator[JoinedRead]:
    run: list[int] = []
    start = end = 0
    for at in sorted(range(len(wanted)), key=lambda at: (wanted[at].offset, at)):
        read = wanted[at]
        stop = read.offset + read.length
        is_near = 0 <= read.offset - end < GAP_BYTES_MIN and stop - start <= JOINED_BYTES_MAX
        if run and not is_near:
            yield JoinedRead(Region(start, end - start), tuple(run))
            run = []
        if not run:
            start = read.offset
        run.append(at)
        end = stop
    if run:
        yield JoinedRead(Region(start, end - start), tuple(run))
