"""A mixture of three small sources whose ids tell the source, and what loaders make of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from dataplane_torch import DataLoader, Mixture, Source

COUNTS = {"web": 400, "code": 150, "math": 40}
FIRST = {"web": 0.7, "code": 0.2, "math": 0.1}
SECOND = {"web": 0.1, "code": 0.6, "math": 0.3}
THIRD = {"web": 0.0, "code": 0.5, "math": 0.5}
BATCH, ROUND = 96, 2048
"""A round: 1,024 steps of two lanes."""
OPTIONS: dict[str, Any] = {
    "shuffle": True, "seed": 5, "lanes": 2, "global_batch_size": BATCH, "end": "drop"
}  # fmt: skip
Rows = list[list[int]]


def write_sources(folder: Path, pad: int = 0) -> Path:
    """The shards of all sources, with so many bytes in each row beside its id."""
    for at, (name, count) in enumerate(COUNTS.items()):
        columns = {"id": pa.array(np.arange(count) + 10_000 * at)}
        if pad:
            bytes_ = pa.array(np.zeros(count * pad, np.uint8))
            columns["pad"] = pa.FixedSizeListArray.from_arrays(bytes_, pad)
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=16)
    return folder


def mixed(folder: Path, weights: dict[str, float] = FIRST, **options: Any) -> Mixture:
    sources = {
        name: Source(folder / f"{name}.parquet", weight=weight) for name, weight in weights.items()
    }
    return Mixture(sources, **({"exhausted": "cycle", "length": 5760} | options))


def rows_of(loader: Any, steps: int | None = None) -> Rows:
    """The ids of each batch, of one pass or of so many steps of it."""
    found: Rows = []
    if steps != 0:
        for batch in loader:
            found.append(batch["id"].tolist())
            if len(found) == steps:
                break
    return found


def counts_of(rows: Rows) -> list[int]:
    ids = np.array([one for row in rows for one in row])
    return np.bincount(ids // 10_000, minlength=3).tolist()


def on_ranks(
    make: Callable[[], Mixture], size: int, use: Callable[[Any], None] = lambda _: None, **more: Any
) -> Rows:
    """The global batches of a pass of so many ranks, each of which is used before."""
    with ExitStack() as stack:
        loaders: list[Any] = [
            stack.enter_context(
                DataLoader(
                    make(),
                    name=f"ranks-{os.getpid()}",
                    dp_rank=rank,
                    dp_size=size,
                    **OPTIONS,
                    **more,
                )
            )
            for rank in range(size)
        ]
        for loader in loaders:
            use(loader)
        passes = [rows_of(loader) for loader in loaders]
    return joined(passes)


def joined(passes: list[Rows]) -> Rows:
    return [
        [one for turn in zip(*step, strict=True) for one in turn]
        for step in zip(*passes, strict=True)
    ]


def saved(loader: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def changed_at(loader: Any, steps: int, weights: dict[str, float]) -> Rows:
    """The batches of a pass in which the weights are set after so many steps."""
    found: Rows = []
    for batch in loader:
        found.append(batch["id"].tolist())
        if len(found) == steps:
            loader.set_weights(weights)
    return found
