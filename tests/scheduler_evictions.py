"""Checks what the scheduler evicts: blocks 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from scheduler_numbers import is_of
from scheduler_uses import NEVER

from dataplane.scheduler import events
from dataplane.scheduler.block import CachedBlock
from dataplane.scheduler.records import SlabTask
from dataplane.scheduler.scheduler import Scheduler


class Before(Struct, frozen=True):
    """What could be evicted before an event, the blocks that were sent to neighbours, and those that
    were kept for them, until others are read. `is_alone`: no slab is kept, which would change how
    far a walk has come while it is decided.
    """

    evictable: dict[int, CachedBlock]
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
) -> None:
    """What went for this block is needed last; and later than it, unless it is the head's. Where it
    is not urgent, what tasks or neighbours wait for stays instead. `use_of` tells how far away a
    block is needed, by key.
    """
    mine, is_lent = use_of(effect.key), isinstance(effect, events.Fetch) and effect.is_lent
    going = [use_of(key) for key in gone if not (is_lent and key in before.lent)]
    if scheduler._head is None or not is_of(scheduler._head, effect):
        assert all(each > mine or each == NEVER for each in going), "blocks 3: needed sooner"
    may_be_asked = scheduler._blocks.holdings.may_be_asked
    staying = [
        (use_of(key), block.is_wanted or may_be_asked(block) or key in before.kept)
        for key, block in before.evictable.items()
        if key not in forgotten and key != effect.key and block.is_evictable
    ]
    first = min(going, default=NEVER)
    assert first >= max((each for each, _ in staying), default=0) or first >= max(
        (each for each, is_kept in staying if not is_kept), default=0
    ), "blocks 3: another is needed later"
