"""Rows of tokens from four sources, in shares that are not those of their sizes."""

from __future__ import annotations

from pathlib import Path

from dataplane_bench.model import BatchKind, WorkloadPart
from dataplane_bench.workloads import tokens
from dataplane_bench.workloads.recipe import SHARD_COUNT, Recipe, shards

_SHARES = {"web": (0.70, 70), "code": (0.20, 25), "books": (0.07, 10), "maths": (0.03, 5)}
"""Weight in a batch, and relative size: the first source to be exhausted is web."""


def _parts(count: int) -> tuple[WorkloadPart, ...]:
    whole = sum(size for _, size in _SHARES.values())
    sizes = {name: count * size // whole for name, (_, size) in _SHARES.items()}
    sizes["web"] += count - sum(sizes.values())
    return tuple(WorkloadPart(name, weight, sizes[name]) for name, (weight, _) in _SHARES.items())


def _write(folder: Path, count: int) -> None:
    first = 0
    for seed, part in enumerate(_parts(count)):
        below = folder / part.name
        below.mkdir()
        files = max(round(SHARD_COUNT * part.sample_count / count), 1)
        tokens.write(shards(below, part.sample_count, first, files), seed)
        first += part.sample_count


RECIPE = Recipe(
    name="mixture",
    version=1,
    columns=tokens.COLUMNS,
    sample_count=tokens.RECIPE.sample_count,
    batch_size=tokens.RECIPE.batch_size,
    step_ms=tokens.RECIPE.step_ms,
    write=_write,
    delivery=BatchKind.MIXED,
    parts=_parts,
)
