"""How long does a training script wait for its first batch?

Bound: one read of a batch's rows: milliseconds. The rest is starting processes.
"""

from dataplane_bench.model import BenchCase, Mode, StorageKind
from dataplane_bench.scenarios.base import Scale, Scenario


def cases(scale: Scale) -> tuple[BenchCase, ...]:
    """Cold; with the samples in the page cache; from a daemon, if the loader has one; from S3."""
    return (
        BenchCase("cold", scale.workload, Mode.FIRST, cold=True),
        BenchCase("warm", scale.workload, Mode.FIRST),
        BenchCase("served", scale.workload, Mode.FIRST, served=True),
        BenchCase("s3", scale.workload, Mode.FIRST, StorageKind.S3, cold=True),
        BenchCase("s3-served", scale.workload, Mode.FIRST, StorageKind.S3, served=True, cold=True),
    )


SCENARIO = Scenario(
    "first-batch",
    "How long does a training script wait for its first batch?",
    "one read of the rows of a batch: milliseconds",
    cases,
)
