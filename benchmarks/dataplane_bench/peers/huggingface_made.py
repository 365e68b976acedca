"""Hugging Face datasets that are more than stored samples: mixed, packed, or tokenised on the way.

Sources: https://huggingface.co/docs/datasets/process (interleave), .../use_with_pytorch and
.../stream (map, with_transform); https://huggingface.co/docs/trl/reducing_memory_usage ("Packing"):
TRL packs a dataset once, before training, or a stream as it comes; its collator makes position ids
of the lengths of each pack's documents.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane_bench.model import BatchKind, ColumnType, TrialTask, Workload
from dataplane_bench.peers.arrow_batches import TableBatches, lists
from dataplane_bench.peers.base import Batch
from dataplane_bench.peers.documents import pack_batch
from dataplane_bench.peers.tokenising import Tokenising, tokenising

if TYPE_CHECKING:
    import pyarrow as pa

PACKS = "packs"
"""The folder of what TRL packed beforehand."""


def prepare(workload: Workload, rows: Any, folder: Path, file_count: int) -> None:
    """Write what is made before a training."""
    if workload.delivery is BatchKind.PACKED:
        _packed(workload, rows).save_to_disk(str(folder / PACKS), num_shards=file_count)


def stored(task: TrialTask, folder: str) -> Any:
    """A map-style dataset of a task's samples."""
    import datasets

    workload = task.workload
    if workload.parts:
        return datasets.interleave_datasets(
            [datasets.load_from_disk(f"{folder}/{part.name}") for part in workload.parts],
            probabilities=[part.weight for part in workload.parts],
            seed=task.seed,
        ).with_format("arrow")
    match workload.delivery:
        case BatchKind.PACKED:
            return datasets.load_from_disk(f"{folder}/{PACKS}").with_format("arrow")
        case BatchKind.TOKENISED:
            rows = datasets.load_from_disk(folder)
            return rows.with_transform(functools.partial(_transformed, tokenising(workload)))
        case _:
            return datasets.load_from_disk(folder).with_format("arrow")


def collate(task: TrialTask) -> Any:
    """What makes a batch of rows of `stored`; with its method `nested`, of `streamed`."""
    workload = task.workload
    match workload.delivery:
        case BatchKind.PACKED:
            return PackBatches(workload.length)
        case BatchKind.TOKENISED:
            return TokenisedBatches(workload, task.seed)
        case _:
            return TableBatches(workload.columns, task.seed)


def streamed(workload: Workload, rows: Any) -> Any:
    """An iterable dataset in Arrow's format, with what is made of its samples."""
    match workload.delivery:
        case BatchKind.PACKED:
            return _packed(workload, rows)
        case BatchKind.TOKENISED:
            make = functools.partial(_tokenised_table, tokenising(workload))
            return rows.map(make, batched=True, batch_size=workload.batch_size)
        case _:
            return rows


def _packed(workload: Workload, rows: Any) -> Any:
    from trl import pack_dataset

    # "bfd" would cut off what does not fit into one pack.
    return pack_dataset(rows.select_columns("tokens"), workload.length, "bfd_split")


class PackBatches:
    """Batches of packs, as TRL's collator makes them, with the number of each document."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, table: pa.Table) -> Batch:
        packs, sizes = (table[name].combine_chunks() for name in ("tokens", "seq_lengths"))
        return pack_batch(_values(packs, "int32"), _values(sizes, "int64"), self._length)

    def nested(self, table: pa.Table) -> Batch:
        """The same for a table of one row that holds each column of the batch as a list."""
        import pyarrow as pa

        names = ["tokens", "seq_lengths"]
        return self(pa.table([table[name].combine_chunks().flatten() for name in names], names))


class TokenisedBatches:
    """Batches of what the transform, or the stream's map, has already made."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._tables = TableBatches(workload.batch_columns, seed)

    def __call__(self, made: Batch) -> Batch:
        return made

    def nested(self, table: pa.Table) -> Batch:
        """See TableBatches."""
        return self._tables.nested(table)


def _values(values: pa.Array, dtype: str) -> list[Any]:
    from dataplane_bench.model import WorkloadColumn

    return lists(WorkloadColumn("", ColumnType.RAGGED, dtype), values)


def _transformed(tokenise: Tokenising, rows: dict[str, list[Any]]) -> Batch:
    import torch

    made = {name: torch.from_numpy(array) for name, array in tokenise(rows["text"]).items()}
    return {"id": torch.tensor(rows["id"]), **made}


def _tokenised_table(tokenise: Tokenising, table: pa.Table) -> pa.Table:
    import pyarrow as pa

    made = tokenise(table["text"].to_pylist())
    flat = pa.array(np.ravel(made["tokens"]))
    tokens = pa.FixedSizeListArray.from_arrays(flat, made["tokens"].shape[1])
    count = pa.array(made["token_count"])
    return pa.table({"id": table["id"], "tokens": tokens, "token_count": count})
