"""Where time went: of each slab in the making, and of the datasets that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.rpc.messages import StageTimes

_US_A_S = 1e6


@dataclass(slots=True, eq=False)
class Stamps:
    """When a slab in the making came to each stage, by the node's clock; 0.0: not yet. What is
    made again later is stamped again.
    """

    planned: float
    fetched: float = 0.0
    gathered_from: float = 0.0
    """All of its blocks were ready."""
    slotted: float = 0.0
    started: float = 0.0
    made: float = 0.0

    def slotted_for_copy(self, made: float, now: float) -> None:
        """It has a slot for the copy of a slab that was `made` for another consumer: what it waited
        for that one counts as waiting for a worker, and the rest as waiting for room.
        """
        since = max(self.planned, self.gathered_from)
        self.slotted = since + min(now - made, now - since)

    def stages(self, now: float) -> tuple[int, ...]:
        """(fetch, decode, room, queue, assemble, ready) as in StageTimes: their sum is the time
        from plan to `now`, whatever is missing or out of order.
        """
        ends = (self.fetched, self.gathered_from, self.slotted, self.started, self.made, now)
        found, at = [], self.planned
        for end in ends:
            until = min(max(end, at), now)
            found.append(round((until - at) * _US_A_S))
            at = until
        return tuple(found)


@dataclass(slots=True, eq=False)
class Account:
    """What was done for a dataset since it was told last, whoever it was done for."""

    read_bytes: int = 0
    decoding_s: float = 0.0
    disk_us: int = 0
    _reading_s: float = 0.0
    _reads: int = 0
    _reading_since: float = 0.0

    def read_began(self, now: float) -> None:
        """One more read from storage is under way."""
        if not self._reads:
            self._reading_since = now
        self._reads += 1

    def read_ended(self, now: float, read_bytes: int) -> None:
        """One fewer, and so many bytes more, whether they were of use or not."""
        self._reads -= 1
        self.read_bytes += read_bytes
        if not self._reads:
            self._reading_s += now - self._reading_since

    def take(self, now: float) -> tuple[int, int, int, int]:
        """(bytes read, reading, decoding, waiting for disks), times in microseconds; from now on it
        counts anew.
        """
        if self._reads:
            self._reading_s += now - self._reading_since
            self._reading_since = now
        found = (
            self.read_bytes, round(self._reading_s * _US_A_S),
            round(self.decoding_s * _US_A_S), self.disk_us,
        )  # fmt: skip
        self.read_bytes, self._reading_s, self.decoding_s, self.disk_us = 0, 0.0, 0.0, 0
        return found


def stage_times(
    stages: tuple[int, ...], accounts: Sequence[Account], worker_count: int, now: float
) -> StageTimes:
    """The times of a slab that is handed over; what was done for its datasets counts for it."""
    fetch, decode, room, queue, assemble, ready = stages
    done = [account.take(now) for account in accounts]
    read_bytes, reading, decoding, disk = map(sum, zip(*done, strict=True))
    return StageTimes(
        fetch, decode, room, queue, assemble, ready,
        read_bytes, reading, decoding, disk, worker_count,
    )  # fmt: skip
