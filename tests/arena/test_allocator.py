"""The numbered invariants of arena/allocator.py."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.arena.allocator import GRANULE_BYTES, Allocator, rounded
from dataplane.arena.slots import AHEAD_SLOTS_MIN, SLOTS_USUAL, Slots, plan_slots
from dataplane.model.errors import ClosedError
from dataplane.model.records import Region

SIZE = 64 * GRANULE_BYTES
actions = st.lists(
    st.tuples(st.sampled_from(["allocate", "free", "shrink"]), st.integers(0, 20 * GRANULE_BYTES)),
    max_size=60,
)


def largest_free(allocator):
    return max((length for _, length in allocator.free_extents()), default=0)


@given(steps=actions)
def test_extents_never_overlap_and_bytes_add_up(steps):
    allocator, taken = Allocator(SIZE), {}
    for action, number in steps:
        if action == "allocate":
            largest = largest_free(allocator)
            at = allocator.allocate(number)
            assert (at is None) == (rounded(number) > largest)
            if at is not None:
                taken[at] = rounded(number)
        elif taken:
            at = sorted(taken)[number % len(taken)]
            if action == "free":
                allocator.free(at)
                del taken[at]
            else:
                allocator.shrink(at, number)
                taken[at] = min(taken[at], rounded(number))
        extents = sorted(taken.items())
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(extents))
        assert all(a + size <= SIZE for a, size in extents)
        assert allocator.free_bytes == SIZE - sum(taken.values())
    for at in taken:
        allocator.free(at)
    assert largest_free(allocator) == allocator.free_bytes == SIZE


def test_a_released_extent_is_used_again_before_new_memory():
    allocator = Allocator(SIZE)
    first = allocator.allocate(3 * GRANULE_BYTES)
    allocator.allocate(GRANULE_BYTES)
    allocator.free(first)
    assert allocator.allocate(2 * GRANULE_BYTES) == first
    assert allocator.allocate(GRANULE_BYTES) == first + 2 * GRANULE_BYTES
    assert allocator.high_water == 4 * GRANULE_BYTES


def test_an_extent_is_given_back_once():
    allocator = Allocator(SIZE)
    at = allocator.allocate(1)
    allocator.free(at)
    with pytest.raises(ClosedError):
        allocator.free(at)


@given(steps=actions, chosen=st.sets(st.integers(0, 60)))
def test_a_trial_says_what_freeing_would_do_and_changes_nothing(steps, chosen):
    allocator, taken = Allocator(SIZE), []
    for action, number in steps:
        if action == "allocate" and (at := allocator.allocate(number)) is not None:
            taken.append(at)
        elif action == "free" and taken:
            allocator.free(taken.pop(number % len(taken)))
    before = allocator.free_extents()
    going = [at for place, at in enumerate(taken) if place in chosen]
    trial = allocator.trial()
    lengths = [trial.free(at) for at in going]
    assert allocator.free_extents() == before
    for at, length in zip(going, lengths, strict=True):
        allocator.free(at)
        assert length in {size for _, size in allocator.free_extents()}
    assert max(lengths, default=0) <= largest_free(allocator)


def test_the_tightest_fitting_extent_is_taken_and_the_lowest_of_equals():
    allocator = Allocator(SIZE)
    places = [allocator.allocate(size * GRANULE_BYTES) for size in (3, 1, 2, 1, 2, 1)]
    for at in (places[0], places[2], places[4]):
        allocator.free(at)
    assert allocator.allocate(2 * GRANULE_BYTES) == places[2]
    assert allocator.allocate(2 * GRANULE_BYTES) == places[4]
    assert allocator.allocate(GRANULE_BYTES) == places[0]


def test_what_is_free_again_soon_leaves_the_room_at_the_other_end_whole():
    allocator = Allocator(8 * GRANULE_BYTES)
    assert allocator.allocate(2 * GRANULE_BYTES) == 0
    brief = allocator.allocate(GRANULE_BYTES, is_brief=True)
    assert brief == 7 * GRANULE_BYTES
    assert allocator.allocate(5 * GRANULE_BYTES) == 2 * GRANULE_BYTES
    allocator.free(brief)
    assert allocator.allocate(GRANULE_BYTES, is_brief=True) == brief


@given(steps=actions, first=st.integers(1, 30), second=st.integers(1, 30))
def test_where_a_trial_has_room_for_both_there_is_room_for_both(steps, first, second):
    allocator, taken = Allocator(SIZE), []
    for action, number in steps:
        if action == "allocate" and (at := allocator.allocate(number)) is not None:
            taken.append(at)
    trial = allocator.trial()
    for at in taken:
        trial.free(at)
        if trial.has_room(first * GRANULE_BYTES, second * GRANULE_BYTES):
            break
    else:
        return
    for freed in taken[: taken.index(at) + 1]:
        allocator.free(freed)
    for length in sorted((first, second), reverse=True):
        assert allocator.allocate(length * GRANULE_BYTES, is_brief=length == second) is not None


# -- The numbered invariants of arena/slots.py


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
