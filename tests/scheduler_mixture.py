"""Several datasets of a scheduler's tests, in one order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from other_orders import Backwards, Concatenated
from scheduler_world import World

from dataplane.model.config import JobSpec
from dataplane.plan.order import SampleOrder
from dataplane.scheduler.dataset import DatasetLookup


class Mixture(World):
    """All samples of several datasets, in one order of their own."""

    def __init__(self, parts: list[World]) -> None:
        self.chance, self.dataset_id, self.parts = parts[0].chance, parts[0].dataset_id, parts
        self.is_large = parts[0].is_large
        self.sizes = [size for part in parts for size in part.sizes]
        self.sample_count = sum(part.sample_count for part in parts)
        self.spec = self.job()
        self._orders = {}

    @property
    def datasets(self) -> DatasetLookup:
        return DatasetLookup(*(part.blocks for part in self.parts))

    def _order(self, spec: JobSpec, epoch: int) -> SampleOrder:
        orders = [part._order(spec, epoch) for part in self.parts]
        return Backwards(Concatenated(orders, [len(part.sizes) for part in self.parts]))

    def cost_of(self, block: int) -> int:
        dataset, block = self.datasets.find(block)
        (part,) = (part for part in self.parts if part.blocks is dataset)
        return part.cost_of(block)


def arena_of_passes(worlds: Sequence[World], chance: random.Random) -> int:
    """An arena for the rows of any batch of these worlds beside any block, and little more."""
    parts = [(world, i) for world in worlds for i in range(len(world.sizes))]
    largest = max(world.cost_of(i) for world, i in parts)
    excerpts = max(world.excerpts_of(i) for world, i in parts)
    return int((largest + excerpts) * chance.choice([1.3, 1.3, 1.6, 2.5]))
