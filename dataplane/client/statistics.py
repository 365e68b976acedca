"""Sum up the causes of a trainer's waits, from the stage times that each slab carries.

The stages of a slab follow one another up to its hand-over. So a trainer that waited for the slab
waited during its last stages, and the wait is attributed to these, from the last one back.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from dataplane.client.first_batch import NOT_YET, FirstBatch
from dataplane.client.waits import Waits, stages_waited_for
from dataplane.rpc.messages import Slab

_US_A_S = 1e6


class Statistics(Struct, frozen=True):
    """The work of a loader so far, over the slabs that its trainer has finished. Times are in
    seconds.

    The time of the trainer's loop is the sum of `waited_s`, spent in the loader, and `consumed_s`,
    spent between two slabs in the trainer's own work. `waited_s` is the sum of its parts: for
    blocks that were read from storage (`fetch_wait_s`), for blocks that were decoded, for a free
    slot in the delivery memory (`room_wait_s`), for a free worker (`queue_wait_s`), for the
    assembly of batches with their images, and for everything else: planning, messages, opening
    (`other_wait_s`).

    `reading_s` is the time with a read from storage in flight. `worker_count` workers spent
    `decoding_s` and `assembling_s` on blocks and batches of this job, including `disk_wait_s`
    waiting for local files. Of the `read_bytes`, the node's own disk had `disk_bytes`, neighbours
    gave `neighbour_bytes`, and `origin_bytes` came from the store. `memory_bytes` more were needed
    and not read, since another rank or epoch had left them in memory. `copied_slabs` were copied
    out of the delivery memory, since the trainer held too much of it. `first_batch` is not a sum:
    it belongs to the whole run.
    """

    slabs: int = 0
    batches: int = 0
    samples: int = 0
    read_bytes: int = 0
    copied_slabs: int = 0
    worker_count: int = 0
    consumed_s: float = 0.0
    waited_s: float = 0.0
    fetch_wait_s: float = 0.0
    decode_wait_s: float = 0.0
    room_wait_s: float = 0.0
    queue_wait_s: float = 0.0
    assemble_wait_s: float = 0.0
    other_wait_s: float = 0.0
    reading_s: float = 0.0
    decoding_s: float = 0.0
    assembling_s: float = 0.0
    disk_wait_s: float = 0.0
    disk_bytes: int = 0
    neighbour_bytes: int = 0
    memory_bytes: int = 0
    first_batch: FirstBatch = NOT_YET

    @property
    def origin_bytes(self) -> int:
        """Bytes that were read from the store itself."""
        return self.read_bytes - self.disk_bytes - self.neighbour_bytes

    @property
    def elapsed_s(self) -> float:
        """Time of the trainer's loop; for several loops, their sum."""
        return self.consumed_s + self.waited_s

    @property
    def samples_per_s(self) -> float:
        """0.0 before the first slab was consumed."""
        return self.samples / self.elapsed_s if self.elapsed_s else 0.0

    def since(self, before: Statistics) -> Statistics:
        """The difference to an earlier value of the same loader."""
        return self._with(before, -1)

    def plus(self, other: Statistics) -> Statistics:
        """Add other statistics."""
        return self._with(other, 1)

    def _with(self, other: Statistics, sign: int) -> Statistics:
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in _SUMMED}
        count = self.worker_count if sign < 0 else max(self.worker_count, other.worker_count)
        first = self.first_batch if self.first_batch != NOT_YET else other.first_batch
        return Statistics(worker_count=count, first_batch=first, **sums)


_SUMMED = tuple(
    name for name in Statistics.__struct_fields__ if name not in ("worker_count", "first_batch")
)


def sum_of(parts: Iterable[Statistics]) -> Statistics:
    """Add up statistics."""
    total = Statistics()
    for part in parts:
        total = total.plus(part)
    return total


class Tally:
    """Collects one stream's statistics; used by one thread at a time."""

    __slots__ = (
        "_by_place",
        "_consumed_s",
        "_counts",
        "_in_hand",
        "_times",
        "_waits",
        "_workers",
        "is_closed",
    )

    def __init__(self) -> None:
        self.is_closed = False
        self._consumed_s = 0.0
        self._counts = (0, 0, 0, 0, 0)
        self._by_place = (0, 0, 0)
        """Bytes from the node's disk, from neighbours and from memory."""
        self._waits: Waits = (0, 0, 0, 0, 0, 0)
        self._times = (0, 0, 0, 0)
        self._workers = 0
        self._in_hand: tuple[Slab, float, bool] | None = None

    def handed_over(self, slab: Slab, waited_s: float, *, was_copied: bool) -> None:
        """Note that a slab arrived after this wait."""
        self._in_hand = (slab, waited_s, was_copied)

    def consumed(self, seconds: float) -> None:
        """Note that the trainer requested the next slab this long after it got the last one, which
        now counts as consumed.
        """
        if self._in_hand is None:
            return
        (slab, waited_s, was_copied), self._in_hand = self._in_hand, None
        self._consumed_s += seconds
        times = slab.times
        slabs, batches, samples, read, copied = self._counts
        self._counts = (
            slabs + 1,
            batches + len(slab.batches),
            samples + sum([batch.valid for batch in slab.batches]),
            read + times.read_bytes,
            copied + was_copied,
        )
        on_disk, given, found = self._by_place
        self._by_place = (
            on_disk + times.disk_bytes,
            given + times.neighbour_bytes,
            found + times.memory_bytes,
        )
        waits = stages_waited_for(round(waited_s * _US_A_S), times)
        a, b, c, d, e, f = self._waits
        u, v, w, x, y, z = waits
        self._waits = (a + u, b + v, c + w, d + x, e + y, f + z)
        a, b, c, d = self._times
        self._times = (
            a + times.reading,
            b + times.decoding,
            c + times.assemble,
            d + times.disk,
        )
        self._workers = times.workers

    def statistics(self) -> Statistics:
        """Return the statistics up to now."""
        slabs, batches, samples, read, copied = self._counts
        fetch, decode, room, queue, assemble, other = (us / _US_A_S for us in self._waits)
        reading, decoding, assembling, disk = (us / _US_A_S for us in self._times)
        return Statistics(
            slabs, batches, samples, read, copied, self._workers, self._consumed_s,
            sum(self._waits) / _US_A_S, fetch, decode, room, queue, assemble, other,
            reading, decoding, assembling, disk, *self._by_place,
        )  # fmt: skip
