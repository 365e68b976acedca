"""The S3 server gets cores of its own where the machine has enough."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from dataplane_bench.cores import confined, divided

ASK = "import os; print(sorted(os.sched_getaffinity(0)))"


@pytest.mark.parametrize("count", [1, 2, 7])
def test_few_cores_are_shared(count):
    division = divided(set(range(count)))
    assert division.loaders == division.server == set(range(count))
    assert not division.are_apart


@pytest.mark.parametrize(("count", "served"), [(8, 2), (16, 4), (96, 24)])
def test_a_server_among_many_cores_has_a_quarter_for_itself(count, served):
    cores = {3 * core for core in range(count)}
    division = divided(cores)
    assert division.are_apart
    assert len(division.server) == served
    assert division.all == cores


def test_what_is_started_while_confined_stays_there_and_nothing_else_is():
    before = os.sched_getaffinity(0)
    one = {min(before)}
    with confined(one):
        told = subprocess.run(
            [sys.executable, "-c", ASK], capture_output=True, text=True, check=True
        )
    assert told.stdout.strip() == str(sorted(one))
    assert os.sched_getaffinity(0) == before
