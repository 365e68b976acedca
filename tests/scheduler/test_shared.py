"""Jobs of one group and peers of one rank: each slab is made once, and nobody waits for anybody."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_run import Run, simulate
from scheduler_scenes import jobs, several
from scheduler_world import PAGE

from dataplane.arena.slots import SlotLayout
from dataplane.errors import BudgetTooSmall, StoreDenied

SEEDS = st.integers(0, 10**9)


@settings(max_examples=40)
@given(SEEDS)
def test_jobs_of_a_group_get_what_each_would_alone_whatever_others_write(seed: int) -> None:
    def scene(run: Run) -> None:
        jobs(run)
        several(run)

    run = simulate(lambda: Run(random.Random(seed), tight=False), scene)
    assert not [c.error for c in run.consumers if c.error is not None]


def together(run: Run, *, peers: bool) -> None:
    """Consumers of a group that all walk over one epoch, in an arena that has room for all of it:
    jobs that declared it, or peers of one rank.
    """
    run.worlds = {1: run.worlds[1]}
    world, group = run.worlds[1], "group"
    run.layout = SlotLayout(8 * PAGE, 6, run.layout.zone_bytes + 16 * PAGE)
    place = run.deliver_to(world, group, is_declared=not peers)
    for _ in range(run.chance.randint(2, 4)):
        run.consume(place, 0, 1, steps=(0, 1))
        place = place if peers else run.deliver_to(world, group, is_declared=True)


@settings(max_examples=60)
@given(SEEDS, st.booleans())
def test_where_there_is_room_each_slab_is_made_once(seed: int, peers: bool) -> None:
    run = simulate(
        lambda: Run(random.Random(seed), tight=False, factor=200),
        lambda run: together(run, peers=peers),
    )
    assert not [c.error for c in run.consumers if c.error is not None]
    made = run.outside.assembled
    assert len(set(made)) == len(made)
    if all(consumer.ended for consumer in run.consumers):
        assert run.outside.copied >= (len(run.consumers) - 1) * len(made)


@settings(max_examples=60)
@given(SEEDS)
def test_a_job_that_stops_holds_up_nobody(seed: int) -> None:
    def scene(run: Run) -> None:
        jobs(run)
        for consumer in run.consumers:
            consumer.stopped = run.chance.random() < 0.5

    run = simulate(lambda: Run(random.Random(seed), tight=False), scene)
    for consumer in run.consumers:
        assert consumer.error is None
        assert consumer.stopped or consumer.is_done


@settings(max_examples=40)
@given(SEEDS, st.integers(0, 150))
def test_whatever_is_under_way_when_jobs_end_nothing_is_left(seed: int, acts: int) -> None:
    simulate(lambda: Run(random.Random(seed), tight=False), jobs, acts)


@settings(max_examples=40)
@given(SEEDS)
def test_too_small_an_arena_is_no_hang_where_slabs_are_kept_in_it(seed: int) -> None:
    run = simulate(lambda: Run(random.Random(seed), tight=True), jobs)
    for consumer in run.consumers:
        assert consumer.error is None or isinstance(consumer.error, BudgetTooSmall)


@settings(max_examples=40)
@given(SEEDS)
def test_a_slab_that_cannot_be_made_fails_those_who_want_it(seed: int) -> None:
    def scene(run: Run) -> None:
        jobs(run)
        for world in run.worlds.values():
            world.broken.add(run.chance.randrange(len(world.sizes)))

    run = simulate(lambda: Run(random.Random(seed), tight=False), scene)
    for consumer in run.consumers:
        assert consumer.error is None or isinstance(consumer.error, StoreDenied)
