"""Does the loader hide behind a trainer that computes, and what does hiding cost the host?

Bound: no stall at all, if a step takes longer than the loader needs for a batch.
"""

from dataplane_bench.model import BenchCase
from dataplane_bench.scenarios.base import Scale, Scenario

STEPS_MS = {"images": (50.0, 100.0, 200.0)}
OTHER_STEPS_MS = (1.0, 5.0, 20.0)


def cases(scale: Scale) -> tuple[BenchCase, ...]:
    """Steps of several lengths."""
    steps = STEPS_MS.get(scale.workload, OTHER_STEPS_MS)
    return tuple(BenchCase(f"{step:g} ms a step", scale.workload, step_ms=step) for step in steps)


SCENARIO = Scenario(
    "compute",
    "Does the loader hide behind a trainer that computes for x ms a step, and at what cost?",
    "no stall as long as a step takes longer than making a batch",
    cases,
)
