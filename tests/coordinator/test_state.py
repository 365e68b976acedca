"""The state machine, one test a promise; numbers are those of coordinator/state.py."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership import SPEC, VERSION, beat, join, leave, node, progress

from dataplane.config import PROTOCOL_VERSION
from dataplane.coordinator import roster as rosters
from dataplane.coordinator.records import Incarnation, Job, Keep, Member, Tick, key_of
from dataplane.coordinator.state import JOB_KEPT_S, NODE_KEPT_S, State
from dataplane.errors import ConfigError, LeaseExpired, LeaseFenced, SpecMismatch, VersionMismatch
from dataplane.model import Topology
from dataplane.rpc.membership import StatusRequest

LEASE_S = 30.0


class Machine:
    """A state machine with a clock, and a disk that keeps every write."""

    def __init__(self):
        self.now = 1_000_000.0
        self.disk = {}
        self.writes = ()
        self.restart()

    def restart(self):
        self.state = State(
            coordinator_id="c",
            version=VERSION,
            protocol=PROTOCOL_VERSION,
            lease_s=LEASE_S,
            now=self.now,
            records=[write.record for write in self.disk.values()],
        )

    def ask(self, event):
        decision = self.state.decide(event, self.now)
        self.writes = decision.writes
        for write in decision.writes:
            if isinstance(write, Keep):
                self.disk[key_of(write)] = write
            else:
                self.disk.pop(key_of(write), None)
        return decision.answer

    def wait(self, seconds):
        """Time passes while the coordinator is awake."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 1.0, until)
            self.ask(Tick())

    def verdict(self, *args, **kwargs):
        (verdict,) = self.ask(beat(progress(*args, **kwargs))).verdicts
        return verdict

    def job(self, job="j"):
        (found,) = self.ask(StatusRequest(job)).jobs
        return found

    def phases(self):
        return {member.member_id: member.state for member in self.job().members}


@pytest.fixture
def machine():
    return Machine()


def other(**changes):
    return dataclasses.replace(SPEC, **changes)


# -- generations: 1 ------------------------------------------------------------------------------


def test_1_a_new_launch_begins_a_generation_and_fences_the_old_one(machine):
    machine.ask(join(0))
    assert machine.ask(join(0, incarnation="i2")).generation == 2
    assert isinstance(machine.verdict("m0-i1", 1).error, LeaseExpired)
    assert isinstance(machine.ask(join(0, incarnation="i1")), LeaseFenced)
    assert machine.ask(join(1, incarnation="i2")).generation == 2
    assert machine.phases() == {"m0-i2": "joined", "m1-i2": "joined"}


def test_1_a_superseded_launch_is_refused_while_the_newer_one_lives_also_after_a_restart(machine):
    machine.ask(join(0))
    machine.ask(join(0, incarnation="i2"))
    machine.ask(join(1, incarnation="i2"))
    machine.ask(leave("m0-i2"))
    for _ in range(2):
        refusal = machine.ask(join(0))
        assert isinstance(refusal, LeaseFenced)
        assert "newer launch has taken over (generation 2)" in str(refusal)
        machine.restart()


@pytest.mark.parametrize("how", ["left", "lost", "silent"])
def test_1_a_launch_may_come_back_when_nobody_of_the_newer_one_is_there(machine, how):
    machine.ask(join(0, member="a"))
    machine.ask(join(0, incarnation="i2", member="b"))
    if how == "silent":
        machine.wait(LEASE_S - 0.5)
        machine.now += 0.5
    else:
        machine.ask(leave("b", lost=how == "lost"))
    assert machine.ask(join(0, member="c")).generation == 3
    machine.restart()
    for member, generation in (("a", 1), ("b", 2)):
        assert isinstance(machine.verdict(member, generation).error, LeaseExpired)
    assert isinstance(machine.ask(join(0, incarnation="i2", member="b")), LeaseFenced)
    assert machine.ask(join(0, member="a")).generation == 3
    assert machine.ask(join(0, incarnation="i3")).generation == 4
    assert isinstance(machine.ask(join(0, member="c")), LeaseFenced)


