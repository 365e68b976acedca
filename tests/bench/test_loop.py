"""The trainer's loop: its report of a window matches what happened in it."""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from array import array

import numpy as np
import pytest
from dataplane_bench.trial.launch import together
from dataplane_bench.trial.loop import BIN_S, Loop, NoBatch
from hypothesis import given
from hypothesis import strategies as st

# Binary fractions: sums of them are exact.
moments = st.integers(0, 4096).map(lambda ticks: ticks / 256)
batches = st.lists(
    st.tuples(
        st.integers(0, 64).map(lambda ticks: ticks / 256),  # the trainer computes
        st.integers(1, 512).map(lambda ticks: ticks / 256),  # it waits
        st.integers(0, 100),  # samples
    ),
    max_size=60,
)


def seen(told, began):
    """A loop that has seen these batches."""
    loop = Loop(iter(()))
    ends, waits, counts = array("d"), array("d"), array("q")
    now = began
    for computed, waited, count in told:
        now += computed + waited
        ends.append(now)
        waits.append(waited)
        counts.append(count)
    loop._ends, loop._waits, loop._counts = ends, waits, counts
    return loop


def arrived(at, told, began):
    """Samples taken by a moment. A batch is on its way since the one before it; the first one
    since the trainer began to wait for it.
    """
    total, now = 0.0, began
    for index, (computed, waited, count) in enumerate(told):
        start = now if index else now + computed
        now += computed + waited
        if at >= now:
            total += count
        elif at > start:
            return total + count * (at - start) / (now - start)
    return total


def waited_within(start, end, told, began):
    now, total = began, 0.0
    for computed, waited, _ in told:
        total += max(min(now + computed + waited, end) - max(now + computed, start), 0.0)
        now += computed + waited
    return total


@given(told=batches, began=moments, start=moments, length=st.integers(1, 2048))
def test_a_window_is_what_a_slow_plain_model_says(told, began, start, length):
    end = start + length / 256
    found = seen(told, began).window(start, end)
    expected = arrived(end, told, began) - arrived(start, told, began)
    assert found["sample_count"] == pytest.approx(expected, abs=1e-6)
    assert found["seconds"] == end - start
    share = waited_within(start, end, told, began) / (end - start)
    assert found["wait_share"] == pytest.approx(share)
    ends = list(itertools.accumulate((c + w for c, w, _ in told), initial=began))[1:]
    inside = bisect.bisect_right(ends, end) - bisect.bisect_right(ends, start)
    assert found["batch_count"] == inside
    waits = [w for (_, w, _), at in zip(told, ends, strict=True) if start < at <= end]
    if waits:
        assert found["wait_p50_ms"] == pytest.approx(float(np.median(waits)) * 1000)
        assert min(waits) * 1000 <= found["wait_p99_ms"] <= max(waits) * 1000


@given(told=batches, began=moments, start=moments, length=st.integers(1, 2048))
def test_the_timeline_adds_up_to_the_window(told, began, start, length):
    found = seen(told, began).window(start, start + length / 256)
    ends = [0.0, *(at for at, _ in found["timeline"])]
    widths = np.diff(ends)
    assert ends[-1] == pytest.approx(length / 256, abs=1e-3)
    assert np.allclose(widths[:-1], BIN_S, atol=2e-3)
    assert widths[-1] >= 0.5 * BIN_S - 2e-3 or len(widths) == 1
    assert widths[-1] <= 1.5 * BIN_S + 2e-3
    total = sum(rate * width for (_, rate), width in zip(found["timeline"], widths, strict=True))
    # Rates and moments are rounded.
    assert total == pytest.approx(found["sample_count"], rel=0.05, abs=5)


def test_a_window_without_a_batch_is_reported():
    found = seen([], 0.0).window(1.0, 2.0)
    assert found["sample_count"] == found["batch_count"] == found["wait_share"] == 0
    assert all(rate == 0 for _, rate in found["timeline"])


