"""The node's record of the delivery arena of one dp_rank of a job."""

from __future__ import annotations

from msgspec import Struct

from dataplane.arena.memfd import Arena
from dataplane.arena.slots import SlotLayout
from dataplane.node.dataset import Dataset


class DeliveryArena(Struct, eq=False):
    """The memory, and how many members use it. The orders of its streams cover `datasets`, number
    their blocks consecutively, and need datasets with equal columns. Deliveries of one `group` have
    equal slabs for equal steps; None if slabs are made only for this arena.
    """

    delivery_id: int
    arena: Arena
    layout: SlotLayout
    datasets: tuple[Dataset, ...]
    group: object = None
    is_declared: bool = False
    users: int = 0
    numa_node: int | None = None
    """Where its trainer runs, if that is bound to one NUMA node."""
