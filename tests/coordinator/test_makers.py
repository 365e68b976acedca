"""Which nodes make slabs for which jobs: numbers are those of coordinator/makers.py, those with an N
are of coordinator/nodes.py.
"""

from __future__ import annotations

import itertools
import math
import sys
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from machine import LEASE_S, Machine
from membership import beat, join, leave, node, progress
from msgspec import structs

from dataplane.coordinator.makers import FEW, KEPT_S, NAMED_EVERY_S
from dataplane.model.errors import ConfigError
from dataplane.rpc.membership import (
    HeartbeatRequest,
    JoinRequest,
    KnownNodes,
    LeaveRequest,
    NeighbourNode,
    RegisterNodeRequest,
    StatusRequest,
)


def at(number):
    return f"10.0.{number // 256}.{number % 256}:7078"


def maker(number, workers=8, **more):
    """A node c<i> with workers and without trainers."""
    return node(
        f"c{number}", data_address=at(number), arena_bytes=100, worker_count=workers, **more
    )


def short(number=0, **more):
    """A node n<i> without workers, which owns no blocks."""
    return node(f"n{number}", data_address=at(100 + number), worker_count=0, **more)


def short_beat(*known, number=0, generation=1, is_short=True, workers=0):
    """The heartbeat of a node n<i> that has rank i of the job j."""
    report = progress(f"m{number}-i{generation}", generation)
    told = beat(report, node_id=f"n{number}", known=known, is_short=is_short)
    return structs.replace(told, node=short(number) if not workers else able(number, workers))


def able(number, workers):
    return node(f"n{number}", data_address=at(100 + number), arena_bytes=100, worker_count=workers)


def beat_of(request, *known):
    """A heartbeat of a node without members, that knows these versions of the job j."""
    return HeartbeatRequest(request, known=tuple(KnownNodes("j", one) for one in known))


def makers(nodes):
    return [one.node_id for one in nodes.nodes if one.worker_count]


def start(machine, *numbers):
    """Makers, then a node without workers that joins; what it is told."""
    for number in numbers:
        machine.ask(maker(number))
    machine.ask(short())
    return machine.ask(join(0, 2)).nodes


def test_1_the_first_join_of_a_node_without_workers_names_makers_after_its_nodes(machine):
    nodes = start(machine, 1)
    assert nodes.nodes == (
        NeighbourNode("n0", at(100), 0),
        NeighbourNode("c1", at(1), 100, 8),
    )
    (told,) = machine.ask(beat_of(maker(1))).jobs
    assert told is nodes
    answer = machine.ask(beat_of(maker(1), nodes.version))
    assert (answer.jobs, answer.left) == ((), ())


def test_1_a_node_for_some_urls_is_no_maker(machine):
    start(machine, 1)
    machine.ask(structs.replace(maker(2), only_under=("s3://b",)))
    assert makers(machine.ask(short_beat()).jobs[0]) == ["c1"]


def test_1_a_maker_that_gets_a_trainer_makes_for_no_other_job(machine):
    before = start(machine, 1, 2)
    assert makers(before) == ["c1", "c2"]
    joined = machine.ask(join(0, 1, job="k", node_id="c1")).nodes
    assert [one.node_id for one in joined.nodes] == ["c1"], "its own job is not short"
    after = machine.ask(short_beat(before.version)).jobs[0]
    assert makers(after) == ["c2"]
    report = structs.replace(
        beat_of(maker(1), before.version),
        members=(progress("m0-i1", job="k"),),
    )
    for _ in range(3):  # it is told what it has left a lease after the coordinator's start
        machine.ask(short_beat())
        machine.ask(beat_of(maker(2)))
        assert machine.ask(report).left == ()
        machine.wait(LEASE_S / 3)
    machine.ask(beat_of(maker(2)))
    answer = machine.ask(report)
    assert answer.left == ("j",)
    assert [one.job_id for one in answer.jobs] == ["k"]
    machine.ask(leave("m0-i1", job="k", node_id="c1"))
    assert machine.ask(short_beat()).jobs[0] == before
    assert machine.ask(beat_of(maker(1))).jobs[0] == before


def test_1_a_maker_with_another_address_or_other_workers_is_named_anew(machine):
    version = start(machine, 1).version
    for changed in (maker(1, 16), structs.replace(maker(1, 16), data_address=at(7))):
        assert machine.ask(beat_of(maker(1), version)).jobs == ()
        machine.ask(beat_of(changed, version))
        (told,) = machine.ask(short_beat(version)).jobs
        (named,) = (one for one in told.nodes if one.worker_count)
        assert (named.address, named.worker_count) == (changed.data_address, 16)
        machine.ask(beat_of(maker(1), version))


