"""The definition of a generated workload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import BatchKind, WorkloadColumn, WorkloadPart

SHARD_COUNT = 8


@dataclass(frozen=True, slots=True)
class Recipe:
    """How samples of one kind are made. Raise `version` whenever the output bytes change.

    `write` puts so many samples as Parquet shards into an empty folder; one thread of it at a time.
    `parts` are those of a mixture with so many samples. `s3_scale` times as many take the fastest
    loader ten seconds or so to read from S3, on two cores.
    """

    name: str
    version: int
    columns: tuple[WorkloadColumn, ...]
    sample_count: int
    batch_size: int
    step_ms: float
    write: Callable[[Path, int], None]
    delivery: BatchKind = BatchKind.STORED
    length: int = 0
    parts: Callable[[int], tuple[WorkloadPart, ...]] = lambda _: ()
    s3_scale: float = 1.0


def shards(
    folder: Path, count: int, first: int = 0, files: int = SHARD_COUNT
) -> Iterator[tuple[Path, NDArray[np.int64]]]:
    """The file of each shard, and the ids of its samples.

    Shapes:  int64[n], which count up from `first` over all shards.
    """
    every = np.arange(first, first + count, dtype=np.int64)
    for index, ids in enumerate(np.array_split(every, files)):
        yield folder / f"shard-{index:05d}.parquet", ids
