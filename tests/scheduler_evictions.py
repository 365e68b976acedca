"""Checks what the scheduler evicts: blocks 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from scheduler_numbers import is_of
from scheduler_uses import NEVER

from dataplane.arena.allocator import rounded
from dataplane.model.records import Region
from dataplane.scheduler import events
from dataplane.scheduler.records import CachedBlock, SlabTask
from dataplane.scheduler.scheduler import Scheduler


class Before(Struct, frozen=True):
    """What could be evicted before an event and where it was, what was free, the blocks that were
    sent to neighbours, and those that were kept for them, until others are read. `is_alone`: no
    slab is kept, which would change how far a walk has come while it is decided.
    """

    evictable: dict[int, CachedBlock]
    regions: dict[int, tuple[Region, ...]]
    free: list[tuple[int, int]]
    lent: set[int]
    kept: set[int]
    is_alone: bool
    emptied_for: SlabTask | None


def check_evicted(
    scheduler: Scheduler,
    before: Before,
    gone: Sequence[int],
    effect: events.Fetch | events.DecodeBlock,
    use_of: Callable[[int], int],
    forgotten: set[int],
    *,
    is_first: bool,
) -> None:
    """What went for this block is needed later than it, unless it is the head's; and had only those
    gone that are needed later still, there would be no room. Where it is not urgent, what tasks or
    neighbours wait for stays instead. `use_of` tells how far away a block is needed, by key.
    `is_first`: nothing else was loaded since `before`. Blocks of a forgotten dataset go for nothing.
    """
    gone = [key for key in gone if key not in forgotten]
    mine, is_lent = use_of(effect.key), isinstance(effect, events.Fetch) and effect.is_lent
    going = [use_of(key) for key in gone if not (is_lent and key in before.lent)]
    if scheduler._head is None or not is_of(scheduler._head, effect):
        assert all(each > mine or each == NEVER for each in going), "blocks 3: needed sooner"
    block = scheduler._blocks._by_key.get(effect.key)
    if not is_first or not going or block is None:
        return
    may_be_asked, first = scheduler._blocks.holdings.may_be_asked, min(going)
    later, kept = list[int](), list[int]()
    for key, other in before.evictable.items():
        if key in gone and use_of(key) > first:
            later.append(key)
        elif key not in forgotten and key != effect.key and other.is_evictable:
            is_kept = other.is_wanted or may_be_asked(other) or key in before.kept
            (kept if is_kept else later).extend([key] * (use_of(key) > first))
    needs = [rounded(effect.into.length)]
    if isinstance(effect, events.Fetch) and block.decoded not in {None, effect.into}:
        needs.append(rounded(block.decoded.length))
    assert not _has_room(before, later, needs) or not _has_room(before, [*later, *kept], needs), (
        "blocks 3: another is needed later"
    )


def _has_room(before: Before, keys: Sequence[int], needs: Sequence[int]) -> bool:
    """Whether all of this would have found room in one piece if these blocks had gone."""
    taken = [region for key in keys for region in before.regions[key]]
    free = sorted([*before.free, *((each.offset, rounded(each.length)) for each in taken)])
    extents = list[list[int]]()
    for at, length in free:
        if extents and sum(extents[-1]) == at:
            extents[-1][1] += length
        else:
            extents.append([at, length])
    return any(length >= sum(needs) for _, length in extents)