def test_1_a_new_launch_may_have_another_world_and_another_global_batch(machine):
    machine.ask(join(0, 2))
    answer = machine.ask(join(0, 3, incarnation="i2", spec=other(global_batch=24)))
    assert answer.generation == 2
    assert machine.job().dp_size == 3
    assert machine.job().spec.global_batch == 24
    stored = {name for cls, _, name in machine.disk if cls is Member}
    assert stored == {"m0-i2"}
    assert machine.verdict("m0-i2", 2).missing_dp_ranks == (1, 2)


# -- agreement: 2 --------------------------------------------------------------------------------


def test_2_a_spec_that_differs_is_refused_with_both_values_and_both_ranks(machine):
    machine.ask(join(0))
    refusal = machine.ask(join(1, spec=other(seed=2, window=16), node_id="n1"))
    assert isinstance(refusal, SpecMismatch)
    assert str(refusal) == (
        "job 'j': rank 1 (member m1-i1, node n1) asks for seed=2, but rank 0 (member m0-i1, node "
        "n0) has joined with seed=1; these differ too: window (16, not 8). Give every rank of the "
        "job the same arguments"
    )
    assert refusal.nouns == {"field": "seed", "expected": "1", "found": "2", "job": "j", "rank": 1}
    assert machine.phases() == {"m0-i1": "joined"}


@pytest.mark.parametrize("changed", [{"global_batch": 32}, {"end": "drop"}, {"columns": ("x",)}])
def test_2_within_a_launch_every_field_counts(machine, changed):
    machine.ask(join(0))
    refusal = machine.ask(join(1, spec=other(**changed)))
    assert refusal.nouns["field"] == next(iter(changed))


def test_2_within_a_launch_dp_size_counts(machine):
    machine.ask(join(0, 2))
    refusal = machine.ask(join(1, 3))
    assert isinstance(refusal, SpecMismatch)
    assert [refusal.nouns[noun] for noun in ("field", "expected", "found")] == ["dp_size", "2", "3"]


def test_2_a_job_name_with_another_spec_is_refused_while_the_old_launch_lives(machine):
    machine.ask(join(0))
    machine.wait(10)
    refusal = machine.ask(join(0, incarnation="i2", spec=other(seed=2)))
    assert isinstance(refusal, SpecMismatch)
    assert "An older launch of this job still runs" in str(refusal)
    assert "its last lease ends in 20 s" in str(refusal)
    assert machine.verdict("m0-i1", 1).error is None


@pytest.mark.parametrize("incarnation", ["i1", "i2"])
def test_2_an_idle_job_takes_another_spec_and_starts_anew(machine, incarnation):
    machine.ask(join(0))
    machine.verdict(epoch=3, cursor=99)
    machine.wait(LEASE_S + 1)
    answer = machine.ask(join(0, 1, incarnation=incarnation, spec=other(seed=2), member="new"))
    assert answer.generation == 2
    job = machine.job()
    assert (job.spec.seed, job.dp_size) == (2, 1)
    assert [(one.member_id, one.epoch, one.cursor) for one in job.members] == [("new", 0, 0)]


def test_2_who_expired_meanwhile_cannot_come_back_with_the_old_spec(machine):
    machine.ask(join(0))
    machine.wait(LEASE_S + 1)
    machine.ask(join(1, spec=other(seed=2)))
    assert isinstance(machine.verdict("m0-i1", 1).error, LeaseExpired)
    assert isinstance(machine.ask(join(0)), SpecMismatch)


# -- verdicts: 3 ---------------------------------------------------------------------------------


def test_3_only_a_joined_member_of_the_present_generation_is_renewed(machine):
    machine.ask(join(0))
    machine.ask(join(1))
    machine.ask(leave("m1-i1"))
    assert machine.verdict("m0-i1", 1).error is None
    for member, generation in (("m1-i1", 1), ("nobody", 1), ("m0-i1", 2)):
        error = machine.verdict(member, generation).error
        assert isinstance(error, LeaseExpired)
        assert "join again" in str(error)
    assert isinstance(machine.verdict(job="other").error, LeaseExpired)


def test_3_missing_ranks_are_named_with_the_time_since_they_are_missing(machine):
    machine.ask(join(0, 4))
    machine.wait(3)
    machine.ask(join(2, 4))
    machine.wait(2)
    verdict = machine.verdict("m0-i1")
    assert (verdict.missing_dp_ranks, verdict.missing_for_s) == ((1, 3), 5.0)
    assert machine.job().state == "forming"
    machine.ask(join(1, 4))
    machine.ask(join(3, 4))
    assert machine.verdict("m0-i1").missing_dp_ranks == ()
    assert machine.job().state == "running"


