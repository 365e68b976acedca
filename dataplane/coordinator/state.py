"""Jobs, their members, generations and leases: events in, decisions out. Pure.

Invariants:
1. A job has one present generation. Its number never decreases, even over a restart (except that a
   job that was idle for 30 days is forgotten, with its number). A launch (incarnation) that was not
   seen before begins the next generation. A superseded launch gets no place while a member of the
   newer one is joined; otherwise it may begin the next generation, since names of launches recur.
2. All joined members of a job belong to its present generation, and agree on the spec and on
   dp_size. A member that differs is refused while any member has a place. If none has, a different
   spec begins a generation and replaces the old spec, and progress starts from zero. The places of
   members fit together, as layout.py says.
3. Only a joined member of the present generation is renewed, and only by the node through which it
   joined last; only that node may also end its lease. All others get LeaseExpired and have to join
   again. The join names the launch, and so decides whether the member gets a place. A member gets
   LeaseFenced, and stops, only while a member of a newer launch is joined.
4. A place (dp_rank, rank) may have any number of members of the present launch: a rank and its
   DataLoader workers, or a process and its successor. Data requests are idempotent and progress is
   a maximum, so several members do no harm, and a dead one expires. Only a newer launch fences
   others.
5. The answer to a join, a leave or a change is durable. A restart gives every joined member a full
   lease, so it stops no member.
6. A lease ends when its member's node says so, or after `lease_s` in which the coordinator was
   awake: a clock jump, a suspended machine or a blocked disk never ends a lease.
7. Within a generation, the progress of a job and of a member never decreases. (A crash may forget
   the last seconds of it; the next heartbeat restores them.)
8. A repeated event changes nothing but the lease.
9. Everything is bounded: members that are gone, launches, silent nodes, idle jobs.
10. The nodes of a job are sent to a node only in the answer to the join of its first member, or as
   nodes.py says.

Lease time runs with the clock but takes no step longer than `lease_s / 3`; ticks make it run.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from dataplane.coordinator import layout, refusals, view
from dataplane.coordinator.makers import Makers
from dataplane.coordinator.mixing import tells_entries
from dataplane.coordinator.nodes import Nodes
from dataplane.coordinator.records import (
    Answer,
    Claim,
    Decision,
    Event,
    Keep,
    Member,
    NodeRecord,
    Phase,
    Record,
    Tick,
    Write,
    place_of,
)
from dataplane.coordinator.roster import Roster, first_generation, restored
from dataplane.metrics.table import Reading
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.ledger import LedgerPosition
from dataplane.rpc.bounds import check_name
from dataplane.rpc.membership import (
    ChangeRequest,
    ChangeResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    LeaveResponse,
    LedgerRequest,
    MemberProgress,
    MemberVerdict,
    RegisterNodeRequest,
    RegisterNodeResponse,
    StatusRequest,
)

_REFUSED_NODES_MAX = 1024
JOB_KEPT_S = 30 * 24 * 3600.0
# The new phase of a member that was lost, or that left on purpose, and the phases from which the
# member may change to it.
_LOST = (Phase.EXPIRED, (Phase.JOINED,))
_LEFT = (Phase.LEFT, (Phase.JOINED, Phase.EXPIRED))


class CoordinatorState:
    """The whole state of a coordinator. `decide` is the only entry point."""

    def __init__(
        self,
        *,
        coordinator_id: str,
        version: str,
        protocol: int,
        lease_s: float,
        now: float,
        records: Iterable[Record] = (),
        salt: bytes = b"",
    ) -> None:
        """Create the state. `salt` is part of the versions of jobs' nodes: up to 64 bytes, not
        secret.
        """
        self._coordinator_id = coordinator_id
        self._version = version
        self._protocol = protocol
        self._lease_s = lease_s
        self._now = now
        self._clock = 0.0
        self._makers = Makers(lease_s)
        self._jobs = restored(records, now, lease_s, self._makers)
        self._nodes = Nodes(self._jobs, self._makers, salt, lease_s)
        self._refused_nodes: OrderedDict[str, RegisterNodeRequest] = OrderedDict()
        """The nodes with other protocols that came last. Their joins are refused, too."""
        self._writes: list[Write] = []
        self._claims: list[Claim] = []

    def decide(self, event: Event, now: float) -> Decision:
        """Decide an event: return an answer or a refusal, and the records to store."""
        self._clock += min(max(now - self._now, 0.0), self._lease_s / 3)
        self._now = now
        self._makers.settle(self._clock)
        self._writes, self._claims = [], []
        try:
            answer = self._answer(event)
        except DataplaneError as refusal:
            answer = refusal
        durable = isinstance(event, JoinRequest | LeaveRequest | ChangeRequest)
        durable |= tells_entries(answer)
        return Decision(answer, tuple(self._writes), durable, tuple(self._claims))

    def _answer(self, event: Event) -> Answer:
        match event:
            case RegisterNodeRequest():
                return self._register(event)
            case JoinRequest():
                return self._join(event)
            case HeartbeatRequest():
                return self._heartbeat(event)
            case LeaveRequest():
                return self._leave(event)
            case StatusRequest():
                return self._status(event)
            case LedgerRequest():
                return view.ledger(event.job_id, self._jobs)
            case ChangeRequest():
                return self._change(event)
            case Tick():
                self._tick()
                return None

    # -- nodes -----------------------------------------------------------------------------------

    def _register(self, request: RegisterNodeRequest) -> RegisterNodeResponse:
        self._check(request)
        node = NodeRecord(request, self._now, is_short=not request.worker_count)
        self._nodes.heard(node, self._clock)
        return RegisterNodeResponse(self._lease_s, self._coordinator_id)

    def _check(self, node: RegisterNodeRequest) -> None:
        refusals.check_node(node)
        refusal = refusals.version_mismatch(node, self._version, self._protocol)
        if refusal is not None:
            self._refused_nodes[node.node_id] = node
            if len(self._refused_nodes) > _REFUSED_NODES_MAX:
                self._refused_nodes.popitem(last=False)
            raise refusal
        self._refused_nodes.pop(node.node_id, None)

    # -- joining ---------------------------------------------------------------------------------

    def _join(self, request: JoinRequest) -> JoinResponse:
        refusals.check_join(request)
        if request.node_id in self._refused_nodes:
            self._check(self._refused_nodes[request.node_id])
        roster = self._jobs.get(request.job_id)
        if roster is None:
            job = first_generation(request, self._now)
            roster = self._jobs[request.job_id] = Roster(job, self._now, self._makers)
            self._writes += roster.begin(job, self._now)
        else:
            self._expire(roster)
            self._check_same_protocol(roster, request)
            self._admit(roster, request)
        self._seat(roster, request)
        self._nodes.want_makers(request.node_id, (request.job_id,), self._clock)
        # Send the list of nodes only to the first member of each node: if every member got it, a
        # launch on n nodes would send n^2 entries for each member that a node has.
        is_first = roster.neighbours.has_one_of(request.node_id)
        nodes = self._nodes.of(roster, self._clock) if is_first else None
        job, ledger = roster.job, roster.ledger
        entries = (*ledger.changes(job), *ledger.midway(job))
        marks = job.mark, ledger.marks
        return JoinResponse(
            job.generation, self._lease_s, nodes, entries, *marks, roster.is_complete,
            roster.ended_count_for(request.member_id),
        )  # fmt: skip

    def _check_same_protocol(self, roster: Roster, request: JoinRequest) -> None:
        """Refuse a member whose node cannot talk to the nodes of its launch. The node of one other
        member is compared, since all members were compared when they joined.
        """
        if request.incarnation != roster.job.incarnation:
            return
        own = self._nodes.records.get(request.node_id)
        others = (
            self._nodes.records.get(member.node_id)
            for member in roster.joined_first(2)
            if member.member_id != request.member_id
        )
        other = next(filter(None, others), None)
        if own is None or other is None or own.request.protocol == other.request.protocol:
            return
        raise refusals.two_protocols(request.job_id, own.request, other.request)

    def _admit(self, roster: Roster, request: JoinRequest) -> None:
        """Refuse a launch or spec that does not match, or begin a generation if that is allowed."""
        job = roster.job
        if roster.is_superseded(request.incarnation):
            raise refusals.superseded(job, request.member_id)
        differences = refusals.differences(job, request)
        place = place_of(request.topology)
        if differences and not roster.is_idle:
            holder = min(roster.joined(), key=lambda one: (one.place != place, one.place[::-1]))
            left_s = max(member.deadline for member in roster.joined()) - self._clock
            table = self._who_said_what(roster, request, [holder])
            reopened = roster.is_reopened_by(request, holder)
            raise refusals.spec_mismatch(
                job, holder, request, differences, left_s, table, reopened=reopened
            )
        # A launcher may give two launches the same name. Then a new member of an idle job shows
        # that a second launch has begun.
        is_new = roster.is_idle and request.member_id not in roster.members
        if differences or request.incarnation != job.incarnation or (is_new and roster.is_changed):
            following = first_generation(request, self._now)
            following = replace(following, generation=job.generation + 1)
            roster.ended_launch = (request.member_id, roster.joined_count)
            self._writes += roster.begin(following, self._now)

    def _seat(self, roster: Roster, request: JoinRequest) -> None:
        known = roster.members.get(request.member_id)
        deadline = self._clock + self._lease_s
        if known is not None:
            if known.place != place_of(request.topology):
                raise refusals.ambiguous(roster.job, known, request)
            if known.phase is Phase.JOINED:
                topology, node_id = request.topology, request.node_id
                renewed = replace(known, topology=topology, node_id=node_id, deadline=deadline)
                self._refresh(roster, renewed)
                roster.mixing.joined(request.member_id)
                return
        if roster.joined_count >= roster.joined_max:
            raise refusals.crowded(roster.job, roster.joined_max)
        conflict = roster.seats.conflict(request.topology)
        if conflict is not None:
            holders = [roster.members[member_id] for member_id in conflict.member_ids]
            table = self._who_said_what(roster, request, holders)
            raise layout.does_not_fit(conflict, request, holders, table)
        newcomer = Member(
            job_id=request.job_id,
            member_id=request.member_id,
            topology=request.topology,
            node_id=request.node_id,
            phase=Phase.JOINED,
            order=0,
            epoch=known.epoch if known is not None else 0,
            cursor=known.cursor if known is not None else 0,
            deadline=deadline,
        )
        self._writes += roster.move(newcomer, Phase.JOINED, self._now)
        roster.mixing.joined(request.member_id)

    def _who_said_what(self, roster: Roster, request: JoinRequest, first: Sequence[Member]) -> str:
        """Return a table of places, starting with the members of `first`."""
        shown = {one.member_id: one for one in (*first, *roster.joined_first(layout.ROWS_MAX))}
        members = list(shown.values())[: layout.ROWS_MAX]
        digest = roster.job.spec.joint_digest
        hosts = self._nodes.host_of
        return layout.who_said_what(request, members, digest, hosts, roster.joined_count)

    def _refresh(self, roster: Roster, member: Member) -> None:
        known = roster.members[member.member_id]
        roster.refresh(member)
        if replace(member, deadline=known.deadline) != known:
            self._writes.append(Keep(member))

    # -- renewing --------------------------------------------------------------------------------

    def _heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        refusals.check_heartbeat(request)
        self._check(request.node)
        node_id = request.node.node_id
        node = NodeRecord(
            request.node,
            self._now,
            request.stores_away,
            request.loop_holds,
            request.longest_hold_s,
            request.reads,
            request.known,
            is_short=request.is_short or not request.node.worker_count,
            held=request.held,
            work=request.work,
        )
        self._nodes.heard(node, self._clock)
        verdicts = tuple(self._renew(node_id, member) for member in request.members)
        renewed = [verdict.error is None for verdict in verdicts]
        jobs = dict.fromkeys(one.job_id for one in itertools.compress(request.members, renewed))
        self._nodes.want_makers(node_id, jobs, self._clock)
        told, left = self._nodes.news(request, jobs, self._clock)
        return HeartbeatResponse(verdicts, told, left)

    def _renew(self, node_id: str, progress: MemberProgress) -> MemberVerdict:
        roster = self._jobs.get(progress.job_id)
        refusal = self._refusal(roster, progress, node_id)
        if roster is None or refusal is not None:
            return MemberVerdict(progress.member_id, refusal)
        known = roster.members[progress.member_id]
        roster.mixing.heard(known.member_id, progress.promise)
        renewed = replace(known, deadline=self._clock + self._lease_s)
        self._refresh(roster, self._advanced(roster, renewed, progress))
        missing = roster.missing_dp_ranks()
        missing_for_s = max(0.0, self._now - roster.incomplete_since) if missing else 0.0
        self._writes += roster.decide(self._now)
        news = roster.ledger.midway(roster.job, progress.known_entry)
        proposal = roster.mixing.proposal
        count = roster.missing_count
        return MemberVerdict(
            progress.member_id, None, missing, missing_for_s, proposal, news, count,
            len(roster.replaced),
        )  # fmt: skip

    def _advanced(self, roster: Roster, member: Member, progress: MemberProgress) -> Member:
        """Return the member with this progress, unless the member was already further; update the
        job's progress.
        """
        reported = (progress.epoch, progress.cursor)
        if reported > (roster.job.epoch, roster.job.cursor):
            roster.job = replace(roster.job, epoch=progress.epoch, cursor=progress.cursor)
            self._writes.append(Keep(roster.job))
        before = roster.job
        if roster.job.has_other_weights(progress):
            roster.job = replace(roster.job, mix=progress.mix, mix_from=progress.mix_from)
            self._writes.append(Keep(roster.job))
        if member.phase is Phase.JOINED:
            by, now = member.node_id, self._now
            known = LedgerPosition(member.epoch, member.cursor)
            self._writes += roster.ledger.reading(roster.job, progress, known, by, now)
            self._writes += roster.ledger.weighted(before, roster.job, by, now)
            self._writes += roster.ledger.quarantined(roster.job, progress.replaced, by, now)
            roster.note_replaced(progress.replaced)
        if reported < (member.epoch, member.cursor):
            return member
        return replace(
            member,
            epoch=progress.epoch,
            cursor=progress.cursor,
            samples_per_s=progress.samples_per_s,
            stall_s=progress.stall_s,
            bound=progress.bound,
        )

    def _refusal(
        self, roster: Roster | None, progress: MemberProgress, node_id: str
    ) -> DataplaneError | None:
        """Return why this node cannot renew this member, or None."""
        known = roster.members.get(progress.member_id) if roster is not None else None
        if roster is not None and known is not None and known.phase is Phase.JOINED:
            if known.deadline <= self._clock:
                self._writes += roster.move(known, Phase.EXPIRED, self._now)
            elif known.node_id != node_id:
                self._claims.append(Claim(node_id, known))
                return refusals.of_another_node(known)
            elif progress.generation == roster.job.generation:
                return None
        return refusals.expired(progress.job_id, progress.member_id, self._lease_s)

    # -- leaving ---------------------------------------------------------------------------------

    def _leave(self, request: LeaveRequest) -> LeaveResponse:
        roster = self._jobs.get(request.job_id)
        if roster is not None:
            known = roster.members.get(request.member_id)
            phase, before = _LOST if request.lost else _LEFT
            is_own = known is not None and known.node_id == request.node_id
            if known is not None and is_own and known.phase in before:
                if request.progress is not None:
                    known = self._advanced(roster, known, request.progress)
                self._writes += roster.move(known, phase, self._now)
            elif known is not None and not is_own and known.phase is Phase.JOINED:
                self._claims.append(Claim(request.node_id, known))
        return LeaveResponse()

    def _expire(self, roster: Roster) -> None:
        for member in roster.ended(self._clock):
            self._writes += roster.move(member, Phase.EXPIRED, self._now)

    def _tick(self) -> None:
        for roster in self._jobs.values():
            self._expire(roster)
        for job_id, roster in list(self._jobs.items()):
            if roster.is_idle and self._now - roster.job.active_at > JOB_KEPT_S:
                self._writes += roster.remove()
                del self._jobs[job_id]
        self._nodes.forget_silent(self._now)

    # -- changing --------------------------------------------------------------------------------

    def _change(self, request: ChangeRequest) -> ChangeResponse:
        check_name("by", request.by)
        roster = view.named(request.job_id, self._jobs)
        self._expire(roster)
        skip, rows, mix = request.skip, request.tombstones, request.mix
        if [skip, rows, mix].count(None) != 2:
            raise ConfigError("ask for one change: steps, rows or weights", field="skip")
        if mix is not None:
            answer, writes = roster.mix(mix, request.by, self._now)
        elif rows is not None:
            answer, writes = roster.take_out(rows, request.by, self._now)
        else:
            assert skip is not None
            answer, writes = roster.skip(skip, request.by, self._now)
        self._writes += writes
        return answer

    # -- looking ---------------------------------------------------------------------------------

    def readings(self) -> Iterator[Reading]:
        """Yield the coordinator's metrics, as of the last event."""
        return view.readings(self._jobs, self._nodes.records.values(), self._lease_s, self._now)

    def _status(self, request: StatusRequest) -> Answer:
        return view.status(
            request.job_id,
            version=self._version,
            coordinator_id=self._coordinator_id,
            rosters=self._jobs,
            nodes=self._nodes.records.values(),
            nodes_of=lambda roster: self._nodes.of(roster, self._clock),
            clock=self._clock,
            now=self._now,
        )
