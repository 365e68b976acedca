"""Record how time is spent: for each slab in progress, and for each dataset."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from dataplane.rpc.messages import StageTimes

_US_A_S = 1e6


class Stamps(Struct, eq=False):
    """The times at which a slab reached each stage, by the node's clock; 0.0: not yet. A slab that
    is made again gets new stamps.
    """

    planned: float
    fetched: float = 0.0
    gathered_from: float = 0.0
    """All of its blocks were ready."""
    wanted: float = 0.0
    """Another node was to make it; there may have been none that did."""
    slotted: float = 0.0
    started: float = 0.0
    made: float = 0.0

    def slotted_for_copy(self, made: float, now: float) -> None:
        """Note that the slab got a slot for a copy of a slab that was `made` for another consumer.
        The wait for that slab counts as waiting for a worker, the rest as waiting for room.
        """
        since = max(self.planned, self.gathered_from)
        self.slotted = since + min(now - made, now - since)

    def stages(self, now: float) -> tuple[int, ...]:
        """Return (fetch, decode, room, queue, assemble, ready) as in StageTimes. Their sum is the
        time from plan to `now`, whatever is missing or out of order. The wait for a node that makes
        the slab counts as `queue`.
        """
        room = min(self.wanted, self.slotted) if self.wanted else self.slotted
        ends = (self.fetched, self.gathered_from, room, self.started, self.made, now)
        found, at = [], self.planned
        for end in ends:
            until = min(max(end, at), now)
            found.append(round((until - at) * _US_A_S))
            at = until
        return tuple(found)


class Account(Struct, eq=False):
    """The work done for a dataset, for all consumers, since the last `take`."""

    read_bytes: int = 0
    decoding_s: float = 0.0
    disk_us: int = 0
    disk_bytes: int = 0
    """The bytes read that the node's own disk had."""
    neighbour_bytes: int = 0
    """The bytes read that neighbours gave."""
    memory_bytes: int = 0
    """The bytes that were needed and not read, since they were in memory."""
    advanced_at: float = 0.0
    """When something was done for the dataset last."""
    _reading_s: float = 0.0
    _reads: int = 0
    _reading_since: float = 0.0

    def advanced(self, now: float) -> None:
        """Note progress: a block was read or decoded, or a worker is at work on one."""
        self.advanced_at = now

    def read_began(self, now: float) -> None:
        """Note that one more read from storage has begun."""
        if not self._reads:
            self._reading_since = now
        self._reads += 1

    def read_ended(self, now: float, read_bytes: int) -> None:
        """Note that a read has ended, and has read this many bytes, useful or not."""
        self._reads -= 1
        self.read_bytes += read_bytes
        if not self._reads:
            self._reading_s += now - self._reading_since

    def take(self, now: float) -> tuple[int, ...]:
        """Return (bytes read, reading, decoding, waiting for disks, bytes from the node's disk,
        from neighbours, from memory), times in microseconds, and restart from zero.
        """
        if self._reads:
            self._reading_s += now - self._reading_since
            self._reading_since = now
        found = (
            self.read_bytes, round(self._reading_s * _US_A_S),
            round(self.decoding_s * _US_A_S), self.disk_us, self.disk_bytes,
            self.neighbour_bytes, self.memory_bytes,
        )  # fmt: skip
        self.read_bytes, self._reading_s, self.decoding_s, self.disk_us = 0, 0.0, 0.0, 0
        self.disk_bytes = self.neighbour_bytes = self.memory_bytes = 0
        return found


def stage_times(
    stages: tuple[int, ...], accounts: Sequence[Account], worker_count: int, now: float
) -> StageTimes:
    """Return the times of a slab that is handed over. The work done for its datasets is attributed
    to it.
    """
    fetch, decode, room, queue, assemble, ready = stages
    done = [account.take(now) for account in accounts]
    read_bytes, reading, decoding, disk, *by_place = map(sum, zip(*done, strict=True))
    return StageTimes(
        fetch, decode, room, queue, assemble, ready,
        read_bytes, reading, decoding, disk, worker_count, *by_place,
    )  # fmt: skip
