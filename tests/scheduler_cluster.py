"""Nodes of one job in one process, on a virtual clock, which lend each other blocks: schedulers,
and around them stores, workers, trainers and lines that take their time.

    python tests/scheduler_cluster.py --nodes 4 --ranks 2 --lanes 8 --arena-mib 16

prints what they read from the store."""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dataplane.arena.slots import plan_slots
from dataplane.model.config import JobSpec
from dataplane.model.errors import DataplaneError
from dataplane.model.records import Region, Stream
from dataplane.neighbours.connection import InFlight, Limits
from dataplane.plan.cluster import Owners, Weighed
from dataplane.plan.order import Order
from dataplane.rpc import messages, tasks
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.dataset import BlockPlaces, DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import SlabSizes, Walk


@dataclass(frozen=True, slots=True)
class Shape:
    """A job over some nodes. Times are in seconds, and drawn up to twice as long. Without lanes it
    reads in order. The first node has an arena of `small_bytes`, if that is not 0.
    """

    nodes: int = 4
    ranks: int = 2
    lanes: int = 8
    window: int = 1024
    batch: int = 512
    blocks: int = 512
    shard_blocks: int = 32
    block_rows: int = 500
    row_bytes: int = 1024
    estimate: float = 1.27
    """Of the index, for decoded blocks."""
    arena_bytes: int = 16 << 20
    small_bytes: int = 0
    slab_bytes: int = 1 << 19
    slots_bytes: int = 8 << 20
    workers: int = 1
    epochs: int = 2
    seed: int = 1
    read_s: float = 0.02
    line_s: float = 0.001
    decode_s: float = 0.003
    assemble_s: float = 0.002
    step_s: float = 0.005
    knows: int = 1
    """0: the nodes do not know each other."""

    @property
    def size(self) -> int:
        return self.nodes * self.ranks

    def arena_of(self, node: int) -> int:
        return self.small_bytes if self.small_bytes and not node else self.arena_bytes

    def place(self, block: int) -> tuple[int, int]:
        """The shard that a block is in, and where it begins there."""
        shard, number = divmod(block, self.shard_blocks)
        return shard, number * (self.block_rows * self.row_bytes)


if TYPE_CHECKING:
    from scheduler_cluster import SimulatedNode

Answer = events.LendBlock | events.OnlyDecoded | events.RefuseAsk


@dataclass(eq=False, slots=True)
class Turn:
    """A request for a block, at its owner."""

    asker: SimulatedNode
    effect: events.Fetch
    epoch: int
    length: int
    has_begun: bool = False
    is_over: bool = False


class SimulatedLender:
    """A request waits for its turn first, and then for the node."""

    def __init__(self, node: SimulatedNode, arena_bytes: int) -> None:
        self._node = node
        self._turns: InFlight[Turn] = InFlight(arena_bytes)

    def asked(self, turn: Turn) -> None:
        self._turns.ask(str(turn.asker.number), turn.length, turn)
        self._next()
        if not turn.has_begun:
            self._node.cluster.later(Limits().turn_s, partial(self._late, turn))

    def ended(self, turn: Turn) -> None:
        """The node refused it, or the asker has the block."""
        self._turns.ended(str(turn.asker.number), turn.length)
        self._node.cluster.later(0.0, self._next)

    def _next(self) -> None:
        while (turn := self._turns.next()) is not None:
            if turn.is_over:
                self._turns.ended(str(turn.asker.number), turn.length)
                continue
            turn.has_begun = True
            self._node.ask(turn)

    def _late(self, turn: Turn) -> None:
        if not turn.has_begun:
            turn.is_over = True
            self._node.refuse(turn)


PREAMBLE_BYTES = 7_590
AHEAD_STEPS = 2
TICK_S = 0.5
FETCHES = 16


