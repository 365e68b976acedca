"""Nodes that open one dataset for one launch: one makes its manifest, the others get it."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dataplane.coordinator.manifests import (
    ASKS_PER_S,
    FETCH_S,
    MAKER_SHARE,
    READERS_MAX,
    ManifestTurns,
)
from dataplane.model.errors import ConfigError
from dataplane.rpc.sharing import ManifestState, ManifestTurn, NodeWork, ShareManifestRequest

MAKE, WAIT, FETCH = ManifestTurn.MAKE, ManifestTurn.WAIT, ManifestTurn.FETCH
KEEP, ALONE = ManifestTurn.KEEP, ManifestTurn.ALONE
LEASE_S = 30.0
MAKER_S = LEASE_S * MAKER_SHARE
URLS = ("s3://bucket/train/",)


def request(node: int | str, state: ManifestState = ManifestState.WANTED, **others):
    address = f"10.0.0.{node}:1" if isinstance(node, int) else ""
    asked = ShareManifestRequest(str(node), "job", "launch", bytes(16), URLS, address, state)
    return replace(asked, **others)


def held(node: int, fingerprint: str = "f"):
    return request(node, ManifestState.HELD, fingerprint=fingerprint)


def test_the_first_node_makes_it_and_the_others_wait_and_then_fetch():
    shared = ManifestTurns(LEASE_S)
    assert shared.decide(request(1), 0.0).turn is MAKE
    assert shared.decide(request(1), 0.1).turn is MAKE, "a repeated call has the same answer"
    waits = [shared.decide(request(2), now) for now in (0.2, 8.0, 14.0)]
    assert [(one.turn, one.node_id) for one in waits] == [(WAIT, "1")] * 3
    pauses = [one.pause_s for one in waits]
    assert pauses == sorted(pauses), "who waits for long asks less often"
    assert pauses[-1] < 14.0 / 4
    kept = shared.decide(held(1), 20.0)
    found = shared.decide(request(2), 20.0)
    assert (kept.turn, found.turn, found.node_id) == (KEEP, FETCH, "1")
    assert found.address == "10.0.0.1:1"
    assert (kept.line, kept.generation) == (found.line, found.generation)


def test_each_manifest_has_a_connection_of_its_own_even_after_the_coordinator_restarts():
    wanted = (request(1), request(1, incarnation="next"), request(1, name=bytes([7] * 16)))
    turns = [
        shared.decide(each, now)
        for now, shared in ((0.0, ManifestTurns(LEASE_S)), (5.0, ManifestTurns(LEASE_S)))
        for each in (*wanted, *(replace(each, state=ManifestState.HELD) for each in wanted))
    ]
    kept = [turn for turn in turns if turn.turn is KEEP]
    assert len({turn.line for turn in kept}) == len({turn.generation for turn in kept}) == 6


def test_who_waits_hears_how_far_the_maker_is():
    shared = ManifestTurns(LEASE_S)
    work = NodeWork("counting packs", "s3://bucket/train/", 12, 40, "blocks", 60.0)
    shared.decide(request(1), 0.0)
    assert shared.decide(request(2), 0.1).work is None
    shared.decide(request(1, ManifestState.MAKING, work=work), 1.0)
    assert shared.decide(request(2), 1.1).work == work
    with pytest.raises(ConfigError, match="what has"):
        shared.decide(request(1, ManifestState.MAKING, work=replace(work, what="x" * 5000)), 1.2)
    # Another maker begins anew.
    assert shared.decide(request(3), 1.0 + MAKER_S).turn is MAKE
    assert shared.decide(request(2), 1.1 + MAKER_S).work is None


def test_however_many_nodes_wait_for_however_many_sources_a_coordinator_is_not_asked_too_often():
    shared, seconds, sources = ManifestTurns(LEASE_S), 30, 20
    due = [(0.0, node, source) for node in range(2, 202) for source in range(sources)]
    for source in range(sources):
        shared.decide(request(1, name=bytes([source] * 16)), 0.0)
    asked = Counter[int]()
    while due[0][0] < seconds:
        now, node, source = heapq.heappop(due)
        asked[int(now)] += 1
        making = request(1, ManifestState.MAKING, name=bytes([source] * 16))
        shared.decide(making, now)
        answer = shared.decide(request(node, name=bytes([source] * 16)), now)
        assert answer.turn is WAIT
        heapq.heappush(due, (now + answer.pause_s, node, source))
    assert max(asked[second] for second in range(1, seconds)) <= ASKS_PER_S + 1


def test_a_maker_that_is_silent_is_replaced_and_takes_what_the_other_one_has_made():
    shared = ManifestTurns(LEASE_S)
    assert shared.decide(request(1), 0.0).turn is MAKE
    assert shared.decide(request(1, ManifestState.MAKING), 10.0).turn is MAKE
    assert shared.decide(request(2), 10.0 + MAKER_S - 1).turn is WAIT
    assert shared.decide(request(2), 10.0 + MAKER_S).turn is MAKE
    assert shared.decide(request(3), 10.0 + MAKER_S).node_id == "2"
    # It was only slow, and goes on.
    assert shared.decide(request(1, ManifestState.MAKING), 30.0).turn is MAKE
    assert shared.decide(held(2, "theirs"), 31.0).turn is KEEP
    late = shared.decide(held(1, "its own"), 32.0)
    assert (late.turn, late.node_id) == (FETCH, "2")
    assert shared.decide(held(1, "theirs"), 33.0).turn is KEEP


def test_who_fails_does_not_make_it_again_and_after_two_each_makes_its_own():
    shared = ManifestTurns(LEASE_S)
    assert shared.decide(request(1), 0.0).turn is MAKE
    assert shared.decide(request(1, ManifestState.FAILED), 1.0).turn is ALONE
    assert shared.decide(request(2), 1.0).turn is MAKE
    assert shared.decide(request(3, ManifestState.FAILED), 1.5).turn is ALONE, "it made nothing"
    assert shared.decide(request(3), 1.5).turn is WAIT
    assert shared.decide(request(2, ManifestState.FAILED), 2.0).turn is ALONE
    assert shared.decide(request(3), 2.0).turn is ALONE


def test_a_holder_that_gives_nothing_is_not_named_again_and_the_last_one_makes_it_anew():
    shared = ManifestTurns(LEASE_S)
    shared.decide(request(1), 0.0)
    shared.decide(held(1), 1.0)
    shared.decide(request(2), 1.0)
    shared.decide(held(2), 2.0)
    named = shared.decide(request(3), 3.0).node_id
    other = shared.decide(request(3, refused_by=named), 4.0)
    assert (other.turn, other.node_id) == (FETCH, {"1": "2", "2": "1"}[named])
    assert shared.decide(request(3, refused_by=other.node_id), 5.0).turn is MAKE


def test_when_nobody_reaches_anybody_all_make_their_own_instead_of_one_after_the_other():
    shared, nodes = ManifestTurns(LEASE_S), range(1, 101)
    now, refused, waiting, makers = 0.0, {}, set(nodes), []
    while waiting:
        now += 1.0
        for node in sorted(waiting):
            answer = shared.decide(request(node, refused_by=refused.pop(node, "")), now)
            if answer.turn is FETCH:
                refused[node] = answer.node_id
            elif answer.turn is not WAIT:
                waiting.discard(node)
                if answer.turn is MAKE:
                    makers.append(node)
                    shared.decide(held(node), now)
        assert now < 50.0
    assert len(makers) == 2


def test_those_that_had_it_once_and_have_it_no_more_do_not_keep_the_others_from_sharing():
    """The job's ranks have closed it on all nodes, and open it again."""
    shared = ManifestTurns(LEASE_S)
    for times in range(4):
        had, refused = set(), dict.fromkeys(range(1, 9), "")
        for _ in range(30):
            get_it = []
            for node in refused.keys() - had:
                answer = shared.decide(request(node, refused_by=refused[node]), float(times))
                assert answer.turn is not ALONE
                refused[node] = ""
                if answer.turn is FETCH and int(answer.node_id) not in had:
                    refused[node] = answer.node_id
                elif answer.turn is not WAIT:
                    get_it.append(node)
            for node in get_it:
                had.add(node)
                shared.decide(held(node), float(times))
        assert len(had) == 8


