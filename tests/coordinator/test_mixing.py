"""Other weights of a running job, by the invariants of coordinator/mixing.py and of
node/member.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine import LEASE_S, Machine, other
from membership import beat, join, leave, progress
from msgspec import structs

from dataplane.coordinator import mixing
from dataplane.coordinator.roster import Roster
from dataplane.model.changes import EpochSteps
from dataplane.model.config import MixtureSpec, SourceSpec
from dataplane.model.errors import ConfigError, DataplaneError
from dataplane.model.ledger import LedgerPosition
from dataplane.model.records import End, Region
from dataplane.node.places import Following
from dataplane.rpc.membership import (
    ChangeRequest,
    LedgerRequest,
    MixAsked,
    MixPromise,
    MixProposal,
    StatusRequest,
    StepsSkipped,
)
from dataplane.rpc.messages import Batch, Slab, WeightsAsked

SPEC = other(
    mixture=MixtureSpec((SourceSpec("web", "f", 1 << 31), SourceSpec("code", "g", 1 << 31)))
)
BATCH = SPEC.global_batch
WEIGHTS = ("code", "web"), (0.75, 0.25)


def mix(request: str = "r", step: int | None = None, epoch: int | None = None, **more: Any) -> Any:
    asked = MixAsked(request, *WEIGHTS, step, epoch)
    return ChangeRequest("j", "me@here", mix=structs.replace(asked, **more))


def arrive(machine: Machine, rank: int = 0, incarnation: str = "i1") -> tuple[Any, ...]:
    """The entries of other weights that a member is told when it joins."""
    answer = machine.ask(join(rank, 2, incarnation=incarnation, spec=SPEC))
    return tuple(one for one in answer.entries if one.kind == "mix")


def say(
    machine: Machine, rank: int, cursor: int, promised: MixPromise | None = None, known: int = 0
) -> Any:
    """A member's heartbeat, and the verdict."""
    told = progress(f"m{rank}-i1", 1, 0, cursor, began=(0, 0))
    told = structs.replace(told, promise=promised, known_entry=known)
    return machine.ask(beat(told)).verdicts[0]


def promise(cursor: int, request: str = "r", **more: Any) -> MixPromise:
    return MixPromise(request, LedgerPosition(0, cursor), **more)


def test_1_the_place_is_the_furthest_that_a_member_has_promised(machine):
    arrive(machine), arrive(machine, 1)
    asked = machine.ask(mix())
    assert (asked.entry, asked.is_running, asked.awaited_ranks) == (None, True, (0, 1))
    for rank in (0, 1):
        assert say(machine, rank, 32).proposal == MixProposal("r", None, *WEIGHTS)
    assert say(machine, 0, 64, promise(320)).entries == ()
    assert machine.ask(mix()).awaited_ranks == (1,)
    verdict = say(machine, 1, 96, promise(160))
    (entry,) = verdict.entries
    assert (entry.kind, entry.position, entry.by) == ("mix", LedgerPosition(0, 320), "me@here")
    assert '"weights":{"code":0.75,"web":0.25}' in entry.payload
    assert verdict.proposal is None
    machine.restart()
    assert machine.ask(mix()).entry == entry == say(machine, 0, 64).entries[0]
    assert say(machine, 0, 64, known=entry.seq).entries == ()
    assert arrive(machine) == arrive(machine, 0, "i2") == (entry,)
    assert machine.ask(LedgerRequest("j")).entries[-2].kind in {"mix", "start"}


def test_1_members_hear_of_an_entry_only_when_it_is_on_disk(machine):
    arrive(machine), arrive(machine, 1)
    machine.ask(mix())
    say(machine, 0, 0, promise(32))
    told = structs.replace(progress("m1-i1"), promise=promise(32))
    decision = machine.state.decide(beat(told), machine.now)
    assert decision.durable
    assert decision.answer.verdicts[0].entries
    later = machine.state.decide(beat(progress("m0-i1")), machine.now)
    assert later.durable
    quiet = structs.replace(progress("m0-i1"), known_entry=9)
    assert not machine.state.decide(beat(quiet), machine.now).durable


def test_2_who_joins_again_promises_again(machine):
    arrive(machine), arrive(machine, 1)
    machine.ask(mix())
    say(machine, 0, 0, promise(32))
    arrive(machine)
    assert machine.ask(mix()).awaited_ranks == (0, 1)
    # What the node says that it was at before counts no more.
    late = structs.replace(progress("m1-i1"), promise=promise(64))
    machine.ask(beat(late, node_id="elsewhere"))
    assert machine.ask(mix()).awaited_ranks == (0, 1)


