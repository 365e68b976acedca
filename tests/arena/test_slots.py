"""The numbered invariants of arena/slots.py."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.arena.slots import AHEAD_SLOTS_MIN, SLOTS_USUAL, Slots, plan_slots
from dataplane.model.errors import ClosedError
from dataplane.model.records import Region


@given(arena=st.integers(0, 1 << 30), slot=st.integers(1, 1 << 26))
def test_a_layout_leaves_room_to_the_node_and_to_the_trainer(arena, slot):
    layout = plan_slots(arena, slot)
    assert layout.slot_bytes >= slot
    assert layout.slot_count - layout.held_slots >= AHEAD_SLOTS_MIN
    assert layout.held_bytes_max == layout.held_slots * layout.slot_bytes >= layout.slot_bytes
    assert layout.arena_bytes <= max(arena, 8 * layout.slot_bytes)
    assert layout.zone_bytes >= 2 * layout.slot_bytes


@given(arena=st.integers(0, 1 << 30), slot=st.integers(1, 1 << 26), most=st.integers(0, 100))
def test_an_arena_has_no_more_slots_than_are_of_use(arena, slot, most):
    layout, unlimited = plan_slots(arena, slot, most), plan_slots(arena, slot)
    assert layout.slot_count == min(unlimited.slot_count, max(most, SLOTS_USUAL))
    assert (layout.slot_bytes, layout.zone_bytes) == (unlimited.slot_bytes, unlimited.zone_bytes)


@given(takes=st.lists(st.booleans(), max_size=80))
def test_regions_in_use_never_overlap(takes):
    slots, used = Slots(plan_slots(1 << 20, 1 << 16)), []
    for take in takes:
        if take:
            region = slots.take() or slots.take_zone()
            if region is not None:
                used.append(region)
        elif used:
            last = used.pop()
            slots.give_back(last)
            if last.length == slots.layout.slot_bytes:
                again = slots.take()
                assert again == last
                slots.give_back(again)
        extents = sorted((r.offset, r.length) for r in used)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(extents))
        assert all(a + size <= slots.layout.arena_bytes for a, size in extents)


def test_a_slot_is_given_back_once():
    slots = Slots(plan_slots(1 << 20, 1 << 16))
    region = slots.take()
    slots.give_back(region)
    with pytest.raises(ClosedError):
        slots.give_back(region)
    with pytest.raises(ClosedError):
        slots.give_back(Region(1, 1))
