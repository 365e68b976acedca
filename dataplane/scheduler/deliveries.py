"""The delivery arenas of a node, and the slabs in them that trainers hold."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.arena.slots import Slots
from dataplane.scheduler.events import DeliveryClosed, DeliveryOpened, HolderGone, Released
from dataplane.scheduler.records import Delivery, Group
from dataplane.scheduler.slab_tasks import SlabTasks


class Deliveries:
    """Every open delivery, by number."""

    def __init__(self, tasks: SlabTasks) -> None:
        self._tasks = tasks
        self.by_id: dict[int, Delivery] = {}
        self.groups: dict[object, Group] = {}

    def get(self, delivery_id: int) -> Delivery:
        """An open delivery."""
        return self.by_id[delivery_id]

    def opened(self, event: DeliveryOpened) -> None:
        """Add a delivery, perhaps the first of its group."""
        group = None
        if event.group is not None:
            group = self.groups.get(event.group)
            if group is None or group.is_closed:
                group = self.groups[event.group] = Group(event.group, event.is_declared)
            group.users += 1
        self.by_id[event.delivery_id] = Delivery(
            event.delivery_id, Slots(event.layout), event.datasets, group
        )

    def closed(self, event: DeliveryClosed) -> None:
        """Close a delivery; closing it again changes nothing."""
        delivery = self.by_id.pop(event.delivery_id, None)
        if delivery is None:
            return
        self._tasks.close_delivery(delivery)
        if delivery.group is not None and delivery.group.is_closed:
            self.groups.pop(delivery.group.name, None)

    def released(self, event: Released) -> None:
        """Free these slabs, which their holder has released."""
        delivery = self.by_id.get(event.delivery_id)
        if delivery is not None:
            self._take_back(delivery, event.slab_ids)

    def holder_gone(self, event: HolderGone) -> None:
        """Free all slabs of a holder that is gone."""
        delivery = self.by_id.get(event.delivery_id)
        if delivery is not None:
            lent = delivery.lent.items()
            self._take_back(delivery, [i for i, loan in lent if loan.holder == event.holder])

    def _take_back(self, delivery: Delivery, slab_ids: Sequence[int]) -> None:
        for slab_id in slab_ids:
            loan = delivery.lent.pop(slab_id, None)
            if loan is not None:
                self._tasks.drop(loan.task)
