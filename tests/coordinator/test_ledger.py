"""The coordinator's notes of a job's launches, by the invariants of coordinator/ledger.py."""

from __future__ import annotations

import json

import pytest
from machine import LEASE_S, other
from membership import join, leave, progress
from msgspec import structs
from msgspec.structs import replace

from dataplane.coordinator import ledger
from dataplane.coordinator.records import LedgerRecord
from dataplane.model.changes import Changes, ReplacedRow, Skip, changes_of
from dataplane.model.config import MixtureSpec, SourceSpec
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import LedgerEntry, LedgerPosition, faults
from dataplane.model.records import DatasetIdentity, MixHistory, ShareChange, Tombstone
from dataplane.rpc.membership import (
    ChangeRequest,
    JoinResponse,
    LeaveRequest,
    LedgerRequest,
    RowsTaken,
    StepsSkipped,
)

HERE, ELSEWHERE = DatasetIdentity("c", "here"), DatasetIdentity("c", "elsewhere")


def entries(machine):
    found = machine.ask(LedgerRequest("j")).entries
    assert list(faults(found, found[-1].hash if found else "")) == []
    stored = [one.record.entry for one in machine.disk.values() if hasattr(one.record, "entry")]
    assert sorted(stored, key=lambda entry: entry.seq) == list(found)
    return found


def told(machine):
    return [
        (one.kind, one.position.epoch, one.position.cursor, json.loads(one.payload).get("why"))
        for one in entries(machine)
    ]


def test_2_a_launch_starts_where_it_began_to_read_and_ends_where_it_had_come(machine):
    machine.ask(join(0))
    machine.ask(join(1))
    machine.verdict()
    assert told(machine) == []
    machine.verdict(epoch=2, cursor=64, began=(2, 32))
    machine.verdict("m1-i1", epoch=2, cursor=32, began=(2, 32))
    assert told(machine) == [("start", 2, 32, None)]
    (start,) = entries(machine)
    about = {"dp_size": 2, "generation": 1, "global_batch": 16, "launch": "i1"}
    assert json.loads(start.payload) == {**about, "spec": machine.job().digest}
    assert (start.seq, start.by, start.at) == (1, "n0", machine.now)
    machine.ask(leave("m0-i1"))
    assert len(told(machine)) == 1
    machine.restart()
    machine.ask(leave("m1-i1"))
    assert told(machine)[1:] == [("end", 2, 64, "left")]


def test_2_a_launch_that_reads_nothing_leaves_no_trace(machine):
    machine.ask(join(0))
    machine.ask(leave("m0-i1"))
    machine.ask(join(0, incarnation="i2"))
    assert told(machine) == []


def test_2_a_short_launch_is_known_by_what_it_says_as_it_leaves(machine):
    machine.ask(join(0))
    last = progress(epoch=0, cursor=48, began=(0, 16))
    machine.ask(LeaveRequest("j", "m0-i1", progress=last, node_id="n0"))
    assert told(machine) == [("start", 0, 16, None), ("end", 0, 48, "left")]
    machine.ask(LeaveRequest("j", "m0-i1", progress=last, node_id="n0"))
    assert len(told(machine)) == 2


@pytest.mark.parametrize("how", ["newer launch", "silence", "lost"])
def test_2_a_launch_ends_however_it_went(machine, how):
    machine.ask(join(0))
    machine.verdict(epoch=1, cursor=32, began=(0, 0))
    if how == "newer launch":
        machine.ask(join(0, 3, incarnation="i2", spec=other(global_batch=24)))
    elif how == "silence":
        machine.wait(LEASE_S + 1)
    else:
        machine.ask(leave("m0-i1", lost=True))
    why = "a newer launch" if how == "newer launch" else "expired"
    assert told(machine) == [("start", 0, 0, None), ("end", 1, 32, why)]


