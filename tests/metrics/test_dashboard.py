"""The dashboard, the alert rules and the docs are those of the table of metrics."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dataplane.metrics.table import METRICS

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
AGAIN = "run python deploy/prometheus/generate.py"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_those_of_the_table(generate: Any) -> None:
    for name, content in generate.FILES.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == content(), f"{name}: {AGAIN}"
    page = generate.DOCS.read_text(encoding="utf-8")
    assert page == generate.with_tables(page), f"docs/metrics.md: {AGAIN}"


def test_each_alert_has_a_runbook_with_what_to_do(generate: Any, tmp_path: Path) -> None:
    sections = dict(
        re.findall(
            r"^## (\w+)\n\n(.*?)(?=^## |\Z)",
            generate.RUNBOOKS.read_text(),
            re.MULTILINE | re.DOTALL,
        )
    )
    for alert in generate.ALERTS:
        assert f"runbook_url: docs/runbooks.md#{alert.name.lower()}\n" in generate.rules()
        assert len(sections[alert.name]) > 100, alert.name
    generate.RUNBOOKS = tmp_path / "runbooks.md"
    generate.RUNBOOKS.write_text("# Runbooks\n")
    try:
        with pytest.raises(ValueError, match="no section DataplaneTrainerWaits"):
            generate.rules()
    finally:
        generate.RUNBOOKS = generate.DOCS.with_name("runbooks.md")


def test_an_expression_with_an_unknown_metric_is_refused(generate: Any) -> None:
    assert generate.check_names("rate(dataplane_stage_seconds_bucket[5m])")
    for expr in ("dataplane_stage_seconds", "rate(dataplane_sample_total[5m])"):
        with pytest.raises(ValueError, match="no such metric"):
            generate.check_names(expr)


def test_the_dashboard_shows_each_metric_and_first_the_rank_that_waits_longest(
    generate: Any,
) -> None:
    panels = json.loads(generate.dashboard())["panels"]
    shown = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for metric in METRICS:
        assert any(metric.name in expr for expr in shown), metric.name
    assert panels[0]["title"] == "Is it the data?"
    assert shown[0].startswith("max by (job) (sum by (job, rank) (rate(dataplane_exposed_seconds")
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in panels})


def promtool(*arguments: str) -> None:
    """Have promtool find nothing wrong."""
    path = shutil.which("promtool")
    if path is None:
        assert "CI" not in os.environ, "promtool is missing: install Debian's prometheus"
        pytest.skip("no promtool: install Debian's prometheus")
    run = subprocess.run(
        [path, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_alerts_fire_and_rest_as_promtool_sees_them() -> None:
    promtool("check", "rules", "alerts.yaml")
    promtool("test", "rules", "alerts_test.yaml")


def test_the_configuration_of_prometheus_is_one(tmp_path: Path) -> None:
    for name in ("prometheus.yaml", "alerts.yaml"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "token").write_text("a-token")
    (tmp_path / "targets.yaml").write_text('- targets: ["gpu-17:9464"]\n')
    promtool("check", "config", str(tmp_path / "prometheus.yaml"))


def test_promtool_reads_each_expression_of_the_dashboard(generate: Any, tmp_path: Path) -> None:
    panels = json.loads(generate.dashboard())["panels"]
    exprs = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    rules = [
        {"record": f"panel:{number}", "expr": expr.replace("$__rate_interval", "5m")}
        for number, expr in enumerate(exprs)
    ]
    path = tmp_path / "panels.yaml"  # JSON is YAML, too
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(path))
