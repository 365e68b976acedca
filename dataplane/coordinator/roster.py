"""One job and the members of its present generation. Pure; only the state machine uses this module.

Invariants:
1. A place (dp_rank, rank) may have any number of members, each with its own lease: a rank and its
   DataLoader workers, or a process and its successor. A member never changes its place.
2. A dp rank is missing while none of its members is joined, unless the last one to go left on
   purpose.
3. The number of remembered members that are gone is bounded: the oldest are forgotten first, but
   never the last one of a dp rank, which invariant 2 needs. There are at most `joined_max` joined
   members.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from dataplane.coordinator.layout import Seats
from dataplane.coordinator.ledger import JobLedger
from dataplane.coordinator.makers import Makers
from dataplane.coordinator.mixing import PROPOSED_S, Mixing, asked_place, checked_weights
from dataplane.coordinator.records import (
    Forget,
    Incarnation,
    Job,
    Keep,
    LedgerRecord,
    Member,
    NodeRecord,
    Phase,
    Record,
    Write,
    place_of,
)
from dataplane.model.changes import ReplacedRow
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import LedgerEntry, LedgerPosition
from dataplane.rpc.membership import (
    ChangeResponse,
    JobNodes,
    JoinRequest,
    MixAsked,
    NeighbourNode,
    RowsTaken,
    StepsSkipped,
)

# -- neighbours --------------------------------------------------------------------------------
#
# The nodes of a job that lend each other blocks, and the job's makers, in the form that is sent to
# nodes. Pure; each roster owns one `JobNeighbours`.
#
# A heartbeat contains the version of the node's list, so the coordinator compares two numbers and
# needs no confirmation. A restart of the coordinator changes no version. A node with an old list
# asks the wrong node, which costs a detour and is never an error.
#
# Invariants:
# 1. The list contains the nodes that have a data address and joined members of the present
#    generation, and after them, while the job has joined members, its makers. Only a member's own
#    node renews the member, so once a node stops renewing, it soon has no joined members.
# 2. The version is a hash of the generation, of the nodes with their addresses and weights, of the
#    urls whose blocks they lend, and of a salt that stands for the secret of the neighbours' keys.
#    The version changes exactly if one of these changes.
# 3. The list is built again only after such a change.
# 4. A node that may read only some urls is listed only if those urls contain the job's dataset, as
#    declared when the generation began. If there is such a node, nodes lend only blocks under the
#    urls of the dataset, until the generation ends.

_VERSION_BYTES = 8
_LOOPBACK = ("127.", "[::1]:")


class JobNeighbours:
    """The number of joined members on each node, and the list of neighbours. `makers` is notified
    of nodes that get their first member or lose their last one.
    """

    def __init__(self, makers: Makers) -> None:
        self._everywhere = makers
        self._members: Counter[str] = Counter()
        self._told: JobNodes | None = None
        self._only_under: tuple[str, ...] = ()
        self._makers: tuple[NeighbourNode, ...] = ()
        self._maker_ids: frozenset[str] = frozenset()
        self.lacks_some = False
        """Whether a node with joined members was unknown at the last call of `told`."""

    def add(self, node_id: str) -> None:
        """Add a joined member of this node."""
        self._members[node_id] += 1
        if self._members[node_id] == 1:
            self._told = None
            self._everywhere.arrived(node_id)

    def remove(self, node_id: str) -> None:
        """Remove a joined member of this node."""
        self._members[node_id] -= 1
        if not self._members[node_id]:
            del self._members[node_id]
            self._told = None
            self._everywhere.departed(node_id)

    def clear(self) -> None:
        """Remove all members."""
        for node_id in self._members:
            self._everywhere.departed(node_id)
        self._members.clear()
        self._told = None
        self._only_under = ()

    def changed(self, node_id: str) -> None:
        """Note that a node is new, or that its address or weight has changed."""
        if node_id in self._members:
            self._told = None

    def has_one_of(self, node_id: str) -> bool:
        """Return whether this node has exactly one joined member."""
        return self._members[node_id] == 1

    def has_maker(self, node_id: str) -> bool:
        """Return whether this node was a maker at the last call of `told`."""
        return node_id in self._maker_ids

    def told(
        self,
        job: Job,
        known: Mapping[str, NodeRecord],
        makers: tuple[NeighbourNode, ...],
        salt: bytes,
    ) -> JobNodes:
        """Return the nodes of this job; the same object until something changes, or `makers` is
        another object.
        """
        if self._told is None or makers is not self._makers:
            self._makers = makers
            self._told = self._made(job, known, salt)
        return self._told

    def _made(self, job: Job, known: Mapping[str, NodeRecord], salt: bytes) -> JobNodes:
        registered = [known[name].request for name in sorted(self._members) if name in known]
        self.lacks_some = len(registered) < len(self._members)
        fitting = {(), *self._limits_that_fit(job, {node.only_under for node in registered})}
        nodes = [
            NeighbourNode(node.node_id, node.data_address, node.arena_bytes, disk_id=node.disk_id)
            for node in registered
            if node.data_address and node.only_under in fitting
        ]
        if self._members:
            nodes += [maker for maker in self._makers if maker.node_id not in self._members]
        # Drop loopback addresses unless all addresses are loopback: they work only within one host.
        beyond = [node for node in nodes if not node.address.startswith(_LOOPBACK)]
        nodes = beyond or nodes
        self._maker_ids = frozenset(node.node_id for node in nodes if node.worker_count)
        hashed = msgspec.msgpack.encode((job.generation, nodes, self._only_under))
        digest = hashlib.blake2b(hashed, digest_size=_VERSION_BYTES, key=salt).digest()
        version = int.from_bytes(digest, "little") or 1
        job_nodes = JobNodes(job.job_id, job.generation, version, nodes=tuple(nodes))
        return replace(job_nodes, only_under=self._only_under)

    def _limits_that_fit(
        self, job: Job, limits: Collection[tuple[str, ...]]
    ) -> Collection[tuple[str, ...]]:
        """Select the limits (prefixes of urls) that contain the job's dataset, and the former
        ones that it names. If there are any, restrict what nodes lend to the urls of these.
        """
        if not any(limits):
            return ()
        from dataplane.security.urls import are_under, roots  # late: only jobs with limits need it

        urls = roots((*job.urls, *job.spec.urls_before)) if job.urls else ()
        fitting = [prefixes for prefixes in limits if are_under(urls, prefixes)]
        if fitting:
            self._only_under = urls
        return fitting


GONE_MAX = 1024
# A job may have 64 joined members per dp rank (ranks and their DataLoader workers), or 16,384 in
# all if that is more: then each of 16 dp ranks may have 1,024. No job may have more than 131,072.
_OF_DP_RANK_MAX, _JOINED_LEAST, _JOINED_MOST = 64, 16384, 131072
_MISSING_SHOWN_MAX = 64
INCARNATIONS_MAX = 1024
_REPLACED_MAX = 1 << 20
_DATASET_LENGTH_MAX = 1024


class Roster:
    """A job, its members, and the launches that it has seen."""

    def __init__(
        self,
        job: Job,
        now: float,
        makers: Makers,
        incarnations: Iterable[Incarnation] = (),
        members: Iterable[Member] = (),
        ledger: Iterable[LedgerEntry] = (),
    ) -> None:
        self.job = job
        self.ledger, self.mixing = JobLedger(job.job_id, ledger), Mixing()
        self.members: dict[str, Member] = {}
        self.incomplete_since = now
        self._incarnations = {seen.name: seen.generation for seen in incarnations}
        # Ids of the joined members, in the order of joining; ids of the members that are gone, in
        # the order of going; and by dp rank, the id of the member that went last.
        self._joined: dict[str, None] = {}
        self._gone: dict[str, None] = {}
        self._last_gone: dict[int, str] = {}
        # The dp ranks that left earlier generations of the same launch on purpose.
        self._left: set[int] = set()
        self._joined_count: Counter[int] = Counter()
        self.seats = Seats()
        self.neighbours = JobNeighbours(makers)
        self._present: set[int] = set()
        self._missing: tuple[int, ...] | None = None
        self._no_end_before = math.inf
        self.replaced: set[int] = set()
        """Hashes of the rows that nodes have replaced in the present launch."""
        self.ended_launch = ("", 0)
        """The member that began the present launch, and how many joined ranks that ended."""
        self._order = 0
        for member in sorted(members, key=lambda member: member.order):
            self._put(member, now)

    @property
    def is_complete(self) -> bool:
        """Whether no dp rank is missing."""
        return len(self._present) == self.job.dp_size

    @property
    def is_idle(self) -> bool:
        """Whether no member is joined."""
        return not self._joined

    @property
    def is_changed(self) -> bool:
        """Whether the next generation will have changes that this one lacks."""
        return self.ledger.last_change != self.job.last_change

    def joined(self) -> Iterator[Member]:
        """Return the joined members, in the order of joining."""
        return (self.members[member_id] for member_id in self._joined)

    def joined_first(self, count: int) -> Iterator[Member]:
        """Return the members that joined first, at most `count`."""
        return itertools.islice(self.joined(), count)

    def some(self, count: int) -> list[Member]:
        """Return at most `count` members, by rank: joined ones first, then those that went last."""
        shown = itertools.islice(itertools.chain(self._joined, reversed(self._gone)), count)
        members = (self.members[member_id] for member_id in shown)
        return sorted(members, key=lambda member: (member.topology.rank, member.order))

    def ended(self, clock: float) -> list[Member]:
        """Return the joined members whose lease has ended. Every join calls this, so no member is
        examined until the earliest lease can have ended; leases are only ever extended.
        """
        if clock < self._no_end_before:
            return []
        deadlines = [member.deadline for member in self.joined()]
        self._no_end_before = min(
            (deadline for deadline in deadlines if deadline > clock), default=math.inf
        )
        return [member for member in self.joined() if member.deadline <= clock]

    def ended_count_for(self, member_id: str) -> int:
        """Return how many joined ranks of an older launch this member ended when it joined."""
        by, count = self.ended_launch
        return count if by == member_id else 0

    @property
    def joined_count(self) -> int:
        """How many members are joined."""
        return len(self._joined)

    @property
    def joined_max(self) -> int:
        """How many members may be joined."""
        return min(max(_OF_DP_RANK_MAX * self.job.dp_size, _JOINED_LEAST), _JOINED_MOST)

    @property
    def joined_dp_rank_count(self) -> int:
        """How many dp ranks have joined members."""
        return len(self._joined_count)

    @property
    def missing_count(self) -> int:
        """How many dp ranks are missing."""
        return self.job.dp_size - len(self._present)

    def missing_dp_ranks(self) -> tuple[int, ...]:
        """Return the first missing dp ranks: they never joined, or their last member was lost."""
        if self._missing is None:
            ranks = range(self.job.dp_size if self.missing_count else 0)
            missing = (rank for rank in ranks if rank not in self._present)
            self._missing = tuple(itertools.islice(missing, _MISSING_SHOWN_MAX))
        return self._missing

    def is_superseded(self, incarnation: str) -> bool:
        """Return whether a newer launch than this one has taken over and has joined members."""
        older = incarnation != self.job.incarnation and incarnation in self._incarnations
        return older and not self.is_idle

    def is_reopened_by(self, request: JoinRequest, holder: Member) -> bool:
        """Return whether the dp rank of the request has left the present generation, or an earlier
        one of the same launch, and `holder` is another rank.
        """
        if request.incarnation != self.job.incarnation:
            return False
        dp_rank = request.topology.dp_rank
        gone = self._last_gone.get(dp_rank)
        left = dp_rank in self._left if gone is None else self._has_left(gone)
        return left and place_of(request.topology) != holder.place

    def note_replaced(self, rows: Iterable[ReplacedRow]) -> None:
        """Count these rows, each once for all nodes."""
        if len(self.replaced) < _REPLACED_MAX:
            self.replaced.update(hash((row.url, row.row)) for row in rows)

    def begin(self, job: Job, now: float) -> list[Write]:
        """Start a new generation, which no member of the old one belongs to.

        Raises:  ConfigError: rows were removed from another dataset.
        """
        self.ledger.check_layout(job)
        left = {dp_rank for dp_rank, name in self._last_gone.items() if self._has_left(name)}
        is_same = job.incarnation == self.job.incarnation
        self._left = {dp_rank for dp_rank in left | self._left if is_same and dp_rank < job.dp_size}
        self.replaced = self.replaced if is_same else set()
        writes: list[Write] = [Forget(Member, job.job_id, name) for name in self.members]
        writes += self.ledger.ended(self.job, "a newer launch", now)
        mark = self.ledger.marks[-1] if self.ledger.marks else None
        job = replace(job, last_change=self.ledger.last_change, mark=mark)
        writes.append(Keep(job))
        if job.incarnation not in self._incarnations or job.incarnation != self.job.incarnation:
            self._incarnations[job.incarnation] = job.generation
            writes.append(Keep(Incarnation(job.job_id, job.incarnation, job.generation)))
        self.job = job
        self.members, self._joined, self._gone, self._last_gone = {}, {}, {}, {}
        self._joined_count, self._present, self.seats = Counter(), set(), Seats()
        self._missing, self.incomplete_since = None, now
        self._no_end_before = math.inf
        self.neighbours.clear()
        self.mixing = Mixing()
        if len(self._incarnations) > INCARNATIONS_MAX:
            oldest = min(self._incarnations, key=self._incarnations.__getitem__)
            del self._incarnations[oldest]
            writes.append(Forget(Incarnation, job.job_id, oldest))
        return writes

    def move(self, member: Member, phase: Phase, now: float) -> list[Write]:
        """Note that a member comes or goes."""
        self._order += 1
        moved = replace(member, phase=phase, order=self._order)
        self._put(moved, now)
        self.job = replace(self.job, active_at=now)
        writes: list[Write] = [Keep(moved), Keep(self.job)]
        # Remember at least twice `dp_size` members that are gone. Then some of them are not the
        # last of their dp rank, and the oldest of those can be forgotten.
        if len(self._gone) > max(GONE_MAX, 2 * self.job.dp_size):
            oldest = next(name for name in self._gone if not self._is_last_gone(name))
            del self.members[oldest], self._gone[oldest]
            writes.append(Forget(Member, self.job.job_id, oldest))
        if phase is not Phase.JOINED:
            self.mixing.left(member.member_id)
        if self.is_idle:
            self.mixing, self.replaced = Mixing(), set()  # rows may be repaired before it goes on
            writes += self.ledger.ended(self.job, phase.value, now)
        return writes

    def refresh(self, member: Member) -> None:
        """Update lease, node or progress of a member that keeps its phase and place."""
        known = self.members[member.member_id]
        if member.phase is Phase.JOINED and known.topology != member.topology:
            self.seats.remove(known)
            self.seats.add(member)
        if member.phase is Phase.JOINED and known.node_id != member.node_id:
            self.neighbours.remove(known.node_id)
            self.neighbours.add(member.node_id)
        self.members[member.member_id] = member

    def mix(self, request: MixAsked, by: str, now: float) -> tuple[ChangeResponse, list[Write]]:
        """Change the weights of a mixture: at once if nobody reads the job, otherwise when all
        members agree.

        Raises:  ConfigError: the weights do not suit the job, the job has already passed the place
        where they take effect, or members may soon come back with another node.
        """
        job, entry = self.job, self.ledger.mix_of_request(request.request)
        weights, writes = checked_weights(job, request), list[Write]()
        if entry is None:
            self.ledger.check_may_change()
            if self.is_idle:
                self._check_left(now)
                self.mixing = Mixing()
                at = asked_place(job, request) or LedgerPosition(job.epoch, job.cursor)
                writes = self.ledger.mix(job, request.request, weights, at, by, now)
            else:
                self.mixing.propose(job, request, by, self._joined, now)
                writes = self.decide(now)
            entry = self.ledger.mix_of_request(request.request)
        return self._answer(entry), writes

    def skip(
        self, request: StepsSkipped, by: str, now: float
    ) -> tuple[ChangeResponse, list[Write]]:
        """Skip steps of the job.

        Raises:  ConfigError: these steps cannot be skipped.
        """
        entry, writes = self.ledger.skip(self.job, request, by, now, is_idle=self.is_idle)
        return self._answer(entry), writes

    def take_out(
        self, request: RowsTaken, by: str, now: float
    ) -> tuple[ChangeResponse, list[Write]]:
        """Take rows out of the job: at once if nobody reads it, otherwise when all members agree on
        the place, or the next launch does it since they do not.

        Raises:  ConfigError: these rows cannot be taken out.
        """
        job, entry = self.job, self.ledger.same_rows(self.job, request)
        writes: list[Write] = []
        if entry is None and not self.ledger.is_read:
            at = LedgerPosition(job.epoch, job.cursor)
            writes = self.ledger.take_out(job, request, at, by, now)
        elif entry is None:
            name = hashlib.blake2b(repr(request).encode(), digest_size=16).hexdigest()
            self.mixing.propose(job, MixAsked(name, (), ()), by, self._joined, now, request)
            writes = self.decide(now)
        return self._answer(entry or self.ledger.same_rows(job, request)), writes

    def _answer(self, entry: LedgerEntry | None) -> ChangeResponse:
        job = self.job
        awaited = () if entry is not None else self.mixing.awaited_ranks(self.members)
        at_batch = job.epoch, job.cursor, job.spec.global_batch
        return ChangeResponse(entry, not self.is_idle, *at_batch, awaited)

    def decide(self, now: float) -> list[Write]:
        """Append the proposed change to the ledger, if all members have agreed on the place where
        it takes effect. Rows on which they do not agree are left out from the next launch on.
        """
        if self.mixing.proposal is None:
            return []
        decided = self.mixing.decided(self.job, self.members, now)
        if decided is None:
            return []
        proposed, at = decided
        if proposed.rows is not None:
            generation = 0 if at is None else self.job.generation
            at = at or LedgerPosition(self.job.epoch, self.job.cursor)
            return self.ledger.take_out(self.job, proposed.rows, at, proposed.by, now, generation)
        assert at is not None, "weights that are refused are not decided"
        weights = checked_weights(self.job, proposed.asked)
        return self.ledger.mix(self.job, proposed.asked.request, weights, at, proposed.by, now)

    def remove(self) -> list[Write]:
        """Forget the job."""
        job_id = self.job.job_id
        return [
            *(Forget(Member, job_id, name) for name in self.members),
            *(Forget(Incarnation, job_id, name) for name in self._incarnations),
            *self.ledger.remove(),
            Forget(Job, job_id),
        ]

    def _check_left(self, now: float) -> None:
        """Check that members whose node died will not soon come back with another one. How far they
        have read is not known: a place that is decided without them may lie behind them.

        Raises:  ConfigError: they may come back.
        """
        gone = (self.members[member_id] for member_id in self._gone)
        left_s = self.job.active_at + PROPOSED_S - now
        if left_s > 0 and any(member.phase is Phase.EXPIRED for member in gone):
            raise ConfigError(
                f"the ranks of job {self.job.job_id!r} have just lost their nodes, and how far they"
                " have read is not known: change the weights when they are back, which `dataplane"
                f" status {self.job.job_id}` shows, or in {math.ceil(left_s)} s for the next"
                " launch",
                job=self.job.job_id,
            )

    def _has_left(self, member_id: str) -> bool:
        return self.members[member_id].phase is Phase.LEFT

    def _is_last_gone(self, member_id: str) -> bool:
        return self._last_gone[self.members[member_id].topology.dp_rank] == member_id

    def _put(self, member: Member, now: float) -> None:
        name, dp_rank = member.member_id, member.topology.dp_rank
        was_complete, was_joined = self.is_complete, name in self._joined
        begins = self.is_idle and member.phase is Phase.JOINED
        if was_joined:
            self.seats.remove(self.members[name])
            self.neighbours.remove(self.members[name].node_id)
        for of_id in (self.members, self._joined, self._gone):
            of_id.pop(name, None)
        self.members[name] = member
        self._order = max(self._order, member.order)
        if member.phase is Phase.JOINED:
            self._joined[name] = None
            self._no_end_before = min(self._no_end_before, member.deadline)
            self.seats.add(member)
            self.neighbours.add(member.node_id)
            self._joined_count[dp_rank] += not was_joined
        else:
            self._gone[name] = None
            self._last_gone[dp_rank] = name
            self._joined_count[dp_rank] -= was_joined
        if not self._joined_count[dp_rank]:
            del self._joined_count[dp_rank]
        if dp_rank in self._joined_count or member.phase is Phase.LEFT:
            self._present.add(dp_rank)
        else:
            self._present.discard(dp_rank)
        if (was_complete or begins) and not self.is_complete:
            self.incomplete_since = now
        self._missing = None


def first_generation(request: JoinRequest, now: float) -> Job:
    """Return the job that this join begins, in generation 1."""
    return Job(
        job_id=request.job_id,
        dataset=request.dataset[:_DATASET_LENGTH_MAX],
        spec=request.spec,
        sample_count=request.sample_count,
        dp_size=request.topology.dp_size,
        generation=1,
        incarnation=request.incarnation,
        active_at=now,
        pixels=request.pixels,
        urls=request.urls,
        format=request.format,
        identity=request.identity,
    )


def restored(
    records: Iterable[Record], now: float, deadline: float, makers: Makers
) -> dict[str, Roster]:
    """Rebuild the jobs of a store. Every member with a place keeps it until `deadline`, in lease
    time.
    """
    jobs: dict[str, Job] = {}
    members: dict[str, list[Member]] = {}
    incarnations: dict[str, list[Incarnation]] = {}
    ledgers: dict[str, list[LedgerEntry]] = {}
    for record in records:
        match record:
            case Job():
                jobs[record.job_id] = record
            case Member():
                leased = replace(record, deadline=deadline)
                members.setdefault(record.job_id, []).append(leased)
            case Incarnation():
                incarnations.setdefault(record.job_id, []).append(record)
            case LedgerRecord():
                ledgers.setdefault(record.job_id, []).append(record.entry)
    return {
        job_id: Roster(
            job,
            now,
            makers,
            incarnations.get(job_id, ()),
            members.get(job_id, ()),
            ledgers.get(job_id, ()),
        )
        for job_id, job in jobs.items()
    }