def test_3_a_rank_that_dies_is_missing_from_then_on_and_one_that_leaves_is_not(machine):
    machine.ask(join(0))
    machine.ask(join(1))
    machine.wait(20)
    machine.verdict("m0-i1")
    machine.wait(15)
    verdict = machine.verdict("m0-i1")
    assert (verdict.missing_dp_ranks, verdict.missing_for_s) == ((1,), 5.0)
    machine.ask(leave("m1-i1"))
    assert machine.verdict("m0-i1").missing_dp_ranks == ()


def test_3_a_rank_whose_process_ended_is_missing_at_once_and_its_place_is_free(machine):
    machine.ask(join(0))
    machine.ask(join(1))
    machine.ask(leave("m1-i1", lost=True))
    assert machine.verdict("m0-i1").missing_dp_ranks == (1,)
    assert machine.phases()["m1-i1"] == "expired"
    machine.ask(leave("m0-i1", lost=True))
    assert machine.job().state == "idle"


def test_3_of_a_rank_without_members_the_last_that_went_decides(machine):
    machine.ask(join(0))
    for worker, lost, missing in (("w0", False, ()), ("w1", True, (1,)), ("w2", False, ())):
        machine.ask(join(1, member=worker))
        machine.ask(join(1, member="peer"))
        machine.ask(leave("peer", lost=True))
        assert machine.verdict("m0-i1").missing_dp_ranks == ()
        machine.ask(leave(worker, lost=lost))
        assert machine.verdict("m0-i1").missing_dp_ranks == missing
        machine.restart()
        assert machine.job().missing_dp_ranks == missing


def test_3_a_tensor_parallel_peer_keeps_a_dp_rank_present(machine):
    machine.ask(join(0, 1, rank=0))
    machine.ask(join(0, 1, rank=1))
    machine.wait(20)
    machine.verdict("m0-i1")
    machine.wait(20)
    assert machine.phases() == {"m0-i1": "joined", "m1-i1": "expired"}
    assert machine.verdict("m0-i1").missing_dp_ranks == ()


# -- places: 4 -----------------------------------------------------------------------------------


def test_4_a_place_has_as_many_members_as_come_and_nobody_is_fenced(machine):
    workers = [f"w{number}" for number in range(4)]
    for worker in workers:
        assert machine.ask(join(0, 1, member=worker)).generation == 1
    assert machine.phases() == dict.fromkeys(workers, "joined")
    for beats in range(3):
        machine.wait(LEASE_S / 2)
        reports = [progress(worker, cursor=beats) for worker in workers]
        assert [one.error for one in machine.ask(beat(*reports)).verdicts] == [None] * 4
    machine.restart()
    assert machine.ask(join(0, 1, member="w0")).generation == 1
    assert machine.phases() == dict.fromkeys(workers, "joined")


def test_4_a_dead_process_beside_the_one_that_replaces_it_simply_expires(machine):
    machine.ask(join(0, 1, member="old"))
    machine.wait(20)
    machine.ask(join(0, 1, member="new"))
    machine.wait(20)
    assert machine.phases() == {"old": "expired", "new": "joined"}
    assert machine.verdict("new").missing_dp_ranks == ()
    assert machine.ask(join(0, 1, member="old")).generation == 1
    assert machine.phases() == {"old": "joined", "new": "joined"}


def test_4_nobody_changes_places(machine):
    machine.ask(join(0, member="same"))
    machine.ask(leave("same"))
    refusal = machine.ask(join(1, member="same"))
    assert isinstance(refusal, ConfigError)
    assert machine.ask(join(0, member="same")).generation == 1


def test_4_a_member_goes_on_through_another_node(machine):
    machine.ask(join(0))
    machine.verdict(cursor=50)
    machine.ask(join(0, node_id="n9"))
    (member,) = machine.job().members
    assert (member.node_id, member.cursor, member.state) == ("n9", 50, "joined")


def test_4_two_ranks_under_one_member_id_are_refused(machine):
    machine.ask(join(0, member="same"))
    refusal = machine.ask(join(1, member="same"))
    assert isinstance(refusal, ConfigError)
    assert "every rank needs a member_id of its own" in str(refusal)
    assert machine.verdict("same").error is None


