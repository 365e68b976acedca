"""How does the cost of the scheduler's decisions grow with the number of blocks?

    python benchmarks/scheduling.py [--json]

The scheduler runs without stores, workers or sockets: each effect completes at once. In the first
part every block must be fetched and the arena is full, so that each block evicts another; the table
shows the CPU time of decisions per loaded block, for 500 to 15,000 blocks in memory and 10^3 to
3 * 10^6 in the dataset. In the second part all blocks are in memory; the table shows the CPU time
per slab of one batch and of eight, for 1 and 8 ranks with batches of 64 rows: decisions, plans, and
the messages to trainer and worker. Exit status 1: one of these costs at its largest size more than
1.2 times what it costs at its smallest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from dataplane.arena.slots import plan_slots
from dataplane.config import JobSpec
from dataplane.model import Stream
from dataplane.plan.order import Order
from dataplane.rpc import messages, tasks
from dataplane.rpc.codec import encode
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.dataset import DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import SlabSizes, Walk

PAGE = 4096
ROUNDS = 3
RATIO_MAX = 1.2


@dataclass(frozen=True, slots=True)
class SchedulingCase:
    """The number of blocks in the arena and in the dataset, and the ranks that read it in lanes."""

    resident: int
    blocks: int
    ranks: int = 1
    batches_a_slab: int = 1
    rows_a_block: int = 16
    batch: int = 64

    @property
    def is_loading(self) -> bool:
        """Whether the dataset is larger than the arena, so that blocks evict each other."""
        return self.resident < self.blocks


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of the decisions in one case, in microseconds."""

    resident: int
    blocks: int
    ranks: int
    batches_a_slab: int
    us_a_block: float
    us_a_slab: float


