"""The invariants of the state machine, by their numbers in coordinator/state.py."""

import pytest
from machine import LEASE_S, other
from membership import VERSION, beat, join, leave, node, progress
from msgspec import structs

from dataplane.coordinator.records import Member
from dataplane.coordinator.state import CoordinatorState
from dataplane.model.config import PROTOCOL_VERSION
from dataplane.model.errors import (
    ConfigError,
    LeaseExpired,
    LeaseFenced,
    SpecMismatch,
    VersionMismatch,
)
from dataplane.model.records import ColumnOptions
from dataplane.rpc.membership import LeaveRequest, StatusRequest

# -- generations: 1 ------------------------------------------------------------------------------


def test_1_a_new_launch_begins_a_generation_and_fences_the_old_one(machine):
    machine.ask(join(0))
    newer = machine.ask(join(0, incarnation="i2"))
    assert (newer.generation, newer.ended_count) == (2, 1)
    assert isinstance(machine.verdict("m0-i1", 1).error, LeaseExpired)
    assert isinstance(machine.ask(join(0, incarnation="i1")), LeaseFenced)
    second = machine.ask(join(1, incarnation="i2"))
    assert (second.generation, second.ended_count) == (2, 0)
    assert machine.phases() == {"m0-i2": "joined", "m1-i2": "joined"}


def test_1_a_superseded_launch_is_refused_while_the_newer_one_lives_even_after_a_restart(machine):
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
def test_1_an_old_launch_may_return_once_the_newer_one_has_no_members(machine, how):
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
        "job the same arguments; if these are two runs, give each a name= of its own\n"
        "  host  rank    dp_rank  spec      place from\n"
        "  n1    1 of 2  1 of 2   689c1515  not told  <- refused\n"
        "  n0    0 of 2  0 of 2   27e6d6d9  not told"
    )
    assert refusal.nouns == {"field": "seed", "expected": "1", "found": "2", "job": "j", "rank": 1}
    assert machine.phases() == {"m0-i1": "joined"}


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("global_batch", {"global_batch": 32}),
        ("end", {"end": "drop"}),
        ("columns", {"column_options": ColumnOptions(columns=("x",))}),
        ("fill_null", {"column_options": ColumnOptions(fill_null=(("x", 0.0),))}),
    ],
)
def test_2_within_a_launch_a_difference_in_any_field_is_refused(machine, field, changed):
    machine.ask(join(0))
    refusal = machine.ask(join(1, spec=other(**changed)))
    assert refusal.nouns["field"] == field


IN_C = "libjpeg-turbo 2.1.5, kernels 0123abcd; Pillow 13.0.0 (libwebp 1.6.0)"


@pytest.mark.parametrize(
    ("pixels", "advice"),
    [
        ("Pillow 13.0.0 (libwebp 1.6.0)", "libjpeg-dev"),
        ("libjpeg-turbo 3.1.0, kernels 0123abcd; Pillow 13.0.0 (libwebp 1.6.0)", "one wheel"),
        ("libjpeg-turbo 2.1.5, kernels 4567abcd; Pillow 13.0.0 (libwebp 1.6.0)", "one wheel"),
        ("libjpeg-turbo 2.1.5, kernels 0123abcd; Pillow 12.2.0 (libwebp 1.5.0)", "pillow==13.0.0"),
        ("libjpeg-turbo 2.1.5, kernels 0123abcd; Pillow 13.0.0 (libwebp 1.7.0)", "pillow==13.0.0"),
    ],
)
def test_2_a_node_that_makes_other_pixels_is_refused_and_the_error_says_what_to_install(
    machine, pixels, advice
):
    machine.ask(join(0, pixels=IN_C))
    refusal = machine.ask(join(1, pixels=pixels, node_id="n1"))
    assert isinstance(refusal, SpecMismatch)
    assert refusal.nouns["field"] == "pixels"
    assert (refusal.nouns["expected"], refusal.nouns["found"]) == (IN_C, pixels)
    assert "node n1" in str(refusal)
    assert advice in str(refusal)
    assert machine.ask(join(1, pixels=IN_C, node_id="n1")).generation == 1


