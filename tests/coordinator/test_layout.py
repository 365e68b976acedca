"""The places of a job's ranks fit together, or the rank that does not fit is refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership import SPEC, beat, join, leave, progress

from dataplane.coordinator.layout import Seats
from dataplane.coordinator.records import Member, Phase
from dataplane.model.errors import ConfigError, SpecMismatch
from dataplane.model.records import Topology


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