def test_a_batch_that_takes_longer_than_the_window_counts_in_part():
    found = seen([(0.0, 10.0, 1000)], 0.0).window(4.0, 6.0)
    assert found["sample_count"] == pytest.approx(200)
    assert found["wait_share"] == 1.0
    assert found["batch_count"] == 0
    assert found["wait_p99_ms"] == 10_000


def test_the_window_of_a_computing_trainer_ends_within_what_was_seen():
    stop = threading.Event()

    def endless():
        for index in itertools.count():
            if index == 4:
                stop.set()  # as the trainer has computed, at the latest
            yield {"x": [0] * 8}

    loop = Loop(endless())
    loop.run(stop, 0.1)
    assert len(loop._ends) == 5, "one more is taken after the stop"
    computed = loop._ends[4] - loop._ends[3]
    assert computed >= 0.1
    found = loop.window(loop._ends[0], loop._ends[3] + 0.2 * computed)
    assert found["sample_count"] == pytest.approx(8 * 3 + 8 * 0.2)


def test_the_time_of_a_step_does_not_count_as_waiting():
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    loop = Loop(itertools.repeat({"x": [0]}))
    share = loop.run(stop, 0.02)
    found = loop.window(loop._ends[0], loop._ends[-1])
    assert found["wait_share"] < 0.2
    assert share < 0.5


def test_each_run_is_measured_separately():
    stop = threading.Event()
    stop.set()
    loop = Loop(itertools.repeat({"x": [0]}))
    loop.run(stop, 0.0)
    loop.run(stop, 0.0)
    assert len(loop._ends) == 1


def test_a_whole_epoch_counts_from_when_the_loader_was_opened():
    began = time.monotonic() - 1.0
    found = Loop(iter([{"x": [0] * 3}, {"x": [0] * 2}])).whole(began, threading.Event())
    assert found["sample_count"] == 5
    assert found["batch_count"] == 2
    assert found["seconds"] >= found["first_batch_s"] >= 1.0
    assert found["start"] == began


def test_an_epoch_that_is_stopped_ends_with_the_batch_under_way():
    stop = threading.Event()

    def endless():
        for index in itertools.count():
            if index == 3:
                stop.set()
            yield {"x": [0]}

    assert Loop(endless()).whole(time.monotonic(), stop)["sample_count"] == 4


def test_an_epoch_without_a_batch_is_refused():
    with pytest.raises(NoBatch):
        Loop(iter(())).whole(time.monotonic(), threading.Event())


def test_ranks_that_begin_and_end_at_different_times_are_added_up():
    first = {
        "sample_count": 100.0,
        "batch_count": 10,
        "seconds": 2.0,
        "start": 5.0,
        "wait_share": 0.5,
        "wait_p50_ms": 1.0,
        "wait_p99_ms": 9.0,
        "first_batch_s": 0.5,
        "trainer_cpu_share": 0.2,
        "timeline": [[1.0, 60.0], [2.0, 40.0]],
    }
    second = {
        "sample_count": 50.0,
        "batch_count": 5,
        "seconds": 4.0,
        "start": 5.5,
        "wait_share": 1.0,
        "wait_p50_ms": 2.0,
        "wait_p99_ms": 3.0,
        "first_batch_s": 0.7,
        "trainer_cpu_share": 0.4,
        "timeline": [[1.0, 20.0], [2.0, 10.0], [4.0, 10.0]],
    }
    found = together([first, second])
    assert found["sample_count"] == 150
    assert found["seconds"] == 4.5
    assert found["samples_per_s"] == pytest.approx(150 / 4.5)
    assert found["wait_share"] == 0.75
    assert found["trainer_cpu_share"] == pytest.approx(0.3)
    assert (found["wait_p50_ms"], found["wait_p99_ms"]) == (2.0, 9.0)
    assert found["first_batch_s"] == 0.7
    assert found["timeline"] == [[1.0, 80.0], [2.0, 50.0], [4.0, 10.0]]
    assert together([first]) == {**first, "samples_per_s": 50.0}
