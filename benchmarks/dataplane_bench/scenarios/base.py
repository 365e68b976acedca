"""What a scenario is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dataplane_bench.model import Case, Mode, Store


@dataclass(frozen=True, slots=True)
class Scale:
    """What a user chooses of a scenario."""

    workload: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A question, what physics allows, and the cases that answer it."""

    name: str
    question: str
    bound: str
    cases: Callable[[Scale], tuple[Case, ...]]


def local_and_s3(scale: Scale) -> tuple[Case, ...]:
    """A workload from the page cache, and in its first epoch from S3."""
    return (
        Case("local", scale.workload),
        Case("s3", scale.workload, Mode.EPOCH, Store.S3, cold=True),
    )
