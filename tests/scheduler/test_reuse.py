"""What was read and what was found in memory add up to what streams needed."""

from __future__ import annotations

import random

import pytest
from scheduler_run import Run

from dataplane.model.records import Stream


@pytest.mark.parametrize("seed", range(20))
def test_what_was_read_and_what_was_found_is_what_was_needed(seed: int) -> None:
    run = Run(random.Random(seed), tight=False, factor=8.0)
    (world, *_) = run.worlds.values()
    consumers = []
    for _ in range(3):
        place = run.deliver_to(world)
        consumers.append(run.begin(place, Stream(0, 0, 0, 1)))
        run.go()
    needed = sum(
        int(world.lengths[block])
        for consumer in consumers
        for block in consumer.blocks_needed
        if world.blocks.needs_fetch(block)
    )
    read = sum(
        int(world.lengths[block])
        for block in set().union(*(one.blocks_needed for one in consumers))
        if world.blocks.needs_fetch(block)
    )
    assert run.scheduler.found_bytes == needed - read, "each block was read once"
    run.end()