def test_2_a_promise_that_was_on_its_way_when_its_member_joined_again_does_not_count(machine):
    arrive(machine)
    machine.ask(mix())
    say(machine, 0, 0)
    arrive(machine)  # over another connection
    late = say(machine, 0, 0, promise(32))
    assert late.entries == ()
    assert late.proposal.request != "r"
    (entry,) = say(machine, 0, 64, promise(96, late.proposal.request)).entries
    assert entry.position == LedgerPosition(0, 96)
    assert machine.ask(mix()).entry == entry


def test_2_a_promise_that_was_on_its_way_when_its_member_left_and_came_back_does_not_count(machine):
    arrive(machine), arrive(machine, 1)
    machine.ask(mix())
    say(machine, 0, 0, promise(32))
    machine.ask(leave("m0-i1", lost=True))
    arrive(machine)
    say(machine, 0, 0, promise(32))
    assert machine.ask(mix()).awaited_ranks == (0, 1)
    proposal = say(machine, 0, 0).proposal
    assert say(machine, 0, 0, promise(64, proposal.request)).entries == ()
    (entry,) = say(machine, 1, 0, promise(32, proposal.request)).entries
    assert entry.position == LedgerPosition(0, 64)


def test_2_who_may_not_join_is_not_awaited(machine):
    arrive(machine)
    machine.ask(mix())
    refused = join(0, 4, member="other", spec=SPEC)
    assert isinstance(machine.ask(refused), DataplaneError)
    assert say(machine, 0, 0, promise(32)).entries


def test_3_a_proposal_ends_with_its_launch(machine):
    arrive(machine)
    machine.ask(mix())
    machine.ask(leave("m0-i1"))
    first = machine.ask(mix()).entry
    second = machine.ask(mix("s")).entry
    assert first.seq < second.seq
    arrive(machine, 0, "i2")
    told = structs.replace(progress("m0-i2", 2), promise=promise(160))
    verdict = machine.ask(beat(told)).verdicts[0]
    assert verdict.proposal is None
    assert verdict.entries[-1] == second


def test_3_the_end_of_a_lease_is_on_disk_with_the_entry_that_follows(machine):
    arrive(machine)
    say(machine, 0, 48)
    machine.now += 2 * LEASE_S
    for _ in range(8):  # the machine's clock of leases goes on by events
        machine.now += LEASE_S / 3
        machine.ask(StatusRequest("j"))
    assert isinstance(machine.ask(mix()), ConfigError)  # the member may come back
    machine.now += mixing.PROPOSED_S
    assert machine.ask(mix()).entry is not None
    before = machine.ask(LedgerRequest("j")).entries
    machine.restart()
    assert machine.ask(LedgerRequest("j")).entries == before
    assert [one.kind for one in before] == ["start", "end", "mix"]


def test_while_all_nodes_have_just_died_weights_are_refused_at_once(machine):
    arrive(machine)
    say(machine, 0, 48)
    machine.restart()
    machine.ask(mix())
    for _ in range(5):
        machine.wait(LEASE_S / 3)
        machine.ask(StatusRequest("j"))
    refused = machine.ask(mix())
    assert isinstance(refused, ConfigError)
    assert "ranks of job 'j' have just lost their nodes" in str(refused)
    assert "or in 40 s for the next launch" in str(refused)
    arrive(machine)
    machine.ask(mix())
    proposal = say(machine, 0, 96).proposal
    assert machine.ask(mix()).awaited_ranks == (0,)
    (entry,) = say(machine, 0, 96, promise(160, proposal.request)).entries
    assert entry.position == LedgerPosition(0, 160)
    assert machine.ask(mix()).entry == entry


def test_a_place_beyond_all_epochs_is_refused(machine):
    arrive(machine)
    far = LedgerPosition(0, 1 << 63)
    for told in ({"cursor": 1 << 63}, {"began": far}, {"promise": MixPromise("r", far)}):
        answer = machine.ask(beat(structs.replace(progress("m0-i1"), **told)))
        assert isinstance(answer, ConfigError)
        assert "beyond the end" in str(answer)
    assert machine.ask(beat(progress("m0-i1"))).verdicts[0].error is None