def test_2_members_that_come_back_go_on_where_they_are(machine):
    machine.ask(join(0))
    machine.verdict(epoch=0, cursor=32, began=(0, 16))
    machine.wait(LEASE_S + 1)
    machine.ask(join(0))
    machine.verdict(epoch=0, cursor=64, began=(0, 16))
    assert [one[:3] for one in told(machine)] == [
        ("start", 0, 16),
        ("end", 0, 32),
        ("start", 0, 64),
    ]


@pytest.mark.parametrize("first_report", [12, 200])
def test_2_a_loader_that_is_opened_again_starts_where_it_begins(machine, first_report):
    for member in ("m0-i1", "again", "once more"):
        machine.ask(join(0, member=member))
        machine.verdict(member, epoch=0, cursor=first_report, began=(0, 0))
        machine.verdict(member, epoch=0, cursor=208, began=(0, 0))
        machine.ask(leave(member))
    assert [one[:3] for one in told(machine)] == [("start", 0, 0), ("end", 0, 208)] * 3


def test_1_of_too_many_entries_the_oldest_launches_are_left_out(machine, monkeypatch):
    monkeypatch.setattr(ledger, "ENTRIES_MAX", 6)
    for launch in range(9):
        machine.ask(join(0, incarnation=f"i{launch}"))
        machine.verdict(f"m0-i{launch}", launch + 1, cursor=launch, began=(0, launch))
        machine.restart()
    found = entries(machine)
    assert [one.seq for one in found] == list(range(12, 18))
    assert sum(isinstance(one.record, LedgerRecord) for one in machine.disk.values()) == 6


def test_an_unknown_job_has_no_ledger(machine):
    machine.ask(join(0))
    answer = machine.ask(LedgerRequest("k"))
    assert isinstance(answer, ConfigError)
    assert "no job is called 'k'; there are: j" in str(answer)


def test_a_mixture_has_the_weights_that_its_furthest_member_reads_with(machine):
    sources = tuple(SourceSpec(name, name, share) for name, share in (("a", 1), ("b", 2)))
    spec = replace(join(0).spec, mixture=MixtureSpec(sources, length=500))
    first = MixHistory((ShareChange(0, 0, (1, 2)),), 500)
    second = MixHistory((*first.changes, ShareChange(0, 64, (2, 1))), 500)

    def history():
        return machine.ask(LedgerRequest("j")).spec.mixture.history

    for rank in (0, 1):
        machine.ask(join(rank, spec=spec))
    assert history() == first
    machine.verdict(mix=((0, 0), first))
    machine.verdict(cursor=64, mix=((0, 48), second))
    assert history() == second
    # The other one has not come there yet.
    machine.verdict("m1-i1", cursor=32, mix=((0, 0), first))
    assert history() == second
    machine.restart()
    assert history() == second
    # What was asked for stays as it was, also for those that join again.
    assert isinstance(machine.ask(join(0, spec=spec)), JoinResponse)
    machine.ask(leave("m0-i1"))
    machine.ask(leave("m1-i1"))
    machine.ask(join(0, spec=spec, incarnation="i2"))
    assert history() == first


def test_members_that_read_with_other_weights_from_one_place_take_no_turns(machine, monkeypatch):
    few = MixHistory((ShareChange(0, 0, (1, 3)),), 500)
    more = MixHistory((*few.changes, ShareChange(1, 0, (2, 2))), 500)
    spec = other(mixture=MixtureSpec(tuple(SourceSpec(n, n, 1) for n in "ab"), length=500))
    for rank in (0, 1):
        machine.ask(join(rank, spec=spec))
    for _ in range(3):
        for member, history in (("m0-i1", more), ("m1-i1", few)):
            machine.verdict(member, epoch=1, mix=((1, 0), history), began=(0, 0))
    assert [one.kind for one in entries(machine)].count("weights") == 1
    monkeypatch.setattr(ledger, "WEIGHTS_MAX", 5)
    for epoch in range(2, 30):
        later = MixHistory((*few.changes, ShareChange(epoch, 0, (epoch, 1))), 500)
        machine.verdict("m0-i1", epoch=epoch, mix=((epoch, 0), later), began=(0, 0))
    kinds = [one.kind for one in entries(machine)]
    assert (kinds.count("start"), kinds.count("weights")) == (1, 5)
    before = entries(machine)
    machine.restart()
    assert entries(machine) == before


