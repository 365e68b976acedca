"""Load of other processes during a measurement."""

from __future__ import annotations

import subprocess
import sys

import pytest
from dataplane_bench.machine import CpuSample, load_between, look

SPIN = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"


def test_the_load_of_others_excludes_our_own():
    before = CpuSample(total_s=100.0, busy_s=20.0, steal_s=1.0, own_s=5.0)
    after = CpuSample(total_s=120.0, busy_s=36.0, steal_s=2.0, own_s=15.0)
    assert load_between(before, after) == {"others": 0.3, "steal": 0.05}


@pytest.mark.parametrize("own_s", [10.0, 20.0])
def test_the_load_of_others_is_never_negative(own_s):
    before, after = CpuSample(0.0, 0.0, 0.0, 0.0), CpuSample(20.0, 10.0, 0.0, own_s)
    assert load_between(before, after)["others"] == 0.0
    assert load_between(before, before) == {}


def test_cpu_of_our_descendants_counts_as_ours_even_after_they_end():
    before, before_of_nobody = look(), look(own=())
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    after, after_of_nobody = look(), look(own=())
    assert after.own_s - before.own_s >= 0.29  # ticks of 10 ms
    assert before_of_nobody.own_s == after_of_nobody.own_s == 0.0
    assert after.busy_s - before.busy_s >= 0.25
    assert before.total_s < after.total_s
