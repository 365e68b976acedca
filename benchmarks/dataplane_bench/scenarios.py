"""All scenarios: a question, the bound that physics sets, and the cases that answer it.

The bound of `tokens`, `tabular`, `mixture` and `packed` is one core that copies rows from memory
into a warm buffer, since every row must be moved once. A loader can pass a bound by doing less: by
decoding only what a crop needs, or by keeping tokens for later epochs.
"""

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
    """A question, the bound that physics sets, and the cases that answer it."""

    name: str
    question: str
    bound: str
    cases: Callable[[Scale], tuple[BenchCase, ...]]


CACHE_SHARE = 0.25
"""How much of the samples a loader may keep where its steady rate from S3 is measured."""
STEADY_EPOCH = 2
STEPS_MS = {"images": (50.0, 100.0, 200.0)}
OTHER_STEPS_MS = (1.0, 5.0, 20.0)
FRACTIONS = (0.1, 0.5, 0.9)
RESTART_RANKS = 3
LATER_S = 5.0
"""As long as a framework takes to agree on the ranks that are left after a failure."""


def local_and_s3(scale: Scale) -> tuple[BenchCase, ...]:
    """A workload from the page cache; in its first epoch from S3; and in its third, where no loader
    may keep more than a quarter of the samples.
    """
    cold = BenchCase("s3-cold", scale.workload, Mode.EPOCH, StorageKind.S3, cold=True)
    steady = dataclasses.replace(
        cold, label="s3-steady", epoch=STEADY_EPOCH, cache_share=CACHE_SHARE
    )
    return BenchCase("local", scale.workload), cold, steady


def local(scale: Scale) -> tuple[BenchCase, ...]:
    """A workload from the page cache."""
    return (BenchCase("local", scale.workload),)


def two_epochs(scale: Scale) -> tuple[BenchCase, ...]:
    """The first epoch, where every text must be tokenised; and the next one."""
    first = BenchCase("first-epoch", scale.workload, Mode.EPOCH, cold=True)
    return first, dataclasses.replace(first, label="second-epoch", epoch=1)


def of_ranks(scale: Scale) -> tuple[BenchCase, ...]:
    """All ranks of a host share one epoch."""
    return (BenchCase(f"{scale.ranks} ranks", scale.workload, ranks=scale.ranks),)


def of_peers(_: Scale) -> tuple[BenchCase, ...]:
    """The files of each peer that has a format of its own, shuffled and in order."""
    workloads = {"mosaic": "rows", "litdata": "rows", "megatron": "rows"}
    workloads |= {"delta": "tabular", "iceberg": "tabular"}
    return tuple(
        BenchCase(f"{peer}{label}", workload, files=peer, in_order=bool(label))
        for peer, workload in workloads.items()
        for label in ("", " in order")
    )


def of_jobs(scale: Scale) -> tuple[BenchCase, ...]:
    """Each job loads the whole epoch in an order of its own, and then all of them in one order; a
    loader with a daemon may share it among them.
    """
    return (
        BenchCase(f"{scale.ranks} jobs", scale.workload, jobs=scale.ranks, served=True),
        BenchCase("one order", scale.workload, jobs=scale.ranks, served=True, shared=True),
    )


def first_batches(scale: Scale) -> tuple[BenchCase, ...]:
    """Cold; with the samples in the page cache; from a daemon, if the loader has one; from S3."""
    return (
        BenchCase("cold", scale.workload, Mode.FIRST, cold=True),
        BenchCase("warm", scale.workload, Mode.FIRST),
        BenchCase("served", scale.workload, Mode.FIRST, served=True),
        BenchCase("s3", scale.workload, Mode.FIRST, StorageKind.S3, cold=True),
        BenchCase("s3-served", scale.workload, Mode.FIRST, StorageKind.S3, served=True, cold=True),
    )


def resumed(scale: Scale) -> tuple[BenchCase, ...]:
    """At several places of the epoch. A loader without a state reads its way there once more."""
    return tuple(
        BenchCase(f"{at:.0%}", scale.workload, Mode.RESUME, fraction=at) for at in FRACTIONS
    )


