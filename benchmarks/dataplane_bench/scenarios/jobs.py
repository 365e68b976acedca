"""How fast are several independent jobs over the same samples fed, in sum?

Bound: reading and decoding once for all of them, if nothing is done twice; the copy into each job's
batches remains.
"""

from dataplane_bench.model import BenchCase
from dataplane_bench.scenarios.base import Scale, Scenario


def cases(scale: Scale) -> tuple[BenchCase, ...]:
    """Each job loads the whole epoch in an order of its own, and then all of them in one order; a
    loader with a daemon may share it among them.
    """
    return (
        BenchCase(f"{scale.ranks} jobs", scale.workload, jobs=scale.ranks, served=True),
        BenchCase("one order", scale.workload, jobs=scale.ranks, served=True, shared=True),
    )


SCENARIO = Scenario(
    "jobs",
    "How fast are several independent jobs over the same samples fed, in sum?",
    "decode once for all of them; each job's batches are copied once",
    cases,
)
