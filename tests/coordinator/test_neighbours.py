"""Nodes of a job hear of each other: numbers are those of coordinator/roster.py, 10
is that of coordinator/state.py.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import LEASE_S, Machine
from membership import SPEC, beat, join, leave, node, progress
from msgspec import structs

from dataplane.coordinator.layout import Seats
from dataplane.coordinator.records import Member, Phase, Tick
from dataplane.model.config import Stage
from dataplane.model.errors import ConfigError, LeaseExpired, SpecMismatch
from dataplane.model.records import DatasetIdentity, Topology
from dataplane.rpc.membership import HeartbeatRequest, NeighbourNode, StatusRequest

NODES = ("n0", "n1", "n2")
ADDRESSES = ("", "10.0.0.1:70", "10.0.0.2:70", "[fd00::1]:70", "127.0.0.1:70", "[::1]:70")


def at(number):
    return f"10.0.0.{number + 1}:7078"


def here(machine, *numbers):
    """Register nodes, and let rank i of 4 join through node i."""
    for number in numbers:
        name = f"n{number}"
        machine.ask(node(name, data_address=at(number), arena_bytes=100))
        joined = machine.ask(join(number, 4, node_id=name))
    return joined


def told(machine, number, *known, generation=1):
    """Return the nodes that a heartbeat of rank i tells its node of; None if nothing."""
    report = progress(f"m{number}-i{generation}", generation)
    renewing = beat(
        report, node_id=f"n{number}", known=known, data_address=at(number), arena_bytes=100
    )
    jobs = machine.ask(renewing).jobs
    return jobs[0] if jobs else None


def names(nodes):
    return [one.node_id for one in nodes.nodes]


def test_1_a_join_and_a_heartbeat_tell_the_nodes_of_the_job_with_address_and_weight(machine):
    nodes = here(machine, 0, 1).nodes
    assert nodes.nodes == tuple(NeighbourNode(f"n{i}", at(i), 100) for i in range(2))
    assert (nodes.job_id, nodes.generation, nodes.key) == ("j", 1, b"")
    assert told(machine, 0) == nodes
    assert told(machine, 0, nodes.version) is None
    assert told(machine, 0, nodes.version + 1) == nodes


def test_1_the_disk_of_a_node_is_told_of(machine):
    machine.ask(node("n0", data_address=at(0), arena_bytes=100, disk_id="d0"))
    (found,) = machine.ask(join(0, 4, node_id="n0")).nodes.nodes
    assert found == NeighbourNode("n0", at(0), 100, disk_id="d0")


def test_1_a_new_generation_is_told_only_to_its_own_members(machine):
    before = here(machine, 0, 1).nodes
    after = machine.ask(join(0, 4, incarnation="i2")).nodes
    assert (after.generation, names(after)) == (2, ["n0"])
    assert after.version != before.version
    answer = machine.ask(beat(progress("m1-i1", 1), node_id="n1", data_address=at(1)))
    assert isinstance(answer.verdicts[0].error, LeaseExpired)
    assert answer.jobs == ()


def test_2_another_secret_means_another_version(machine):
    before = here(machine, 0).nodes
    machine.salt = b"another salt"
    machine.restart()
    after = told(machine, 0)
    assert after.nodes == before.nodes
    assert after.version != before.version


def test_3_what_is_told_is_made_once(machine):
    here(machine, 0, 1)
    assert told(machine, 0) is told(machine, 1)


def test_10_only_the_first_member_of_a_node_is_told_when_it_joins(machine):
    nodes = here(machine, 0).nodes
    assert machine.ask(join(1, 4)).nodes is None
    assert machine.ask(join(0, 4)).nodes is None
    assert told(machine, 0) == nodes
    machine.ask(leave("m1-i1"))
    assert machine.ask(join(0, 4)).nodes == nodes


def test_10_a_node_without_a_member_of_a_job_is_told_nothing_of_it(machine):
    here(machine, 0)
    assert machine.ask(beat(node_id="n1", data_address=at(1), known=(1,))).jobs == ()
    assert machine.ask(beat(progress("m9-i1"), node_id="n1", known=(1,))).jobs == ()
    assert machine.ask(beat(progress(generation=2), node_id="n1")).jobs == ()


def test_4_a_node_for_some_urls_is_told_of_only_if_the_job_reads_nothing_else(machine):
    def told_with(rank, *prefixes):
        name = f"n{rank}"
        machine.ask(node(name, data_address=at(rank), arena_bytes=100, only_under=prefixes))
        machine.ask(join(rank, 4, node_id=name, urls=("s3://b/train/*.parquet",)))
        return told(machine, 0)

    assert told_with(0).only_under == ()
    assert names(told_with(1, "s3://b/other", "s3://b/train/x")) == ["n0"]
    assert told(machine, 0).only_under == ()
    limited = told_with(2, "s3://b/other", "s3://b/train")
    assert (names(limited), limited.only_under) == (["n0", "n2"], ("s3://b/train/",))
    machine.ask(leave("m2-i1", node_id="n2"))
    # The key stays what it was, so that connections do.
    after = told(machine, 0)
    assert (names(after), after.only_under) == (["n0"], ("s3://b/train/",))
    machine.ask(join(0, 4, incarnation="i2", urls=("s3://b/train/*.parquet",)))
    assert told(machine, 0, generation=2).only_under == ()


def test_4_a_job_reads_the_former_shards_that_it_names(machine):
    identity, before = DatasetIdentity("c", "l"), (("", ("s3://c/old/x.parquet",)),)
    stage = Stage("d", 0, 1, 2, identity, unread=True, before=before)
    changed, reads = structs.replace(SPEC, stages=(stage,)), ("s3://b/*",)
    machine.ask(node("n0", data_address=at(0), arena_bytes=100))
    machine.ask(join(0, 4, urls=reads, spec=changed))
    for rank, prefixes in ((1, ("s3://b",)), (2, ("s3://b", "s3://c"))):
        more = {"data_address": at(rank), "arena_bytes": 100, "only_under": prefixes}
        machine.ask(node(f"n{rank}", **more))
        machine.ask(join(rank, 4, node_id=f"n{rank}", urls=reads, spec=changed))
    limited = told(machine, 0)
    assert (names(limited), limited.only_under) == (["n0", "n2"], ("s3://b/", *before[0][1]))


@pytest.mark.parametrize("how", ["all are heard of", "one is silent", "one has left"])
def test_10_after_a_restart_nodes_keep_what_they_know_until_all_are_heard_of(machine, how):
    before = here(machine, 0, 1).nodes
    machine.restart()
    assert told(machine, 0, before.version) is None
    assert told(machine, 0) is None
    assert machine.ask(join(0, 4)).nodes is None
    assert machine.job().nodes == ()
    if how == "all are heard of":
        assert told(machine, 1, before.version) is None
        assert told(machine, 1) == told(machine, 0) == before
        assert machine.job().nodes_version == before.version
        return
    if how == "one has left":
        machine.ask(leave("m1-i1", node_id="n1"))
    else:
        for _ in range(3):
            machine.wait(LEASE_S / 3)
            told(machine, 0)
        machine.wait(1)
    assert names(told(machine, 0, before.version)) == ["n0"]


@pytest.mark.parametrize(
    "address",
    [
        "node-1:7078",
        "10.0.0.1",
        "10.0.0.1:0",
        "unix:/run/x",
        "169.254.169.254:80",
        "[fe80::1]:80",
        "[::ffff:169.254.169.254]:80",
        "0.0.0.0:80",
        "[::]:80",
        "224.0.0.1:80",
        "[FD00::1]:80",
        "010.0.0.1:80",
        "x" * 300,
    ],
)
def test_an_address_to_which_no_node_may_be_sent_is_refused(machine, address):
    for request in (node(data_address=address), beat(data_address=address)):
        refusal = machine.ask(request)
        assert isinstance(refusal, ConfigError)
        assert refusal.field in ("data_address", None)
    assert not machine.state._nodes.records


def test_a_heartbeat_of_no_node_of_ours_is_refused(machine):
    for request, field in (
        (beat(arena_bytes=1 << 60), "arena_bytes"),
        (beat(known=range(5000)), "known"),
    ):
        refusal = machine.ask(request)
        assert isinstance(refusal, ConfigError)
        assert refusal.field == field


which = st.sampled_from(NODES)
ranks = st.integers(0, 3)
launches = st.sampled_from(["i1", "i2"])
EVENTS = st.one_of(
    st.builds(lambda name, address, weight: node(name, data_address=address, arena_bytes=weight),
              which, st.sampled_from(ADDRESSES), st.integers(1, 2)),
    st.builds(lambda rank, name, launch: join(rank, 4, node_id=name, incarnation=launch),
              ranks, which, launches),
    st.builds(lambda rank, launch, lost, name: leave(
                  f"m{rank}-{launch}", lost=lost, node_id=name),
              ranks, launches, st.booleans(), which),
    st.sampled_from(["beat", "wait", "restart"]),
)  # fmt: skip


def renew_all(machine, registered):
    """A heartbeat of every node with joined members, whose address stays."""
    jobs = machine.ask(StatusRequest()).jobs
    for one in jobs[0].members if jobs else ():
        if one.state == "joined" and one.node_id in registered:
            report = progress(one.member_id, jobs[0].generation)
            machine.ask(HeartbeatRequest(registered[one.node_id], (report,)))


@given(events=st.lists(EVENTS, max_size=40))
@settings(max_examples=80)
def test_2_the_version_changes_exactly_when_the_nodes_or_the_generation_do(events):
    machine, registered = Machine(), {}
    versions = {}
    for event in events:
        if event == "wait":
            machine.wait(LEASE_S / 2)
        elif event == "restart":
            machine.restart()
            # All are heard of again at once.
            for request in registered.values():
                machine.ask(request)
        elif event == "beat":
            renew_all(machine, registered)
        else:
            machine.ask(event)
            if hasattr(event, "data_address"):
                registered[event.node_id] = event
        machine.ask(Tick())
        jobs = machine.ask(StatusRequest()).jobs
        if not jobs:
            continue
        (job,) = jobs
        joined = {one.node_id for one in job.members if one.state == "joined"}
        nodes = [registered[name] for name in NODES if name in joined and name in registered]
        present = [(one.node_id, one.data_address, one.arena_bytes) for one in nodes]
        reached = [one for one in present if one[1]]
        reached = [one for one in reached if one[1] not in ADDRESSES[-2:]] or reached
        if job.nodes_version:
            assert [(one.node_id, one.address, one.arena_bytes) for one in job.nodes] == reached
            content = (job.generation, *reached)
            assert versions.setdefault(content, job.nodes_version) == job.nodes_version
        else:
            assert not joined <= set(registered), "they are told unless one is not known"
    assert all(one != other for one, other in itertools.combinations(versions.values(), 2))


def test_a_join_says_whether_it_names_the_nodes_of_all_ranks(machine):
    assert [here(machine, number).knows_all_nodes for number in range(4)] == [False] * 3 + [True]
    # It has been told by the join of another rank, and perhaps not of those that came later.
    again = machine.ask(join(3, 4, node_id="n0", member="other"))
    assert (again.is_complete, again.nodes, again.knows_all_nodes) == (True, None, False)


def ask(machine, rank, dp_rank, dp_size=2, world=4, **more):
    return machine.ask(join(dp_rank, dp_size, rank=rank, world=world, **more))


def test_ranks_of_a_job_with_tensor_parallel_peers_fit(machine):
    for rank in range(8):
        assert ask(machine, rank, rank // 4, world=8).generation == 1
    assert machine.phases() == dict.fromkeys((f"m{rank}-i1" for rank in range(8)), "joined")


def test_a_rank_that_reads_another_batch_than_its_peers_is_refused_with_a_table(machine):
    machine.ask(beat(node_id="n7"))
    ask(machine, 0, 0, source="DeviceMesh(dp=2, tp=2), batch axes: dp")
    ask(machine, 1, 0, source="DeviceMesh(dp=2, tp=2), batch axes: dp")
    refusal = ask(machine, 2, 0, node_id="n7", source="torchrun: RANK=2, WORLD_SIZE=4")
    assert isinstance(refusal, SpecMismatch)
    assert refusal.field == "dp_rank"
    digest = SPEC.digest()[:8]
    assert str(refusal) == (
        "job 'j': 3 ranks ask for the batches of dp_rank 0, but with 4 ranks and dp_size 2 only "
        "2 can, or other dp ranks would lack some. All ranks must find their places in the same way: "
        "pass the same device_mesh= on each, or dp_rank= and dp_size=\n"
        "  host     rank    dp_rank  spec      place from\n"
        f"  host-n7  2 of 4  0 of 2   {digest}  torchrun: RANK=2, WORLD_SIZE=4  <- refused\n"
        f"  n0       0 of 4  0 of 2   {digest}  DeviceMesh(dp=2, tp=2), batch axes: dp\n"
        f"  n0       1 of 4  0 of 2   {digest}  DeviceMesh(dp=2, tp=2), batch axes: dp"
    )
    assert ask(machine, 2, 1).generation == 1


def test_one_rank_cannot_read_two_batches(machine):
    ask(machine, 1, 0)
    refusal = ask(machine, 1, 1, member="again")
    assert isinstance(refusal, SpecMismatch)
    assert (
        "rank 1 asks for the batches of dp_rank 1, but it has already joined with dp_rank 0"
        in str(refusal)
    )
    assert (refusal.expected, refusal.found) == (0, 1)
    machine.ask(leave("m1-i1"))
    assert ask(machine, 1, 1, member="again").generation == 1


def test_all_ranks_count_the_same_ranks(machine):
    ask(machine, 0, 0)
    refusal = ask(machine, 1, 0, world=8)
    assert "rank 1 counts 8 ranks in all, but rank 0 counts 4" in str(refusal)
    assert refusal.field == "world_size"
    assert ask(machine, 1, 0).generation == 1


def test_members_that_differ_in_dp_size_are_refused_with_the_table(machine):
    ask(machine, 0, 0, source="Megatron-Core: dp=2 tp=2 cp=1 pp=1")
    refusal = ask(machine, 1, 1, dp_size=4, source="torchrun: RANK=1, WORLD_SIZE=4")
    assert refusal.field == "dp_size"
    assert "1 of 4  1 of 4" in str(refusal)
    assert "Megatron-Core: dp=2 tp=2 cp=1 pp=1" in str(refusal)


def test_each_stage_and_each_part_of_a_sequence_has_its_own_ranks(machine):
    for rank, (pp, dp, cp) in enumerate(itertools.product(range(2), range(2), range(2))):
        place = {"pp_rank": pp, "pp_size": 2, "cp_rank": cp, "cp_size": 2}
        assert ask(machine, rank, dp, world=8, **place).generation == 1
    machine.ask(leave("m7-i1"))
    place = {"pp_rank": 0, "pp_size": 2, "cp_rank": 1, "cp_size": 2}
    refusal = ask(machine, 7, 1, world=8, **place)
    assert "dp_rank 1 (pp_rank 0, cp_rank 1), but with 8 ranks" in str(refusal)


def test_processes_of_one_rank_and_ranks_without_a_number_are_not_counted(machine):
    for worker in range(6):
        assert ask(machine, 3, 1, member=f"w{worker}").generation == 1
    # Explicit dp ranks without a launcher: nobody knows how many ranks there are.
    for worker in range(3):
        assert machine.ask(join(0, 2, rank=0, member=f"x{worker}")).generation == 1


def test_a_lease_that_ends_makes_room_for_the_rank_that_takes_over(machine):
    ask(machine, 0, 0), ask(machine, 1, 0)
    assert isinstance(ask(machine, 2, 0), SpecMismatch)
    machine.wait(20)
    machine.ask(beat(progress("m0-i1")))
    machine.wait(20)
    assert machine.phases()["m1-i1"] == "expired"
    assert ask(machine, 2, 0).generation == 1


def test_places_are_still_compared_after_a_restart(machine):
    ask(machine, 0, 0), ask(machine, 1, 0)
    machine.restart()
    assert isinstance(ask(machine, 2, 0), SpecMismatch)
    assert isinstance(ask(machine, 1, 1, member="again"), SpecMismatch)
    assert ask(machine, 2, 1).generation == 1
    assert ask(machine, 0, 0, incarnation="i2").generation == 2
    assert ask(machine, 1, 1, incarnation="i2").generation == 2  # another launch, another layout


def test_a_table_of_many_ranks_is_short(machine):
    for rank in range(63):
        ask(machine, rank, rank % 32, dp_size=32, world=64)
    refusal = ask(machine, 63, 0, dp_size=32, world=64, source="s" * 500)
    lines = str(refusal).splitlines()
    assert len(lines) == 1 + 1 + 1 + 10 + 1
    assert lines[-1] == "  … and 53 more"
    assert lines[2].endswith("s…  <- refused")
    assert max(map(len, lines[1:])) < 150
    with pytest.raises(ConfigError, match="source has 2000 characters"):
        raise ask(machine, 63, 31, dp_size=32, world=64, source="s" * 2000)


@given(st.data())
def test_seats_are_what_a_recount_of_the_joined_members_gives(data):
    """Whatever came and went: the same conflicts as those of seats that only ever saw the rest."""
    seats, joined = Seats(), {}
    for number in range(data.draw(st.integers(0, 12))):
        if joined and data.draw(st.booleans()):
            seats.remove(joined.pop(data.draw(st.sampled_from(sorted(joined)))))
            continue
        rank = data.draw(st.integers(0, 3))
        place = Topology(rank % 2, 2, rank, 4, cp_rank=rank // 2, cp_size=2)
        member = Member("j", f"m{number}", place, "n", Phase.JOINED, number)
        joined[member.member_id] = member
        seats.add(member)
    again = Seats()
    for member in joined.values():
        again.add(member)
    for rank, dp_rank, world in itertools.product(range(4), range(2), (4, 8)):
        asked = Topology(dp_rank, 2, rank, world, cp_rank=rank // 2, cp_size=2)
        assert (seats.conflict(asked) is None) == (again.conflict(asked) is None)
        fits = all(
            one.topology.world_size == world
            and (one.topology.rank != rank or one.topology.dp_rank == dp_rank)
            for one in joined.values()
        )
        others = {
            one.topology.rank
            for one in joined.values()
            if (one.topology.dp_rank, one.topology.cp_rank) == (dp_rank, rank // 2)
        }
        share = world // 4
        assert (seats.conflict(asked) is None) == (
            fits and (rank in others or len(others) < share)
        ), dataclasses.astuple(asked)
