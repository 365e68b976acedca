"""Does the plan of a mixture scale? 10^10 samples of 100 sources with Pareto weights, with bars.

    python benchmarks/mixtures.py [--json] [--sources 100] [--blocks 2500000]

Exit status 1: a bar was missed. Memory is the peak while the order is made and one slab is located;
a seek finds one position of a round and of windows not seen before.
"""

from __future__ import annotations

import argparse
import json
import sys
import tracemalloc
from dataclasses import asdict

import numpy as np
from plan_scale import PlanFigure, table, timed

from dataplane.plan.counting import SHARES_SUM, CountingTree, quantised
from dataplane.plan.mixed_order import MixedOrder, SourceOrder
from dataplane.plan.mixture import Mixed, plan_of
from dataplane.plan.permute import key

_SEED, _SEEKS, _ROUNDS = 7, 200, 10_000
_SLAB = 96 * 1024


def order_of(asked: argparse.Namespace, exhausted: str = "renormalise") -> MixedOrder:
    """Each source has blocks in proportion to its weight, a tenth more or less."""
    weights = (1 + np.arange(asked.sources)) ** -1.2
    uneven = weights * np.linspace(0.9, 1.1, asked.sources)
    blocks = np.maximum(asked.blocks * uneven / uneven.sum(), 1).astype(np.int64)
    rows = [np.full(count, asked.rows) for count in blocks.tolist()]
    shares = quantised(weights.tolist())
    mixed = Mixed(
        tuple((blocks * asked.rows).tolist()),
        shares,
        (1,) * asked.sources,
        asked.lanes,
        exhausted,  # type: ignore[arg-type]
    )
    window = max(4096 // asked.sources, 64)
    return MixedOrder(
        plan_of(mixed, 0), [SourceOrder(each, window) for each in rows], _SEED, True, asked.lanes
    )


def error_max(shares: tuple[int, ...]) -> float:
    """How far the counts of a lane are from exact, at most, at the first rounds' ends."""
    slots = np.arange(_ROUNDS) * 1024
    exact = slots[:, None] * np.array(shares) / SHARES_SUM
    return float(np.abs(CountingTree(shares).counts(slots) - exact).max())


def measure(asked: argparse.Namespace) -> list[PlanFigure]:
    tracemalloc.start()
    order = order_of(asked)
    order.locate(np.arange(1024))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    order, plan_s = timed(lambda: order_of(asked))
    seeks, finds = [], []
    for each in range(_SEEKS):
        position = np.array([key(_SEED, each) % order.sample_count])
        (block, row), took_s = timed(lambda: order.locate(position))  # noqa: B023 - called at once
        seeks.append(took_s * 1e3)
        found, took_s = timed(lambda: order.positions_of(int(block[0]), int(row[0])))  # noqa: B023
        assert position[0] in found
        finds.append(took_s)
    begin = order.sample_count // 2
    slab = np.arange(begin, min(begin + _SLAB, order.sample_count))
    order.locate(slab)
    slab_s = min(timed(lambda: order.locate(slab))[1] for _ in range(5))
    every = np.arange(int(order.block_count))
    _, span_s = timed(lambda: order.block_span(every))
    return [
        PlanFigure("samples", order.sample_count, ""),
        PlanFigure("sources", asked.sources, ""),
        PlanFigure("segments of the epoch", len(order.plan.segments), ""),
        PlanFigure("plan an epoch", plan_s, "s", asked.plan_s_max),
        PlanFigure("memory while planning, at most", peak / 1e6, "MB", asked.plan_mb_max),
        PlanFigure("seek, median", float(np.median(seeks)), "ms"),
        PlanFigure("seek, slowest", max(seeks), "ms", asked.seek_ms_max),
        PlanFigure("find the positions of a row, slowest", max(finds), "s", 1.0),
        PlanFigure(f"{len(slab):,} positions in open windows", slab_s * 1e3, "ms"),
        PlanFigure("spans of all blocks", span_s, "s"),
        PlanFigure(
            "counts of a lane, away from exact, at most",
            error_max(order.plan.segments[0].shares), "samples", 3.4,
        ),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sources", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=2_500_000)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--lanes", type=int, default=96)
    parser.add_argument("--plan-s-max", type=float, default=1.0)
    parser.add_argument("--plan-mb-max", type=float, default=150.0)
    parser.add_argument("--seek-ms-max", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    figures = measure(asked)
    if asked.json:
        shown = [{**asdict(each), "missed": each.missed} for each in figures]
        print(json.dumps({"measures": shown}))
    else:
        print(table(figures))
    return int(any(each.missed for each in figures))


if __name__ == "__main__":
    sys.exit(main())
