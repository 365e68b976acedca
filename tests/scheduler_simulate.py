"""Whole runs of a scheduler."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_run import Run


def simulate(run: Callable[[], Run], scene: Callable[[Run], None], acts_max: int = 20_000) -> Run:
    """A whole run, from its beginning to its end."""
    made = run()
    scene(made)
    made.go(acts_max)
    made.end()
    return made