def test_the_weights_that_members_read_with_are_noted_once_and_when_they_are_taken_back(machine):
    sources = tuple(SourceSpec(name, name, share) for name, share in (("a", 1), ("b", 3)))
    spec = replace(join(0).spec, mixture=MixtureSpec(sources, length=500))
    first = MixHistory((ShareChange(0, 0, (1, 3)),), 500)
    second = MixHistory((*first.changes, ShareChange(0, 64, (2, 2))), 500)
    third = MixHistory((*second.changes, ShareChange(1, 0, (4, 0))), 500)

    def noted():
        some = [one for one in entries(machine) if one.kind == "weights"]
        return [(one.position, json.loads(one.payload)["changes"]) for one in some]

    machine.ask(join(0, spec=spec))
    machine.ask(join(1, spec=spec))
    machine.verdict(mix=((0, 0), first), began=(0, 0))
    assert noted() == []
    for member in ("m0-i1", "m1-i1"):
        machine.verdict(member, cursor=48, mix=((0, 48), second), began=(0, 0))
        machine.restart()
    at_64 = (LedgerPosition(0, 64), [[0, 64, {"a": 0.5, "b": 0.5}]])
    assert noted() == [at_64]
    machine.verdict(epoch=1, mix=((1, 0), third), began=(0, 0))
    at_1 = (LedgerPosition(1, 0), [[1, 0, {"a": 1.0, "b": 0.0}]])
    assert noted() == [at_64, at_1]
    # A launch that goes on, and one that begins before the weights were set.
    machine.ask(join(0, spec=spec, incarnation="i2"))
    machine.verdict("m0-i2", 2, 1, mix=((1, 0), third), began=(1, 0))
    assert noted() == [at_64, at_1]
    machine.ask(join(0, spec=spec, incarnation="i3"))
    machine.verdict("m0-i3", 3, 0, mix=((0, 0), first), began=(0, 0))
    start = (LedgerPosition(0, 0), [[0, 0, {"a": 0.25, "b": 0.75}]])
    assert noted() == [at_64, at_1, start]


def test_the_dataset_is_told_as_the_first_member_declared_it(machine):
    machine.ask(structs.replace(join(0), urls=("s3://b/",), format="parquet"))
    found = machine.ask(LedgerRequest("j"))
    assert (found.urls, found.format, found.sample_count) == (("s3://b/",), "parquet", 1000)


def skip(first, stop, epoch=None):
    return ChangeRequest("j", "me@here", skip=StepsSkipped(first, stop, epoch))


def take(*rows, layout="here", known=0):
    return ChangeRequest("j", "me@here", tombstones=RowsTaken(rows, layout, known))


def arrive(machine, incarnation="i1", *, dp_rank=0, identity=HERE, member=None, **more):
    """The changes that a member is told when it joins."""
    request = join(dp_rank, 2, incarnation=incarnation, member=member, **more)
    answer = machine.ask(structs.replace(request, identity=identity))
    return answer if isinstance(answer, Exception) else changes_of(answer.entries)


SKIPPED = Changes((Skip(0, 16, 48),))


def test_3_a_generation_has_the_changes_that_were_there_when_it_began(machine):
    assert arrive(machine) == Changes()
    made = machine.ask(skip(1, 3))
    assert (made.is_running, made.entry.kind, made.entry.by) == (True, "skip", "me@here")
    for restarts in (False, True):
        if restarts:
            machine.restart()
        assert arrive(machine) == arrive(machine, dp_rank=1) == Changes()
    assert arrive(machine, "i2") == SKIPPED
    machine.ask(take(Tombstone(0, 3)))
    machine.restart()
    assert arrive(machine, "i2", dp_rank=1) == SKIPPED
    assert arrive(machine, "i3") == Changes(SKIPPED.skips, (Tombstone(0, 3),))
    assert [one.kind for one in entries(machine)] == ["skip", "tombstone"]


