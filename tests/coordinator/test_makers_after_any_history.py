"""The nodes of jobs, and what nodes know of them, after any history."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from machine import LEASE_S, Machine
from membership import join, leave, node, progress

from dataplane.coordinator.makers import KEPT_S
from dataplane.rpc.membership import (
    HeartbeatRequest,
    JoinRequest,
    KnownNodes,
    LeaveRequest,
    NeighbourNode,
    RegisterNodeRequest,
    StatusRequest,
)

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
@settings(max_examples=150)
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
