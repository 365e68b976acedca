"""Checks an epoch of a mixture: rows as the sources have them, none twice in a pass, and shares.

An epoch ends when the first source is exhausted, so it is not all samples of all sources; those
that arrive are compared one by one with the shards.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dataplane_bench.model import Workload
from dataplane_bench.peers.reference import batches
from dataplane_bench.trial.checksum import Batch, sample_hashes

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
