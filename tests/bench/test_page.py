"""The page in a real browser: it shows its plots, and loads nothing from elsewhere."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import bench_report
import pytest
from browser import open_page
from dataplane_bench.model import BenchCase
from dataplane_bench.report import axes, page, results
from dataplane_bench.report.figures import case_figures
from dataplane_bench.report.results import CaseResult, HardwareBound, Tried
from hypothesis import given
from hypothesis import strategies as st

from dataplane.model.errors import ConfigError

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;"
    "<b>bold</b><a href='https://example.com'>link</a>"
)
SHOWN = {
    "tokens": ("local", "s3-steady"), "resume": ("50%",), "compute": ("5 ms a step",),
}  # fmt: skip
"""Cases of each kind, by scenario: a browser takes 0.2 s for a plot."""


@pytest.fixture(scope="module")
def report():
    found = bench_report.full()
    scenarios = [
        dataclasses.replace(
            one,
            cases=tuple(case for case in one.cases if case.case.label in SHOWN[one.name]),
        )
        for one in found.scenarios
        if one.name in SHOWN
    ]
    assert [len(one.cases) for one in scenarios] == [2, 1, 1]
    return dataclasses.replace(found, scenarios=tuple(scenarios))


@pytest.fixture(scope="module")
def opened(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    page.write(report, folder / "report.html")
    return open_page(folder / "report.html")


def drawings(text):
    inside = re.search(r'id="drawings">(.*?)</script>', text, re.DOTALL).group(1)
    return json.loads(inside)


def plot(opened, name):
    (found,) = opened.page.all(id=name)
    return found


def labels(element, axis):
    return [one.text for one in element.all("g", f"{axis}tick")]


def drawn(case):
    return [one for one in case.measured if not one.is_harness]


def test_the_page_logs_no_script_error(opened):
    assert opened.said == []


def test_every_plot_is_drawn(opened, report):
    told = drawings(page.render(report))
    (body,) = opened.page.all("body")
    assert body.attributes["data-drawn"] == str(len(told))
    places = opened.page.all(css="plot")
    assert [one.attributes["id"] for one in places] == [one["id"] for one in told]
    assert all("js-plotly-plot" in one.classes for one in places)


@pytest.mark.parametrize("kind", ["throughput", "cpu", "memory", "stall", "first"])
def test_there_is_a_bar_for_every_system_with_its_name_and_figure(opened, report, kind):
    case = case_figures(report)[0]
    found = plot(opened, f"case-0-{kind}")
    (layer,) = found.all(css="barlayer")
    assert len(layer.all(css="point")) == len(drawn(case))
    names, figures = (labels(found, axis) for axis in ("y", "y2"))
    assert sorted(names) == sorted(
        one.result.title + " !" * (one.result.same_samples is False) for one in drawn(case)
    )
    assert len(figures) == len(names)


@pytest.mark.parametrize(("kind", "unit"), [("rates", "samples/s"), ("memories", "GiB")])
def test_there_is_a_line_for_every_system_over_time(opened, report, kind, unit):
    found = plot(opened, f"case-0-{kind}")
    assert len(found.all(css="js-line")) == len(drawn(case_figures(report)[0]))
    (title,) = found.all(css="ytitle")
    assert title.text == unit


def test_tables_have_every_system_of_a_case(opened, report):
    for place, case in enumerate(case_figures(report)):
        (card,) = opened.page.all(id=f"case-{place}")
        assert all(one.result.title in card.text for one in case.systems)


def hostile():
    found = CaseResult(
        BenchCase(HOSTILE, HOSTILE),
        (
            bench_report.system("dataplane", (3.0, 4.0), version=HOSTILE),
            bench_report.system(
                HOSTILE,
                (1.0, 2.0),
                title=HOSTILE,
                describes=HOSTILE,
                settings={HOSTILE: HOSTILE},
                sweep=(Tried({HOSTILE: HOSTILE}, 1.0),),
            ),
            bench_report.system("torch", refused=HOSTILE, title=HOSTILE),
            bench_report.system("ray", error=HOSTILE + "\n" + HOSTILE),
        ),
        (HardwareBound(HOSTILE, (5.0, 5.0)),),
    )
    scenario = dataclasses.replace(
        bench_report.scenario(found), name=HOSTILE, question=HOSTILE, bound=HOSTILE
    )
    return bench_report.report(
        scenario,
        created=HOSTILE,
        command=HOSTILE,
        machine={HOSTILE: HOSTILE, "cpu": HOSTILE},
        versions={HOSTILE: {HOSTILE: HOSTILE}},
        options={HOSTILE: [HOSTILE]},
        workloads=(bench_report.workload(HOSTILE, fingerprint=HOSTILE, urls=(HOSTILE,)),),
        bounds={HOSTILE: (1.0,)},
        missing={HOSTILE: HOSTILE},
    )


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A page of odd names, dark, in a narrow window: a browser takes five seconds to start."""
    folder = tmp_path_factory.mktemp("odd")
    page.write(hostile(), folder / "report.html")
    return open_page(folder / "report.html", width=500, is_dark=True)


