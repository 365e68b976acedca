"""How long does a training script wait for its first batch?

Bound: one read of a batch's rows: milliseconds. The rest is starting processes.
"""

from dataplane_bench.model import BenchCase, Mode
from dataplane_bench.scenarios.base import Scale, Scenario


def cases(scale: Scale) -> tuple[BenchCase, ...]:
    """Cold; with the samples in the page cache; from a daemon, if the loader has one."""
    return (
        BenchCase("cold", scale.workload, Mode.FIRST, cold=True),
        BenchCase("warm", scale.workload, Mode.FIRST),
        BenchCase("served", scale.workload, Mode.FIRST, served=True),
    )


SCENARIO = Scenario(
    "first-batch",
    "How long does a training script wait for its first batch?",
    "one read of the rows of a batch: milliseconds",
    cases,
)
