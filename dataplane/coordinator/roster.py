"""One job and the members of its present generation. Pure; the state machine is its only user.

Invariants:
1. A place (dp_rank, rank) has at most one joined member, and a joined member has its place.
2. A dp rank is missing while none of its members is joined or has left on purpose.
3. Members without a place are bounded: the oldest are forgotten first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from dataplane.coordinator.records import Forget, Incarnation, Job, Keep, Member, Phase, Write

PLACELESS_MAX = 1024
INCARNATIONS_MAX = 1024

Place = tuple[int, int]


class Roster:
    """A job, its members, and the launches that it has seen."""

    def __init__(
        self,
        job: Job,
        now: float,
        incarnations: Iterable[Incarnation] = (),
        members: Iterable[Member] = (),
    ) -> None:
        self.job = job
        self.members: dict[str, Member] = {}
        self.incomplete_since = now
        self._incarnations = {seen.name: seen.generation for seen in incarnations}
        self._places: dict[Place, str] = {}
        self._present: Counter[int] = Counter()
        self._missing: tuple[int, ...] | None = None
        self._order = 0
        for member in sorted(members, key=lambda member: member.order):
            self._put(member, now)

    @property
    def is_complete(self) -> bool:
        """Whether every dp rank has come."""
        return len(self._present) == self.job.dp_size

    @property
    def is_idle(self) -> bool:
        """Whether nobody has a place."""
        return not self._places

    def joined(self) -> Iterator[Member]:
        """Who has a place, in the order of coming."""
        return (self.members[member_id] for member_id in self._places.values())

    def holder(self, place: Place) -> Member | None:
        """Who has this place."""
        return self.members.get(self._places.get(place, ""))

    def missing_dp_ranks(self) -> tuple[int, ...]:
        """Data-parallel ranks of which no member has come."""
        if self._missing is None:
            ranks = range(self.job.dp_size)
            complete = self.is_complete
            self._missing = () if complete else tuple(r for r in ranks if r not in self._present)
        return self._missing

    def is_superseded(self, incarnation: str) -> bool:
        """Whether a newer launch than this one has been seen."""
        return incarnation != self.job.incarnation and incarnation in self._incarnations

    def is_of_older_launch(self, generation: int) -> bool:
        """Whether a generation was given to a launch that is now superseded."""
        return generation < self._incarnations.get(self.job.incarnation, self.job.generation)

    def begin(self, job: Job, now: float) -> list[Write]:
        """A new generation: nobody of the old one remains."""
        writes: list[Write] = [Forget(Member, job.job_id, name) for name in self.members]
        writes.append(Keep(job))
        self.job = job
        self.members, self._places, self._present = {}, {}, Counter()
        self._missing, self.incomplete_since = None, now
        if job.incarnation not in self._incarnations:
            self._incarnations[job.incarnation] = job.generation
            writes.append(Keep(Incarnation(job.job_id, job.incarnation, job.generation)))
        if len(self._incarnations) > INCARNATIONS_MAX:
            oldest = min(self._incarnations, key=self._incarnations.__getitem__)
            del self._incarnations[oldest]
            writes.append(Forget(Incarnation, job.job_id, oldest))
        return writes

    def move(self, member: Member, phase: Phase, now: float) -> list[Write]:
        """A member comes, or loses its place."""
        self._order += 1
        moved = replace(member, phase=phase, order=self._order)
        self._put(moved, now)
        self.job = replace(self.job, active_at=now)
        writes: list[Write] = [Keep(moved), Keep(self.job)]
        limit = max(PLACELESS_MAX, 2 * self.job.dp_size)
        if len(self.members) - len(self._places) > limit:
            dead = (one for one in self.members.values() if one.phase is not Phase.JOINED)
            oldest = min(dead, key=lambda one: one.order)
            self._drop(oldest)
            writes.append(Forget(Member, oldest.job_id, oldest.member_id))
        return writes

    def refresh(self, member: Member) -> None:
        """A member that keeps its phase and place has a new lease, node or progress."""
        self.members[member.member_id] = member

    def remove(self) -> list[Write]:
        """Forget the job."""
        job_id = self.job.job_id
        return [
            *(Forget(Member, job_id, name) for name in self.members),
            *(Forget(Incarnation, job_id, name) for name in self._incarnations),
            Forget(Job, job_id),
        ]

    def _put(self, member: Member, now: float) -> None:
        was_complete = self.is_complete
        old = self.members.get(member.member_id)
        if old is not None:
            self._drop(old)
        self.members[member.member_id] = member
        self._order = max(self._order, member.order)
        if member.phase is Phase.JOINED:
            self._places[member.place] = member.member_id
        if member.phase in (Phase.JOINED, Phase.LEFT):
            self._present[member.topology.dp_rank] += 1
        if was_complete and not self.is_complete:
            self.incomplete_since = now
        self._missing = None

    def _drop(self, member: Member) -> None:
        del self.members[member.member_id]
        if member.phase is Phase.JOINED:
            del self._places[member.place]
        if member.phase in (Phase.JOINED, Phase.LEFT):
            self._present[member.topology.dp_rank] -= 1
            self._present += Counter()
        self._missing = None
