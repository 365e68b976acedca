"""Forked trainers behave like other processes: see warm.py."""

from __future__ import annotations

import signal
import sys

import fleet
import hygiene
import pytest

SCRIPT = """
import os, sys, torch
print(sys.argv[1], os.environ["OWN"], "DATAPLANE_TEST_RUN" in os.environ, flush=True)
sys.stderr.write("a word\\n")
sys.exit(int(sys.stdin.readline()))
"""


@pytest.fixture
def started(tmp_path):
    script, errors = tmp_path / "script.py", tmp_path / "errors"
    script.write_text(SCRIPT)
    with errors.open("ab") as stderr:
        process = fleet.WARM[0].run([str(script), "first"], {"OWN": "value"}, stderr.fileno())
    yield process, errors
    process.kill()
    process.wait(60)
    process.stdin.close()
    process.stdout.close()


def test_it_has_the_arguments_streams_and_environment_it_is_given_and_its_own_status(started):
    process, errors = started
    assert process.stdout.readline() == "first value False\n"
    assert process.poll() is None
    process.stdin.write("7\n")
    process.stdin.flush()
    assert process.wait(60) == process.poll() == 7
    assert errors.read_text() == "a word\n"


def test_what_a_test_forgets_is_found_and_killed(tmp_path, run_mark):
    before = hygiene.take(run_mark)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = fleet.WARM[0].run([str(script), "first"], {"OWN": "value"}, sys.stderr.fileno())
    assert process.pid in {pid for pid, _ in hygiene._new_processes(before, run_mark)}
    hygiene.kill_new(before, run_mark)
    # Its parent may have been killed first, and then reports nothing.
    process.stdin.close()
    process.stdout.close()
    process._told.close()


def test_a_signal_is_its_status(started):
    process, _ = started
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
