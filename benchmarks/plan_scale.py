"""Does the plan scale? Time and memory for 10^10 samples in 2.5 million blocks, with bars.

    python benchmarks/plan_scale.py [--json]

Exit status 1: a bar was missed. Memory is the peak while the order is made, including the blocks'
row counts; a seek finds one position in a window not seen before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataplane.model import Region
from dataplane.plan.defaults import BlockSizes, shuffle_of
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane.plan.permute import key
from dataplane.plan.shards import Shard, ShardTable

T = TypeVar("T")

_SEEKS = 200
_SEED = 7
_BLOCKS_PER_SHARD = 100


@dataclass(frozen=True, slots=True)
class PlanFigure:
    """One line of the table. `bar`, if set, is the most that `value` may be."""

    name: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def missed(self) -> bool:
        return self.bar is not None and self.value >= self.bar


def timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def planned_bytes(blocks: int, rows: int, lanes: int, window: int) -> int:
    """The peak of memory while the row counts and the order are made, and one slab is located."""
    tracemalloc.start()
    order = Order(np.full(blocks, rows), _SEED, True, lanes, window, 1)
    order.locate(np.arange(min(1024, order.sample_count)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def seek_ms(order: Order) -> list[float]:
    found = []
    for each in range(_SEEKS):
        position = np.array([key(_SEED, each) % order.sample_count])
        found.append(timed(lambda: order.locate(position))[1] * 1e3)  # noqa: B023 - called at once
    return found


def slab_ms(order: Order, length: int) -> float:
    """The time to locate a slab of consecutive positions in open windows."""
    begin = order.sample_count // 2
    positions = np.arange(begin, min(begin + length, order.sample_count))
    order.locate(positions)
    return min(timed(lambda: order.locate(positions))[1] for _ in range(5)) * 1e3


def manifest_of(block_rows: NDArray[np.int64], sample_bytes: int) -> Manifest:
    blocks = len(block_rows)
    block_shard = (np.arange(blocks) // _BLOCKS_PER_SHARD).astype(np.int32)
    length = block_rows * sample_bytes
    counts = np.bincount(block_shard).tolist()
    shards = ShardTable.of(
        Shard(f"s3://bucket/data/{each:08d}.arrow", 1 << 30, f'"{each:032x}"', count, Region(0, 0),
              zero_copy=True)
        for each, count in enumerate(counts)
    )  # fmt: skip
    offset = np.arange(blocks) % _BLOCKS_PER_SHARD * length
    return Manifest(
        ("s3://bucket/data/",), "arrow_ipc", b"", shards, block_shard, block_rows, offset, length,
        length,
    )  # fmt: skip


def measure(asked: argparse.Namespace) -> list[PlanFigure]:
    block_rows = np.full(asked.blocks, asked.rows)
    shuffle = shuffle_of(BlockSizes.of(block_rows, block_rows * asked.sample_bytes))
    lanes, window = shuffle.lanes, shuffle.window
    order, plan_s = timed(lambda: Order(block_rows, _SEED, True, lanes, window, 1))
    wide = Order(block_rows, _SEED, True, 64, 65_536, 1)
    seeks, wide_seeks = seek_ms(order), seek_ms(wide)
    every = np.arange(order.block_count)
    (_, span_s), (_, again_s) = (timed(lambda: order.block_span(every)) for _ in range(2))
    manifest, build_s = timed(lambda: manifest_of(block_rows, asked.sample_bytes))
    content, write_s = timed(manifest.to_bytes)
    _, read_s = timed(lambda: Manifest.from_bytes(content))
    peak = planned_bytes(asked.blocks, asked.rows, lanes, window)
    return [
        PlanFigure("samples", order.sample_count, ""),
        PlanFigure("blocks", order.block_count, ""),
        PlanFigure("lanes by default", lanes, ""),
        PlanFigure("window by default", window, "samples"),
        PlanFigure("plan an epoch", plan_s, "s", asked.plan_s_max),
        PlanFigure("memory while planning, at most", peak / 1e6, "MB", asked.plan_mb_max),
        PlanFigure("seek, median", float(np.median(seeks)), "ms"),
        PlanFigure("seek, slowest", max(seeks), "ms", asked.seek_ms_max),
        PlanFigure("seek in windows of 65,536, median", float(np.median(wide_seeks)), "ms"),
        PlanFigure("seek in windows of 65,536, slowest", max(wide_seeks), "ms", asked.seek_ms_max),
        PlanFigure("1,024 positions in open windows of 64 lanes", slab_ms(wide, 1024), "ms"),
        PlanFigure("65,536 positions in open windows of 64 lanes", slab_ms(wide, 65_536), "ms"),
        PlanFigure("spans of all blocks, first time", span_s, "s"),
        PlanFigure("spans of all blocks, again", again_s, "s"),
        PlanFigure("manifest, made", build_s, "s"),
        PlanFigure("manifest, written", write_s, "s"),
        PlanFigure("manifest, read", read_s, "s"),
        PlanFigure("manifest, size of its file", len(content) / 1e6, "MB"),
    ]


def table(measures: list[PlanFigure]) -> str:
    lines = []
    for each in measures:
        value = f"{each.value:>16,.0f}" if not each.unit else f"{each.value:>16,.3f}"
        bar = "" if each.bar is None else f"  bar {each.bar:g}: {'MISSED' if each.missed else 'ok'}"
        lines.append(f"{each.name:<46}{value} {each.unit:<8}{bar}".rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=2_500_000)
    parser.add_argument("--rows", type=int, default=4000, help="samples of each block")
    parser.add_argument("--sample-bytes", type=int, default=1024)
    parser.add_argument("--plan-s-max", type=float, default=1.0)
    parser.add_argument("--plan-mb-max", type=float, default=150.0)
    parser.add_argument("--seek-ms-max", type=float, default=10.0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    asked = parser.parse_args()
    measures = measure(asked)
    if asked.json:
        shown = [{**asdict(each), "missed": each.missed} for each in measures]
        print(json.dumps({"measures": shown}))
    else:
        print(table(measures))
    return int(any(each.missed for each in measures))


if __name__ == "__main__":
    sys.exit(main())
