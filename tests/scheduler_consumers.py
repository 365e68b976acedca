"""Consumers of a scheduler: they check what they get, write into it, and hold it for a while."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from scheduler_world import Unplanned, World, slab_bytes

from dataplane.arena.slab_layout import row_index_bytes
from dataplane.model.changes import EpochSteps
from dataplane.model.config import JobSpec
from dataplane.model.errors import BudgetTooSmall, DataplaneError, LeaseFenced
from dataplane.model.records import End, Stream
from dataplane.plan.slices import Slice
from dataplane.rpc import messages
from dataplane.scheduler import events
from dataplane.scheduler.walk import Walk

if TYPE_CHECKING:
    from scheduler_run import Run


class Place:
    """A delivery arena of one dp_rank of a job."""

    def __init__(
        self,
        delivery_id: int,
        world: World,
        spec: JobSpec,
        memory: memoryview,
        group: object = None,
        *,
        is_declared: bool = False,
    ) -> None:
        self.delivery_id, self.world, self.spec, self.memory = delivery_id, world, spec, memory
        self.group, self.is_declared, self.is_open = group, is_declared, True


class Consumer:
    """One stream's consumer; `patience` is how many slabs it holds before it lets one go, and
    `after` another that comes first.
    """

    def __init__(
        self,
        run: Run,
        number: int,
        place: Place,
        at: Stream,
        walk: Walk,
        patience: int,
        row_bytes: int,
        after: Consumer | None = None,
    ) -> None:
        self.run, self.number, self.place, self.at, self.walk = run, number, place, at, walk
        self.patience, self.row_bytes, self.after = patience, row_bytes, after
        self.is_open, self.ended, self.planned, self.stopped = True, False, False, False
        self.asked = self.request_id = 0
        self.held: deque[tuple[messages.Slab, bytes]] = deque()
        self.error: DataplaneError | None = None
        self.stalled: list[events.Stalled] = []
        self.advanced: list[events.Advanced] = []
        self.ready_at = 0.0
        """The time at which it acts next, if time decides the order of events."""
        self.pause = (0.0, 1.0)
        self.next_step = at.first_step
        self._steps = self._expected()
        before = after.number if after is not None else None
        opened = events.StreamStarted(number, place.delivery_id, walk, number, before)
        run.consumers.append(self)
        run.tell(opened)
        if random.Random(f"{number} {place.spec.seed}").random() < 0.5:
            order, _ = self.world.order(place.spec, at.epoch + 1)
            run.tell(events.NextOrderKnown(number, order))

    def _expected(self) -> list[tuple[int, int, list[list[int]]]]:
        """(rows, valid rows, samples) of each of its steps, by step; None where it has none."""
        at, spec, world = self.at, self.place.spec, self.world
        count = world.sample_count
        whole = EpochSteps.of(spec, count, at.epoch, cursor=at.cursor, dp_size=at.dp_size)
        mine = Slice(whole, at.dp_rank)
        steps = mine.positions_of_steps(0, mine.step_count)
        _, samples = world.order(spec, at.epoch)
        positions, found, first = steps.positions.tolist(), [], 0
        for rows, valid in zip(steps.rows.tolist(), steps.valid.tolist(), strict=True):
            found.append((rows, valid, [samples[p] for p in positions[first : first + rows]]))
            first += rows
        return found

    @property
    def world(self) -> World:
        return self.place.world

    @property
    def is_done(self) -> bool:
        return self.ended or self.error is not None or not self.is_open

    @property
    def may_ask(self) -> bool:
        """Whether it waits for few slabs, and will get another one."""
        return not self.is_done and self.asked < 2

    @property
    def is_stopped(self) -> bool:
        """Whether it does nothing any more, or comes after one that does nothing."""
        return self.stopped or (self.after is not None and self.after.is_stopped)

    @property
    def blocks_needed(self) -> set[int]:
        steps = self._steps[self.at.first_step :: self.at.step_stride]
        return {block for _, _, samples in steps for block, _ in samples}

    def ask(self) -> None:
        assert self.is_open
        self.asked += 1
        self.request_id += 1
        self.run.tell(events.Requested(self.number, self.request_id))

    def receive(self, effect: events.Send) -> None:
        assert self.is_open, "an answer after the stream was closed"
        self.asked -= 1
        body = effect.body
        if isinstance(body, DataplaneError):
            self.error = body
            if isinstance(body, Unplanned):
                behind = self.at.cursor + self.next_step * self.place.spec.global_batch
                is_last = self.next_step == len(self._steps)
                if is_last and self.place.spec.end is End.RAGGED:  # it may have joined rows
                    behind = max(behind, self.walk.order.sample_count)
                assert behind == self.walk.position, "an error before what was planned"
            if isinstance(body, BudgetTooSmall) and "its slab has" in str(body):
                self._check_size(body)
        elif isinstance(body, messages.EndOfStream):
            assert self.next_step >= self.walk._end_step, "scheduler 1: the end comes too early"
            assert self.planned
            self.ended = True
        else:
            assert isinstance(body, messages.Slab)
            self.check(body)
            # A consumer may write into its slab: no other consumer may see that.
            content = bytes([body.slab_id % 251]) * body.region.length
            self.memory(body)[:] = content
            self.held.append((body, content))

    def _check_size(self, error: BudgetTooSmall) -> None:
        """A batch is too large only if neither a slot nor the zone has room for it."""
        rows, _, _ = self._steps[self.next_step]
        layout, batch = self.run.layout, messages.Batch(self.next_step, rows, 0)
        if layout.slot_bytes <= row_index_bytes(rows):
            return  # it has not even room for the row index
        need = slab_bytes(batch, self.row_bytes) + row_index_bytes(rows)
        assert str(error).startswith(f"the batch of step {self.next_step} takes {need} bytes")
        assert (error.needed, error.budget) == (need, layout.zone_bytes)
        assert need > max(layout.slot_bytes, layout.zone_bytes)

    def memory(self, slab: messages.Slab) -> memoryview:
        return self.place.memory[slab.region.offset : slab.region.offset + slab.region.length]

    def check(self, slab: messages.Slab) -> None:
        view, offset = self.memory(slab), 0
        for batch in slab.batches:
            assert batch.step == self.next_step, "scheduler 1: not the next step"
            rows, valid, samples = self._steps[batch.step]
            assert (batch.rows, batch.valid) == (rows, valid)
            found = np.frombuffer(view[offset : offset + 16 + 16 * rows], np.int64)
            assert found[0] == batch.step
            assert found[2:].reshape(-1, 2).tolist() == samples, "wrong samples"
            offset += slab_bytes(batch, self.row_bytes)
            self.next_step += self.at.step_stride
        assert slab.batches
        assert slab.bytes_used == offset

    def release(self, which: int = 0) -> None:
        slab, content = self.held[which]
        del self.held[which]
        # The tail of a slot holds the row index; the node must not write into a held slab.
        assert self.memory(slab) == content, "a slab was written while it was held"
        self.run.tell(events.Released(self.place.delivery_id, [slab.slab_id]))

    def copy_out(self) -> None:
        """Return at once the slabs that are not to be held."""
        for which, (slab, _) in enumerate(self.held):
            if slab.copy_out:
                self.release(which)
                return

    def close(self) -> None:
        if self.is_open:
            self.run.tell(events.StreamClosed(self.number))
            self.is_open = False

    def late(self) -> None:
        """Events for a stream or a delivery arena that was closed have no effect."""
        number, place = self.number, self.place
        of_stream = (
            events.StreamClosed(number),
            events.Requested(number, 1),
            events.StreamAdopted(number),
            events.NextOrderKnown(number, self.walk.order),
            events.StreamRefused(number, LeaseFenced("another member has its place")),
        )
        of_place = (
            events.DeliveryClosed(place.delivery_id),
            events.Released(place.delivery_id, [1]),
            events.HolderGone(place.delivery_id, number),
        )
        for event in of_stream * (not self.is_open) + of_place * (not place.is_open):
            assert not self.run.scheduler.decide(event, self.run.now)

    def leave(self) -> None:
        """End its process: it holds nothing any more."""
        self.close()
        self.held.clear()
        self.run.tell(events.HolderGone(self.place.delivery_id, self.number))
