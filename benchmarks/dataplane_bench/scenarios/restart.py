"""How long does a trainer wait that opens its loader again in the same process?

After a failure, frameworks restart in the same process, with the ranks that are left. Bound: one
read of the rows of a batch, as for a first batch: what the loader needs may still be there.
"""

from dataplane_bench.model import BenchCase, Mode
from dataplane_bench.scenarios.base import Scale, Scenario

RANKS = 3
LATER_S = 5.0
"""As long as a framework takes to agree on the ranks that are left."""


def cases(scale: Scale) -> tuple[BenchCase, ...]:
    """At once; later; by a rank less; with a daemon."""
    return (
        BenchCase("at once", scale.workload, Mode.RESTART),
        BenchCase("later", scale.workload, Mode.RESTART, pause_s=LATER_S),
        BenchCase("a rank less", scale.workload, Mode.RESTART, ranks=RANKS, pause_s=LATER_S),
        BenchCase("served", scale.workload, Mode.RESTART, served=True, pause_s=LATER_S),
    )


SCENARIO = Scenario(
    "restart",
    "How long does a trainer wait that opens its loader again in the same process?",
    "one read of the rows of a batch: milliseconds",
    cases,
)
