"""The report in a terminal and as Markdown: everything is there, and it fits."""

from __future__ import annotations

import dataclasses
import io
import re

import bench_report
import pytest
from dataplane_bench.model import BenchCase
from dataplane_bench.report import cells, notes, results, table
from dataplane_bench.report.figures import case_figures
from dataplane_bench.report.results import CaseResult, Tried
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dataplane.model.errors import ConfigError

HOSTILE = "[bold]<script>alert(1)</script>|`*_\\ \x1b[31m"


def printed(report, width=80):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    table.show(report, console)
    return console.file.getvalue()


def row(text, name):
    return next(line for line in text.splitlines() if line.startswith(name)).split()


def of(*systems, **case):
    result = CaseResult(BenchCase("local", "tokens", **case), systems)
    return bench_report.report(bench_report.scenario(result))


def test_a_row_has_the_figures_of_its_system():
    text = printed(bench_report.small())
    assert row(text, "Dataplane") == ["Dataplane", "400", "±38%", "0.0016", "0.50"]
    assert row(text, "Grain")[1:] == ["210", "±90%", "0.0008", "0.25", "2.00x"]


def test_the_order_of_rows_is_that_of_speed():
    text = printed(bench_report.small())
    names = ["WebDataset !", "Dataplane ", "Grain", "torch DataLoader", "noop", "Ray Data"]
    places = [re.search(f"^{name}", text, re.MULTILINE).start() for name in names]
    assert places == sorted(places)


def test_systems_that_were_not_measured_are_listed_with_a_reason_in_one_line():
    text = printed(bench_report.small())
    assert row(text, "Ray Data")[2:] == [
        "no",
        "part",
        "in",
        "it:",
        "it",
        "has",
        "no",
        "part",
        "in",
        "this",
    ]
    assert row(text, "LitData")[1:] == ["failed:", "RuntimeError:", "no", "-", "Too", "bad"]
    assert row(text, "ffcv")[1:] == [
        "not",
        "installed:",
        "dataplane",
        "bench",
        "--install-peer",
        "ffcv",
    ]


def test_other_samples_noise_and_a_slow_harness_are_noted():
    text = " ".join(printed(bench_report.small()).split())
    assert "! samples differ! WebDataset" in text
    assert "noisy, a round more than 15% off the median: Dataplane ±38%, Grain ±90%" in text
    assert "the harness alone" not in text
    slow = of(bench_report.system("dataplane", (9.0,)), bench_report.system("noop", (18.0,)))
    assert "the harness alone is only 2.00x as fast" in " ".join(printed(slow).split())


def test_settings_and_the_whole_sweep_are_reported():
    sweep = (
        Tried({"num_workers": 2}, 1000.0),
        Tried({"num_workers": 0}, 250.0),
        Tried({"num_workers": 9}, error="OSError: no\nlog\nOSError: no"),
    )
    chosen = bench_report.system(
        "torch", (1.0,), sweep=sweep, settings={"num_workers": 2}, describes="npy, memory-mapped"
    )
    text = " ".join(printed(of(chosen), 200).split())
    assert (
        "torch DataLoader 1.0 tokens · local: npy, memory-mapped; num_workers 2 (1.00k/s);"
        " tried: num_workers 0 (250/s); num_workers 9 (failed: OSError: no)"
    ) in text


def test_the_summary_counts_the_faster_systems():
    fast = CaseResult(
        BenchCase("a", "tokens"),
        (bench_report.system("dataplane", (4.0, 4.0)), bench_report.system("torch", (2.0, 1.0))),
    )
    slow = CaseResult(
        BenchCase("b", "tokens"),
        (bench_report.system("dataplane", (1.0, 1.0)), bench_report.system("torch", (2.0, 4.0))),
    )
    level = CaseResult(
        BenchCase("c", "tokens"),
        (bench_report.system("dataplane", (1.0, 3.0)), bench_report.system("torch", (2.0, 2.0))),
    )
    report = bench_report.report(bench_report.scenario(fast, slow, level))
    first, second = notes.gist(case_figures(report))
    assert "faster in 1, slower in 1 and level, within the spread of the rounds, in 1 of 3" in first
    assert "0.38x (tokens · b, torch DataLoader) to 3.00x (tokens · a" in second


@pytest.mark.parametrize("width", [80, 200])
def test_no_line_is_longer_than_the_terminal_and_no_cell_is_cut(width):
    text = printed(bench_report.full(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_names_are_not_interpreted_as_terminal_markup():
    report = of(bench_report.system("torch", (1.0,), title=HOSTILE, error=""))
    text = printed(report, 200)
    assert "[bold]<script>" in text
    assert "\x1b" not in text


def test_markdown_has_a_table_a_case_and_ours_stands_out():
    lines = table.markdown(bench_report.small()).splitlines()
    heading = "| system | samples/s | ± | GB/s | x of the bound | Dataplane is |"
    assert heading in lines
    assert "| **Dataplane** | **400** | **±38%** | **0.0016** | **0.50** |  |" in lines
    assert "| Grain | 210 | ±90% | 0.0008 | 0.25 | 2.00x |" in lines
    assert "- LitData: failed: RuntimeError: no - Too bad" in lines
    assert any(line.startswith("- samples differ!") for line in lines)


def test_every_row_of_a_markdown_table_has_as_many_cells_as_its_heading():
    report = of(bench_report.system("torch", (1.0,), title=HOSTILE))
    for text in (table.markdown(bench_report.full()), table.markdown(report)):
        rows = [line for line in text.splitlines() if line.startswith("|")]
        counts = [len(re.findall(r"(?<!\\)\|", line)) for line in rows]
        for place, line in enumerate(rows):
            if line.startswith("| ---"):
                width = counts[place]
            if not line.startswith(("| case", "| system")):
                assert counts[place] == width
        assert "<script" not in re.sub(r"\\<", "", text)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "-"),
        (0, "0"),
        (0.00012, "0.0001"),
        (0.0123, "0.0123"),
        (0.9999, "1.00"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (1234.0, "1,230"),
    ],
)
def test_numbers_keep_the_digits_that_matter(value, told):
    assert cells.number(value) == told


@pytest.mark.parametrize(
    ("value", "told"),
    [(None, "-"), (41.24, "41.2"), (999.4, "999"), (999_600, "1.00M"), (1.5e9, "1.50G")],
)
def test_rates_have_a_unit(value, told):
    assert cells.rate(value) == told


@given(st.text())
def test_the_summary_of_an_error_is_one_line(text):
    told = notes.one_line(text)
    assert len(told) <= 160
    assert told.isprintable()


@given(bench_report.damaged())
def test_whatever_can_be_read_can_be_printed(told):
    try:
        report = results.from_json(told, "it")
    except ConfigError:
        return
    printed(report)
    table.markdown(report)


def test_what_the_machine_can_do_is_told_with_its_unit():
    bounds = {"gather_gb_per_s": (5.0, 5.0), "jpeg_decode_per_s": (1500.0,)}
    bounds |= {"s3_20_ms_tls_gb_per_s": (0.5,), "new_thing": (1.0,)}
    report = dataclasses.replace(bench_report.small(), bounds=bounds)
    assert notes.machine_bounds(report) == [
        ("gather of random rows", "5.00 GB/s ±0%"),
        ("JPEG decode", "1.50k/s"),
        ("S3 server, 20 ms tls", "0.500 GB/s"),
        ("new thing", "1.00/s"),
    ]