def test_3_a_second_launch_of_the_same_name_has_them_but_a_member_that_comes_back_does_not(machine):
    arrive(machine)
    machine.verdict(epoch=0, cursor=16, began=(0, 0))
    machine.ask(skip(4, 5))
    machine.wait(LEASE_S + 1)
    assert arrive(machine) == Changes()
    machine.ask(leave("m0-i1"))
    assert arrive(machine, member="new") == Changes((Skip(0, 64, 80),))
    assert machine.job().generation == 2
    machine.verdict("new", generation=2, epoch=0, cursor=32, began=(0, 16))
    start = [one for one in entries(machine) if one.kind == "start"][-1]
    assert json.loads(start.payload)["last_change"] == 2


@pytest.mark.parametrize(
    ("at", "steps", "free"),
    [((0, 0), (0, 2), (1, 0)), ((0, 32), (2, 5), (3, 0)), ((1, 40), (4, 6, 0), (4, 1)),
     ((1, 990), (61, 62), (0, 2))],
)  # fmt: skip
def test_of_a_running_job_only_steps_are_skipped_that_it_has_not_begun(machine, at, steps, free):
    arrive(machine)
    machine.verdict(epoch=at[0], cursor=at[1], began=(0, 0))
    refused = machine.ask(skip(*steps))
    assert isinstance(refused, ConfigError)
    assert f"the first step that can be skipped is step {free[0]} of epoch {free[1]}" in str(
        refused
    )
    assert machine.ask(skip(free[0], free[0] + 1, free[1])).entry.seq == 2
    machine.ask(leave("m0-i1"))
    assert not machine.ask(skip(*steps)).is_running


def test_a_repeated_change_changes_nothing(machine):
    arrive(machine)
    for request in (skip(5, 7), take(Tombstone(1, 2), Tombstone(0, 3))):
        first = machine.ask(request)
        assert machine.ask(request) == first
        assert machine.writes == ()
    assert machine.ask(skip(5, 7, 1)).entry.seq == 3


def test_rows_that_were_checked_without_those_of_another_command_are_refused(machine):
    arrive(machine)
    first = machine.ask(take(Tombstone(0, 1))).entry.seq
    assert "repeat the command" in str(machine.ask(take(Tombstone(0, 2))))
    machine.ask(skip(5, 7))
    assert machine.ask(take(Tombstone(0, 2), known=first)).entry.seq == first + 2


@pytest.mark.parametrize(
    "request_",
    [skip(5, 5), skip(6, 5), skip(60, 64), ChangeRequest("j", "me"), take(), take(layout="x"),
     take(Tombstone(0, 0), layout="elsewhere"), structs.replace(skip(5, 6), job_id="k"),
     structs.replace(skip(5, 6), by=""), structs.replace(take(Tombstone(0, 0)), skip=StepsSkipped(5, 6)),
     take(*(Tombstone(0, row) for row in range(ledger.TOMBSTONES_MAX + 1)))],
)  # fmt: skip
def test_what_cannot_be_changed_is_refused(machine, request_):
    arrive(machine)
    assert isinstance(machine.ask(request_), ConfigError)
    assert entries(machine) == ()


@pytest.mark.parametrize(("length", "bound"), [(0, None), (160, 10)])
def test_steps_of_a_mixture_are_skipped_up_to_its_length(machine, length, bound):
    sources = (SourceSpec("web", "f", 1 << 32),)
    request = join(spec=other(mixture=MixtureSpec(sources, length=length)))
    machine.ask(structs.replace(request, sample_count=160))
    assert machine.ask(skip(5, 7)).entry.seq == 1
    answer = machine.ask(skip(9, 11))
    assert isinstance(answer, ConfigError) == (bound is not None)
    assert bound is None or f"has steps 0:{bound}" in str(answer)


