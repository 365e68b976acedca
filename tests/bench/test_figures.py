"""Figures computed from trials, checked by hand and at random; reports survive serialization."""

from __future__ import annotations

import dataclasses
import io
import math
import statistics

import bench_report
import pytest
from dataplane_bench.model import BenchCase, Mode, StorageKind
from dataplane_bench.report import results
from dataplane_bench.report.compare import compare, gist, show
from dataplane_bench.report.figures import Spread, Standing, case_figures, known, ratio_of
from dataplane_bench.report.results import CaseResult, HardwareBound, Tried
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dataplane.model.errors import ConfigError


def only(report):
    (case,) = case_figures(report)
    return case, {one.result.name: one for one in case.systems}


def of(*systems, bounds=(), **case):
    report = bench_report.report(
        bench_report.scenario(CaseResult(BenchCase("local", "tokens", **case), systems, bounds))
    )
    return only(report)


def test_figures_are_medians_of_the_rounds():
    _, found = only(bench_report.small())
    ours = found["dataplane"]
    assert ours.samples_per_s == Spread((400.0, 360.0, 550.0))
    assert ours.samples_per_s.median == 400
    assert (ours.samples_per_s.low, ours.samples_per_s.high) == (360, 550)
    assert ours.samples_per_s.relative == pytest.approx(150 / 400)
    assert ours.gb_per_s == pytest.approx(400 * 4000 / 1e9)


def test_a_ratio_is_taken_within_each_round_and_then_its_median():
    _, found = only(bench_report.small())
    assert found["torch"].ratio.values == pytest.approx((4.0, 3.0, 5.0))
    assert found["grain"].ratio.values == pytest.approx((2.0, 0.9, 550 / 210))
    assert found["grain"].ratio.median == pytest.approx(2.0)
    assert found["dataplane"].ratio is None
    assert found["noop"].ratio is None


def test_the_tightest_bound_of_the_same_round_is_what_counts():
    case, found = only(bench_report.small())
    assert [name for name, _ in case.bounds] == ["gather", "server"]
    assert found["dataplane"].of_bound == pytest.approx(
        statistics.median((400 / 800, 360 / 1200, 550 / 1000))
    )


def test_systems_are_sorted_by_speed_and_the_harness_comes_last():
    case, _ = only(bench_report.small())
    names = [one.result.name for one in case.measured]
    assert names == ["webdataset", "dataplane", "grain", "torch", "noop"]
    assert [one.result.name for one in case.absent] == ["ray", "litdata"]


def test_a_system_with_wrong_samples_has_no_ratio_and_is_not_the_best_peer():
    case, found = only(bench_report.small())
    assert found["webdataset"].samples_per_s.median == 900
    assert found["webdataset"].ratio is None
    assert case.best_peer.result.name == "grain"


def test_there_are_no_ratios_if_our_own_samples_differ():
    ours = bench_report.system("dataplane", (2.0,), same_samples=False)
    case, found = of(ours, bench_report.system("torch", (1.0,)))
    assert found["torch"].ratio is None
    assert case.best_peer.result.name == "torch"


def test_what_refused_or_failed_has_no_figures_but_a_reason():
    _, found = only(bench_report.small())
    assert found["ray"].standing is Standing.REFUSED
    assert found["litdata"].standing is Standing.FAILED
    assert found["litdata"].reason.startswith("RuntimeError")
    for name in ("ray", "litdata"):
        figures = dataclasses.asdict(dataclasses.replace(found[name], result=None))
        told = {"result", "standing", "reason", "by"}
        assert all(value is None for field, value in figures.items() if field not in told)


def test_a_system_that_failed_in_a_later_round_has_no_figures():
    late = bench_report.system("torch", (1.0, 2.0), error="it broke in round 3")
    _, found = of(late, bench_report.system("dataplane", (1.0, 2.0, 3.0)))
    assert found["torch"].speed is None
    assert found["torch"].standing is Standing.FAILED


