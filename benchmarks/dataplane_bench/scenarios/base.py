"""What a scenario is."""

from __future__ import annotations

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


def local_and_s3(scale: Scale) -> tuple[BenchCase, ...]:
    """A workload from the page cache, and in its first epoch from S3."""
    return (
        BenchCase("local", scale.workload),
        BenchCase("s3", scale.workload, Mode.EPOCH, StorageKind.S3, cold=True),
    )
