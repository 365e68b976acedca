"""How long does a restarted run wait for its first batch, deep in an epoch?

Bound: as long as a fresh start: the place in the order can be computed. A loader without a state
reads its way there once more ("replay").
"""

from dataplane_bench.model import BenchCase, Mode
from dataplane_bench.scenarios.base import Scale, Scenario

FRACTIONS = (0.1, 0.5, 0.9)


def cases(scale: Scale) -> tuple[BenchCase, ...]:
    """At several places of the epoch."""
    return tuple(
        BenchCase(f"{at:.0%}", scale.workload, Mode.RESUME, fraction=at) for at in FRACTIONS
    )


SCENARIO = Scenario(
    "resume",
    "How long does a restarted run wait for its first batch at 10, 50 and 90 % of an epoch?",
    "as long as a fresh start: the place can be computed",
    cases,
)