@pytest.mark.parametrize("is_read", [True, False])
def test_weights_from_a_step_that_no_job_reaches_are_refused(machine, is_read):
    arrive(machine)
    if not is_read:
        machine.ask(leave("m0-i1"))
    before = machine.ask(LedgerRequest("j")).entries
    for far in ({"step": 1 << 60}, {"step": (1 << 62) // BATCH}, {"step": 0, "epoch": 1 << 62}):
        assert "is beyond the end of any job" in str(machine.ask(mix(**far)))
    assert machine.ask(LedgerRequest("j")).entries == before


def test_4_a_heartbeat_looks_at_one_member_while_a_proposal_lasts(machine, monkeypatch):
    for rank in (0, 1):
        arrive(machine, rank)
    machine.ask(mix())
    monkeypatch.setattr(Roster, "joined", lambda _: pytest.fail("all members are looked at"))
    assert say(machine, 0, 0, promise(32)).entries == ()
    assert say(machine, 1, 0, promise(32)).entries


def test_3_a_restart_forgets_what_was_not_decided(machine):
    arrive(machine), arrive(machine, 1)
    machine.ask(mix())
    say(machine, 0, 0, promise(32))
    machine.restart()
    assert say(machine, 0, 0, promise(32)).proposal is None
    assert say(machine, 1, 0, promise(32)).entries == ()
    assert machine.ask(mix()).awaited_ranks == (0, 1)


def test_those_that_are_lost_need_not_promise(machine):
    arrive(machine), arrive(machine, 1)
    machine.ask(mix())
    for _ in range(int(LEASE_S)):
        machine.wait(1)
        say(machine, 0, 0, promise(32))
    assert machine.ask(mix()).entry.position.cursor == 32


def test_a_job_that_nobody_reads_has_them_from_where_it_is(machine):
    arrive(machine)
    say(machine, 0, 48)
    machine.ask(leave("m0-i1"))
    made = machine.ask(mix())
    assert (made.is_running, made.entry.position) == (False, LedgerPosition(0, 48))
    assert machine.ask(mix("s", step=1)).entry.position.cursor == BATCH
    assert machine.ask(mix("t", step=1, epoch=3)).entry.position == LedgerPosition(3, BATCH)


@pytest.mark.parametrize(
    ("promised", "why"),
    [
        (
            promise(64, is_late=True),
            "earliest step that can have other weights is step 4 of epoch 0",
        ),
        (promise(0, refusal="it is a stone"), "rank 1 of job 'j' cannot read these weights: it is"),
        (None, "ranks 1 of job 'j' have not agreed to other weights within 60 s"),
    ],
)
def test_a_refusal_is_told_once_and_ends_the_proposal(machine, monkeypatch, promised, why):
    monkeypatch.setattr(mixing, "PROPOSED_S", 60.0)
    arrive(machine), arrive(machine, 1)
    machine.ask(mix(step=2))
    say(machine, 0, 0, promise(32))
    if promised is None:
        for _ in range(61):
            machine.wait(1)
            say(machine, 1, 0)
            verdict = say(machine, 0, 0, promise(32))
    else:
        verdict = say(machine, 1, 0, promised)
    assert (verdict.proposal, verdict.entries) == (None, ())
    refused = machine.ask(mix(step=2))
    assert isinstance(refused, ConfigError)
    assert why in str(refused)
    assert machine.ask(mix("s")).awaited_ranks == (0, 1)


def test_one_proposal_at_a_time(machine):
    arrive(machine)
    machine.ask(mix())
    assert "try again in a few seconds" in str(machine.ask(mix("s")))
    for wrong in (
        {"sources": ("web", "web")},
        {"weights": (1.0,)},
        {"weights": (0.0, 0.0)},
        {"sources": ("web", "news")},
        {"request": ""},
    ):
        assert isinstance(machine.ask(mix(**wrong)), ConfigError)
    both = structs.replace(mix(), skip=StepsSkipped(1, 2))
    assert "one change" in str(machine.ask(both))


class Member:
    """A member of a node, and its trainer, which takes slab after slab."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.rank, self.cursor = machine, rank, 0
        self.taken: list[tuple[int, int]] = []
        self.known = self.asked = 0
        self.has_begun = True
        self.join()

    def join(self) -> None:
        """Its trainer's stream is opened at a node, maybe another one."""
        entries = arrive(self.machine, self.rank)
        self.known = max((one.seq for one in entries), default=0)
        self.following = Following(entries, BATCH, lambda _: None, follows=True)
        self.open()

    def open(self) -> None:
        self.start, self.asked = self.cursor, 0
        steps = EpochSteps(1 << 40, self.start, BATCH, End.DROP)
        self.answer = self.following.sending(0, steps, self.known, self.hear)

    def hear(self, _number: int, body: Any) -> None:
        self.asked = 0
        if isinstance(body, WeightsAsked):
            self.known = max(one.seq for one in body.entries)
            self.open()
            return
        self.cursor = self.start + (body.batches[-1].step + 1) * BATCH
        self.taken.append((self.cursor, self.known))

    def take(self, steps: int) -> None:
        """Ask for a slab of so many steps, unless one is awaited."""
        self.has_begun = True
        if self.asked:
            return
        self.asked, first = 1, (self.cursor - self.start) // BATCH
        batches = tuple(Batch(step, BATCH, BATCH) for step in range(first, first + steps))
        self.answer(1, Slab(1, 1, Region(0, 0), batches, b""))

    def beat(self, per_s: float) -> None:
        following = self.following
        verdict = say(
            self.machine, self.rank, self.cursor, following.promise, following.known_entry
        )
        assert verdict.error is None
        following.heard(verdict, LedgerPosition(0, self.cursor) if self.has_begun else None, per_s)


@pytest.mark.parametrize("outcome", ["decided", "forgotten"])
def test_1_what_is_behind_a_promise_waits_for_the_outcome(machine, outcome):
    first, second = Member(machine, 0), Member(machine, 1)
    machine.ask(mix())
    first.take(2)
    first.beat(0)
    first.take(1)
    assert (first.asked, first.cursor) == (1, 2 * BATCH)
    if outcome == "forgotten":
        machine.restart()
        first.beat(0)
        assert (first.asked, first.cursor, first.known) == (0, 3 * BATCH, 0)
        return
    for each in (second, second, first, first):
        each.beat(0)
    entry = machine.ask(mix()).entry
    assert entry.position.cursor == 2 * BATCH
    assert (first.asked, first.cursor, first.known) == (0, 2 * BATCH, entry.seq)
    first.take(1)
    assert first.cursor == 3 * BATCH


def test_2_who_has_not_begun_promises_nothing(machine):
    """A pass may begin anywhere, such as where a state was taken."""
    first, second = Member(machine, 0), Member(machine, 1)
    machine.ask(mix())
    second.has_begun, second.cursor = False, 50 * BATCH
    for _ in range(3):
        first.beat(0), second.beat(0)
    assert machine.ask(mix()).awaited_ranks == (1,)
    second.open()
    second.take(1)
    second.beat(0), second.beat(0)
    assert machine.ask(mix()).entry.position.cursor == 51 * BATCH
    machine.ask(mix("s"))
    second.has_begun = False
    for _ in range(61):
        machine.wait(1)
        first.beat(0), second.beat(0)
    assert "ranks 1 of job 'j' have not agreed" in str(refused := machine.ask(mix("s")))
    assert "these ranks have not begun to read" in str(refused)


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.just("beat"), st.integers(0, 2), st.sampled_from([0, 7])),
        st.tuples(st.just("take"), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.just("beat"), st.integers(0, 2), st.sampled_from([0, 7])),
        st.tuples(st.just("mix"), st.integers(0, 3), st.integers(-1, 12)),
        st.tuples(st.sampled_from(["join", "restart"]), st.integers(0, 2), st.sampled_from([0, 7])),
    ),
    max_size=60,
)


@given(MOVES)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_1_no_member_reads_beyond_a_place_before_it_knows_the_weights(moves):
    machine = Machine()
    members = [Member(machine, rank) for rank in range(2)]
    for what, which, number in moves:
        member = members[which % 2]
        if what == "mix":
            machine.ask(mix(f"r{which}", step=number if number >= 0 else None))
        elif what == "restart":
            machine.restart()
        elif what == "take":
            member.take(number)
        elif what == "beat":
            member.beat(number)
        else:
            member.join()
            member.has_begun = number == 0
    for member in members:
        member.take(1)
    for _ in range(4):  # nobody waits for ever
        for member in members:
            member.beat(0)
    for member in members:
        member.take(1)
        member.take(1)
        assert not member.asked
    entries = [
        one for one in machine.ask(LedgerRequest("j")).entries if one.kind == "mix"
    ]  # fmt: skip
    for entry in entries:
        for member in members:
            behind = [known for end, known in member.taken if end > entry.position.cursor]
            assert all(known >= entry.seq for known in behind)
