"""Write the dashboard, the alert rules, their tests, and the tables of docs/metrics.md from the
table of metrics (dataplane/metrics/table.py).

python deploy/prometheus/generate.py, after each change of that table or of ALERTS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dataplane.metrics.table import METRICS, Group, Kind, Metric

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "metrics.md"
RUNBOOKS = HERE.parents[1] / "docs" / "runbooks.md"
_BEGIN, _END = "<!-- made by deploy/prometheus/generate.py -->", "<!-- end -->"
_NAME = re.compile(r"\bdataplane_\w+")
_OF_HISTOGRAM = ("_bucket", "_count", "_sum")


class Alert(NamedTuple):
    """A rule. `fires` has series for which it must fire, in the notation of promtool, with these
    `labels` and this summary, `says`; for those of `rests` it must not.
    """

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    what_to_do: str
    fires: Mapping[str, str]
    rests: Mapping[str, str]
    labels: Mapping[str, str]
    says: str


ALERTS = (
    Alert(
        "DataplaneTrainerWaits",
        "max by (job, stage) (rate(dataplane_exposed_seconds_total[5m])) > 0.1",
        "10m", "warning",
        "A rank of {{ $labels.job }} waits {{ $value | humanizePercentage }} of its time for data: "
        "{{ $labels.stage }}",
        "The label `stage` says what the rank waits for. fetch: object store or network; decode, "
        "queue, assemble: workers; room: the trainer keeps many batches. `dataplane doctor` says "
        "which setting helps",
        {'dataplane_exposed_seconds_total{job="a", rank="3", stage="fetch"}': "0+15x60"},
        {'dataplane_exposed_seconds_total{job="a", rank="3", stage="fetch"}': "0+3x60"},
        {"job": "a", "stage": "fetch"},
        "A rank of a waits 25% of its time for data: fetch",
    ),
    Alert(
        "DataplaneTrainerStuck",
        "max by (job, stage) (dataplane_waiting_seconds) > 30",
        "0m", "critical",
        "A rank of {{ $labels.job }} has waited for {{ $value | humanizeDuration }} for one slab: "
        "{{ $labels.stage }}",
        "After stall_timeout_s, the trainer gets an error. The label `stage` says what the trainer "
        "waits for. Other alerts may say why: the store is away, or processes die",
        {'dataplane_waiting_seconds{job="a", rank="3", stage="fetch"}': "0+60x60"},
        {'dataplane_waiting_seconds{job="a", rank="3", stage="fetch"}': "7x60"},
        {"job": "a", "stage": "fetch"},
        "A rank of a has waited for 40m 0s for one slab: fetch",
    ),
    Alert(
        "DataplaneTrainerStands",
        "sum by (job, rank) (rate(dataplane_samples_total[5m])) == 0",
        "15m", "warning",
        "Rank {{ $labels.rank }} of {{ $labels.job }} has taken no batch for a quarter of an hour",
        "If other alerts say that the store is away or processes die, begin there. Otherwise "
        "look for a long evaluation or checkpoint, or a collective that hangs",
        {'dataplane_samples_total{job="a", rank="3"}': "100x60"},
        {'dataplane_samples_total{job="a", rank="3"}': "0+1x60"},
        {"job": "a", "rank": "3"},
        "Rank 3 of a has taken no batch for a quarter of an hour",
    ),
    Alert(
        "DataplaneStoreAway",
        "max by (store) (dataplane_store_away_seconds) > 30",
        "0m", "critical",
        "{{ $labels.store }} has not answered for {{ $value | humanizeDuration }}",
        "Jobs end after stall_timeout_s. `dataplane status` shows each node's error",
        {'dataplane_store_away_seconds{store="s3://lab"}': "0+60x60"},
        {'dataplane_store_away_seconds{store="s3://lab"}': "5x60"},
        {"store": "s3://lab"},
        "s3://lab has not answered for 40m 0s",
    ),
    Alert(
        "DataplaneStoreThrottles",
        'sum by (store) (rate(dataplane_store_errors_total{error="StoreThrottled"}[5m])) > 0.1',
        "5m", "warning",
        "{{ $labels.store }} asks to slow down",
        "Spread shards over more prefixes, ask for a higher limit, or give nodes a disk "
        "(cache_bytes), so that each block is read once",
        {'dataplane_store_errors_total{store="s3://lab", error="StoreThrottled"}': "0+60x60"},
        {'dataplane_store_errors_total{store="s3://lab", error="StoreThrottled"}': "0+1x60"},
        {"store": "s3://lab"},
        "s3://lab asks to slow down",
    ),
    Alert(
        "DataplaneStoreSlow",
        "histogram_quantile(0.9, sum by (store, le) (rate(dataplane_store_request_seconds_bucket[5m"
        "]))) > 3",
        "10m", "warning",
        "A tenth of the requests to {{ $labels.store }} takes more than "
        "{{ $value | humanizeDuration }}",
        "Compare the rate at which nodes read with the limits of network and store",
        {
            'dataplane_store_request_seconds_bucket{store="s3://lab", le="3.0"}': "0+1x60",
            'dataplane_store_request_seconds_bucket{store="s3://lab", le="10.0"}': "0+10x60",
            'dataplane_store_request_seconds_bucket{store="s3://lab", le="+Inf"}': "0+10x60",
        },
        {
            'dataplane_store_request_seconds_bucket{store="s3://lab", le="0.1"}': "0+10x60",
            'dataplane_store_request_seconds_bucket{store="s3://lab", le="+Inf"}': "0+10x60",
        },
        {"store": "s3://lab"},
        "A tenth of the requests to s3://lab takes more than 9.222s",
    ),
    Alert(
        "DataplaneProcessesDie",
        "sum by (instance, kind) (increase(dataplane_process_deaths_total[15m])) > 2.5",
        "0m", "critical",
        "Processes ({{ $labels.kind }}) of the node {{ $labels.instance }} die again and again",
        "The node's log says how (`worker ended`, `fetcher ended`): look for an OOM killer, a "
        "block that crashes its decoder (`dataplane verify`), or a function of map= that hangs",
        {'dataplane_process_deaths_total{instance="h1", kind="worker"}': "0+1x60"},
        {'dataplane_process_deaths_total{instance="h1", kind="worker"}': "2x60"},
        {"instance": "h1", "kind": "worker"},
        "Processes (worker) of the node h1 die again and again",
    ),
    Alert(
        "DataplaneArenaSmall",
        'sum by (instance) (rate(dataplane_evictions_total{kind="needed"}[15m])) > 0.1',
        "15m", "warning",
        "The node {{ $labels.instance }} reads blocks again, since its memory is too small",
        "Raise block_arena_bytes, or lower the window: `dataplane plan URL` says what fits",
        {'dataplane_evictions_total{instance="h1", kind="needed"}': "0+60x60"},
        {'dataplane_evictions_total{instance="h1", kind="spent"}': "0+60x60"},
        {"instance": "h1"},
        "The node h1 reads blocks again, since its memory is too small",
    ),
    Alert(
        "DataplaneRanksMissing",
        "max by (job) (dataplane_job_missing_ranks) > 0",
        "5m", "warning",
        "{{ $value }} ranks of {{ $labels.job }} have not joined",
        "`dataplane status` lists these ranks. The job waits until they join",
        {'dataplane_job_missing_ranks{job="a"}': "2x60"},
        {'dataplane_job_missing_ranks{job="a"}': "0x60"},
        {"job": "a"},
        "2 ranks of a have not joined",
    ),
    Alert(
        "DataplaneNodeGone",
        "max(dataplane_nodes) < max(max_over_time(dataplane_nodes[1h]))",
        "5m", "warning",
        "Fewer nodes than in the last hour send heartbeats: {{ $value }}",
        "`dataplane status` shows when each node last sent a heartbeat. Trainers of a dead node "
        "wait for a new node on their host",
        {"dataplane_nodes": "8x20 7x40"},
        {"dataplane_nodes": "8x60"},
        {},
        "Fewer nodes than in the last hour send heartbeats: 7",
    ),
    Alert(
        "DataplaneCoordinatorGone",
        "absent(dataplane_nodes)",
        "5m", "critical",
        "No coordinator of Dataplane exports metrics",
        "Restart the coordinator with the same state_dir. Running jobs go on, and new jobs wait",
        {'dataplane_samples_total{job="a", rank="3"}': "0+1x60"},
        {"dataplane_nodes": "8x60"},
        {},
        "No coordinator of Dataplane exports metrics",
    ),
    Alert(
        "DataplaneRefusals",
        "sum by (event) (increase(dataplane_refusals_total[10m])) > 20",
        "0m", "warning",
        "More than 20 times in ten minutes: {{ $labels.event }}",
        "The log has the peer and reason of each refusal (docs/security.md#refusals-in-the-log)",
        {'dataplane_refusals_total{event="call refused"}': "0+10x60"},
        {'dataplane_refusals_total{event="call refused"}': "1x60"},
        {"event": "call refused"},
        "More than 20 times in ten minutes: call refused",
    ),
    Alert(
        "DataplaneFilesShort",
        'process_open_fds{job=~".*dataplane.*"} / process_max_fds > 0.8',
        "5m", "warning",
        "{{ $labels.instance }} has opened {{ $value | humanizePercentage }} of the files that it "
        "may open",
        "Raise the limit of open files (LimitNOFILE=)",
        {
            'process_open_fds{instance="h1", job="dataplane"}': "900x60",
            'process_max_fds{instance="h1", job="dataplane"}': "1000x60",
        },
        {
            'process_open_fds{instance="h1", job="dataplane"}': "100x60",
            'process_max_fds{instance="h1", job="dataplane"}': "1000x60",
        },
        {"instance": "h1", "job": "dataplane"},
        "h1 has opened 90% of the files that it may open",
    ),
)  # fmt: skip


def _runbook(alert: Alert) -> str:
    """Return the place of its section, which must exist."""
    if f"\n## {alert.name}\n" not in RUNBOOKS.read_text(encoding="utf-8"):
        raise ValueError(f"docs/runbooks.md has no section {alert.name}")
    return f"docs/runbooks.md#{alert.name.lower()}"


def check_names(expr: str) -> str:
    """Return the expression, if all metrics in it are in the table.

    Raises:  ValueError: one is not.
    """
    histograms = {metric.name for metric in METRICS if metric.kind is Kind.HISTOGRAM}
    known = {metric.name for metric in METRICS if metric.kind is not Kind.HISTOGRAM}
    known |= {name + end for name in histograms for end in _OF_HISTOGRAM}
    unknown = set(_NAME.findall(expr)) - known
    if unknown:
        raise ValueError(f"no such metric: {', '.join(sorted(unknown))}")
    return expr


# -- alert rules -----------------------------------------------------------------------------------


def rules() -> str:
    """Return the rules for Prometheus, as YAML."""
    lines = ["# Written by generate.py; do not edit.", "groups:", "  - name: dataplane"]
    lines.append("    rules:")
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(check_names(alert.expr))}",
            f"        for: {alert.lasts}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.what_to_do)}",
            f"          runbook_url: {_runbook(alert)}",
        ]
    return "\n".join([*lines, ""])


def rule_tests() -> str:
    """Return the tests of the rules for `promtool test rules`: each fires, and rests."""
    lines = ["# Written by generate.py; do not edit.", "rule_files: [alerts.yaml]", "tests:"]
    for alert in ALERTS:
        for series, does_fire in ((alert.fires, True), (alert.rests, False)):
            lines += ["  - interval: 1m", "    input_series:"]
            for name, values in series.items():
                lines += [f"      - series: {json.dumps(name)}", f"        values: {values}"]
            lines += ["    alert_rule_test:", "      - eval_time: 40m"]
            lines.append(f"        alertname: {alert.name}")
            lines.append(f"        exp_alerts:{'' if does_fire else ' []'}")
            if does_fire:
                labels = {"severity": alert.severity, **alert.labels}
                notes = {"summary": alert.says, "description": alert.what_to_do}
                lines.append(f"          - exp_labels: {json.dumps(labels)}")
                notes["runbook_url"] = _runbook(alert)
                lines.append(f"            exp_annotations: {json.dumps(notes)}")
    return "\n".join([*lines, ""])


# -- dashboard -------------------------------------------------------------------------------------

_UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit", "": "short"}
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT = 24, 8


def _panel(title: str, expr: str, unit: str, legend: str = "", **more: Any) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [{"expr": check_names(expr), "legendFormat": legend, "refId": "A"}],
    } | more


def _first_row() -> list[dict[str, Any]]:
    """Return the panels that answer the question of the page."""
    exposed = 'rate(dataplane_exposed_seconds_total{job=~"$job"}[$__rate_interval])'
    worst = f"max by (job) (sum by (job, rank) ({exposed}))"
    steps = [{"color": "green", "value": None}, {"color": "orange", "value": 0.02},
             {"color": "red", "value": 0.1}]  # fmt: skip
    limits = {"unit": "percentunit", "min": 0, "max": 1,
              "thresholds": {"mode": "absolute", "steps": steps}}  # fmt: skip
    colours = {"fieldConfig": {"defaults": limits, "overrides": []}}
    samples = 'sum by (job) (rate(dataplane_samples_total{job=~"$job"}[$__rate_interval]))'
    return [
        _panel("Exposed time: the rank that waits longest", worst, "percentunit", "{{job}}",
               type="stat", **colours),
        _panel("What that time is spent on (largest over ranks)",
               f"max by (job, stage) ({exposed})", "percentunit", "{{job}} {{stage}}"),
        _panel("Samples a second", samples, "short", "{{job}}"),
    ]  # fmt: skip


def _panel_of(metric: Metric) -> dict[str, Any]:
    """Return the panel that shows one metric as it is."""
    by = [label for label in metric.labels if label != "rank"]
    where = '{job=~"$job"}' if "job" in metric.labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in by) or "{{instance}}"
    over = ", ".join(by or ["instance"])
    unit = _UNITS[metric.unit]
    if metric.kind is Kind.HISTOGRAM:
        rate = f"rate({metric.name}_bucket{where}[$__rate_interval])"
        expr = f"histogram_quantile(0.9, sum by ({over}, le) ({rate}))"
        return _panel(f"{metric.name}, 90 % are shorter", expr, unit, legend,
                      description=metric.help)  # fmt: skip
    if metric.kind is Kind.COUNTER:
        rate = f"rate({metric.name}{where}[$__rate_interval])"
        unit = {"s": "percentunit", "bytes": "Bps"}.get(unit, "short")
        return _panel(f"{metric.name}, per second", f"sum by ({over}) ({rate})", unit, legend,
                      description=metric.help)  # fmt: skip
    return _panel(metric.name, f"max by ({over}) ({metric.name}{where})", unit, legend,
                  description=metric.help)  # fmt: skip


def dashboard() -> str:
    """Return the dashboard for Grafana, as JSON: a row for each group of metrics."""
    panels: list[dict[str, Any]] = []
    at = 0
    for group in Group:
        own = [_panel_of(metric) for metric in METRICS if metric.group is group]
        own = (_first_row() if group is Group.WAITING else []) + own
        panels.append({"type": "row", "title": group.value, "collapsed": False,
                       "gridPos": {"x": 0, "y": at, "w": _WIDTH, "h": 1}})  # fmt: skip
        at += 1
        for number, panel in enumerate(own):
            width = _WIDTH // 3
            place = {"x": number % 3 * width, "y": at, "w": width, "h": _HEIGHT}
            panels.append({**panel, "gridPos": place})
            at += _HEIGHT if number % 3 == 2 or panel is own[-1] else 0
    numbered = [{"id": number, **panel} for number, panel in enumerate(panels, 1)]
    jobs = "label_values(dataplane_samples_total, job)"
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {"name": "job", "type": "query", "datasource": _SOURCE, "query": check_names(jobs),
         "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*",
         "current": {"text": "All", "value": "$__all"}},
    ]  # fmt: skip
    page = {
        "title": "Dataplane: is it the data?", "uid": "dataplane", "schemaVersion": 39,
        "tags": ["dataplane"], "refresh": "30s", "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": variables}, "panels": numbered,
    }  # fmt: skip
    return json.dumps(page, indent=1, ensure_ascii=False) + "\n"


# -- docs ------------------------------------------------------------------------------------------


def tables() -> str:
    """Return the tables of docs/metrics.md: metrics by group, then alerts."""
    lines = [_BEGIN, "", "| metric | type | labels | says |", "|---|---|---|---|"]
    for group in Group:
        lines.append(f"| **{group.value}** | | | |")
        for metric in METRICS:
            if metric.group is group:
                labels = ", ".join(f"`{label}`" for label in metric.labels)
                lines.append(
                    f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |"
                )
    lines += ["", "## Alerts", "", "| alert | when | what to do |", "|---|---|---|"]
    for alert in ALERTS:
        expr = alert.expr.replace("|", "\\|")
        lasts = "" if alert.lasts == "0m" else f" for {alert.lasts}"
        name = f"[`{alert.name}`](runbooks.md#{alert.name.lower()})"
        lines.append(f"| {name} | `{expr}`{lasts} | {alert.what_to_do} |")
    return "\n".join([*lines, "", _END])


def with_tables(page: str) -> str:
    """Return the page of the docs with the tables as they are now."""
    before, rest = page.split(_BEGIN)
    return before + tables() + rest.split(_END)[1]


FILES = {"alerts.yaml": rules, "alerts_test.yaml": rule_tests, "dashboard.json": dashboard}


if __name__ == "__main__":
    for name, content in FILES.items():
        (HERE / name).write_text(content(), encoding="utf-8")
    DOCS.write_text(with_tables(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