def test_2_a_rank_that_reopens_a_job_with_another_batch_is_to_wait_for_the_others(machine):
    for rank in range(2):
        machine.ask(join(rank))
    machine.ask(leave("m0-i1"))
    refusal = machine.ask(join(0, spec=other(global_batch=64)))
    assert isinstance(refusal, SpecMismatch)
    assert refusal.reopened
    assert "other ranks still have theirs: close that of each rank first" in str(refusal)
    # A rank that has not left disagrees with the others.
    assert not machine.ask(join(1, spec=other(global_batch=64))).reopened
    machine.ask(leave("m1-i1"))
    for rank in (1, 0):
        assert machine.ask(join(rank, spec=other(global_batch=64))).generation == 2


def test_2_ranks_without_a_launcher_are_told_apart_by_their_dp_ranks(machine):
    alone = [{"dp_rank": one, "rank": 0, "member": f"m{one}"} for one in range(2)]
    for place in alone:
        machine.ask(join(**place))
    machine.ask(leave("m1"))
    refusal = machine.ask(join(**alone[1], spec=other(global_batch=64)))
    assert refusal.reopened
    assert "The loader of dp_rank 1 was closed" in str(refusal)
    # Another run has the places of one that is there.
    refusal = machine.ask(join(dp_rank=0, rank=0, member="m2", spec=other(seed=2)))
    assert not refusal.reopened
    assert "Both are rank 0: if these are two runs, give each a name= of its own" in str(refusal)


def test_2_a_rank_that_waits_while_others_reopen_a_job_twice_still_waits(machine):
    for rank in range(2):
        machine.ask(join(rank))
        machine.ask(leave(f"m{rank}-i1"))
    for batch in (64, 16):
        machine.ask(join(1, spec=other(global_batch=batch), member=f"m-{batch}"))
        assert machine.ask(join(0, spec=other(global_batch=32))).reopened
        machine.ask(leave(f"m-{batch}"))
    assert machine.ask(join(0, spec=other(global_batch=32))).generation == 4
    # Ranks of another launch have not reopened it.
    machine.ask(leave("m0-i1"))
    machine.ask(join(1, incarnation="i2"))
    assert not machine.ask(join(0, spec=other(seed=2), incarnation="i2")).reopened


def test_2_the_image_software_is_known_after_a_restart_and_may_change_without_members(machine):
    machine.ask(join(0, pixels=IN_C))
    machine.restart()
    assert isinstance(machine.ask(join(1, pixels="Pillow 13.0.0 ()")), SpecMismatch)
    refusal = machine.ask(join(0, incarnation="i2", pixels="Pillow 13.0.0 ()"))
    assert "An older launch of this job still runs" in str(refusal)
    machine.ask(leave("m0-i1"))
    assert machine.ask(join(1, pixels="Pillow 13.0.0 ()")).generation == 2


def test_2_jobs_without_images_do_not_depend_on_the_image_software(machine):
    machine.ask(join(0))
    assert machine.ask(join(1, node_id="n1")).generation == 1
    refusal = machine.ask(join(0, job="k", pixels="x" * 2000))
    assert isinstance(refusal, ConfigError)
    assert refusal.nouns["field"] == "pixels"


def test_2_a_job_name_with_another_spec_is_refused_while_the_old_launch_lives(machine):
    machine.ask(join(0))
    machine.wait(10)
    refusal = machine.ask(join(0, incarnation="i2", spec=other(seed=2)))
    assert isinstance(refusal, SpecMismatch)
    assert "An older launch of this job still runs" in str(refusal)
    assert "its last lease ends in 20 s" in str(refusal)
    assert machine.verdict("m0-i1", 1).error is None


