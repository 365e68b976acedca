"""What a scenario is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from dataplane_bench.model import BenchCase, Mode, StorageKind


@dataclass(frozen=True, slots=True)
class Scale:
    """The options of a scenario that a user chooses."""

    workload: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A question, what physics allows, and the cases that answer it."""

    name: str
    question: str
    bound: str
    cases: Callable[[Scale], tuple[BenchCase, ...]]


CACHE_SHARE = 0.25
"""How much of the samples a loader may keep where its steady rate from S3 is measured."""
STEADY_EPOCH = 2


def local_and_s3(scale: Scale) -> tuple[BenchCase, ...]:
    """A workload from the page cache; in its first epoch from S3; and in its third, where no loader
    may keep more than a quarter of the samples.
    """
    cold = BenchCase("s3-cold", scale.workload, Mode.EPOCH, StorageKind.S3, cold=True)
    steady = dataclasses.replace(
        cold, label="s3-steady", epoch=STEADY_EPOCH, cache_share=CACHE_SHARE
    )
    return BenchCase("local", scale.workload), cold, steady
