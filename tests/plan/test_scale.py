from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "plan_scale.py"
MIXTURES = SCRIPT.with_name("mixtures.py")
SMALL = ("--blocks", "2000", "--rows", "50")
# Very generous: a test must not depend on the machine's load.
EASY = ("--plan-s-max", "1e9", "--plan-mb-max", "1e9", "--seek-ms-max", "1e9")


def run(*arguments, script=SCRIPT):
    return subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, check=False
    )


def test_scale_script_measures_and_says_that_bars_are_met():
    done = run(*SMALL, *EASY, "--json")
    assert done.returncode == 0, done.stderr
    measures = {each["name"]: each for each in json.loads(done.stdout)["measures"]}
    assert measures["samples"]["value"] == 100_000
    assert not any(each["missed"] for each in measures.values())


def test_scale_script_fails_when_a_bar_is_missed():
    done = run(*SMALL, *EASY, "--seek-ms-max", "0")
    assert done.returncode == 1, done.stderr
    assert "MISSED" in done.stdout


def test_the_script_about_mixtures_measures_and_says_that_bars_are_met():
    done = run(*SMALL, *EASY, "--sources", "5", "--json", script=MIXTURES)
    assert done.returncode == 0, done.stderr
    measures = {each["name"]: each["value"] for each in json.loads(done.stdout)["measures"]}
    assert 90_000 < measures["samples"] <= 100_000
    assert measures["counts of a lane, away from exact, at most"] < 3.4


def test_the_script_about_manifests_measures_every_part(tmp_path):
    path = SCRIPT.with_name("manifests.py")
    spec = importlib.util.spec_from_file_location("manifests_benchmark", path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    try:
        spec.loader.exec_module(script)
        script._CALLS, script._OTHER_BYTES = 3, 1 << 10
        saved = tmp_path / "small.manifest"
        parts = (
            script.written(saved, 40, 100),
            *(part(saved) for part in (script.loaded, script.listed, script.opened, script.called)),
        )
        measures = [each for part in parts for each in part]
    finally:
        del sys.modules[spec.name]
    assert all(each.value >= 0 for each in measures)
    assert {"manifest, loaded", "block_in_shard", "raw_block"} <= {each.name for each in measures}
