"""Which node makes which slab: each as many as it can, and none that fails."""

from __future__ import annotations

import heapq
import itertools

import pytest
from scheduler_rates import BATCHES, Node

from dataplane.rpc.lending import StepRange
from dataplane.scheduler import autoscaler, events
from dataplane.scheduler.autoscaler import TRIAL_LOOKS, Autoscaler, Utilization
from dataplane.scheduler.elsewhere import (
    AT_ONCE_MAX,
    CALM_LOOKS,
    COMING_MAX,
    HUNGRY_LOOKS,
    LOST_S,
    SILENT_S,
    Elsewhere,
)
from dataplane.scheduler.records import KnownMaker, Moment

_BUSY = Utilization(2.0, 1.0, is_awaited=True)
_CALM = Utilization(0.5, 1.0, is_awaited=False)


def _made_in(node: Node, seconds: float) -> dict[str, int]:
    before = node.made.copy()
    node.run(node.now + seconds)
    return {name: node.made[name] - before[name] for name in node.made}


@pytest.mark.parametrize(("slower", "least"), [(1, 195), (2, 145), (10, 95)])
def test_a_maker_that_is_faster_makes_more(slower: int, least: int) -> None:
    node = Node({"fast": 0.01, "slow": 0.01 * slower})
    node.run(5)
    made = _made_in(node, 10)
    if slower < 10:  # too slow for its share before the others' slabs are needed
        assert made["fast"] / made["slow"] == pytest.approx(slower, rel=0.25)
    assert sum(made.values()) > least * 10


def test_the_own_workers_are_one_maker_of_a_node_that_is_short_of_them() -> None:
    node = Node({"a": 0.02}, own_s=0.02)
    node.run(5)
    made = _made_in(node, 10)
    assert made["a"] == pytest.approx(made[""], rel=0.25)
    assert not any(node.is_short[:HUNGRY_LOOKS])
    assert node.is_short[-1]


def test_a_new_maker_gets_its_part_at_once() -> None:
    node = Node({"a": 0.02})
    node.run(5)
    node.makers["b"] = type(node.makers["a"])(0.02)
    node.known("a", "b")
    made = _made_in(node, 5)
    assert made["b"] == pytest.approx(made["a"], rel=0.3)


def _known(*took_s: float) -> KnownMaker:
    """A maker that took so long for each slab."""
    maker, now = KnownMaker("a"), 10.0
    for each in took_s:
        maker.begin(BATCHES, now)
        maker.tell(BATCHES, now)
        now += each
        maker.batches = maker.told = 0
        maker.ended(BATCHES, now, each)
    return maker


def test_the_first_slab_of_a_maker_says_nothing_about_the_others() -> None:
    assert _known(4.0).expected_s(0.01, 14.0) == 0.01, "it has opened the dataset"
    assert _known(4.0, 0.04).seconds == pytest.approx(0.01)
    assert _known(4.0, 4.0).seconds == pytest.approx(1.0)


def test_one_late_slab_does_not_make_a_maker_slow() -> None:
    usual = [0.04] * 10
    assert _known(*usual, 4.0).seconds < 0.03
    assert _known(*usual, *[0.4] * 10).seconds > 0.09, "it became slower"


def test_a_maker_that_was_slow_once_is_tried_again() -> None:
    node = Node({"a": 0.04, "b": 5.0})
    node.run(30)
    node.makers["b"].seconds = 0.04
    node.makers["b"].free_at = node.now
    node.run(90)
    made = _made_in(node, 10)
    assert made["b"] > made["a"] / 2


def test_a_maker_that_fails_is_asked_less_and_less_and_the_others_make_its_slabs() -> None:
    node = Node({"a": 0.04, "b": 0.0})
    node.run(45)
    assert node.made["a"] > 45 * 24
    gaps = [
        later - sooner for sooner, later in itertools.pairwise(sorted({*node.makers["b"].asked}))
    ]
    assert gaps[0] >= 0.25
    assert len(gaps) <= 12
    assert max(gaps) >= 10.0
    # After the first failure, one at a time.
    assert node.makers["b"].asked.count(node.makers["b"].asked[-1]) == 1