def test_names_that_look_like_markup_stay_text(odd):
    assert odd.said == []
    assert len(odd.page.all("script")) == 3
    assert odd.page.all("img") == []
    assert HOSTILE in odd.page.text
    assert next(one.text for one in odd.page.all("title")).startswith("dataplane bench")
    told = " ".join(labels(plot(odd, "case-0-throughput"), "y"))
    assert "<b>" in " ".join(one.text for one in odd.page.all(css="annotation-text"))
    assert "</script>" in told
    assert all(link.attributes["href"].startswith("#") for link in odd.page.all("a"))


def test_the_page_needs_nothing_from_elsewhere(report):
    text = page.render(report)
    ours = re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", text, flags=re.DOTALL)
    assert len(text) - len(ours) > 1_000_000
    assert re.findall(r"https?:|//[a-z]|@import|url\(|\bsrc=|<link|<iframe|javascript:", ours) == []
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', ours))
    assert "default-src 'none'" in ours


def test_bars_whiskers_dots_and_bounds_are_where_the_figures_are():
    told = {one["id"]: one for one in drawings(page.render(bench_report.small()))}
    found = told["case-0-throughput"]
    bars = [one for one in found["data"] if one["type"] == "bar"]
    assert [(one["meta"], one["x"], one["y"]) for one in bars] == [
        ("webdataset", [900.0], [3]),
        ("dataplane", [400.0], [2]),
        ("grain", [210.0], [1]),
        ("torch", [110.0], [0]),
    ]
    whiskers = bars[1]["error_x"]
    assert (whiskers["array"], whiskers["arrayminus"]) == ([150.0], [40.0])
    points = [one for one in found["data"] if one.get("mode") == "markers"]
    assert (points[1]["x"], points[1]["y"]) == ([400.0, 360.0, 550.0], [2, 2, 2])
    assert [one["x0"] for one in found["layout"]["shapes"]] == [1000.0]
    assert found["layout"]["yaxis"]["ticktext"][0] == "WebDataset !"
    assert found["layout"]["yaxis2"]["ticktext"][1] == "400 ±38%"


def test_a_bound_beyond_the_axis_is_labelled_at_the_edge():
    systems = (bench_report.system("dataplane", (10.0, 10.0)),)
    case = CaseResult(BenchCase("local", "tokens"), systems, (HardwareBound("memory", (1000.0,)),))
    told = {
        one["id"]: one
        for one in drawings(page.render(bench_report.report(bench_report.scenario(case))))
    }
    layout = told["case-0-throughput"]["layout"]
    (edge,) = layout["shapes"]
    assert (edge["xref"], edge["x0"]) == ("paper", 1.0)
    assert layout["annotations"][0]["text"] == "bound: memory 1.00k, 100x the fastest →"
    assert layout["xaxis"]["range"] == [0, 10.6]


def test_a_report_without_cases_is_a_page_too():
    assert "No peer was measured" in page.render(bench_report.report())


def test_a_page_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        page.write(bench_report.small(), tmp_path / "none" / "report.html")


@given(bench_report.damaged())
def test_whatever_can_be_read_can_be_drawn(told):
    try:
        report = results.from_json(told, "it")
    except ConfigError:
        return
    page.render(report)


def test_one_round_has_no_spread_anywhere():
    text = page.render(dataclasses.replace(bench_report.full(rounds=1), bounds={}))
    assert "±" not in text
    assert "within the spread" not in text
    assert "There was one round" in text
    assert "±" in page.render(bench_report.small())


def busy_report(**load):
    small = bench_report.small()
    (scenario,) = small.scenarios
    cases = (*scenario.cases, dataclasses.replace(scenario.cases[0], load=load))
    return dataclasses.replace(small, scenarios=(dataclasses.replace(scenario, cases=cases),))


def test_a_busy_machine_is_reported_at_the_top_and_beside_the_case():
    text = page.render(busy_report(others=0.31, steal=0.05))
    told = "had other load in 1 of 2 cases: other processes took up to 31% and the"
    assert text.index(told) < text.index("<main>")
    assert text.count("the machine was busy: other processes took 31% and the hypervisor took") == 1
    assert "the hypervisor took up to 3% of its CPU time" in page.render(busy_report(steal=0.03))
    for quiet in ({}, {"others": 0.05, "steal": 0.001}, {"others": None}):
        assert "had other load" not in page.render(busy_report(**quiet))


@given(st.floats(1e-4, 1e6), st.floats(0, 8))
def test_a_logarithmic_axis_has_a_few_round_ticks(low, decades):
    axis = axes.log_axis("ms", [low, low * 10**decades])
    start, end = axis["range"]
    shown = [tick for tick in axis["tickvals"] if start <= math.log10(tick) <= end]
    assert 3 <= len(shown) <= 8
    assert shown == axis["tickvals"]
    assert [float(told) for told in axis["ticktext"]] == pytest.approx(shown)