def restarted(scale: Scale) -> tuple[BenchCase, ...]:
    """At once; later; by a rank less; with a daemon. After a failure, frameworks restart in the
    same process, with the ranks that are left.
    """
    return (
        BenchCase("at once", scale.workload, Mode.RESTART),
        BenchCase("later", scale.workload, Mode.RESTART, pause_s=LATER_S),
        BenchCase(
            "a rank less", scale.workload, Mode.RESTART, ranks=RESTART_RANKS, pause_s=LATER_S
        ),
        BenchCase("served", scale.workload, Mode.RESTART, served=True, pause_s=LATER_S),
    )


def with_steps(scale: Scale) -> tuple[BenchCase, ...]:
    """Steps of several lengths."""
    steps = STEPS_MS.get(scale.workload, OTHER_STEPS_MS)
    return tuple(BenchCase(f"{step:g} ms a step", scale.workload, step_ms=step) for step in steps)


WORKLOADS = (
    Scenario(
        "tokens",
        "How fast do fixed rows of 2,048 tokens reach a training loop in random order?",
        "one core's gather of random rows into a warm buffer; from S3, what the server delivers",
        local_and_s3,
    ),
    Scenario(
        "images",
        "How fast do 97 KB photographs become random resized crops of 224 x 224, half of them "
        "flipped?",
        "full JPEG decode and resize on all cores; decoding only the crop can pass it",
        local_and_s3,
    ),
    Scenario(
        "tabular",
        "How fast do shuffled rows of a 40-column table reach a training loop?",
        "one core's gather of whole rows from memory; from S3, what the server delivers",
        local_and_s3,
    ),
    Scenario(
        "text",
        "How fast do token lists of different lengths reach a training loop as padded batches?",
        "one core gathering lists into a zeroed buffer; from S3, what the server delivers",
        local_and_s3,
    ),
)
"""One workload each; the others load whichever the user names."""

MADE = (
    Scenario(
        "mixture",
        "How fast do rows of 2,048 tokens from four sources, 70, 20, 7 and 3 %, reach a training "
        "loop?",
        "one core's gather of random rows into a warm buffer, as without a mixture",
        local,
    ),
    Scenario(
        "packed",
        "How fast do documents of 616 tokens on average become packs of 2,048 tokens?",
        "one core's gather of the tokens into a warm buffer; positions and document ids not "
        "counted",
        local,
    ),
    Scenario(
        "tokenise",
        "How fast do texts become 256 tokens each, in the loader's own processes?",
        "the tokenizer alone on all cores; a loader that keeps the tokens can pass it in later "
        "epochs",
        two_epochs,
    ),
    Scenario(
        "foreign",
        "How fast do other libraries' files reach a training loop, unconverted, beside the library "
        "itself?",
        "one core's gather of random rows into a warm buffer",
        of_peers,
    ),
)
"""Workloads of their own. They load generated samples only."""

OTHERS = (
    Scenario(
        "ranks",
        "How fast are several data-parallel ranks of one host fed, in sum?",
        "the same as for one rank: they share cores and memory",
        of_ranks,
    ),
    Scenario(
        "jobs",
        "How fast are several independent jobs over the same samples fed, in sum?",
        "decode once for all of them; each job's batches are copied once",
        of_jobs,
    ),
    Scenario(
        "first-batch",
        "How long does a training script wait for its first batch?",
        "one read of the rows of a batch: milliseconds",
        first_batches,
    ),
    Scenario(
        "resume",
        "How long does a restarted run wait for its first batch at 10, 50 and 90 % of an epoch?",
        "as long as a fresh start: the place can be computed",
        resumed,
    ),
    Scenario(
        "restart",
        "How long does a trainer wait that opens its loader again in the same process?",
        "one read of the rows of a batch: milliseconds",
        restarted,
    ),
    Scenario(
        "compute",
        "Does the loader hide behind a trainer that computes for x ms a step, and at what cost?",
        "no stall as long as a step takes longer than making a batch",
        with_steps,
    ),
)
SCENARIOS = {scenario.name: scenario for scenario in (*WORKLOADS, *MADE, *OTHERS)}