class Cluster:
    """Runs the job. Afterwards: `reads`, for each epoch and block how often it was read from the
    store for it, and `whys`, for each epoch and reason how many blocks were. `longest_s` is the
    longest time from one step of a rank to its next one, with where that was.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.chance = random.Random(shape.seed)
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self.steps = [0] * shape.size
        self.ranks: list[Rank] = []
        self.reads: Counter[tuple[int, int]] = Counter()
        self.whys: Counter[tuple[int, str]] = Counter()
        self.longest_s = (0.0, 0, 0, 0)
        weighed = [Weighed(f"node-{i}", shape.arena_of(i)) for i in range(shape.nodes)]
        self._owners = Owners(weighed)
        rows = self.rows = np.full(shape.blocks, shape.block_rows, np.int64)
        spec = self.spec = JobSpec(
            "f", seed=shape.seed, shuffle=shape.lanes > 0, lanes=max(shape.lanes, 1),
            window=shape.window, global_batch=shape.batch,
        )  # fmt: skip
        self.orders = [
            Order(rows, spec.seed, spec.shuffle, spec.lanes, spec.window, epoch)
            for epoch in range(shape.epochs + 2)
        ]
        self.members = [SimulatedNode(self, number) for number in range(shape.nodes)]
        for node in self.members:
            node.begin()
        while any(rank.epoch < shape.epochs for rank in self.ranks):
            self.now, _, act = heapq.heappop(self._due)
            act()

    def owner(self, block: int) -> SimulatedNode:
        return self.members[self._owners.of(b"d" * 16, *self.shape.place(block))]

    def later(self, wait_s: float, act: Callable[[], None]) -> None:
        due = self.now + wait_s * (1 + self.chance.random())
        heapq.heappush(self._due, (due, next(self._serial), act))

    def epoch_reads(self, epoch: int) -> float:
        """How often each block was read from the store for this epoch, on average."""
        return sum(n for (at, _), n in self.reads.items() if at == epoch) / self.shape.blocks


class Rank:
    """A trainer, which is at most AHEAD_STEPS ahead of any other."""

    def __init__(self, cluster: Cluster, node: SimulatedNode, number: int) -> None:
        self._cluster, self._node, self.number = cluster, node, number
        self.epoch = self.steps = 0
        self.planned = -1
        """The stream that is read ahead."""
        self._slabs: list[tuple[int, int]] = []
        self._left = 0
        self._is_stepping = self._has_ended = False
        self._stepped_at = -1.0

    def stream(self, epoch: int) -> int:
        return epoch * self._cluster.shape.size + self.number

    def got(self, slab: messages.Slab) -> None:
        self._slabs.append((slab.slab_id, len(slab.batches)))
        self.go_on()

    def go_on(self) -> None:
        """Take the next step, if there is a batch and others are not far behind."""
        if self._is_stepping:
            return
        if not self._slabs:
            if self._has_ended:
                self._has_ended = False
                self._next_epoch()
            return
        if self.steps - min(rank.steps for rank in self._cluster.ranks) >= AHEAD_STEPS:
            return
        self._is_stepping = True
        if not self._left:
            self._left = self._slabs[0][1]
            # The next slab is requested while this one is used.
            self._node.tell(events.Requested(self.stream(self.epoch), 0))
        self._cluster.later(self._cluster.shape.step_s, self._stepped)

    def _stepped(self) -> None:
        cluster, now = self._cluster, self._cluster.now
        if self._stepped_at >= 0:
            gap = (now - self._stepped_at, self.number, self.epoch, self.steps)
            cluster.longest_s = max(cluster.longest_s, gap)
        self._is_stepping, self._stepped_at = False, now
        self.steps += 1
        self._left -= 1
        if not self._left:
            slab_id, _ = self._slabs.pop(0)
            self._node.tell(events.Released(self.number, (slab_id,)))
        self._go_on_together()

    def _go_on_together(self) -> None:
        """Others may wait for this one."""
        for rank in self._cluster.ranks:
            rank.go_on()

    def ended(self) -> None:
        self._has_ended = True
        self.go_on()

    def _next_epoch(self) -> None:
        node, former = self._node, self.stream(self.epoch)
        self.epoch += 1
        if self.epoch >= self._cluster.shape.epochs:
            self.steps = sys.maxsize
            self._go_on_together()
            return
        node.tell(events.StreamClosed(former))
        if self.planned < self.epoch:
            node.open(self, self.epoch, is_ahead=False)
        else:
            node.tell(events.StreamAdopted(self.stream(self.epoch)))
        node.tell(events.Requested(self.stream(self.epoch), 0))
        order = self._cluster.orders[self.epoch + 1]
        node.tell(events.NextOrderKnown(self.stream(self.epoch), order))


class SimulatedNode:
    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.number = cluster, number
        shape = self.shape = cluster.shape
        stored = np.full(shape.blocks, shape.block_rows * shape.row_bytes, np.int64)
        raw = stored + PREAMBLE_BYTES
        decoded = (stored * shape.estimate).astype(np.int64)
        marks = Marks.of(raw, decoded, np.ones(shape.blocks, np.bool_))
        shards, offsets = np.array([shape.place(block) for block in range(shape.blocks)]).T
        places = BlockPlaces(shards.astype(np.int32), offsets, stored)
        self.dataset = DatasetBlocks(1, "d", marks, stored, cluster.rows, url=str, places=places)
        self._decoded_bytes = int(stored[0]) + 900
        workers = Autoscaler(shape.workers, shape.workers, 8)
        self.scheduler = Scheduler(shape.arena_of(number), FETCHES, workers, 1e9)
        self.lender = SimulatedLender(self, shape.arena_of(number))
        self._events: list[events.Event] = []
        self._is_deciding = False
        self._idle_workers = shape.workers
        self._tasks: list[tuple[int, int, float, Callable[[], None]]] = []
        self._expected: set[int] = set()
        self._left_alone: set[int] = set()
        self._asks: dict[int, Turn] = {}
        self._ask_numbers = itertools.count(1)
        self._serial = itertools.count()
        self._purpose: dict[int, int] = {}
        """The epoch for which a block was asked for by others."""
        self.local: dict[int, Rank] = {}

    def begin(self) -> None:
        shape, cluster = self.shape, self.cluster
        sizes = self._sizes()
        layout = plan_slots(shape.slots_bytes, sizes.slot_bytes)
        datasets = DatasetLookup(self.dataset)
        for local in range(shape.ranks):
            rank = Rank(cluster, self, self.number * shape.ranks + local)
            cluster.ranks.append(rank)
            self.local[rank.number] = rank
            self.tell(events.DeliveryOpened(rank.number, layout, datasets, None, False))
            self.open(rank, 0, is_ahead=False)
            self.tell(events.Requested(rank.stream(0), 0))
            self.tell(events.NextOrderKnown(rank.stream(0), cluster.orders[1]))
        self._tick()

    def _sizes(self) -> SlabSizes:
        shape = self.shape
        batch_bytes = shape.batch // shape.size * shape.row_bytes + 256
        batches = max(1, shape.slab_bytes // batch_bytes)
        return SlabSizes(batches, batches, max(shape.slab_bytes, batch_bytes) + 8192, batch_bytes)

    def open(self, rank: Rank, epoch: int, *, is_ahead: bool) -> None:
        rank.planned = epoch
        at = Stream(epoch, 0, rank.number, self.shape.size, 0, 1)
        walk = Walk(
            self.cluster.spec, self.cluster.orders[epoch], at, self._sizes(), is_ahead=is_ahead
        )
        before = rank.stream(epoch - 1) if is_ahead else None
        self.tell(events.StreamStarted(rank.stream(epoch), rank.number, walk, rank.number, before))

    def tell(self, event: events.Event) -> None:
        self._events.append(event)
        if self._is_deciding:
            return
        self._is_deciding = True
        while self._events or not self.scheduler.is_settled:
            event = self._events.pop(0) if self._events else events.Settled()
            for effect in self.scheduler.decide(event, self.cluster.now):
                self._do(effect)
        self._is_deciding = False

    def _tick(self) -> None:
        self.tell(events.Ticked(0.5, 1e6))
        self.cluster.later(TICK_S / 1.5, self._tick)

    def _do(self, effect: events.Effect) -> None:
        later, shape = self.cluster.later, self.shape
        match effect:
            case events.PlanSteps():
                plans = effect.walk.next_plans(effect.count)
                later(0.001, partial(self.tell, events.Planned(effect.stream_id, plans)))
            case events.AllPlanned():
                self._open_next(effect.stream_id)
            case events.Fetch():
                self._fetch(effect)
            case events.DecodeBlock():
                result = tasks.Decoded(self._decoded_bytes, stored=True)
                end = events.BlockDecoded(effect.key, result, self.cluster.now)
                self._submit(1, shape.decode_s, partial(self.tell, end))
            case events.ExtractRows():
                sizes = tuple(each.into.length for each in effect.excerpts)
                end = events.RowsExtracted(effect.number, tasks.Extracted(sizes), self.cluster.now)
                self._submit(0, shape.assemble_s, partial(self.tell, end))
            case events.AssembleSlab():
                count = len(effect.plan.batches)
                used = count * self._sizes().batch_bytes
                made = tasks.Assembled(count, bytes_needed=0, bytes_used=used)
                end = events.SlabAssembled(effect.number, made, self.cluster.now)
                self._submit(0, shape.assemble_s, partial(self.tell, end))
            case events.Send():
                self._sent(effect)
            case events.LendBlock() | events.RefuseAsk() | events.OnlyDecoded():
                self._answer(effect)

    def _open_next(self, stream_id: int) -> None:
        epoch, number = divmod(stream_id, self.shape.size)
        if epoch + 1 <= self.shape.epochs:
            self.open(self.local[number], epoch + 1, is_ahead=True)

    def _sent(self, effect: events.Send) -> None:
        rank = self.local[effect.stream_id % self.shape.size]
        match effect.body:
            case messages.Slab() as slab:
                rank.got(slab)
            case messages.EndOfStream():
                self.cluster.later(1e-4, rank.ended)
            case DataplaneError() as error:
                raise error

    def _submit(self, urgency: int, wait_s: float, end: Callable[[], None]) -> None:
        heapq.heappush(self._tasks, (urgency, next(self._serial), wait_s, end))
        self._work()

    def _work(self) -> None:
        while self._tasks and self._idle_workers:
            self._idle_workers -= 1
            _, _, wait_s, end = heapq.heappop(self._tasks)
            self.cluster.later(wait_s, partial(self._worked, end))

    def _worked(self, end: Callable[[], None]) -> None:
        self._idle_workers += 1
        end()
        self._work()

    # -- blocks ----------------------------------------------------------------------------------

    def _epoch_of(self, block: int) -> int:
        """The epoch of the first task here that waits for a block."""
        found = [
            stream.stream_id // self.shape.size
            for stream in self.scheduler._streams
            for task in stream.tasks
            if block in task.missing or block in task.idle
        ]
        return min(found, default=self._purpose.get(block, -1))

    def _fetch(self, effect: events.Fetch) -> None:
        block = effect.block
        owner = self.cluster.owner(block) if self.shape.knows else self
        if effect.is_lent or block in self._left_alone or owner is self:
            assert not effect.is_decoded
            self.from_store(effect, "lent" if effect.is_lent else "own")
            return
        self._expected.add(block)
        length = effect.into.length if effect.is_decoded else int(self.dataset.stored[block])
        turn = Turn(self, effect, self._epoch_of(block), length)
        self.cluster.later(self.shape.line_s, partial(owner.lender.asked, turn))

    def from_store(self, effect: events.Fetch, why: str) -> None:
        epoch = self._epoch_of(effect.block)
        self.cluster.reads[epoch, effect.block] += 1
        self.cluster.whys[epoch, why] += 1
        self.cluster.later(self.shape.read_s, partial(self.fetched, effect))

    def fetched(self, effect: events.Fetch, decoded_bytes: int = 0, is_away: bool = False) -> None:
        is_guest = effect.block in self._expected
        self._expected.discard(effect.block)
        self._left_alone.discard(effect.block)
        if is_away:
            self._left_alone.add(effect.block)
        if decoded_bytes:
            self.tell(events.BlockFetched(effect.key, decoded_bytes=decoded_bytes))
        else:
            self.tell(events.BlockFetched(effect.key, is_away=is_away, is_guest=is_guest))

    # -- neighbours ------------------------------------------------------------------------------

    def ask(self, turn: Turn) -> None:
        """A neighbour's turn has come."""
        effect, number = turn.effect, next(self._ask_numbers)
        self._asks[number] = turn
        if not effect.is_decoded and effect.block in self._expected:
            self._do(events.RefuseAsk(number))
            return
        self._purpose[effect.block] = turn.epoch
        part = Region(0, turn.length)
        ask = events.NeighbourAsked(number, self.dataset, effect.block, part, effect.is_decoded)
        self.tell(ask)

    def _answer(self, answer: Answer) -> None:
        turn = self._asks.pop(answer.number)
        effect, length = turn.effect, getattr(answer, "length", 0)
        if isinstance(answer, events.LendBlock):
            self.cluster.later(self.shape.line_s, partial(self._sent_to, turn, answer.number))
        else:
            self.lender.ended(turn)
        if not isinstance(answer, events.RefuseAsk):
            self.cluster.later(self.shape.line_s, partial(turn.asker.fetched, effect, length))
        else:
            self.refuse(turn)

    def refuse(self, turn: Turn) -> None:
        asker, effect = turn.asker, turn.effect
        if effect.is_decoded:
            elsewhere = partial(asker.fetched, effect, is_away=True)
        else:
            elsewhere = partial(asker.from_store, effect, "refused")
        self.cluster.later(self.shape.line_s, elsewhere)

    def _sent_to(self, turn: Turn, number: int) -> None:
        self.lender.ended(turn)
        self.tell(events.SendingEnded(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    shape = Shape()
    for name in Shape.__dataclass_fields__:
        value = getattr(shape, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    shape = Shape(**vars(parser.parse_args()))
    cluster = Cluster(shape)
    longest_s, rank, epoch, step = cluster.longest_s
    at = f"{longest_s:.2f} s, of rank {rank} after step {step}, in epoch {epoch}"
    sys.stdout.write(f"{shape.epochs} epochs in {cluster.now:.1f} s; the longest step took {at}\n")
    for epoch in range(shape.epochs):
        whys = {why: n for (at, why), n in sorted(cluster.whys.items()) if at == epoch}
        sys.stdout.write(f"epoch {epoch}: {cluster.epoch_reads(epoch):.3f} x dataset, {whys}\n")


if __name__ == "__main__":
    main()