def test_a_node_that_asks_again_was_started_again_and_has_it_no_more():
    shared = ManifestTurns(LEASE_S)
    shared.decide(request(1), 0.0)
    shared.decide(held(1), 1.0)
    assert shared.decide(request(1), 2.0).turn is MAKE


def test_launches_views_urls_and_loopback_nodes_share_nothing_with_others():
    shared = ManifestTurns(LEASE_S)
    shared.decide(request(1), 0.0)
    for other in (
        {"job_id": "other"},
        {"incarnation": "other"},
        {"name": b"x" * 16},
        {"urls": ("s3://bucket/else/",)},
        {"data_address": "127.0.0.1:5"},
        {"data_address": "[::1]:5"},
    ):
        assert shared.decide(request(2, **other), 0.0).turn is MAKE, other


def test_a_node_that_others_cannot_reach_gets_it_and_never_makes_it_for_others():
    shared = ManifestTurns(LEASE_S)
    assert shared.decide(request("hidden"), 0.0).turn is ALONE
    shared.decide(request(1), 0.0)
    assert shared.decide(request("hidden"), 1.0).turn is WAIT
    shared.decide(held(1), 2.0)
    assert shared.decide(request("hidden"), 3.0).turn is FETCH


def test_a_holder_has_few_readers_at_a_time_and_each_of_them_has_some_next():
    shared = ManifestTurns(LEASE_S)
    shared.decide(request(1), 0.0)
    shared.decide(held(1), 1.0)
    turns = [shared.decide(request(node), 1.0).turn for node in range(2, 40)]
    assert Counter(turns) == {FETCH: READERS_MAX, WAIT: 38 - READERS_MAX}
    for node in range(2, 2 + READERS_MAX):
        assert shared.decide(held(node), 2.0).turn is KEEP
    turns = [shared.decide(request(node), 2.0).turn for node in range(2 + READERS_MAX, 40)]
    assert set(turns) == {FETCH}
    # Who never came back does not take a place for ever.
    shared = ManifestTurns(LEASE_S)
    shared.decide(request(1), 0.0)
    shared.decide(held(1), 1.0)
    for node in range(2, 2 + READERS_MAX):
        shared.decide(request(node), 1.0)
    assert shared.decide(request(99), 1.0).turn is WAIT
    assert shared.decide(request(99), 1.1 + FETCH_S).turn is FETCH


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", b"short"),
        ("urls", ("s3://b/",) * 100),
        ("data_address", "169.254.169.254:80"),
        ("data_address", "somewhere"),
        ("job_id", ""),
        ("incarnation", "x" * 1000),
        ("refused_by", "x" * 1000),
    ],
)
def test_what_no_node_would_send_is_refused(field, value):
    with pytest.raises(ConfigError):
        ManifestTurns(LEASE_S).decide(request(1, **{field: value}), 0.0)


