"""How fast are several ranks of one host fed, in sum?

Bound: the same as for one rank, since all ranks share the cores and the memory.
"""

from dataplane_bench.model import BenchCase
from dataplane_bench.scenarios.base import Scale, Scenario


def cases(scale: Scale) -> tuple[BenchCase, ...]:
    """All ranks of a host share one epoch."""
    return (BenchCase(f"{scale.ranks} ranks", scale.workload, ranks=scale.ranks),)


SCENARIO = Scenario(
    "ranks",
    "How fast are several data-parallel ranks of one host fed, in sum?",
    "the same as for one rank: they share cores and memory",
    cases,
)