def test_nobody_is_asked_while_all_makers_fail_and_all_goes_on_once_one_answers() -> None:
    node = Node({"a": 0.0, "b": 0.0})
    node.run(60)
    assert not node.made
    assert len(node.orders) < 40
    node.makers["b"].seconds = 0.01
    node.run(75)
    assert node.made["b"] > 100


def test_a_stall_says_that_a_slab_waits_for_a_node_and_what_that_said_last() -> None:
    node = Node({"a": 0.0}, stall_s=5.0)
    node.run(20)
    assert {stall.progress.stage for stall in node.stalls} == {
        "waiting for a node that makes slabs: a is gone"
    }
    node.known()
    node.stalls.clear()
    node.tell(events.Requested(1, 1000))
    node.run(40)
    assert {stall.progress.stage for stall in node.stalls} == {
        "waiting for a node that makes slabs"
    }
    late = Node({"a": 100.0}, stall_s=5.0)
    late.run(20)
    assert {stall.progress.stage for stall in late.stalls} == {"being made by node a"}


def test_a_maker_that_says_that_it_works_is_asked_again_and_nobody_stalls() -> None:
    node = Node({"a": 15.0}, stall_s=30.0, patience_s=20.0)
    node.run(200)
    assert node.made["a"] >= 2 * BATCHES, "a minute a slab"
    assert not node.stalls


def test_a_maker_is_told_of_its_next_slabs_of_the_stream() -> None:
    node = Node({"a": 0.01})
    node.run(2)
    for order in node.orders[20:40]:
        first = order.steps.first
        starts = [first + BATCHES * which for which in range(1, COMING_MAX + 1)]
        asked = [StepRange(at, BATCHES) for at in starts]
        assert order.coming == tuple(asked[: len(order.coming)])
        assert len(order.coming) >= COMING_MAX // 2


def test_few_of_many_makers_are_asked_by_one_rank_and_others_by_others() -> None:
    many = {f"node-{which}": 0.01 for which in range(500)}
    asked = []
    for dp_rank in range(6):
        node = Node(many, dp_rank=dp_rank)
        node.run(0.3)
        asked.append({order.maker for order in node.orders})
        assert 1 < len(asked[-1]) <= AT_ONCE_MAX
    assert len(set().union(*asked)) > 4 * AT_ONCE_MAX


def test_those_that_fail_make_way_for_others() -> None:
    many = {f"node-{which}": 0.0 for which in range(100)}
    many["node-50"] = 0.01
    node = Node(many)
    node.run(30)
    assert node.made["node-50"] > 500


def test_slabs_of_makers_that_are_gone_are_made_by_the_own_workers() -> None:
    node = Node({"a": 0.02}, own_s=0.02)
    node.run(10)
    node.known()
    assert _made_in(node, 1)["a"] == 0
    assert _made_in(node, 10)[""] > 450


def test_a_maker_that_fails_is_left_alone_longer_each_time_until_it_answers() -> None:
    maker, now = KnownMaker("a"), 10.0
    for pause_s in (0.25, 0.5, 1, 2, 4, 8, 10, 10):
        maker.failed(now, "gone")
        maker.failed(now + pause_s / 2, "another slab of the same moment")
        assert not maker.may_be_asked(now + pause_s - 0.01)
        now += pause_s
        assert maker.may_be_asked(now)
    maker.asked = BATCHES
    assert not maker.may_be_asked(now)
    maker.ended(BATCHES, now, 0.1)
    assert maker.may_be_asked(now)
    maker.failed(now, "gone again")
    assert maker.left_alone_until == now + 0.25


def _looks(elsewhere: Elsewhere, workers: Autoscaler, *looks: Utilization) -> Autoscaler:
    for look in looks:
        workers = workers.after(look)
        elsewhere.look(look, workers)
    return workers


def test_a_node_is_short_once_trainers_wait_and_no_worker_can_be_added() -> None:
    elsewhere, workers = Elsewhere(Autoscaler(1, 2, 2), Moment()), Autoscaler(1, 2, 2)
    _looks(elsewhere, workers, *[_BUSY] * (HUNGRY_LOOKS - 1), _CALM, *[_BUSY] * (HUNGRY_LOOKS - 1))
    assert not elsewhere.is_short
    workers = _looks(elsewhere, workers, _BUSY)
    assert elsewhere.is_short
    workers = _looks(elsewhere, workers, *[_CALM] * (CALM_LOOKS - 1))
    assert elsewhere.is_short
    _looks(elsewhere, workers, _CALM)
    assert not elsewhere.is_short