def test_1_a_node_that_gives_up_its_workers_is_a_maker_no_longer(machine):
    before = start(machine, 1, 2)
    machine.ask(beat_of(maker(1, workers=0), before.version))
    assert makers(machine.ask(short_beat(before.version)).jobs[0]) == ["c2"]


def test_1_a_maker_that_falls_silent_is_named_for_a_lease(machine):
    before = start(machine, 1, 2)
    for _ in range(3):
        machine.ask(beat_of(maker(2)))
        assert machine.ask(short_beat(before.version)).jobs == ()
        machine.wait(LEASE_S / 3)
    after = machine.ask(short_beat(before.version)).jobs[0]
    assert makers(after) == ["c2"]
    # It is back, and knows the job still.
    assert machine.ask(beat_of(maker(1), before.version)).left == ()
    assert machine.ask(short_beat(after.version)).jobs[0].version == before.version


def test_1_a_maker_whose_token_is_for_one_job_makes_for_no_other(machine):
    machine.ask(maker(1, only_job="j"))
    machine.ask(maker(2, only_job="k"))
    assert makers(start(machine, 3)) == ["c1", "c3"]
    machine.ask(short(1))
    assert makers(machine.ask(join(0, 1, job="k", node_id="n1")).nodes) == ["c2", "c3"]
    for number, jobs in ((1, ["j"]), (2, ["k"]), (3, ["j", "k"])):
        only = jobs[0] if len(jobs) == 1 else ""
        told = machine.ask(beat_of(maker(number, only_job=only))).jobs
        assert [one.job_id for one in told] == jobs
    # It asks for the other one, in vain.
    told = machine.ask(beat_of(maker(3, only_job="l"))).jobs
    assert told == ()


def test_2_a_job_is_short_while_one_of_its_nodes_says_so(machine):
    machine.ask(maker(1))
    machine.ask(able(0, workers=4))
    nodes = machine.ask(join(0, 2)).nodes
    assert makers(nodes) == []
    assert machine.ask(beat_of(maker(1))).jobs == ()
    told = machine.ask(short_beat(nodes.version, workers=4)).jobs[0]
    assert makers(told) == ["c1"]
    assert machine.ask(short_beat(told.version, workers=4, is_short=False)).jobs == ()
    waited = 0
    while waited < KEPT_S - 2:
        machine.ask(short_beat(workers=4, is_short=False))
        (still,) = machine.ask(beat_of(maker(1))).jobs
        assert still.version == told.version
        machine.wait(2)
        waited += 2
    machine.wait(2)
    after = machine.ask(short_beat(told.version, workers=4, is_short=False)).jobs[0]
    assert after == nodes
    answer = machine.ask(beat_of(maker(1), told.version))
    assert (answer.jobs, answer.left) == ((), ("j",))


def test_2_other_jobs_do_not_change(machine):
    machine.ask(able(1, workers=4))
    before = machine.ask(join(1, 2, job="k", node_id="n1", member="m")).nodes
    assert makers(start(machine, 1)) == ["c1"]
    report = HeartbeatRequest(able(1, workers=4), (progress("m", job="k"),))
    assert machine.ask(report).jobs[0] is before
    (told,) = machine.ask(beat_of(maker(1))).jobs
    assert told.job_id == "j"


def test_3_many_makers_that_start_together_change_the_nodes_of_a_job_once_a_second(machine):
    version, told = start(machine, 1).version, []
    for number in range(2, 4 * FEW):
        machine.ask(maker(number))
        for nodes in machine.ask(short_beat(version)).jobs:
            told, version = [*told, len(makers(nodes))], nodes.version
    assert told == list(range(2, FEW + 2))
    machine.wait(NAMED_EVERY_S)
    assert len(makers(machine.ask(short_beat(version)).jobs[0])) == 4 * FEW - 1


