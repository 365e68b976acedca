"""The state machine over time: leases, restarts, progress, bounds; numbers are those of coordinator/state.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import LEASE_S, Machine, other
from membership import beat, join, leave, node, progress
from msgspec import structs

from dataplane.coordinator import roster as rosters
from dataplane.coordinator.nodes import NODE_KEPT_S
from dataplane.coordinator.records import Incarnation, Job, Member, Tick
from dataplane.coordinator.state import JOB_KEPT_S
from dataplane.model.errors import ConfigError, LeaseExpired, LeaseFenced, VersionMismatch
from dataplane.model.records import Topology
from dataplane.rpc.membership import StatusRequest, StoreOutage

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


@pytest.mark.parametrize("is_lost", [True, False])
def test_the_ranks_of_a_launch_are_not_missing_for_longer_than_it_runs(machine, is_lost):
    machine.ask(join(0))
    machine.wait(5)
    assert machine.verdict().missing_for_s == 5
    machine.ask(join(1))
    for name in ("m1-i1", "m0-i1"):
        machine.ask(leave(name, lost=is_lost))
    machine.wait(3600)
    machine.ask(join(0, member="again"))
    verdict = machine.verdict("again")
    assert (verdict.missing_dp_ranks, verdict.missing_for_s) == ((1,) * is_lost, 0)


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


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["join", "beat", "leave"]), st.integers(0, 29)
        ),
        max_size=30,
    )
)
def test_6_each_lease_ends_in_time_whatever_other_members_do(steps):
    """Every step: one of three ranks joins, renews its lease or leaves; then time passes."""
    machine, ends = Machine(), {}
    for rank, how, seconds in steps:
        name = f"m{rank}-i1"
        if how == "join":
            machine.ask(join(rank, 3))
            ends[name] = machine.now + LEASE_S
        elif name in ends and how == "beat":
            machine.verdict(name)
            ends[name] = machine.now + LEASE_S
        elif name in ends:
            machine.ask(leave(name))
            del ends[name]
        machine.wait(seconds)
        ends = {name: end for name, end in ends.items() if end > machine.now}
        found = machine.phases() if machine.disk else {}
        assert {name for name, phase in found.items() if phase == "joined"} == ends.keys()


def test_6_a_join_looks_at_two_other_members_at_most(machine, monkeypatch):
    looked = []
    joined = rosters.Roster.joined
    monkeypatch.setattr(
        rosters.Roster,
        "joined",
        lambda roster: (looked.append(one) or one for one in joined(roster)),
    )
    for rank in range(64):
        machine.ask(join(rank, 64))
    assert len(looked) <= 2 * 64


def test_6_leases_still_end_after_the_clock_was_set_back(machine):
    machine.ask(join(0))
    machine.ask(node())
    machine.now -= 1000
    assert machine.verdict().missing_for_s == 0.0
    assert machine.ask(StatusRequest()).nodes[0].last_seen_s == 0.0
    machine.wait(LEASE_S)
    assert machine.phases() == {"m0-i1": "expired"}


@pytest.mark.parametrize("jump_s", [10 * LEASE_S, 365 * 86400.0, -1000.0])
def test_6_no_lease_ends_because_the_clock_jumps(machine, jump_s):
    machine.ask(join(0))
    machine.now += jump_s
    machine.ask(Tick())
    assert machine.verdict().error is None


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
    stored = machine.disk[Job, "j", ""].record
    machine.ask(leave("m1-i1"))
    machine.restart()
    for job in (stored, machine.job()):
        assert (job.epoch, job.cursor) == (1, 5)


def test_7_speed_and_waits_are_updated_even_without_progress(machine):
    machine.ask(join(0))
    assert (machine.job().epoch, machine.job().cursor) == (0, 0)
    for speed, stall in ((5.0, 1.0), (7.0, 0.5)):
        machine.verdict(cursor=9, speed=speed, stall=stall)
        (shown,) = machine.job().members
        assert (shown.samples_per_s, shown.stall_s) == (speed, stall)
    machine.verdict(cursor=8, speed=1.0)
    assert machine.job().members[0].samples_per_s == 7.0


# -- bounds: 9; refusals -------------------------------------------------------------------------


def test_9_members_that_are_gone_are_bounded(machine, monkeypatch):
    monkeypatch.setattr(rosters, "GONE_MAX", 3)
    for number in range(20):
        machine.ask(join(0, 1, member=f"p{number}"))
        machine.ask(leave(f"p{number}", lost=number % 2 == 0))
    assert sorted(machine.phases()) == ["p17", "p18", "p19"]
    stored = sorted(name for cls, _, name in machine.disk if cls is Member)
    assert stored == ["p17", "p18", "p19"]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.sampled_from(["", "l", "x"]))))
def test_9_a_forgotten_member_is_never_missing(steps):
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


@pytest.mark.parametrize(("kept_s", "what"), [(30 * 86400, "jobs"), (86400, "nodes")])
def test_9_an_idle_job_is_kept_for_thirty_days_and_a_silent_node_for_one(machine, kept_s, what):
    machine.ask(node())
    machine.ask(join(0))
    machine.ask(leave())
    for wait_s, is_kept in ((kept_s, True), (1, False)):
        machine.now += wait_s
        machine.ask(Tick())
        assert bool(getattr(machine.ask(StatusRequest()), what)) == is_kept


def test_a_node_of_another_protocol_renews_no_lease(machine):
    machine.ask(join(0))
    assert isinstance(machine.ask(beat(progress(), protocol=99)), VersionMismatch)
    machine.wait(LEASE_S)
    assert machine.phases() == {"m0-i1": "expired"}


def test_nodes_of_another_protocol_are_refused_and_those_of_another_version_are_not(machine):
    refusal = machine.ask(node(protocol=99))
    assert isinstance(refusal, VersionMismatch)
    assert "install the same version on both" in str(refusal)
    assert set(refusal.nouns) == {"expected", "found"}
    assert machine.ask(StatusRequest()).nodes == ()
    machine.ask(node(version="0.9"))
    assert [status.version for status in machine.ask(StatusRequest()).nodes] == ["0.9"]


def test_names_and_texts_that_are_too_long_are_refused(machine):
    long, stores = "x" * 10_000, tuple(StoreOutage(f"s3://{i}", 1.0, "away") for i in range(65))
    for request, words in (
        (node(long), "node_id has 10000 characters ('xxxx"),
        (structs.replace(node(), host=long), "host has 10000 characters"),
        (join(0, node_id=long), "node_id has 10000 characters"),
        (structs.replace(beat(), stores_away=stores), "65 stores_away: 64 at most"),
        (structs.replace(beat(), stores_away=(StoreOutage("s3://b", 1.0, long),)), "error has"),
    ):
        refusal = machine.ask(request)
        assert isinstance(refusal, ConfigError)
        assert words in str(refusal)
        assert len(str(refusal)) < 200
    assert machine.ask(StatusRequest()).nodes == ()


def test_impossible_places_are_refused_before_anything_happens(machine):
    no_place = structs.replace(join(0), topology=Topology(dp_size=0))
    for request, words in (
        (join(2, 2), "dp_rank 2 is outside of dp_size 2"),
        (no_place, "dp_rank 0 is outside of dp_size 0"),
        (join(0, member="x" * 257), "member_id has 257 characters"),
        (structs.replace(join(0), job_id=""), "job_id has 0 characters"),
        (join(0, spec=other(global_batch=0)), "global_batch is 0"),
    ):
        refusal = machine.ask(request)
        assert isinstance(refusal, ConfigError)
        assert words in str(refusal)
    assert machine.disk == {}


def test_the_longest_names_and_the_largest_jobs_are_taken(machine):
    stores = tuple(StoreOutage(f"s3://{i}", 1.0, "x" * 1024) for i in range(64))
    machine.ask(structs.replace(beat(), stores_away=stores))
    assert machine.ask(StatusRequest()).nodes[0].stores_away == stores
    largest = structs.replace(join(0, 1 << 20, pixels="x" * 1024), dataset="x" * 1025)
    assert machine.ask(largest).generation == 1
    assert machine.job().dataset == "x" * 1024
    smallest = join(0, 1, job="k", spec=other(global_batch=1))
    assert machine.ask(smallest).generation == 1
    for request, words in (
        (join(0, (1 << 20) + 1), "is outside of"),
        (join(0, pixels="x" * 1025), "pixels has 1025"),
    ):
        assert words in str(machine.ask(request))


def test_a_node_needs_an_id_and_a_version_but_no_host(machine):
    machine.ask(structs.replace(node("n1"), host=""))
    assert [one.node_id for one in machine.ask(StatusRequest()).nodes] == ["n1"]
    assert isinstance(machine.ask(node("n2", version="")), VersionMismatch)
    assert isinstance(machine.ask(node("")), ConfigError)


def test_a_node_is_shown_as_soon_as_it_has_registered(machine):
    machine.ask(node())
    assert [one.node_id for one in machine.ask(StatusRequest()).nodes] == ["n0"]


def test_a_store_is_away_for_longer_while_its_node_is_silent(machine):
    outage = StoreOutage("s3://b", 5.0, "away")
    machine.ask(structs.replace(beat(), stores_away=(outage,)))
    machine.now += 2.0
    (seen,) = machine.ask(StatusRequest()).nodes
    assert seen.last_seen_s == 2.0
    assert seen.stores_away == (structs.replace(outage, away_s=7.0),)