# -- leases: 5, 6 --------------------------------------------------------------------------------


def test_6_a_lease_that_is_not_renewed_ends_and_joining_again_continues(machine):
    machine.ask(join(0))
    machine.verdict(cursor=70)
    machine.wait(LEASE_S - 1)
    assert machine.verdict(cursor=80).error is None
    machine.wait(LEASE_S)
    assert machine.phases() == {"m0-i1": "expired"}
    assert isinstance(machine.verdict().error, LeaseExpired)
    assert machine.ask(join(0)).generation == 1
    assert machine.verdict(cursor=60).error is None
    assert machine.job().members[0].cursor == 80


def test_6_an_overdue_member_is_expired_even_before_the_next_tick(machine):
    machine.ask(join(0))
    machine.wait(LEASE_S - 0.5)
    machine.now += 0.5
    assert isinstance(machine.verdict().error, LeaseExpired)


def test_6_an_overdue_member_holds_no_job_name_even_before_the_next_tick(machine):
    machine.ask(join(0))
    machine.wait(LEASE_S - 0.5)
    machine.now += 0.5
    assert machine.ask(join(0, incarnation="i2", spec=other(seed=2))).generation == 2


def test_6_leases_still_end_after_the_clock_was_set_back(machine):
    machine.ask(join(0))
    machine.ask(node())
    machine.now -= 1000
    assert machine.verdict().missing_for_s == 0.0
    assert machine.ask(StatusRequest()).nodes[0].last_seen_s == 0.0
    machine.wait(LEASE_S)
    assert machine.phases() == {"m0-i1": "expired"}


@pytest.mark.parametrize("jump_s", [10 * LEASE_S, 365 * 86400.0, -1000.0])
def test_6_a_jump_of_the_clock_costs_nobody_a_lease(machine, jump_s):
    machine.ask(join(0))
    machine.now += jump_s
    machine.ask(Tick())
    assert machine.verdict().error is None


def test_5_a_restart_stops_nobody_and_loses_no_join(machine):
    machine.ask(join(0))
    machine.ask(join(1))
    machine.verdict(epoch=1, cursor=7)
    machine.wait(LEASE_S - 1)
    machine.now += 1000
    machine.restart()
    machine.wait(LEASE_S - 1)
    verdict = machine.verdict(epoch=1, cursor=7)
    assert (verdict.error, verdict.missing_dp_ranks) == (None, ())
    assert machine.ask(join(1)).generation == 1
    members = machine.job().members
    assert [(one.epoch, one.cursor) for one in members] == [(1, 7), (0, 0)]


def test_5_joins_and_leaves_are_durable_and_nothing_else_is(machine):
    durable = {
        type(event).__name__: machine.state.decide(event, machine.now).durable
        for event in (node(), join(0), beat(progress()), leave(), StatusRequest(), Tick())
    }
    assert [name for name, yes in durable.items() if yes] == ["JoinRequest", "LeaveRequest"]


# -- progress: 7; repetition: 8 ------------------------------------------------------------------


def test_7_progress_only_grows_and_the_job_knows_the_furthest(machine):
    machine.ask(join(0))
    machine.ask(join(1))
    machine.ask(beat(progress("m0-i1", cursor=90), progress("m1-i1", epoch=1, cursor=5)))
    machine.ask(beat(progress("m0-i1", cursor=40), progress("m1-i1", epoch=0, cursor=95)))
    assert [(one.epoch, one.cursor) for one in machine.job().members] == [(0, 90), (1, 5)]
    job = machine.disk[Job, "j", ""].record
    assert (job.epoch, job.cursor) == (1, 5)


def test_8_repeated_events_write_nothing_new(machine):
    machine.ask(join(0))
    machine.ask(join(0))
    assert machine.writes == ()
    machine.verdict(cursor=9)
    machine.verdict(cursor=9)
    assert machine.writes == ()
    for lost in (True, False):
        machine.ask(leave(lost=lost))
        assert machine.writes != ()
        machine.wait(2)
        active_at = machine.disk[Job, "j", ""].record.active_at
        for again in (lost, True):
            machine.ask(leave(lost=again))
            assert machine.writes == ()
        assert machine.disk[Job, "j", ""].record.active_at == active_at
    machine.ask(leave("nobody"))
    machine.ask(leave(job="nojob"))
    assert machine.writes == ()


