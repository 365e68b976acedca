"""Checks of epochs whose batches are more than their samples: mixtures, and packs of documents.

An epoch of a mixture ends when the first source is exhausted, so it is not all samples of all
sources; those that arrive are compared one by one with the shards: rows as the sources have them,
none twice in a pass, and shares.

Of packs, a checksum of all documents: every token of them, once. A document that is longer than a
pack fills whole packs, and its rest counts as a document: every system cuts it at the same places.
Tokens of documents are not 0, so that 0 is padding.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import Workload
from dataplane_bench.peers.reference import batches
from dataplane_bench.trial.checksum import (
    Batch,
    BatchRefused,
    check,
    mix,
    sample_hashes,
    weights,
)

DEVIATIONS_MAX = 4.0
"""By how many standard deviations of independent draws a source's share of an epoch may be off."""
_LENGTH_MIN = 0.5
"""An epoch may end before the first source is exhausted, as with worker processes, but not soon."""


class MixtureSum:
    """Looks at the batches of one epoch."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._hashes = np.zeros(workload.sample_count, np.uint64)
        for batch in batches(workload):
            self._hashes[batch["id"].numpy()] = sample_hashes(batch, workload)[0]
        self._seen = np.zeros(workload.sample_count, np.int64)
        self._wrong_count = 0
        self.sample_count = 0
        self.byte_count = 0

    def add(self, batch: Batch) -> None:
        """Raises:  BatchRefused."""
        hashes, byte_count = sample_hashes(batch, self._workload)
        ids = batch["id"].numpy()
        known = (ids >= 0) & (ids < len(self._seen))
        np.add.at(self._seen, ids[known], 1)
        right = self._hashes[ids[known]] == hashes[known]
        self._wrong_count += len(ids) - int(right.sum())
        self.sample_count += len(ids)
        self.byte_count += byte_count

    @property
    def digest(self) -> str:
        """Of no use here."""
        return f"{0:016x}"

    def facts(self) -> dict[str, Any]:
        """The share that each source has, and what is wrong, "" if nothing is."""
        parts = self._workload.parts
        bounds = np.cumsum([part.sample_count for part in parts])[:-1]
        seen = np.split(self._seen, bounds)
        shares = {
            part.name: float(one.sum()) / self.sample_count
            for part, one in zip(parts, seen, strict=True)
        }
        again = [part.name for part, one in zip(parts, seen, strict=True) if np.ptp(one) > 1]
        return {"shares": shares, "fault": self._fault(shares, again)}

    def _fault(self, shares: dict[str, float], again: list[str]) -> str:
        parts = self._workload.parts
        if self._wrong_count:
            return f"{self._wrong_count:,} samples are not the sources'"
        if again:
            return f"samples of {', '.join(again)} come again before others have come once"
        for part in parts:
            deviation = math.sqrt(part.weight * (1 - part.weight) / self.sample_count)
            if abs(part.weight - shares[part.name]) > DEVIATIONS_MAX * deviation:
                return f"{shares[part.name]:.1%} of the samples are {part.name}'s"
        length = min(part.sample_count / part.weight for part in parts)
        if self.sample_count < length * _LENGTH_MIN:
            return f"{self.sample_count:,} samples, and no source is exhausted"
        return ""


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