def steps_of(call):
    """How many steps Python makes in this call."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_4_a_heartbeat_takes_as_many_steps_with_many_nodes_as_with_few():
    taken = []
    for count in (3, 300):
        machine = Machine()
        for number in range(count):
            machine.ask(able(number, workers=4))
            machine.ask(join(number, count, node_id=f"n{number}"))
            machine.ask(maker(number))
        machine.ask(short_beat(workers=4))
        machine.wait(NAMED_EVERY_S)
        version = machine.ask(short_beat(workers=4)).jobs[0].version
        assert len(machine.job().nodes) == 2 * count
        requests = (short_beat(version, workers=4), beat_of(maker(1), version), maker(2))
        taken.append([steps_of(partial(machine.ask, one)) for one in requests])
    assert taken[0] == taken[1]
    assert min(taken[0]) > 100, "the steps are counted"


def test_n2_after_a_restart_makers_are_told_again_once_all_had_time_for_a_heartbeat(machine):
    before = start(machine, 1, 2)
    machine.restart()
    for _ in range(3):
        # Neither is told anything before, although the node is known, and one maker.
        for request in (
            short_beat(before.version),
            short_beat(),
            beat_of(maker(1), before.version),
            beat_of(maker(1)),
        ):
            answer = machine.ask(request)
            assert (answer.jobs, answer.left) == ((), ())
        assert machine.job().nodes == ()
        machine.wait(3)
    machine.ask(maker(2))
    machine.wait(LEASE_S / 3 - 9)
    assert machine.ask(short_beat(before.version)).jobs == ()
    assert machine.ask(short_beat()).jobs == (before,)
    assert machine.ask(beat_of(maker(2))).jobs == (before,)


def test_n3_a_maker_of_a_job_that_the_coordinator_has_lost_is_told_after_a_lease(machine):
    known = (KnownNodes("lost", 7),)
    waited = 0
    while waited < LEASE_S:
        answer = machine.ask(HeartbeatRequest(maker(1), known=known))
        assert answer.left == ()
        machine.wait(5)
        waited += 5
    assert machine.ask(HeartbeatRequest(maker(1), known=known)).left == ("lost",)


def test_a_maker_of_many_jobs_is_told_some_of_them_with_each_heartbeat(machine, monkeypatch):
    monkeypatch.setattr("dataplane.coordinator.nodes._TOLD_MAX", 5)
    machine.ask(maker(1))
    machine.ask(short())
    for number in range(5):
        machine.ask(join(0, 1, job=f"j{number}"))
    known, rounds = (), 0
    while jobs := machine.ask(HeartbeatRequest(maker(1), known=known)).jobs:
        assert len(jobs) <= 2, "of two nodes each"
        known += tuple(KnownNodes(one.job_id, one.version) for one in jobs)
        rounds += 1
    assert rounds == 3
    assert sorted(one.job_id for one in known) == [f"j{number}" for number in range(5)]


def test_numbers_of_no_node_of_ours_are_refused(machine):
    for request, field in (
        (maker(1, 1 << 20), "worker_count"),
        (maker(1, only_job="x" * 300), "only_job"),
    ):
        refusal = machine.ask(request)
        assert isinstance(refusal, ConfigError)
        assert refusal.field == field


NAMES = ("n0", "n1", "n2", "n3")
JOBS = ("j", "k")
LOOPBACK = "127.0.0.1:70"
which, job = st.sampled_from(NAMES), st.sampled_from(JOBS)
launch = st.sampled_from(["i1", "i2"])
EVENTS = st.one_of(
    st.builds(lambda name, address, workers, only: node(
                  name, data_address=address, arena_bytes=workers, worker_count=workers,
                  only_job=only),
              which, st.sampled_from(["", "10.0.0.1:70", "10.0.0.2:70", LOOPBACK]),
              st.integers(0, 2), st.sampled_from(["", "", "j"])),
    st.builds(lambda name, of, incarnation: join(
                  int(name[1]), 4, job=of, node_id=name, incarnation=incarnation),
              which, job, launch),
    st.builds(lambda name, of, incarnation: leave(
                  f"m{name[1]}-{incarnation}", job=of, node_id=name),
              which, job, launch),
    st.tuples(st.just("beat"), which, st.booleans()),
    st.tuples(st.just("beats"), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([2, LEASE_S / 2, KEPT_S])),
    st.just(("restart",)),
)  # fmt: skip


class Recomputed:
    """A machine, and beside it what follows from all that it was told, computed plainly."""

    def __init__(self):
        self.machine = Machine()
        self.began = self.machine.now
        self.registered = {}
        self.heard_at, self.is_short, self.wanted_at = {}, {}, {}
        self.knows = {name: {} for name in NAMES}
        self.restored = {}

    def happen(self, event):
        machine = self.machine
        match event:
            case RegisterNodeRequest():
                machine.ask(event)
                self.registered[event.node_id] = event
                self.hear(event, is_short=not event.worker_count)
            case JoinRequest():
                answer = machine.ask(event)
                if not isinstance(answer, Exception) and self.is_short.get(event.node_id):
                    self.wanted_at[event.job_id] = machine.now
                if getattr(answer, "nodes", None) is not None:
                    self.knows[event.node_id][event.job_id] = answer.nodes.version
            case LeaveRequest():
                machine.ask(event)
            case ("beat", name, is_short):
                self.beat(name, is_short)
            case ("beats", is_short):
                for name in NAMES:
                    self.beat(name, is_short)
            case ("wait", seconds):
                machine.wait(seconds)
            case ("restart",):
                machine.restart()
                self.began = machine.now
                self.heard_at, self.is_short, self.wanted_at = {}, {}, {}
                self.restored = {one.job_id: one.generation for one in self.jobs() if here(one)}

    def hear(self, request, *, is_short):
        self.heard_at[request.node_id] = self.machine.now
        self.is_short[request.node_id] = is_short

    def beat(self, name, is_short):
        """The node renews what it has, and learns what it is told."""
        request = self.registered.get(name)
        if request is None:
            return
        knows = self.knows[name]
        members = tuple(
            progress(one.member_id, found.generation, job=found.job_id)
            for found in self.jobs()
            for one in found.members
            if one.node_id == name and one.state == "joined"
        )
        known = tuple(KnownNodes(*one) for one in knows.items())
        answer = self.machine.ask(
            HeartbeatRequest(request, members, known=known, is_short=is_short)
        )
        renewed = {
            one.job_id
            for one, verdict in zip(members, answer.verdicts, strict=True)
            if verdict.error is None
        }
        is_short = is_short or not request.worker_count
        self.hear(request, is_short=is_short)
        if is_short:
            self.wanted_at |= dict.fromkeys(renewed, self.machine.now)
        knows |= {one.job_id: one.version for one in answer.jobs}
        assert not {one.job_id for one in answer.jobs} & set(answer.left)
        for job_id in answer.left:
            del knows[job_id]

    def jobs(self):
        return self.machine.ask(StatusRequest()).jobs

    @property
    def clock(self):
        return self.machine.now - self.began

    def wants(self, job_id):
        return self.wanted_at.get(job_id, -1e9) + max(KEPT_S, LEASE_S) > self.machine.now

    def expected(self, found):
        """The nodes of a job as they should be told; None if they should not."""
        present = here(found)
        restored = self.restored.get(found.job_id) == found.generation
        lacks = self.clock < LEASE_S and not present <= set(self.heard_at)
        waits = restored and self.wants(found.job_id) and self.clock < LEASE_S / 3
        if lacks or waits:
            return None
        busy = set().union(*(here(one) for one in self.jobs()))
        nodes = [
            NeighbourNode(one.node_id, one.data_address, one.arena_bytes)
            for name in sorted(present & set(self.heard_at))
            if (one := self.registered[name]).data_address
        ]
        nodes += [
            NeighbourNode(name, one.data_address, one.arena_bytes, one.worker_count)
            for name, heard_at in sorted(self.heard_at.items())
            if self.wants(found.job_id) and present and name not in busy
            if (one := self.registered[name]).data_address and one.worker_count
            if heard_at + LEASE_S > self.machine.now and one.only_job in ("", found.job_id)
        ]
        return tuple([one for one in nodes if one.address != LOOPBACK] or nodes)


def here(found):
    return {one.node_id for one in found.members if one.state == "joined"}


@given(events=st.lists(EVENTS, max_size=40))
@settings(max_examples=80)
def test_tables_after_any_history_are_those_that_follow_from_it(events):
    tables = Recomputed()
    for event in events:
        tables.happen(event)
        found = tables.jobs()
        for one in found:
            expected = tables.expected(one)
            assert (one.nodes_version == 0) == (expected is None)
            assert one.nodes == (expected or ())
    # Once jobs that are idle want no makers any more, each node knows its own and no others.
    for _ in range(math.ceil(KEPT_S / (LEASE_S / 2)) + 1):
        tables.happen(("beats", False))
        tables.happen(("wait", LEASE_S / 2))
    tables.happen(("beats", False))
    found = tables.jobs()
    for name, knows in tables.knows.items():
        if name in tables.heard_at:
            assert knows == {
                one.job_id: one.nodes_version
                for one in found
                if name in here(one)
                or any(other.node_id == name and other.worker_count for other in one.nodes)
            }


def test_the_recomputation_sees_makers_come_and_go():
    """So that the test above would not hold of tables without makers."""
    tables, seen = Recomputed(), set()
    maker = node("n1", data_address="10.0.0.1:7078", worker_count=8)
    short = node("n0", data_address="10.0.0.2:7078", worker_count=0)
    for event in (maker, short, join(0, 4), ("beats", True), ("wait", 2), ("beats", True)):
        tables.happen(event)
        seen |= set(itertools.chain.from_iterable(one.nodes for one in tables.jobs()))
    assert {one.node_id: one.worker_count for one in seen} == {"n0": 0, "n1": 8}
    assert set(tables.knows["n1"]) == {"j"}
