"""The claims that the demo proves: pure functions over arrays of ids and checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from dataplane.plan.defaults import BlockSizes, shuffle_of
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane_bench.demo.journal import Step

Int64 = NDArray[np.int64]
Steps = Mapping[int, tuple[tuple[int, ...], float]]
"""By step number: the ids of its global batch, in order, and its loss."""


@dataclass(frozen=True, slots=True)
class Proof:
    """One claim, whether it holds, and the evidence."""

    name: str
    claim: str
    holds: bool
    evidence: str


def planned_ids(manifest: Manifest, seed: int, epoch: int) -> Int64:
    """The epoch's samples in planned order, computed from the plan without loader or service.

    Ids number the rows of the dataset: row r of a block has the block's first id + r.

    Shapes:  result: int64[N].
    """
    rows = manifest.block_rows
    shuffle = shuffle_of(BlockSizes.of(rows, manifest.block_decoded))
    order = Order(rows, seed, True, shuffle.lanes, shuffle.window, epoch, shuffle.ramp)
    blocks, row = order.locate(np.arange(order.sample_count))
    return (np.cumsum(rows) - rows)[blocks] + row


def complete(ids: Int64, sample_count: int) -> Proof:
    """Check that every sample was read once.   Shapes:  ids: int64[n]."""
    known = ids[(ids >= 0) & (ids < sample_count)]
    times = np.bincount(known, minlength=sample_count)
    missing, again = int((times == 0).sum()), int((times > 1).sum())
    strangers = len(ids) - len(known)
    return Proof(
        "every_sample_once",
        "every sample of the epoch was trained on exactly once",
        not missing and not again and not strangers,
        f"{len(ids):,} of {sample_count:,}; {missing} missing, {again} repeated"
        + (f", {strangers} unknown" if strangers else ""),
    )


def as_planned(ids: Int64, planned: Int64) -> Proof:
    """Check the order against the plan.   Shapes:  ids, planned: int64[n]."""
    return Proof(
        "planned_order",
        "in the order that the plan computes",
        np.array_equal(ids, planned),
        _compared(ids, planned),
    )


def as_uninterrupted(kept: Int64, passed: Int64) -> Proof:
    """Check against an uninterrupted pass.   Shapes:  kept, passed: int64[n, 2]."""
    return Proof(
        "uninterrupted_order",
        "the same as an uninterrupted pass of a single rank",
        np.array_equal(kept, passed),
        _compared(kept, passed),
    )


def right_content(kept: Int64, sums: Int64) -> Proof:
    """Check the bytes against the text.   Shapes:  kept: int64[n, 2].   sums: int64[N]."""
    known = (kept[:, 0] >= 0) & (kept[:, 0] < len(sums))
    right = int((sums[kept[known, 0]] == kept[known, 1]).sum())
    return Proof(
        "right_content",
        "every sample has the bytes of the text that it was made from",
        right == len(kept),
        f"{right:,} of {len(kept):,} checksums agree",
    )


def made_again(before: Steps, after: Steps, resumed_from: int) -> Proof:
    """Check that the steps lost since the checkpoint were repeated with the same samples."""
    lost = [step for step in before if step > resumed_from]
    alike = [step for step in lost if step in after and before[step][0] == after[step][0]]
    apart = max((abs(before[step][1] - after[step][1]) for step in alike), default=0.0)
    return Proof(
        "same_steps_again",
        "the steps lost in the kill were repeated with the same samples",
        bool(lost) and alike == lost,
        f"{len(alike)} of {len(lost)} steps; losses differ by at most {apart:.1g}",
    )


def kept_apart(looks: int, offences: Sequence[str]) -> Proof:
    """Check what `Watch` saw of the trainers."""
    evidence = f"looked {looks} times" if not offences else "; ".join(sorted(set(offences)))
    return Proof(
        "trainers_apart",
        "the trainers held no credentials and no connection to S3 or the coordinator",
        looks > 0 and not offences,
        evidence,
    )


def steps_of(ranks: Sequence[Sequence[Step]]) -> dict[int, tuple[tuple[int, ...], float]]:
    """The steps that are in the journals of all ranks of a launch, with their samples in global
    order: a rank's j-th sample is at position j * ranks + rank of the global batch.
    """
    by_rank = [{step.step: step for step in steps} for steps in ranks]
    shared = set.intersection(*(set(steps) for steps in by_rank)) if by_rank else set()
    shared_steps = {}
    for number in sorted(shared):
        rows = [steps[number].ids for steps in by_rank]
        in_order = [
            sample for column in zip_longest(*rows) for sample in column if sample is not None
        ]
        shared_steps[number] = (tuple(in_order), by_rank[0][number].loss)
    return shared_steps


def _compared(actual: NDArray[np.int64], expected: NDArray[np.int64]) -> str:
    """Where two sequences first differ, as text."""
    length = min(len(actual), len(expected))
    differs = (actual[:length] != expected[:length]).reshape(length, -1).any(axis=1)
    if differs.any():
        first = int(differs.argmax())
        return f"position {first:,} has {actual[first]}, not {expected[first]}"
    if len(actual) != len(expected):
        return f"{len(actual):,} samples, not {len(expected):,}"
    return f"{length:,} positions agree"