def test_rounds_are_paired_by_their_number_and_not_by_their_place():
    ours = bench_report.system("dataplane", (10.0, 20.0, 30.0))
    late = bench_report.system("torch", (None, 10.0, 10.0))
    bounds = (HardwareBound("memory", (100.0, 100.0, 100.0)),)
    _, found = of(ours, late, bounds=bounds)
    assert found["torch"].ratio.values == (2.0, 3.0)
    assert found["torch"].of_bound == pytest.approx(0.1)


def test_starts_are_compared_by_their_seconds():
    case, found = only(bench_report.starts())
    assert case.is_start
    assert [one.result.name for one in case.measured] == ["dataplane", "torch"]
    assert found["dataplane"].first_batch_s.median == 0.25
    assert found["dataplane"].main is found["dataplane"].first_batch_s
    assert found["torch"].ratio.values == pytest.approx((10.0, 8.0, 4.0))
    assert (found["dataplane"].by, found["torch"].by) == ("state", "replay")
    assert found["torch"].samples_per_s is None


def test_a_round_far_from_the_median_is_noisy():
    _, found = only(bench_report.small())
    assert found["grain"].is_noisy
    assert not found["torch"].is_noisy
    assert not found["noop"].is_noisy


def test_the_headroom_of_the_harness_is_of_the_fastest_system():
    case, _ = only(bench_report.small())
    assert case.harness_headroom == pytest.approx(5000 / 900)


def test_the_trial_that_is_drawn_is_of_the_median_round():
    _, found = only(bench_report.small())
    assert found["dataplane"].typical["samples_per_s"] == 400
    even, _ = of(bench_report.system("torch", (4.0, 1.0)))
    assert even.measured[0].typical["samples_per_s"] == 1


@pytest.mark.parametrize("value", [None, "12", True, math.nan, math.inf, [1]])
def test_values_that_are_not_numbers_are_unknown(value):
    assert known(value) is None
    _, found = of(bench_report.system("torch", trials=({"samples_per_s": value},)))
    assert found["torch"].standing is Standing.NOT_MEASURED


rates = st.lists(st.floats(0.001, 1e9), min_size=1, max_size=7)


@given(rates, rates)
def test_a_ratio_lies_between_the_extremes_and_turns_with_its_sides(ours, theirs):
    mine, peer = bench_report.system("dataplane", ours), bench_report.system("torch", theirs)
    case = BenchCase("local", "tokens")
    ratio, turned = ratio_of(mine, peer, case), ratio_of(peer, mine, case)
    assert len(ratio.values) == min(len(ours), len(theirs))
    assert min(ours) / max(theirs) <= ratio.median * (1 + 1e-9)
    assert ratio.median <= max(ours) / min(theirs) * (1 + 1e-9)
    assert ratio.low == pytest.approx(1 / turned.high)
    assert ratio_of(mine, mine, case).median == 1


@pytest.mark.parametrize(
    "report",
    [bench_report.small(), bench_report.starts(), bench_report.full(), bench_report.report()],
)
def test_a_report_is_the_same_after_being_written_and_read(report, tmp_path):
    path = tmp_path / "report.json"
    results.write(report, path)
    assert results.read(path) == report


names = st.text(max_size=20)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    leaves | names, lambda inner: st.lists(inner) | st.dictionaries(names, inner), max_leaves=5
)
mappings = st.dictionaries(names, values, max_size=4)
systems = st.builds(
    results.SystemResult,
    *(names, names, names, names),
    settings=mappings,
    sweep=st.lists(st.builds(Tried, mappings, st.floats(0, 1e9), names), max_size=2).map(tuple),
    same_samples=st.none() | st.booleans(),
    trials=st.lists(mappings, max_size=3).map(tuple),
    refused=names,
    error=names,
)
cases = st.builds(
    CaseResult,
    st.builds(
        *(BenchCase, names, names, st.sampled_from(Mode), st.sampled_from(StorageKind)),
        ranks=st.integers(1, 9),
        step_ms=st.floats(0, 1e3),
    ),
    st.lists(systems, max_size=3).map(tuple),
    st.lists(
        st.builds(HardwareBound, names, st.lists(st.floats(0, 1e9)).map(tuple)), max_size=2
    ).map(tuple),
)


