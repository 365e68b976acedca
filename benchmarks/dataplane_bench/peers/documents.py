"""Packs of documents as batches, for loaders that leave their form to the trainer's code.

A document longer than a pack fills whole packs, and its rest is packed as a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bounds = NDArray[np.int64]
Ids = NDArray[np.int32]


def pieces(offsets: Bounds, length: int) -> tuple[Bounds, Bounds]:
    """Where the pieces of documents begin and end: the documents, cut every `length` tokens.

    Shapes:  offsets: int64[documents + 1].   result: int64[pieces], int64[pieces].
    """
    sizes = np.diff(offsets)
    counts = -(-sizes // length)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    places = np.arange(int(counts.sum())) - first
    starts = np.repeat(offsets[:-1], counts) + places * length
    return starts, np.minimum(starts + length, np.repeat(offsets[1:], counts))


def pack_batch(
    tokens: Sequence[Ids], lengths: Sequence[NDArray[Any]], length: int
) -> dict[str, Any]:
    """Tensors of these packs.

    Shapes:  tokens: int32[n <= length] of each pack.   lengths: those of its documents.
    result: int32[packs, length] each, padded with 0; document_ids with -1.
    """
    import torch

    rows = np.zeros((len(tokens), length), np.int32)
    positions = np.zeros_like(rows)
    documents = np.full_like(rows, -1)
    for index, (row, sizes) in enumerate(zip(tokens, lengths, strict=True)):
        count = len(row)
        rows[index, :count] = row
        firsts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        positions[index, :count] = np.arange(count) - firsts
        documents[index, :count] = np.repeat(np.arange(len(sizes)), sizes)
    named = {"tokens": rows, "position_ids": positions, "document_ids": documents}
    return {name: torch.from_numpy(array) for name, array in named.items()}


def unpacked(batch: dict[str, Any], length: int, batch_size: int) -> Iterator[dict[str, Any]]:
    """The pieces of a padded batch's documents, each in a pack of its own."""
    values, counts = batch["tokens"].numpy(), batch["tokens.length"].numpy()
    width = values.shape[1]
    flat = values.reshape(-1)
    found: list[Ids] = []
    for index, count in enumerate(counts.tolist()):
        starts, ends = pieces(np.array([0, count]) + index * width, length)
        bounds = zip(starts.tolist(), ends.tolist(), strict=True)
        found += [flat[start:end] for start, end in bounds]
    for at in range(0, len(found), batch_size):
        some = found[at : at + batch_size]
        yield pack_batch(some, [np.array([len(one)]) for one in some], length)
