"""The delivery arena of one dp_rank of a job, as the node has it."""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.arena.memfd import Arena
from dataplane.arena.slots import SlotLayout
from dataplane.node.dataset import Dataset


@dataclass(slots=True, eq=False)
class DeliveryArena:
    """The memory, and how many members use it. Orders of its streams are over `datasets`, whose
    blocks they number through, and whose columns are alike. `group` names those whose slabs are
    equal where their steps are, None if slabs are made for this arena alone.
    """

    delivery_id: int
    arena: Arena
    layout: SlotLayout
    datasets: tuple[Dataset, ...]
    group: object = None
    is_declared: bool = False
    users: int = 0