# -- bounds: 9; refusals -------------------------------------------------------------------------


def test_9_members_that_are_gone_are_bounded(machine, monkeypatch):
    monkeypatch.setattr(rosters, "GONE_MAX", 3)
    for number in range(20):
        machine.ask(join(0, 1, member=f"p{number}"))
        machine.ask(leave(f"p{number}", lost=number % 2 == 0))
    assert sorted(machine.phases()) == ["p17", "p18", "p19"]
    stored = sorted(name for cls, _, name in machine.disk if cls is Member)
    assert stored == ["p17", "p18", "p19"]


def test_9_a_rank_that_left_is_not_missed_however_many_go_after_it(machine, monkeypatch):
    monkeypatch.setattr(rosters, "GONE_MAX", 3)
    machine.ask(join(0, 2))
    machine.ask(leave())
    for number in range(20):
        machine.ask(join(1, 2, member=f"p{number}"))
        machine.ask(leave(f"p{number}"))
        assert machine.job().missing_dp_ranks == ()
    assert len(machine.phases()) == 4
    assert machine.phases()["m0-i1"] == "left"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.sampled_from(["", "l", "x"]))))
def test_9_what_was_forgotten_is_never_missed(steps):
    """Every step: a member of one of three dp ranks joins, leaves or is lost."""
    machine, joined, last = Machine(), set(), {}
    machine.ask(join(0, 3, member="first"))
    machine.ask(leave("first"))
    last[0] = "l"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rosters, "GONE_MAX", 1)
        for rank, number, how in steps:
            member = (rank, f"{rank}-{number}")
            if not how:
                machine.ask(join(rank, 3, member=member[1]))
                joined.add(member)
            elif member in joined:
                machine.ask(leave(member[1], lost=how == "x"))
                joined.remove(member)
                last[rank] = how
            present = {rank for rank, _ in joined} | {r for r in last if last[r] != "x"}
            assert machine.job().missing_dp_ranks == tuple({0, 1, 2} - present)
            phases = machine.phases()
            assert {name for name, phase in phases.items() if phase == "joined"} == {
                name for _, name in joined
            }
            assert len(phases) - len(joined) <= 6


def test_9_launches_are_bounded_and_the_oldest_are_forgotten(machine, monkeypatch):
    monkeypatch.setattr(rosters, "INCARNATIONS_MAX", 3)
    for number in range(9):
        machine.ask(join(0, incarnation=f"i{number}"))
    assert machine.job().generation == 9
    assert isinstance(machine.ask(join(0, incarnation="i7")), LeaseFenced)
    assert len([key for key in machine.disk if key[0] is Incarnation]) == 3


def test_9_idle_jobs_and_silent_nodes_are_forgotten_and_live_jobs_are_not(machine):
    machine.ask(join(0, job="dead"))
    machine.ask(leave(job="dead"))
    machine.ask(node("n7"))
    machine.ask(join(0))
    machine.now += max(JOB_KEPT_S, NODE_KEPT_S) + 1
    machine.ask(Tick())
    status = machine.ask(StatusRequest())
    assert [job.job_id for job in status.jobs] == ["j"]
    assert status.nodes == ()
    assert not [key for key in machine.disk if key[1] == "dead"]


def test_nodes_of_another_version_or_protocol_are_refused(machine):
    for request in (node(version="0.9"), node(protocol=99)):
        refusal = machine.ask(request)
        assert isinstance(refusal, VersionMismatch)
        assert "install the same version on both" in str(refusal)
        assert set(refusal.nouns) == {"expected", "found"}
    assert machine.ask(StatusRequest()).nodes == ()


def test_impossible_places_are_refused_before_anything_happens(machine):
    no_place = dataclasses.replace(join(0), topology=Topology(dp_size=0))
    for request, words in (
        (join(2, 2), "dp_rank 2 is outside of dp_size 2"),
        (no_place, "dp_rank 0 is outside of dp_size 0"),
        (join(0, member="x" * 257), "member_id has 257 characters"),
        (dataclasses.replace(join(0), job_id=""), "job_id has 0 characters"),
        (join(0, spec=other(global_batch=0)), "global_batch is 0"),
    ):
        refusal = machine.ask(request)
        assert isinstance(refusal, ConfigError)
        assert words in str(refusal)
    assert machine.disk == {}
