"""Many ranks, nodes and launches around one coordinator, on a network that loses, repeats and
reorders; the coordinator crashes and its clock jumps. Numbers are those of coordinator/state.py.
"""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from membership import SPEC, VERSION, beat, join, leave, progress
from msgspec import structs

from dataplane.coordinator.records import Incarnation, Job, Tick, key_of
from dataplane.coordinator.state import CoordinatorState
from dataplane.coordinator.store import MEMORY, JobStore
from dataplane.model.config import PROTOCOL_VERSION
from dataplane.model.errors import LeaseExpired, LeaseFenced, SpecMismatch
from dataplane.rpc.membership import (
    HeartbeatRequest,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    StatusRequest,
)

LEASE_S = 10.0
NODES = ("n0", "n1", "n2")
SPECS = tuple(structs.replace(SPEC, seed=seed) for seed in range(2))
pick = st.integers(0, 2**16)


class Membership(RuleBasedStateMachine):
    """The world, and what it remembers of the promises that were made to it."""

    def __init__(self):
        super().__init__()
        self.store = JobStore(MEMORY)
        self.now, self.awake = 1e9, 0.0
        self.waiting = {}
        self.names = itertools.count(1)
        self.launches = []
        self.sessions = []
        self.wire = []
        self.generation_of = {}
        self.renewed_at = {}
        self.launch_of = {}
        self.fenced = set()
        self.acknowledged = {}
        self.progress_seen = {}
        self.last_generation = 0
        self.last_stored = (0, 0, 0)
        self.boot()

    def teardown(self):
        self.store.close()

    # -- the coordinator -------------------------------------------------------------------------

    def boot(self):
        self.state = CoordinatorState(
            coordinator_id="c",
            version=VERSION,
            protocol=PROTOCOL_VERSION,
            lease_s=LEASE_S,
            now=self.now,
            records=self.store.load(),
        )

    def decide(self, event):
        decision = self.state.decide(event, self.now)
        self.waiting |= {key_of(write): write for write in decision.writes}
        return decision

    def flush(self):
        self.store.write(self.waiting.values())
        self.waiting = {}

    def job(self):
        jobs = self.decide(StatusRequest()).answer.jobs
        return jobs[0] if jobs else None

    def node_of(self, member):
        job = self.job()
        return {one.member_id: one.node_id for one in job.members}.get(member) if job else None

    def phases(self):
        job = self.job()
        return {one.member_id: one.state for one in job.members} if job else {}

    # -- ranks and launches ----------------------------------------------------------------------

    @initialize()
    def first_launch(self):
        self.launch(2, 0, 16)

    @rule(dp_size=st.integers(1, 3), seed=st.integers(0, 1), batch=st.sampled_from([16, 32]))
    def launch(self, dp_size, seed, batch):
        spec = structs.replace(SPECS[seed], global_batch=batch)
        self.launches.append((f"i{next(self.names)}", spec, dp_size))
        for rank in range(dp_size):
            self.open_session(len(self.launches) - 1, rank, spec)

    @rule(which=pick, rank=pick, differs=st.sampled_from([False, False, True]))
    def open_session(self, which, rank, spec=None, differs=False):
        """Start a process of a launch, or start it again; now and then with another seed."""
        incarnation, own, dp_size = self.launches[which % len(self.launches)]
        spec = structs.replace(own, seed=9) if differs else own
        rank %= dp_size
        member = f"m{rank}-{incarnation}-{next(self.names)}"
        request = join(rank, dp_size, spec=spec, incarnation=incarnation, member=member)
        self.sessions.append(request)
        self.wire.append(request)

    def session(self, which):
        """One of the latest: older ones have had their say."""
        return self.sessions[-1 - which % min(6, len(self.sessions))]

    @rule(which=pick, node=st.sampled_from(NODES))
    def join_again(self, which, node):
        session = self.session(which)
        self.wire.append(structs.replace(session, node_id=node))

    @rule(
        which=st.lists(pick, min_size=1, max_size=4),
        node=st.sampled_from(NODES),
        epoch=pick,
        cursor=pick,
    )
    def send_heartbeat(self, which, node, epoch, cursor):
        members = (self.session(one).member_id for one in which)
        known = [one for one in dict.fromkeys(members) if one in self.generation_of]
        reports = [
            progress(
                one, self.generation_of[one], epoch % 3, cursor, began=(0, 0) if epoch else None
            )
            for one in known
        ]
        self.wire.append(beat(*reports, node_id=node))

    @rule(which=pick, lost=st.booleans(), node=st.sampled_from(NODES))
    def send_leave(self, which, lost, node):
        self.wire.append(leave(self.session(which).member_id, lost=lost, node_id=node))

    # -- the network and the clock ---------------------------------------------------------------

    @precondition(lambda self: self.wire)
    @rule(which=pick, keep=st.sampled_from([False, False, True]))
    def deliver(self, which, keep):
        at = which % len(self.wire)
        self.answer(self.wire[at])
        if not keep:
            del self.wire[at]

    @precondition(lambda self: self.wire)
    @rule()
    def deliver_all(self):
        for event in self.wire:
            self.answer(event)
        self.wire.clear()

    @precondition(lambda self: self.wire)
    @rule(which=pick)
    def lose(self, which):
        del self.wire[which % len(self.wire)]

    @rule(seconds=st.sampled_from([1, 3, 11]))
    def wait(self, seconds):
        for _ in range(seconds):
            self.now += 1.0
            self.awake += 1.0
            self.decide(Tick())
            self.check_expired()

    @rule(seconds=st.sampled_from([-100.0, 60.0, 5e4]))
    def clock_jumps(self, seconds):
        self.now += seconds
        self.awake += LEASE_S / 3 if seconds > 0 else 0.0

    @rule()
    def progress_is_flushed(self):
        self.flush()

    @rule(which=pick)
    def coordinator_crashes(self, which):
        """Crash now and then between a decision and its write: no member has seen the answer."""
        expected = {
            member: generation
            for member, generation in self.acknowledged.items()
            if self.phases().get(member) == "joined"
        }
        if self.wire and which % 2:
            self.decide(self.wire[which % len(self.wire)])
        self.waiting = {}
        self.boot()
        self.progress_seen.clear()
        self.renewed_at = dict.fromkeys(self.renewed_at, self.awake)
        phases, job = self.phases(), self.job()
        for member, generation in expected.items():
            assert phases[member] == "joined", "5: a join was lost"
            assert job.generation == generation, "5: a join was moved"

    # -- invariants --------------------------------------------------------------------------------

    def answer(self, event):
        self.decide(Tick())
        self.check_expired()
        before = {name for name, phase in self.phases().items() if phase == "joined"}
        if not before:
            self.fenced.clear()
        decision = self.decide(event)
        again = self.state.decide(event, self.now)
        assert again.writes == (), "8: a repeated event writes nothing"
        assert repr(again.answer) == repr(decision.answer), "8: and is answered alike"
        if decision.durable:
            self.flush()
        match event:
            case JoinRequest():
                self.check_join(event, decision.answer, before)
            case HeartbeatRequest():
                for report, verdict in zip(event.members, decision.answer.verdicts, strict=True):
                    self.check_verdict(report, verdict, event.node.node_id)
            case LeaveRequest(member_id=member, node_id=node):
                if self.node_of(member) == node:
                    self.acknowledged.pop(member, None)
                else:
                    phases = {name for name, one in self.phases().items() if one == "joined"}
                    assert phases == before, "3: a node has ended another's lease"

    def check_join(self, request, answer, before):
        member = request.member_id
        if isinstance(answer, JoinResponse):
            for other in (one for one in self.sessions if one.member_id in before):
                assert other.spec.digest() == request.spec.digest(), "2: admitted beside another"
            assert member not in self.fenced, "3: a fenced member came back"
            self.generation_of[member] = answer.generation
            launch = self.launch_of.setdefault(answer.generation, request.incarnation)
            assert launch == request.incarnation, "1: two launches in one generation"
            self.acknowledged[member] = answer.generation
            self.renewed_at[member] = self.awake
            assert answer.generation == self.job().generation
            assert self.phases()[member] == "joined"
        else:
            assert isinstance(answer, LeaseFenced | SpecMismatch)
            if isinstance(answer, LeaseFenced):
                assert "joined" in self.phases().values(), "3: fenced by nobody"
                launch = self.launch_of.get(self.job().generation)
                assert launch != request.incarnation, "4: fenced by its own launch"
                self.fenced.add(member)
            else:
                assert "joined" in self.phases().values(), "2: nobody was there to differ from"

    def check_verdict(self, report, verdict, node):
        member, job = report.member_id, self.job()
        if verdict.error is None:
            assert self.node_of(member) == node, "3: renewed by another node"
            assert member not in self.fenced, "3: a fenced member was renewed"
            assert self.phases()[member] == "joined"
            assert report.generation == job.generation
            assert verdict.missing_dp_ranks == job.missing_dp_ranks
            self.renewed_at[member] = self.awake
        else:
            assert isinstance(verdict.error, LeaseExpired)
            self.check_expired()

    def check_expired(self):
        for member, phase in self.phases().items():
            if phase == "expired" and self.acknowledged.pop(member, None) is not None:
                silent_s = self.awake - self.renewed_at[member]
                assert silent_s >= LEASE_S - 1e-6, "6: a lease ended early"

    @invariant()
    def generations_never_go_back(self):
        job = self.job()
        if job is not None:
            assert job.generation >= self.last_generation, "1"
            self.last_generation = job.generation if not self.waiting else self.last_generation

    @invariant()
    def all_joined_members_agree(self):
        job, requests = self.job(), {one.member_id: one for one in self.sessions}
        joined = [one for one in job.members if one.state == "joined"] if job else []
        for member in joined:
            request = requests[member.member_id]
            assert request.spec == job.spec, "2: a member with another spec was admitted"
            assert request.topology.dp_size == job.dp_size, "2"
        assert len({requests[one.member_id].incarnation for one in joined}) <= 1, "2"

    @invariant()
    def missing_ranks_are_those_that_never_came_or_were_lost(self):
        job = self.job()
        if job is not None:
            # Of one rank the members come in the order of their last change.
            last = {one.topology.dp_rank: one.state for one in job.members}
            alive = {rank for rank, state in last.items() if state == "left"}
            alive |= {one.topology.dp_rank for one in job.members if one.state == "joined"}
            assert job.missing_dp_ranks == tuple(sorted(set(range(job.dp_size)) - alive))
            joined = any(one.state == "joined" for one in job.members)
            state = "forming" if job.missing_dp_ranks else "running"
            assert job.state == (state if joined else "idle")

    @invariant()
    def progress_never_goes_back(self):
        job = self.job()
        for member in job.members if job else ():
            key, found = (member.member_id, job.generation), (member.epoch, member.cursor)
            assert found >= self.progress_seen.get(key, (0, 0)), "7"
            self.progress_seen[key] = found
        for record in self.store.load():
            if isinstance(record, Job):
                stored = (record.generation, record.epoch, record.cursor)
                assert stored >= self.last_stored, "1, 7: what is stored went back"
                self.last_stored = stored

    @invariant()
    def every_launch_that_was_admitted_is_remembered(self):
        stored = {one.name for one in self.store.load() if isinstance(one, Incarnation)}
        admitted = {one.incarnation for one in self.sessions if one.member_id in self.generation_of}
        assert admitted <= stored, "1"


TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=60, stateful_step_count=50)


@pytest.mark.slow
def test_many_more_histories():
    run_state_machine_as_test(Membership, settings=settings(max_examples=400))
