"""Hosts of one machine; tests/hosts.py is the long version, as a command of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import hosts_namespaces
import pytest

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    bool(hosts_namespaces.why_not()), reason=hosts_namespaces.why_not() or "works"
)


def lines_of(*arguments: str) -> list[str]:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout.splitlines()


def run(*arguments: str) -> dict[str, object]:
    return json.loads(lines_of(*arguments)[-1])


def test_hosts_reach_each_other_until_they_are_cut_off_silently():
    told = run(str(TESTS / "hosts_network.py"))
    assert told["mb_per_s"] > 0
    assert told["cut"] == "silent"
    assert told["joined"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_hosts_are_gone_with_their_script_whatever_ends_it(number, tmp_path):
    script = (
        "import signal, hosts_namespaces as h, hosts_network as n\n"
        "h.live_inside()\n"
        "with h.scratch('1m'), n.network('auto', ['a', 'b'], 0, 0) as (_, (a, b)):\n"
        "    a.call(lambda: __import__('subprocess').Popen([*b.within, 'sleep', '600']))\n"
        "    print('up', flush=True)\n"
        "    signal.pause()\n"
    )
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
    assert process.returncode != 0
    with hosts_namespaces.empty_folder():
        pass  # removes the empty folder of one that was killed
    # Processes and files: the suite's fixture looks for them after every test.


@pytest.mark.slow
def test_hosts_that_fail_cost_no_sample_and_no_trainer():
    told = run(str(TESTS / "hosts.py"), "--quick", "--json")
    assert len(told["rounds"]) == 3
    assert told["epochs_with_faults"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_upgrades_and_a_restored_database_cost_no_sample():
    lines = lines_of(str(TESTS / "soak.py"), "--minutes", "1")
    assert any("each once an epoch, in the planned order" in line for line in lines)
