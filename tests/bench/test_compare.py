"""Comparison of two reports: what changed, by how much, and what cannot be compared."""

from __future__ import annotations

import dataclasses
import io

import bench_report
import pytest
from dataplane_bench.model import BenchCase
from dataplane_bench.report import results
from dataplane_bench.report.compare import Pair, compare, gist, show
from dataplane_bench.report.figures import Spread, spread
from dataplane_bench.report.results import CaseResult
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dataplane.model.errors import ConfigError


def of(ours, torch, **case):
    systems = (bench_report.system("dataplane", ours), bench_report.system("torch", torch))
    result = CaseResult(BenchCase("local", "tokens", **case), systems)
    return bench_report.report(bench_report.scenario(result))


def changes(old, new):
    return {one.system: one for one in compare(old, new).changes}


def printed(old, new, width=80):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(old, new, console)
    return console.file.getvalue()


def test_a_report_has_not_changed_against_itself():
    for report in (bench_report.small(), bench_report.starts(), bench_report.full()):
        found = compare(report, report)
        assert found.cautions == found.uncompared == ()
        assert found.changes
        assert all(one.speed.change == 1 and not one.marks for one in found.changes)
        assert {share for share, _ in found.ratios} == {0.0}


def test_speeds_and_ratios_are_compared():
    found = changes(of((100.0, 110.0), (50.0, 50.0)), of((200.0, 220.0), (50.0, 50.0)))
    ours, torch = found["Dataplane"], found["torch DataLoader"]
    assert ours.speed.change == pytest.approx(2)
    assert ours.ratio.change is None
    assert ours.marks == ("faster",)
    assert torch.speed.change == 1
    assert torch.ratio.change == pytest.approx(2)
    assert torch.marks == ("ratio up",)


def test_a_slower_machine_changes_speeds_and_no_ratios():
    found = changes(of((100.0, 110.0), (50.0, 55.0)), of((10.0, 11.0), (5.0, 5.5)))
    assert [one.marks for one in found.values()] == [("slower",), ("slower",)]
    assert found["torch DataLoader"].ratio.change == pytest.approx(1)


def test_differences_within_the_spread_of_rounds_are_not_changes():
    found = changes(of((100.0, 140.0), (50.0, 50.0)), of((130.0, 150.0), (50.0, 50.0)))
    assert found["Dataplane"].speed.change == pytest.approx(140 / 120)
    assert found["Dataplane"].marks == ()


def test_a_single_round_is_not_judged():
    found = changes(of((100.0,), (50.0,)), of((900.0, 900.0), (50.0, 50.0)))
    assert found["Dataplane"].speed.change == 9
    assert found["Dataplane"].marks == ()


def test_starts_that_take_longer_are_slower():
    old = bench_report.starts()
    seconds = bench_report.trials("first_batch_s", (1.0, 1.1, 1.2), by="state")
    (scenario,) = old.scenarios
    (case,) = scenario.cases
    torch, ours = case.systems
    late = dataclasses.replace(case, systems=(torch, dataclasses.replace(ours, trials=seconds)))
    new = bench_report.report(dataclasses.replace(scenario, cases=(late,)))
    found = changes(old, new)["Dataplane"]
    assert found.marks == ("slower",)
    assert found.speed.change == pytest.approx(0.25 / 1.1)
    assert (found.main.old.median, found.main.new.median) == (0.25, 1.1)
    assert "0.250   1.10  0.23x" in printed(old, new)


def test_differences_of_machine_versions_and_options_are_reported():
    old = bench_report.small()
    new = dataclasses.replace(
        old,
        machine={**old.machine, "cpu": "Other", "kernel": "6.1.0"},
        versions={**old.versions, "torch": {"torch": "2.14.0"}},
        options={**old.options, "rounds": 5, "peers": ["torch"]},
    )
    assert compare(old, new).cautions == (
        "machine, cpu: Other, was Example CPU @ 2.0 GHz",
        "versions of torch, torch: 2.14.0, was 2.13.0",
        "option rounds: 5, was 3",
    )
    assert "! machine, cpu: Other" in printed(old, new)