def test_1_changes_are_bounded_and_never_left_out(machine, monkeypatch):
    monkeypatch.setattr(ledger, "ENTRIES_MAX", 6)
    monkeypatch.setattr(ledger, "CHANGES_MAX", 3)
    arrive(machine)
    for first in (3, 5, 7):
        machine.ask(skip(first, first + 1))
    assert "was changed 3 times already" in str(machine.ask(skip(9, 10)))
    for launch in range(2, 9):
        arrive(machine, f"i{launch}")
        machine.verdict(f"m0-i{launch}", launch, cursor=launch, began=(0, launch))
    kinds = [one.kind for one in entries(machine)]
    assert kinds.count("skip") == 3
    assert len(kinds) == 6


def test_rows_stay_out_and_skips_hold_for_their_order_alone(machine):
    arrive(machine)
    machine.ask(skip(5, 7))
    machine.ask(take(Tombstone(0, 1)))
    machine.ask(leave("m0-i1"))
    refused = arrive(machine, "i2", identity=ELSEWHERE)
    assert "reads another dataset than the one of which rows were taken out" in str(refused)
    assert arrive(machine, "i3", spec=other(seed=9)) == Changes((), (Tombstone(0, 1),))
    machine.ask(leave("m0-i3"))
    moved = other(fingerprint="moved", global_batch=24)
    assert arrive(machine, "i4", spec=moved) == Changes((Skip(0, 80, 112),), (Tombstone(0, 1),))


def replaced(*rows, url="s3://b/a"):
    return tuple(ReplacedRow(url, 0, row, row + 1, "empty") for row in rows)


def test_1_rows_that_cannot_be_decoded_are_noted_once_by_whoever_finds_them(machine, monkeypatch):
    monkeypatch.setattr(ledger, "QUARANTINED_MAX", 5)
    machine.ask(join(0))
    machine.ask(join(1))
    machine.verdict(epoch=0, cursor=16, began=(0, 0), replaced=replaced(4, 5))
    machine.verdict("m1-i1", epoch=0, cursor=32, began=(0, 0), replaced=replaced(5, 6, 6))
    machine.verdict(epoch=0, cursor=48, began=(0, 0), replaced=replaced(4, 5, 6))
    noted = [one for one in entries(machine) if one.kind == "quarantine"]
    rows = [[row["row"] for row in json.loads(one.payload)["rows"]] for one in noted]
    assert rows == [[4, 5], [6]]
    assert [(one.position.cursor, one.by) for one in noted] == [(16, "n0"), (32, "n0")]
    machine.restart()
    long = replaced(*range(6, 99), url="u" * 9999)
    machine.verdict(epoch=0, cursor=64, began=(0, 0), replaced=(*replaced(6), *long))
    last = json.loads(entries(machine)[-1].payload)["rows"]
    assert [(row["row"], len(row["url"])) for row in last] == [(6, 1024), (7, 1024)]
    machine.verdict(epoch=0, cursor=80, began=(0, 0), replaced=replaced(99))
    assert json.loads(entries(machine)[-1].payload)["rows"] == last, "no more than the bound"


def test_replaced_rows_are_counted_over_all_nodes_of_a_launch(machine):
    machine.ask(join(0))
    machine.ask(join(1))
    assert machine.verdict(epoch=0, cursor=16, replaced=replaced(4, 5)).replaced_count == 2
    other_node = machine.verdict("m1-i1", epoch=0, cursor=16, replaced=replaced(5, 6))
    assert other_node.replaced_count == 3
    assert machine.verdict(epoch=1, cursor=16).replaced_count == 3
    machine.ask(join(0, incarnation="i2"))
    assert machine.verdict("m0-i2", generation=2, epoch=0, cursor=16).replaced_count == 0


@pytest.mark.parametrize("payload", ["[]", '{"rows":7}', '{"rows":[{"row":1}]}'])
def test_a_damaged_entry_of_rows_does_not_keep_a_coordinator_from_starting(payload) -> None:
    entry = LedgerEntry(1, "quarantine", LedgerPosition(0, 0), payload, "n0", 0.0, "")
    assert ledger.JobLedger("j", [entry]).entries == [entry]
