"""Recipes of runs that change, their shards and their loaders, for tests of stages."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from dataplane_torch import DataLoader, Mixture, Pack, Source

from dataplane.model.records import Topology

SHARDS, ROWS, GROUP, BATCH = 4, 60, 15, 24
OPTIONS: dict[str, Any] = {"shuffle": True, "seed": 3, "lanes": 2, "window": 20, "columns": ["id"]}
PACKED: dict[str, Any] = {"columns": None, "pack": Pack("tokens", 32), "global_batch_size": 12}


def write(made: Path) -> Path:
    """Write the shards."""
    for shard in range(SHARDS):
        ids = np.arange(shard * ROWS, (shard + 1) * ROWS)
        tokens = [[number] * (1 + number * 7 % 23) for number in ids.tolist()]
        table = pa.table({"id": ids, "tokens": tokens, "half": ids % 2})
        pq.write_table(table, made / f"s{shard}.parquet", row_group_size=GROUP)
    return made


def some(folder: Path, *shards: int) -> list[str]:
    return [f"{folder}/s{shard}.parquet" for shard in shards]


def mixed(folder: Path, first: float = 1.0, **more: Any) -> Mixture:
    a, b = some(folder, 0, 1), some(folder, 2, 3)
    return Mixture({"a": Source(a, weight=first), "b": Source(b, weight=1.0)}, **more)


@contextlib.contextmanager
def ranks(
    url: Any,
    size: int = 1,
    state: Any = None,
    change: Any = None,
    before: Any = None,
    **more: Any,
) -> Iterator[list[Any]]:
    """The loaders of all ranks of one launch."""
    with contextlib.ExitStack() as stack:
        made = []
        for rank in range(size):
            place = Topology(rank, size, rank, size, rank, size)
            options = {"topology": place, "name": "stages", "global_batch_size": BATCH, **OPTIONS}
            made.append(stack.enter_context(DataLoader(url, **{**options, **more})))
        for loader in made if state is not None else ():
            loader.load_state_dict(state, change=change, before=before)
        yield made


def ids_of(batch: Any) -> list[Any]:
    return batch["id"].tolist() if "id" in batch else batch["tokens"].tolist()


def read(loaders: list[Any], steps: int | None = None) -> list[list[Any]]:
    """The global batches of the next steps of a pass."""
    passes = [[ids_of(batch) for batch in itertools.islice(loader, steps)] for loader in loaders]
    return [
        [row for turn in itertools.zip_longest(*step) for row in turn if row is not None]
        for step in zip(*passes, strict=True)
    ]


def state_after(url: Any, steps: int, epoch: int = 0, **more: Any) -> dict[str, Any]:
    with ranks(url, **more) as (loader,):
        loader.set_epoch(epoch)
        read([loader], steps)
        return json.loads(json.dumps(loader.state_dict()))


RECIPES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    # the shards before and after, the options before and after
    "length": ((0, 1), (0, 1), {"columns": ["id", "tokens"]}, {"max_length": 8, "columns": None}),
    "seed and batch": ((0, 1), (0, 1), {}, {"seed": 4, "global_batch_size": 12}),
    "shard added": ((0, 1), (0, 1, 2), {}, {}),
    "shard lost": ((0, 1, 2), (0, 2), {}, {}),
    "view": ((0, 1), (0, 1), {"where": "half == 0"}, {"where": "half == 1"}),
    "packing": ((0, 1), (0, 1), {}, PACKED),
    "other packs": ((0, 1), (0, 1), PACKED, {**PACKED, "pack": Pack("tokens", 48)}),
    "source added": ((0, 1), "mixed", {}, {}),
    "source removed": ("mixed", (2, 3), {}, {}),
    "longer mixture": ("mixed", "longer", {}, {"seed": 5}),
}


def urls(folder: Path, shards: Any) -> Any:
    if shards == "mixed":
        return mixed(folder)
    return mixed(folder, 2.0, length=96) if shards == "longer" else some(folder, *shards)