class Play:
    """Five nodes that do what they are told."""

    def __init__(self) -> None:
        self.turns, self.now = ManifestTurns(LEASE_S), 0.0
        self.making: dict[int, float] = {}
        self.replaced: set[int] = set()
        """Those that make it and were silent for too long, so that another does, too."""
        self.has: dict[int, str] = {}
        self.alone: set[int] = set()
        self.dead: set[int] = set()
        self.made = 0

    def go_on(self, node: int) -> None:
        if node in self.making:
            self._finish(node)
        elif node not in self.has and node not in self.alone:
            self._ask(node)

    def die(self, node: int) -> None:
        self.dead.add(node)
        self.making.pop(node, None)
        self.has.pop(node, None)
        self.alone.discard(node)

    def fail(self, node: int) -> None:
        del self.making[node]
        self.turns.decide(request(node, ManifestState.FAILED), self.now)

    def still_makes(self, node: int) -> None:
        self.making[node] = self.now
        assert self.turns.decide(request(node, ManifestState.MAKING), self.now).turn is MAKE

    def _finish(self, node: int) -> None:
        del self.making[node]
        self.made += 1
        made = f"made {self.made}"
        answer = self.turns.decide(held(node, made), self.now)
        if answer.turn is FETCH:
            self._fetch(node, answer.node_id)
        else:
            self.has[node] = made

    def _fetch(self, node: int, holder: str) -> None:
        found = self.has.get(int(holder))
        if found is None:
            self._ask(node, holder)
        else:
            self.has[node] = found
            assert self.turns.decide(held(node, found), self.now).turn is KEEP

    def _ask(self, node: int, refused_by: str = "") -> None:
        answer = self.turns.decide(request(node, refused_by=refused_by), self.now)
        if answer.turn is MAKE:
            self.replaced &= self.making.keys()
            others = self.making.keys() - self.replaced
            assert all(self.now - self.making[one] >= MAKER_S for one in others), "two make it"
            self.replaced |= others
            self.making[node] = self.now
        elif answer.turn is FETCH:
            assert answer.node_id != str(node)
            self._fetch(node, answer.node_id)
        elif answer.turn is ALONE:
            self.alone.add(node)
        else:
            assert int(answer.node_id) in self.making.keys() | self.has.keys() | self.dead


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.sampled_from(("ask", "ask", "go on", "die", "fail")),
            st.floats(0.0, 8.0),
        ),
        max_size=60,
    )
)
def test_whatever_happens_only_one_that_is_heard_of_makes_it_and_all_go_on(steps):
    """Each node asks, does what it is told, fails or dies; at the end all of them go on."""
    play = Play()
    for node, what, passed in steps:
        play.now += passed
        if what == "die":
            play.die(node)
        elif node not in play.making:
            play.go_on(node)
        elif what == "fail":
            play.fail(node)
        elif what == "go on":
            play.go_on(node)
        else:
            play.still_makes(node)
    for _ in range(12):
        play.now += MAKER_S
        for node in (1, 2, 3, 4, 5):
            play.go_on(node)
    assert play.has.keys() | play.alone == {1, 2, 3, 4, 5}
