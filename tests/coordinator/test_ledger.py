"""What the coordinator notes of a job's launches, by the invariants of coordinator/ledger.py."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from machine import LEASE_S, other
from membership import join, leave, progress
from msgspec import structs

from dataplane.coordinator import ledger
from dataplane.coordinator.records import LedgerRecord
from dataplane.errors import ConfigError
from dataplane.ledger import faults
from dataplane.mixture import MixtureSpec, SourceSpec
from dataplane.rpc.membership import JoinResponse, LeaveRequest, LedgerRequest
from dataplane.weights import MixHistory, ShareChange


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
    machine.ask(LeaveRequest("j", "m0-i1", progress=last))
    assert told(machine) == [("start", 0, 16, None), ("end", 0, 48, "left")]
    machine.ask(LeaveRequest("j", "m0-i1", progress=last))
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


def test_the_dataset_is_told_as_the_first_member_declared_it(machine):
    machine.ask(structs.replace(join(0), urls=("s3://b/",), format="parquet"))
    found = machine.ask(LedgerRequest("j"))
    assert (found.urls, found.format, found.sample_count) == (("s3://b/",), "parquet", 1000)
