"""Starting points of a scheduler's runs, and whole histories, each drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec import structs
from scheduler_run import STALL_S, Run
from scheduler_world import Unplanned

from dataplane.model.errors import BudgetTooSmall, DataplaneError, LeaseFenced, StoreDenied

DISKS = (0, 0, 20_000, 100_000, 1 << 30)


def simulate(run: Callable[[], Run], scene: Callable[[Run], None], acts_max: int = 20_000) -> Run:
    """A whole run, from its beginning to its end."""
    made = run()
    scene(made)
    made.go(acts_max)
    made.end()
    return made


def several(run: Run) -> None:
    """Some deliveries, with peers that share slabs or do not."""
    chance = run.chance
    for world in run.worlds.values():
        dp_size = chance.randint(1, min(3, world.spec.global_batch))
        for dp_rank in range(dp_size):
            place = run.deliver_to(world, chance.choice([None, ("peers", len(run.places))]))
            for _ in range(chance.choice([1, 1, 2, 3])):
                run.consume(place, dp_rank, dp_size)


def far_too_small(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run over a store, whose arena is smaller than the blocks of one batch."""
    monkeypatch.setattr("scheduler_world.KINDS", (("s3", False),) * 4)
    monkeypatch.setattr("scheduler_run.arena_of_passes", lambda *_: 600_000)
    return Run(chance, tight=False, is_large=True)


def epoch_of_one(run: Run) -> None:
    """A shuffled epoch of one consumer."""
    spec = structs.replace(run.worlds[1].spec, shuffle=True, lanes=8, window=24, global_batch=8)
    run.consume(run.deliver_to(run.worlds[1], spec=spec), 0, 1, steps=(0, 1))


def jobs(run: Run, count: int = 3) -> None:
    """Jobs of one group over each world, each with its own delivery arena."""
    for world in run.worlds.values():
        dp_size = run.chance.randint(1, min(2, world.spec.global_batch))
        for dp_rank in range(dp_size):
            group = ("group", world.dataset_id, dp_rank)
            for _ in range(run.chance.randint(2, count)):
                run.consume(run.deliver_to(world, group, is_declared=True), dp_rank, dp_size)


def alike(run: Run) -> None:
    """Jobs of several orders over each dataset, each with its own delivery arena."""
    for world in run.worlds.values():
        for _ in range(run.chance.randint(1, 3)):
            run.consume(run.deliver_to(world, spec=world.job()), 0, 1)


def mixed(run: Run) -> None:
    """Jobs over all datasets together, in one order, and jobs over each of them."""
    assert run.mixture is not None
    run.chance.choice((several, alike))(run)
    for group in run.chance.choice(((None,), (None, "mixture"))):
        place = run.deliver_to(run.mixture, group, spec=run.mixture.job())
        run.consume(place, 0, 1)


def history(seed: int) -> Run:
    """A history with every kind of event that a scheduler may see, at any speed.

    Raises:  AssertionError: names the invariant that did not hold.
    """
    chance = random.Random(f"history {seed}")
    is_tight = chance.random() < 0.2
    is_mixed, is_large = seed % 8 == 7, seed % 3 == 1
    run = Run(
        chance,
        tight=is_tight,
        hoard=chance.random() < 0.1,
        is_timed=chance.random() < 0.6,
        restless=chance.choice([0.0, 0.0, 0.03, 0.1]),
        stall_s=chance.choice([2.0, STALL_S]),
        is_mixed=is_mixed,
        is_large=is_large,
        makers={2: "all", 4: "some"}.get(seed % 5, ""),
        cache_bytes=(disk := random.Random(f"disk {seed}")).choice(DISKS),
    )
    lengths = random.Random(f"lengths {seed}")
    is_often = lengths.choice([0.0, 0.0, 0.3, 1.0])
    run.length = lambda: lengths.randint(1, 5) if lengths.random() < is_often else None
    run.disk.begin(disk)
    allowed: list[type[DataplaneError]] = []
    allowed += [BudgetTooSmall] * (is_tight and not is_large) + [LeaseFenced] * (run.restless > 0)
    if chance.random() < 0.15:
        run.narrow()
        allowed.append(BudgetTooSmall)
    scene = chance.choice((several, several, jobs, alike))
    (mixed if is_mixed else scene)(run)
    if chance.random() < 0.2:
        run.outside.away = chance.choice([0.1, 0.5])
    if chance.random() < 0.15:
        run.outside.refused = chance.choice([0.02, 0.1])
        allowed.append(BudgetTooSmall)
    if chance.random() < 0.15:
        allowed.append(StoreDenied)
        for world in run.worlds.values():
            world.broken.add(chance.randrange(len(world.sizes)))
    if chance.random() < 0.1:
        run.outside.unplanned = 0.1
        allowed.append(Unplanned)
    if chance.random() < 0.4:
        run.neighbours.chance = chance.choice([0.05, 0.5])
        run.outside.elsewhere = chance.choice([0.0, 0.2, 0.7])
    if run.makers.is_on and chance.random() < 0.15:
        run.makers.broken = 0.02
        allowed.append(StoreDenied)
    for consumer in run.consumers:
        consumer.stopped = chance.random() < 0.05
    for _ in range(chance.choice([0, 0, 0, 1, 3])):
        run.go(run.acts + chance.randint(0, 60))
        run.forget_one()
    run.go(chance.choice([run.acts + chance.randint(0, 100), 20_000, 20_000, 20_000]))
    run.end()
    for consumer in run.consumers:
        error = consumer.error
        assert error is None or isinstance(error, tuple(allowed)), repr(error)
    return run
