"""Errors for budgets of the node that are too small: which part needs how much, and how to raise
it.
"""

from __future__ import annotations

from dataplane.arena.slots import SlotLayout, arena_bytes_of_zone
from dataplane.base.units import raise_to
from dataplane.model.errors import BudgetTooSmall


def block_too_large(url: str, need: int, budget: int) -> BudgetTooSmall:
    """Return the error for a block that does not fit into the block arena, raw and decoded
    together. The advice makes room for two blocks: the next one is fetched meanwhile, and decoded
    sizes in the index are estimates.
    """
    return BudgetTooSmall(
        f"{url}: one block takes {need} bytes on its way through memory, and the block arena has "
        f"{budget}: {raise_to('block_arena_bytes', 2 * need)}, or write smaller blocks (row "
        "groups)",
        shard=url,
        needed=need,
        budget=budget,
    )


def batch_larger_than_arena(
    rows_bytes: int, block_bytes: int, together: int, budget: int
) -> BudgetTooSmall:
    """Return the error for a batch whose rows do not fit into the block arena beside the block that
    they come from. The advice makes room for all blocks of the batch together, so that each is read
    once.
    """
    return BudgetTooSmall(
        f"the rows of one batch take {rows_bytes} bytes beside a block of {block_bytes}, and the "
        f"block arena has {budget}: {raise_to('block_arena_bytes', together * 5 // 4)}, or make "
        "the batch smaller, or write smaller blocks (row groups)",
        needed=min(rows_bytes + block_bytes, together),
        budget=budget,
    )


def batch_too_large(step: int, need: int, budget: int) -> BudgetTooSmall:
    """Return the error for a batch that fits neither into a slot nor into the zone."""
    room = raise_to("delivery_bytes_per_rank", arena_bytes_of_zone(need))
    return BudgetTooSmall(
        f"the batch of step {step} takes {need} bytes and its slab has {budget}: {room}, or make "
        "the batch smaller",
        needed=need,
        budget=budget,
    )


def rank_takes_too_much(
    layout: SlotLayout, batch_bytes: int, slab_bytes: int, budget: int
) -> BudgetTooSmall:
    """Return the error for a rank whose slots take more memory than the node allows."""
    what, advice = (
        (f"batches of about {batch_bytes}", "make the batch smaller")
        if batch_bytes > slab_bytes
        else (f"slabs of {slab_bytes}", "lower slab_bytes")
    )
    return BudgetTooSmall(
        f"{what} bytes need {layout.arena_bytes} bytes of memory for finished batches, and this "
        f"node allows a rank {budget} at most: {advice}, or "
        f"{raise_to('delivery_bytes_per_rank', layout.arena_bytes)}",
        needed=layout.arena_bytes,
        budget=budget,
    )