class DrivenNode:
    """A scheduler, and a node in which every effect completes at once."""

    def __init__(self, case: SchedulingCase) -> None:
        self._scheduler = Scheduler(case.resident * PAGE, 64, Autoscaler(2, 2, 2), 1e9)
        rows = np.full(case.blocks, case.rows_a_block, np.int64)
        raw, decoded = np.full(case.blocks, PAGE, np.int64), np.zeros(case.blocks, np.int64)
        marks = Marks.of(raw, decoded, np.ones(case.blocks, np.bool_))
        dataset = DatasetBlocks(1, "made up", marks, raw, rows, url=str)
        datasets = DatasetLookup(dataset)
        # Open windows take an eighth of the blocks in memory.
        window = max(case.resident // 8, 1) * case.rows_a_block
        self._rows, self._ranks = rows, range(case.ranks)
        self._batches, self._is_loading = case.batches_a_slab, case.is_loading
        step = case.batch * case.ranks
        self._spec = JobSpec("f", seed=1, shuffle=True, window=window, global_batch=step)
        self._orders: dict[int, Order] = {}
        self._epochs = dict.fromkeys(self._ranks, -1)
        self._pending: deque[events.Event] = deque()
        self._now = self.cpu_s = 0.0
        self.loaded = self.slabs = 0
        self._requests = 0
        for rank in self._ranks:
            delivery = events.DeliveryOpened(
                rank, plan_slots(1 << 20, 1 << 16), datasets, group=rank, is_declared=False
            )
            self._tell(delivery)
            self._open_next_epoch(rank)

    def _open_next_epoch(self, rank: int) -> None:
        self._epochs[rank] += 1
        epoch, spec = self._epochs[rank], self._spec
        for each in (epoch, epoch + 1):
            if each not in self._orders:
                self._orders[each] = Order(self._rows, spec.seed, True, 1, spec.window, each)
        at = Stream(epoch, 0, rank, len(self._ranks), 0, 1)
        walk = Walk(spec, self._orders[epoch], at, SlabSizes(self._batches, self._batches, 1 << 16))
        self._tell(events.StreamStarted(self._stream_of(rank), rank, walk, rank))
        self._tell(events.NextOrderKnown(self._stream_of(rank), self._orders[epoch + 1]))

    def _stream_of(self, rank: int) -> int:
        return self._epochs[rank] * len(self._ranks) + rank

    def _tell(self, event: events.Event) -> None:
        self._pending.append(event)

    def run(self, slab_count: int) -> None:
        """Run until each rank has received this many more slabs."""
        end = self.slabs + slab_count * len(self._ranks)
        while self.slabs < end:
            for rank in self._ranks:
                self._requests += 1
                self._tell(events.Requested(self._stream_of(rank), self._requests))
            wanted = self.slabs + len(self._ranks)
            while self.slabs < wanted:
                self._step()

    def _step(self) -> None:
        event = self._pending.popleft() if self._pending else events.Settled()
        self._now += 1e-6
        for effect in self._costing(self._scheduler.decide, event, self._now):
            if not self._is_loading:
                self._costing(self._message_of, effect)
            match effect:
                case events.PlanSteps():
                    plan = partial(effect.walk.next_plans, effect.count)
                    plans = plan() if self._is_loading else self._costing(plan)
                    self._tell(events.Planned(effect.stream_id, plans))
                case events.Fetch():
                    self.loaded += 1
                    self._tell(events.BlockFetched(effect.key))
                case events.AssembleSlab():
                    count = len(effect.plan.batches)
                    result = tasks.Assembled(count, bytes_needed=0, bytes_used=1)
                    self._tell(events.SlabAssembled(effect.number, result, self._now))
                case events.Send(body=messages.Slab(slab_id=slab_id)):
                    self.slabs += 1
                    self._tell(events.Released(effect.stream_id % len(self._ranks), (slab_id,)))
                case events.Send(body=messages.EndOfStream()):
                    rank = effect.stream_id % len(self._ranks)
                    self._tell(events.StreamClosed(effect.stream_id))
                    self._open_next_epoch(rank)
                    self._tell(events.Requested(self._stream_of(rank), effect.request_id))

    def _costing(self, call: Callable[..., Any], *given: object) -> Any:
        """Make a call whose CPU time counts as the node's."""
        began = time.thread_time_ns()
        found = call(*given)
        self.cpu_s += (time.thread_time_ns() - began) / 1e9
        return found

    def _message_of(self, effect: events.Effect) -> bytes:
        """The message that the engine sends for an effect, to a trainer or to a worker."""
        if isinstance(effect, events.Send):
            return encode(messages.FromNode(effect.request_id, effect.body))
        if isinstance(effect, events.AssembleSlab):
            return encode(
                tasks.Task(
                    tasks.Assemble(
                        1, effect.keys, effect.row_index, effect.plan.batches, effect.delivery_id,
                        effect.slab, effect.render,
                    )
                )
            )  # fmt: skip
        return b""


def measured(case: SchedulingCase) -> Cost:
    """The minimum of several rounds, since other load can only add to it."""
    node = DrivenNode(case)
    # Enough slabs to read two windows: the blocks of a window are loaded together.
    rows = case.rows_a_block
    slabs = max(2 * case.resident // 8 * rows // case.batch // case.ranks, 100)
    slabs = max(slabs // case.batches_a_slab, 100)
    # Warm up until the arena is full and every new block evicts another.
    node.run(case.resident * rows // case.batch // case.ranks // case.batches_a_slab + 50)
    found = []
    for _ in range(ROUNDS):
        cpu_s, loaded, made = node.cpu_s, node.loaded, node.slabs
        node.run(slabs)
        cpu_us = (node.cpu_s - cpu_s) * 1e6
        found.append((cpu_us / max(node.loaded - loaded, 1), cpu_us / (node.slabs - made)))
    block, slab = (min(each) for each in zip(*found, strict=True))
    return Cost(
        case.resident, case.blocks, case.ranks, case.batches_a_slab,
        round(block, 1), round(slab, 1),
    )  # fmt: skip


def show(name: str, costs: list[Cost]) -> None:
    print(name)
    for cost in costs:
        what = f"{cost.us_a_block:8.1f} us a block"
        if cost.resident == cost.blocks:
            batch = cost.us_a_slab / cost.batches_a_slab
            what = f"{cost.us_a_slab:8.1f} us a slab, {batch:8.1f} us a batch"
        print(
            f"  {cost.resident:>7,} in memory, {cost.blocks:>9,} in all, {cost.ranks} ranks:",
            what,
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    given = parser.parse_args()
    groups = {
        "blocks in memory": [
            SchedulingCase(resident, 100_000) for resident in (500, 3_700, 15_000)
        ],
        "blocks in the dataset": [
            SchedulingCase(500, blocks) for blocks in (1_000, 100_000, 3_000_000)
        ],
        **{
            f"slabs of {count}": [
                SchedulingCase(3_700, 3_700, ranks, count, rows_a_block=256) for ranks in (1, 8)
            ]
            for count in (1, 8)
        },
    }
    costs: dict[str, list[Cost]] = {}
    for name, cases in groups.items():
        costs[name] = [measured(case) for case in cases]
        if not given.json:
            show(name, costs[name])
    if given.json:
        print(json.dumps({name: [asdict(cost) for cost in found] for name, found in costs.items()}))
    ratios = [
        max(found[-1].us_a_block / found[0].us_a_block, 0)
        if not name.startswith("slabs")
        else found[-1].us_a_slab / found[0].us_a_slab
        for name, found in costs.items()
    ]
    return int(max(ratios) > RATIO_MAX)


if __name__ == "__main__":
    sys.exit(main())