@pytest.mark.parametrize("incarnation", ["i1", "i2"])
def test_2_an_idle_job_accepts_another_spec_and_starts_over(machine, incarnation):
    machine.ask(join(0))
    machine.verdict(epoch=3, cursor=99)
    machine.wait(LEASE_S + 1)
    answer = machine.ask(join(0, 1, incarnation=incarnation, spec=other(seed=2), member="new"))
    assert answer.generation == 2
    job = machine.job()
    assert (job.spec.seed, job.dp_size) == (2, 1)
    assert [(one.member_id, one.epoch, one.cursor) for one in job.members] == [("new", 0, 0)]


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


def test_3_a_tensor_parallel_peer_keeps_a_dp_rank_present(machine):
    machine.ask(join(0, 1, rank=0))
    machine.ask(join(0, 1, rank=1))
    machine.wait(20)
    machine.verdict("m0-i1")
    machine.wait(20)
    assert machine.phases() == {"m0-i1": "joined", "m1-i1": "expired"}
    assert machine.verdict("m0-i1").missing_dp_ranks == ()


# -- places: 4 -----------------------------------------------------------------------------------


def test_4_a_place_may_have_any_number_of_members_and_none_is_fenced(machine):
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


def test_4_two_ranks_under_one_member_id_are_refused(machine):
    machine.ask(join(0, member="same"))
    refusal = machine.ask(join(1, member="same"))
    assert isinstance(refusal, ConfigError)
    assert "every rank needs a member_id of its own" in str(refusal)
    assert machine.verdict("same").error is None
    machine.ask(leave("same"))
    assert isinstance(machine.ask(join(1, member="same")), ConfigError)
    assert machine.ask(join(0, member="same")).generation == 1


@pytest.mark.parametrize("lost", [False, True])
def test_7_a_member_that_leaves_is_remembered_with_its_progress(machine, lost):
    machine.ask(join(0))
    machine.verdict("m0-i1", epoch=0, cursor=16)
    for reached in (48, 32):
        last = progress(epoch=0, cursor=reached)
        machine.ask(LeaveRequest("j", "m0-i1", lost, last, "n0"))
    assert (machine.job().epoch, machine.job().cursor) == (0, 48)
    assert machine.job().members[0].cursor == 48
    machine.restart()
    assert machine.job().cursor == machine.job().members[0].cursor == 48


def test_nodes_of_the_protocol_before_may_join_and_none_before_that():
    newest = PROTOCOL_VERSION + 1
    ids = {"coordinator_id": "c", "version": VERSION, "protocol": newest}
    state = CoordinatorState(**ids, lease_s=LEASE_S, now=0.0)

    def answer(event):
        return state.decide(event, 1.0).answer

    for name, protocol in (("new", newest), ("old", newest - 1)):
        assert answer(node(name, protocol=protocol)).lease_s == LEASE_S
        assert answer(join(0, job=name, node_id=name)).generation == 1
        assert not isinstance(answer(beat(node_id=name, protocol=protocol)), VersionMismatch)
    for name, protocol in (("older", newest - 2), ("future", newest + 1)):
        refused = answer(node(name, protocol=protocol))
        assert isinstance(refused, VersionMismatch)
        assert f"speaks protocol {protocol}," in str(refused)
        assert f"speaks {newest - 1} and {newest}: install" in str(refused)
        assert isinstance(answer(join(0, job=name, node_id=name)), VersionMismatch)
    # Nodes of one job talk to each other: they are of one version, until another launch begins.
    mixed = answer(join(1, job="new", node_id="old"))
    assert isinstance(mixed, VersionMismatch)
    assert f"old on host-old (dataplane {VERSION}) speaks protocol {newest - 1}" in str(mixed)
    assert answer(join(1, job="new", node_id="old", incarnation="i2")).generation == 2


