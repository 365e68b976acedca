"""How often are neighbouring blocks asked for together, and what would joining their reads save?

    python benchmarks/joined_reads.py [--latency-ms 20] [--in-flight 16,64]

Pure simulation: the blocks of 64 shards in the order in which an epoch needs them (unshuffled, and
shuffled with the defaults), so many reads in flight, each of one latency and of its bytes at 80
MB/s. When reads end at the same time, the next ones begin together: `store/joined.py` joins those
of neighbours. The table has requests, seconds, and CPU seconds, of which a request takes 0.34 ms
and a GiB 0.46 s (docs/performance.md): as it is; joined, with as many blocks in flight; and in
order, joined with as many requests in flight.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.model import Region
from dataplane.plan.defaults import BlockSizes, shuffle_of
from dataplane.plan.order import Order
from dataplane.store.joined import JOINED_BYTES_MAX, joined_reads

SHARDS = 64
SAMPLE_BYTES = 2_048
CONNECTION_BYTES_PER_S = 80e6
REQUEST_CPU_S = 0.34e-3
BYTES_CPU_S = 0.46 / (1 << 30)
_TICK_S = 1e-3


@dataclass(frozen=True, slots=True)
class EpochReads:
    """What an epoch took."""

    requests: int
    seconds: float
    cpu_s: float


def needed(block_rows: Sequence[int], *, shuffled: bool) -> list[int]:
    """The blocks in the order of their first samples."""
    rows = np.array(block_rows, np.int64)
    shape = shuffle_of(BlockSizes.of(rows, rows * SAMPLE_BYTES))
    order = Order(rows, 7, shuffled, shape.lanes, shape.window, 0, shape.ramp)
    blocks, _ = order.locate(np.arange(order.sample_count))
    found, first = np.unique(blocks, return_index=True)
    return [int(block) for block in found[np.argsort(first)]]


def requests_of(blocks: Sequence[int], a_shard: int, size: int, *, is_joined: bool) -> Iterator[
    tuple[int, int]
]:  # fmt: skip
    """Of each request for these blocks: how many of them it reads, and its bytes."""
    if not is_joined:
        yield from ((1, size) for _ in blocks)
        return
    of_shard: defaultdict[int, list[Region]] = defaultdict(list)
    for block in blocks:
        of_shard[block // a_shard].append(Region(block % a_shard * size, size))
    for wanted in of_shard.values():
        yield from ((len(one.reads), one.place.length) for one in joined_reads(wanted))


def epoch(
    blocks: list[int],
    a_shard: int,
    size: int,
    latency_s: float,
    in_flight: int,
    *,
    is_joined: bool,
    a_request: int = 1,
) -> EpochReads:
    """Reads begin whenever others end; those that end within a millisecond end together. A request
    that ends makes room for `a_request` blocks, or for as many as it read if that is more.
    """
    running: list[tuple[float, int]] = []
    now, at, room, count, total = 0.0, 0, in_flight * a_request, 0, 0
    while at < len(blocks) or running:
        begun = blocks[at : at + room]
        for taken, length in requests_of(begun, a_shard, size, is_joined=is_joined):
            took_s = latency_s + length / CONNECTION_BYTES_PER_S
            heapq.heappush(running, (now + took_s, max(taken, a_request)))
            count, total = count + 1, total + length
        at += len(begun)
        now, room = running[0][0], 0
        while running and running[0][0] <= now + _TICK_S:
            room += heapq.heappop(running)[1]
    return EpochReads(count, now, count * REQUEST_CPU_S + total * BYTES_CPU_S)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--in-flight", default="16,64", help="numbers, with commas between")
    given = parser.parse_args()
    print("    block       order  in flight     requests, seconds, CPU s: as it is | joined | also")
    for size in (32 << 10, 128 << 10, 512 << 10, 2 << 20):
        a_shard = max(4, (16 << 20) // size)
        rows = [size // SAMPLE_BYTES] * (a_shard * SHARDS)
        for shuffled in (False, True):
            blocks = needed(rows, shuffled=shuffled)
            for in_flight in map(int, given.in_flight.split(",")):
                ways = [(False, 1), (True, 1)]
                if not shuffled:
                    ways.append((True, max(1, JOINED_BYTES_MAX // size)))
                found = [
                    epoch(
                        blocks, a_shard, size, given.latency_ms / 1e3, in_flight,
                        is_joined=is_joined, a_request=a_request,
                    )
                    for is_joined, a_request in ways
                ]  # fmt: skip
                name = "shuffled" if shuffled else "in order"
                print(
                    f"{size >> 10:5d} KiB{name:>12s}{in_flight:11d}   ",
                    " | ".join(f"{x.requests:6d} {x.seconds:5.1f} {x.cpu_s:5.2f}" for x in found),
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