def test_what_only_one_report_has_is_told_and_not_compared():
    first, second = bench_report.small(), bench_report.starts()
    found = compare(first, second)
    assert found.changes == ()
    assert found.uncompared == (
        "only in the new report: resume · 50%",
        "only in the old report: tokens · local",
    )
    assert gist(found) == ["The two reports have no case in common."]
    assert "no case in common" in printed(first, second)


def test_systems_may_come_and_go():
    both = (bench_report.system("torch", (1.0, 1.0)), bench_report.system("grain", (1.0, 1.0)))
    old, new = (
        bench_report.report(bench_report.scenario(CaseResult(BenchCase("a", "tokens"), systems)))
        for systems in (both, (both[0], bench_report.system("ray", (1.0,))))
    )
    found = changes(old, new)
    assert found["Grain"].marks == ("only old",)
    assert found["Ray Data"].marks == ("only new",)
    assert found["torch DataLoader"].marks == ()


def test_a_system_that_fails_now_is_reported():
    old = of((1.0, 1.0), (1.0, 1.0))
    (scenario,) = old.scenarios
    (case,) = scenario.cases
    failing = dataclasses.replace(case.systems[1], error="it broke", trials=())
    case = dataclasses.replace(case, systems=(case.systems[0], failing))
    new = bench_report.report(dataclasses.replace(scenario, cases=(case,)))
    assert changes(old, new)["torch DataLoader"].marks == ("failed, was measured",)
    assert changes(new, old)["torch DataLoader"].marks == ("measured, was failed",)


def test_changed_settings_are_reported():
    old = of((1.0, 1.0), (1.0, 1.0))
    (scenario,) = old.scenarios
    (case,) = scenario.cases
    tuned = dataclasses.replace(case.systems[1], settings={"num_workers": 9})
    case = dataclasses.replace(case, systems=(case.systems[0], tuned))
    new = bench_report.report(dataclasses.replace(scenario, cases=(case,)))
    assert changes(old, new)["torch DataLoader"].marks == ("other settings",)


def test_cases_of_one_name_that_are_not_the_same_are_not_compared():
    old, new = of((1.0,), (1.0,)), of((1.0,), (1.0,), ranks=4)
    found = compare(old, new)
    assert found.changes == ()
    assert found.uncompared == ("tokens · local: a different case: ranks 4, was 1",)


@pytest.mark.parametrize(
    "other", [{"fingerprint": "other"}, {"sample_count": 1}, {"batch_size": 1}]
)
def test_other_samples_are_not_compared(other):
    old = bench_report.small()
    new = dataclasses.replace(old, workloads=(bench_report.workload(**other),))
    assert compare(old, new).uncompared == (
        "tokens · local: different samples, or different batches",
    )


def test_the_summary_says_how_far_ratios_moved():
    old, new = of((100.0, 110.0), (50.0, 50.0)), of((120.0, 132.0), (50.0, 50.0))
    first, second = gist(compare(old, new))
    assert first == "2 of 2 figures changed by more than the spread of either report."
    assert second.startswith("1 ratio to peers changed by 20% in the median, by 20% at most")
    assert second.endswith("(tokens · local, torch DataLoader).")


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_longer_than_the_terminal(width):
    text = printed(bench_report.full(1), bench_report.full(2), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


rounds = st.lists(st.floats(0.01, 1e6), min_size=2, max_size=5)


@given(rounds, rounds)
def test_a_change_beyond_the_spreads_turns_with_its_sides(old, new):
    there, back = (
        Pair(spread(first), spread(second)) for first, second in ((old, new), (new, old))
    )
    assert there.is_beyond == back.is_beyond
    assert there.change * back.change == pytest.approx(1)
    if there.is_beyond:
        assert there.change != 1


def test_changes_of_unknown_values_are_not_reported():
    assert Pair(None, Spread((1.0, 1.0))).change is None
    assert not Pair(Spread((1.0, 1.0)), None).is_beyond
    assert Pair(Spread((0.0, 0.0)), Spread((1.0, 1.0))).change is None


@settings(max_examples=40)
@given(bench_report.damaged())
def test_whatever_can_be_read_can_be_compared(told):
    try:
        report = results.from_json(told, "it")
    except ConfigError:
        return
    printed(report, bench_report.small())
    printed(bench_report.small(), report)