def test_what_json_cannot_say_is_unknown_after_reading(tmp_path):
    system = bench_report.system("torch", (math.inf, 2.0))
    report = bench_report.report(
        bench_report.scenario(
            CaseResult(
                BenchCase("local", "tokens"), (system,), (HardwareBound("memory", (math.nan,)),)
            )
        )
    )
    path = tmp_path / "report.json"
    results.write(report, path)
    assert "Infinity" not in path.read_text()
    case, found = only(results.read(path))
    assert found["torch"].samples_per_s.values == (2.0,)
    assert case.bounds == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a report"),
        ("[]", "not a report"),
        ('"text"', "not a report"),
        ("{}", "missing required field `created`"),
        ('{"version": 1}', "missing required field `created`"),
        ('{"version": 99}', "version 99"),
        ("\xff\xfe", "not a report"),
        ("[" * 100_000, "not a report"),
        ('{"created": 3}', r"got `int` - at `\$\.created`"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what_is_wrong(text, told, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=told) as caught:
        results.read(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        results.read(tmp_path / "none.json")


@given(bench_report.damaged())
def test_a_damaged_report_is_refused_or_still_consistent(told):
    try:
        report = results.from_json(told, "it")
    except ConfigError:
        return
    case_figures(report)


def compared(ours, torch, **case):
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
    found = changes(compared((100.0, 110.0), (50.0, 50.0)), compared((200.0, 220.0), (50.0, 50.0)))
    ours, torch = found["Dataplane"], found["torch DataLoader"]
    assert ours.speed.change == pytest.approx(2)
    assert ours.ratio.change is None
    assert ours.marks == ("faster",)
    assert torch.speed.change == 1
    assert torch.ratio.change == pytest.approx(2)
    assert torch.marks == ("ratio up",)


def test_differences_within_the_spread_of_rounds_are_not_changes():
    found = changes(compared((100.0, 140.0), (50.0, 50.0)), compared((130.0, 150.0), (50.0, 50.0)))
    assert found["Dataplane"].speed.change == pytest.approx(140 / 120)
    assert found["Dataplane"].marks == ()


def test_a_single_round_is_not_judged():
    found = changes(compared((100.0,), (50.0,)), compared((900.0, 900.0), (50.0, 50.0)))
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
    old = compared((1.0, 1.0), (1.0, 1.0))
    (scenario,) = old.scenarios
    (case,) = scenario.cases
    failing = dataclasses.replace(case.systems[1], error="it broke", trials=())
    case = dataclasses.replace(case, systems=(case.systems[0], failing))
    new = bench_report.report(dataclasses.replace(scenario, cases=(case,)))
    assert changes(old, new)["torch DataLoader"].marks == ("failed, was measured",)
    assert changes(new, old)["torch DataLoader"].marks == ("measured, was failed",)


def test_changed_settings_are_reported():
    old = compared((1.0, 1.0), (1.0, 1.0))
    (scenario,) = old.scenarios
    (case,) = scenario.cases
    tuned = dataclasses.replace(case.systems[1], settings={"num_workers": 9})
    case = dataclasses.replace(case, systems=(case.systems[0], tuned))
    new = bench_report.report(dataclasses.replace(scenario, cases=(case,)))
    assert changes(old, new)["torch DataLoader"].marks == ("other settings",)


def test_cases_of_one_name_that_are_not_the_same_are_not_compared():
    old, new = compared((1.0,), (1.0,)), compared((1.0,), (1.0,), ranks=4)
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
    old, new = (
        compared((100.0, 110.0), (50.0, 50.0)),
        compared((120.0, 132.0), (50.0, 50.0)),
    )
    first, second = gist(compare(old, new))
    assert first == "2 of 2 figures changed by more than the spread of either report."
    assert second.startswith("1 ratio to peers changed by 20% in the median, by 20% at most")
    assert second.endswith("(tokens · local, torch DataLoader).")


def test_no_line_is_longer_than_the_terminal():
    text = printed(bench_report.full(1), bench_report.full(2))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@given(bench_report.damaged())
def test_whatever_can_be_read_can_be_compared(told):
    try:
        report = results.from_json(told, "it")
    except ConfigError:
        return
    printed(report, bench_report.small())
    printed(bench_report.small(), report)