def test_nodes_with_tokens_for_one_job_have_so_many_places_and_status_shows_the_last_ones(
    monkeypatch,
):
    monkeypatch.setattr("dataplane.coordinator.nodes._OF_JOB_MAX", 3)
    monkeypatch.setattr("dataplane.coordinator.nodes._COUNT_MAX", 5)
    monkeypatch.setattr("dataplane.coordinator.view._NODES_MAX", 2)
    ids = {"coordinator_id": "c", "version": VERSION, "protocol": PROTOCOL_VERSION}
    coordinator = CoordinatorState(**ids, lease_s=LEASE_S, now=0.0)

    def register(name, only_job, now):
        request = structs.replace(node(node_id=name), only_job=only_job)
        return coordinator.decide(request, now).answer

    for n in range(3):
        assert register(f"n{n}", "j", n).lease_s
    assert register("n0", "j", 4).lease_s  # it is known
    refused = register("n3", "j", 5)
    assert isinstance(refused, ConfigError)
    assert "for the job 'j' (3) are taken" in str(refused)
    assert register("other", "", 5).lease_s
    # One that was silent for a lease gives way, and nobody else does.
    assert register("n3", "j", 2 + LEASE_S).lease_s
    told = coordinator.decide(StatusRequest(), 3 + LEASE_S).answer
    assert [one.node_id for one in told.nodes] == ["n3", "other"]
    assert told.node_count == 4
    assert register("another", "", 3 + LEASE_S).lease_s
    assert register("n2", "j", 3 + LEASE_S).lease_s
    assert isinstance(register("more", "", 3 + LEASE_S), ConfigError)


def test_a_job_has_so_many_joined_members_and_others_find_room_again(machine, monkeypatch):
    monkeypatch.setattr("dataplane.coordinator.roster._OF_DP_RANK_MAX", 2)
    monkeypatch.setattr("dataplane.coordinator.roster._JOINED_LEAST", 3)
    monkeypatch.setattr("dataplane.coordinator.roster._JOINED_MOST", 5)
    for dp_size, most in ((1, 3), (2, 4), (8, 5)):
        job = f"of-{dp_size}"
        for n in range(most):
            assert machine.ask(join(0, dp_size, job=job, member=f"m{n}")).generation == 1
        refused = machine.ask(join(0, dp_size, job=job, member="more"))
        assert isinstance(refused, ConfigError)
        assert f"{job!r} has {most} joined members, the most for dp_size" in str(refused)
        assert machine.ask(join(0, dp_size, job=job, member="m0")).generation == 1  # it is known
        machine.ask(leave("m0", job=job))
        assert machine.ask(join(0, dp_size, job=job, member="more")).generation == 1


def test_status_shows_a_share_of_each_job_and_how_much_there_is(machine, monkeypatch):
    monkeypatch.setattr("dataplane.coordinator.view._JOBS_MAX", 2)
    monkeypatch.setattr("dataplane.coordinator.view._OF_JOBS_MAX", 6)
    machine.ask(join(0, 1, job="idle", member="m"))
    machine.ask(leave("m", job="idle"))
    for n in range(9):
        machine.ask(join(0, 1 << 20, job="large", member=f"m{n}", source="x" * 1024))
    machine.ask(leave("m0", job="large"))
    for n in range(2):
        machine.ask(join(0, 1, job="small", member=f"m{n}"))
    told = machine.ask(StatusRequest())
    large, small = told.jobs
    assert [one.member_id for one in small.members] == ["m0", "m1"]
    assert [one.member_id for one in large.members] == ["m1", "m2", "m3", "m4"]
    assert (large.member_count, small.member_count, told.job_count) == (9, 2, 3)
    assert large.members[0].topology.source == "x" * 128
    assert large.missing_dp_ranks == tuple(range(1, 65))
    assert large.missing_count == (1 << 20) - 1
    assert (large.joined_dp_rank_count, small.joined_dp_rank_count) == (1, 1)
    verdict = machine.verdict("m1", job="large")
    assert (verdict.missing_dp_ranks, verdict.missing_count) == (tuple(range(1, 65)), 1048575)
    (only,) = machine.ask(StatusRequest("idle")).jobs
    assert (only.member_count, only.joined_dp_rank_count, only.state) == (1, 0, "idle")


def test_a_heartbeat_names_no_member_twice(machine):
    machine.ask(join(0, 1))
    refused = machine.ask(beat(*[progress()] * 2))
    assert isinstance(refused, ConfigError)
    assert "names a member twice" in str(refused)
