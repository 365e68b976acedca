"""A checksum of all documents of an epoch that arrives as packs: every token of them, once.

A document that is longer than a pack fills whole packs, and its rest counts as a document: every
system cuts it at the same places. Tokens of documents are not 0, so that 0 is padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import Workload
from dataplane_bench.trial.checksum import Batch, BatchRefused, check, mix, weights


class PackSum:
    """Adds up the documents in the packs of one epoch."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._weights = workload, weights(workload.length)
        self._sum = self._token_count = self._document_count = 0
        self.sample_count = 0
        self.byte_count = 0

    def add(self, batch: Batch) -> None:
        """Raises:  BatchRefused: the form is wrong, or documents are not told apart."""
        check(batch, self._workload)
        tokens, positions, documents = (
            batch[column.name].numpy() for column in self._workload.batch_columns
        )
        is_token = tokens != 0
        places, in_order = positions[is_token], documents[is_token]
        packs = np.nonzero(is_token)[0]
        starts = _starts(packs, places, in_order)
        words = tokens[is_token].astype(np.uint64) * self._weights[places]
        lengths = np.diff(np.append(starts, len(words))).astype(np.uint64)
        hashes = mix(np.add.reduceat(words, starts, dtype=np.uint64) + mix(lengths))
        self._sum = (self._sum + int(hashes.sum(dtype=np.uint64))) % (1 << 64)
        self._token_count += len(words)
        self._document_count += len(starts)
        self.sample_count += len(tokens)
        self.byte_count += sum(batch[one.name].nbytes for one in self._workload.batch_columns)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        return f"{self._sum:016x}"

    def facts(self) -> dict[str, Any]:
        """How many documents there were, and which share of the packs is padding."""
        room = self.sample_count * self._workload.length
        return {"documents": self._document_count, "waste": 1 - self._token_count / room}


def _starts(
    packs: NDArray[np.int64], places: NDArray[np.int32], documents: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Where documents begin among the tokens of a batch: at position 0.

    Shapes:  packs, places, documents: [tokens].   result: int64[documents].
    Raises:  BatchRefused: a position does not follow from the one before, or a document's number is
    not the same for all of its tokens, or is its neighbour's.
    """
    first = places == 0
    begins = np.append(True, packs[1:] != packs[:-1])
    follows = np.append(False, places[1:] == places[:-1] + 1)
    if np.any(begins & ~first) or np.any(~first & ~follows):
        raise BatchRefused("position_ids: they do not count up from 0 in each document")
    is_other = np.append(True, documents[1:] != documents[:-1])
    if np.any((first != is_other) & ~begins):
        raise BatchRefused("document_ids: they are not one number for each document of a pack")
    return np.flatnonzero(first)
