"""The places of slabs in one delivery arena: equal slots, and one zone for oversized batches. Pure.

Slots are equal because a trainer holds slabs for as long as it likes: extents of different sizes
would leave gaps that nothing fits into, and slabs cannot be moved. A batch that outgrows a slot
goes to the zone at the end of the arena; the trainer copies it out at once, so that the zone is
free again whatever the trainer holds.

Invariants:
1. Each slot is free or has one user; the zone likewise.
2. The slot freed last is used first, since its pages are warm in every cache.
3. `held_slots` leaves `AHEAD_SLOTS_MIN` slots to the node, so that a trainer that holds as much as
   it may still gets batches. The node may use all slots that the trainer does not hold. Handing a
   slab over makes its slot one of the trainer's, and the node makes no new slab in its place.

    slot                  held by the trainer as long as it likes     | up to held_slots
    slot                  a slab that is ready or being made          | all others
    zone                  one oversized batch                         | one
"""

from __future__ import annotations

from msgspec import Struct

from dataplane.model.errors import ClosedError
from dataplane.model.records import Region

AHEAD_SLOTS_MIN = 4
_SLOTS_MIN = 6
SLOTS_USUAL = 12
_SLOT_SHARE = 16
_ZONE_SHARE = 4
_PAGE_BYTES = 4096


class SlotLayout(Struct, frozen=True):
    """The sizes of one delivery arena, in bytes."""

    slot_bytes: int
    slot_count: int
    zone_bytes: int

    @property
    def arena_bytes(self) -> int:
        """The size of the whole arena."""
        return self.slot_bytes * self.slot_count + self.zone_bytes

    @property
    def held_slots(self) -> int:
        """How many slots the trainer may hold before it must copy."""
        return self.slot_count - max(AHEAD_SLOTS_MIN, self.slot_count // 3)

    @property
    def held_bytes_max(self) -> int:
        """Bytes that the trainer may hold before it must copy."""
        return self.held_slots * self.slot_bytes


def plan_slots(arena_bytes: int, slot_bytes: int, slots_max: int | None = None) -> SlotLayout:
    """Return the layout of an arena of about `arena_bytes`, more if six slots need more. It has at
    most `slots_max` slots, or the usual number if that is more.
    """
    slot = -(-slot_bytes // _PAGE_BYTES) * _PAGE_BYTES
    zone = max(2 * slot, arena_bytes // _ZONE_SHARE // _PAGE_BYTES * _PAGE_BYTES)
    count = max(_SLOTS_MIN, (arena_bytes - zone) // slot)
    if slots_max is not None:
        count = min(count, max(slots_max, SLOTS_USUAL))
    return SlotLayout(slot, count, zone)


def slot_bytes_of(arena_bytes: int) -> int:
    """Return the usual slot size of an arena of this size: beside the zone, twelve slots fit into
    it.
    """
    return max(arena_bytes // _SLOT_SHARE // _PAGE_BYTES, 1) * _PAGE_BYTES


def arena_bytes_min(slot_bytes: int) -> int:
    """Return the size of the smallest arena with slots of this size."""
    return plan_slots(0, slot_bytes).arena_bytes


def arena_bytes_of_zone(zone_bytes: int) -> int:
    """Return the size of the smallest arena whose zone has this many bytes, whatever the slots."""
    return (zone_bytes + _PAGE_BYTES) * _ZONE_SHARE


class Slots:
    """The free slots of one arena."""

    def __init__(self, layout: SlotLayout) -> None:
        self.layout = layout
        self._free = [i * layout.slot_bytes for i in reversed(range(layout.slot_count))]
        self._taken: set[int] = set()
        self._zone_at = layout.slot_bytes * layout.slot_count
        self.zone_is_free = True

    @property
    def free_count(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def take(self) -> Region | None:
        """Return a slot, or None if no slot is free."""
        if not self._free:
            return None
        at = self._free.pop()
        self._taken.add(at)
        return Region(at, self.layout.slot_bytes)

    def take_zone(self) -> Region | None:
        """Return the zone, or None while it is in use."""
        if not self.zone_is_free:
            return None
        self.zone_is_free = False
        return Region(self._zone_at, self.layout.zone_bytes)

    def give_back(self, region: Region) -> None:
        """Free a slot, or the zone.

        Raises:  ClosedError: it is free already.
        """
        if region.offset == self._zone_at and not self.zone_is_free:
            self.zone_is_free = True
            return
        if region.offset not in self._taken:
            raise ClosedError(f"no slot at {region.offset} is in use")
        self._taken.remove(region.offset)
        self._free.append(region.offset)
