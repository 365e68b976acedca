"""A scheduler that reads epochs of a made-up dataset, in which every effect completes at once."""

from __future__ import annotations

from collections import deque

import numpy as np

from dataplane.arena.slots import plan_slots
from dataplane.model.config import JobSpec
from dataplane.model.errors import DataplaneError
from dataplane.model.records import Stream
from dataplane.plan.order import Order
from dataplane.rpc import messages, tasks
from dataplane.scheduler import events
from dataplane.scheduler.autoscaler import Autoscaler
from dataplane.scheduler.dataset import BlockPlaces, DatasetBlocks, DatasetLookup, Marks
from dataplane.scheduler.events import DiskScanned, KeepBlock, KeepingEnded
from dataplane.scheduler.scheduler import Scheduler
from dataplane.scheduler.walk import SlabSizes, Walk

PAGE = 4096
FILE_BYTES = 2 * PAGE


class DrivenEpochs:
    """One consumer that reads `epochs` epochs of `blocks` blocks of `rows` rows, with an arena for
    `room` blocks. Afterwards: `loads`, the blocks in the order in which they were loaded, and
    `slabs`, the blocks of each slab. `is_told`: the scheduler knows the next epoch's order. There
    is room for as many blocks as `disk` on disk; `disk_loads` are those that were read there.
    """

    def __init__(
        self,
        blocks: int,
        room: int,
        spec: JobSpec,
        *,
        rows: int,
        epochs: int,
        is_told: bool = True,
        disk: int = 0,
    ) -> None:
        workers = Autoscaler(2, 2, 2)
        self._scheduler = Scheduler(room * PAGE, 64, workers, 1e9, disk * FILE_BYTES)
        self._rows = np.full(blocks, rows, np.int64)
        raw, decoded = np.full(blocks, PAGE, np.int64), np.zeros(blocks, np.int64)
        marks = Marks.of(raw, decoded, np.ones(blocks, np.bool_))
        shard = np.arange(blocks, dtype=np.int32)  # each block has its own: none are read together
        places = BlockPlaces(shard, np.zeros(blocks, np.int64), raw)
        self.dataset = DatasetBlocks(
            1, "made up", marks, raw, self._rows, url=str, places=places, digest=b"made up dataset."
        )
        datasets = DatasetLookup(self.dataset)
        self._spec, self._epochs, self._is_told = spec, epochs, is_told
        self._pending: deque[events.Event] = deque()
        self._now, self._opened, self._reading = 0.0, 0, 0
        self.loads: list[int] = []
        self.disk_loads: list[int] = []
        self.slabs: list[list[int]] = []
        layout = plan_slots(1 << 20, 1 << 16)
        self._pending.append(DiskScanned())
        self._pending.append(
            events.DeliveryOpened(0, layout, datasets, group=None, is_declared=False)
        )
        self._open()
        self._pending.append(events.Requested(0, 0))
        while self._reading < epochs:
            self._step()

    def order(self, epoch: int) -> Order:
        """The order of an epoch."""
        spec = self._spec
        return Order(self._rows, spec.seed, spec.shuffle, spec.lanes, spec.window, epoch)

    def _open(self) -> None:
        epoch = self._opened
        self._opened += 1
        walk = Walk(
            self._spec,
            self.order(epoch),
            Stream(epoch, 0, 0, 1, 0, 1),
            SlabSizes(1, 1, 1 << 16),
            is_ahead=epoch > 0,
        )
        before = epoch - 1 if epoch else None
        self._pending.append(events.StreamStarted(epoch, 0, walk, 0, before))
        if self._is_told:
            self._pending.append(events.NextOrderKnown(epoch, self.order(epoch + 1)))

    def _step(self) -> None:
        event = self._pending.popleft() if self._pending else events.Settled()
        self._now += 1e-6
        tell = self._pending.append
        for effect in self._scheduler.decide(event, self._now):
            match effect:
                case events.PlanSteps():
                    tell(events.Planned(effect.stream_id, effect.walk.next_plans(effect.count)))
                case events.AllPlanned():
                    if self._opened < self._epochs:
                        self._open()
                case KeepBlock():
                    tell(KeepingEnded(effect.number))
                case events.Fetch():
                    (self.disk_loads if effect.is_on_disk else self.loads).append(effect.block)
                    tell(events.BlockFetched(effect.key))
                case events.ExtractRows():
                    sizes = tuple(each.into.length for each in effect.excerpts)
                    tell(events.RowsExtracted(effect.number, tasks.Extracted(sizes), self._now))
                case events.AssembleSlab():
                    self.slabs.append(effect.plan.blocks.tolist())
                    count = len(effect.plan.batches)
                    made = tasks.Assembled(count, bytes_needed=0, bytes_used=1)
                    tell(events.SlabAssembled(effect.number, made, self._now))
                case events.Send(body=messages.Slab(slab_id=slab_id)):
                    tell(events.Released(0, (slab_id,)))
                    tell(events.Requested(effect.stream_id, 0))
                case events.Send(body=DataplaneError() as error):
                    raise error
                case events.Send(body=messages.EndOfStream()):
                    self._reading += 1
                    if self._reading < self._epochs:
                        tell(events.StreamClosed(effect.stream_id))
                        tell(events.StreamAdopted(self._reading))
                        tell(events.Requested(self._reading, 0))