def test_a_node_is_short_if_another_worker_gained_nothing() -> None:
    workers = Autoscaler(1, 8, 2)
    elsewhere = Elsewhere(workers, Moment())
    for _ in range(autoscaler.HUNGRY_LOOKS + TRIAL_LOOKS + HUNGRY_LOOKS - 1):
        assert not elsewhere.is_short
        workers = _looks(elsewhere, workers, Utilization(workers.count, 1.0, is_awaited=True))
    assert workers.count == 2
    assert elsewhere.is_short


def test_a_node_stays_short_while_its_own_workers_could_not_make_every_slab() -> None:
    helped = Node({"a": 0.04}, own_s=0.08)
    helped.trainer_s = BATCHES / 20  # the own worker makes 12.5 batches a second
    helped.run(100)
    assert all(helped.is_short[HUNGRY_LOOKS:])
    assert sum(_made_in(helped, 10).values()) == pytest.approx(200, rel=0.03)
    helped.trainer_s = BATCHES / 6
    helped.run(200)
    assert not helped.is_short[-1]
    assert _made_in(helped, 10)[""] == pytest.approx(60, rel=0.1)


def test_a_node_without_workers_is_always_short() -> None:
    elsewhere = Elsewhere(Autoscaler(0, 0, 0), Moment())
    _looks(elsewhere, Autoscaler(0, 0, 0), *[_CALM] * 2 * CALM_LOOKS)
    assert elsewhere.is_short


def test_the_rest_of_a_slab_that_was_cut_is_asked_of_the_same_maker() -> None:
    node = Node({"a": 0.01, "b": 0.01})
    node.made_at_once = 1
    node.run(1)
    by_step = {order.steps.first: order.maker for order in node.orders}
    cut = [order for order in node.orders if order.steps.count == BATCHES]
    rests = [(by_step[one.steps.first], by_step.get(one.steps.first + 1)) for one in cut]
    assert len(rests) > 3
    assert all(rest in {maker, None} for maker, rest in rests)


def _stop(node: Node, name: str) -> None:
    """From now on it sends nothing."""
    node.makers[name].seconds = node.makers[name].free_at = 1e9
    node.makers[name].made.clear()
    numbers = {number for number, order in node._asked.items() if order.maker == name}
    node._due = [due for due in node._due if getattr(due[2], "number", 0) not in numbers]
    heapq.heapify(node._due)


def test_what_a_silent_maker_was_asked_for_is_made_by_the_own_workers() -> None:
    node = Node({"a": 0.02}, own_s=0.02)
    node.run(10)
    _stop(node, "a")
    assert _made_in(node, 10)[""] > 200
    assert min(node.given_up) < 10 + SILENT_S + 1.0


def test_a_slab_that_is_lost_is_made_by_another_maker_while_its_own_sends_others() -> None:
    node = Node({"a": 0.02, "b": 0.02})
    node.run(10)
    lost = node._due[[getattr(due[2], "number", 0) in node._asked for due in node._due].index(True)]
    node._due.remove(lost)
    heapq.heapify(node._due)
    maker = node._asked[lost[2].number].maker
    made = _made_in(node, LOST_S + 1.0)
    assert len(node.given_up) == 1
    assert made[maker] > 10


def test_what_the_only_maker_was_asked_for_is_made_by_one_that_comes_after_that() -> None:
    node = Node({"a": 0.02})
    node.run(10)
    _stop(node, "a")
    node.run(40)
    assert not node.given_up, "nobody else can make it"
    node.makers["b"] = type(node.makers["a"])(0.02)
    node.known("a", "b")
    assert _made_in(node, 10)["b"] > 200


def test_a_maker_that_is_slow_but_alive_is_not_given_up() -> None:
    node = Node({"a": 1.5, "b": 1.0})
    node.run(300)
    assert not node.given_up
    assert node.made["a"] > 150
