"""The watchdog reports what blocks the node's event loop, and ignores a busy machine."""

from __future__ import annotations

import asyncio
import json
import logging
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.base import watchdog
from dataplane.base.trace import Trace
from dataplane.base.watchdog import Hold, LoopHolds, Watchdog

pytestmark = pytest.mark.may_hold_loop


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Also those for developers."""
    caplog.set_level(logging.DEBUG, "dataplane.test")


_SEEN_S = 20.0
_QUIET_TURNS = 20
_QUIET_TURN_S = 0.008


def compute_for(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def wait_for_a_file_server(seconds: float) -> None:
    select.select([], [], [], seconds)


def seen_of(held: Callable[[], object], count: int = 1, *, warns: bool = True) -> LoopHolds:
    """The reports of a watchdog on a loop that this call holds, this many times."""

    async def play() -> LoopHolds:
        dog = Watchdog(Trace("test"), warns=warns)
        dog.start()
        try:
            for _ in range(count):
                await asyncio.sleep(0)
                held()
                await asyncio.sleep(0)
            return dog.statistics()
        finally:
            dog.close()

    return asyncio.run(play())


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    words = "event loop held", "a step of this node took long"
    return [dict(one.msg.facts) for one in caplog.records if one.msg.event.startswith(words)]


def test_a_callback_that_computes_holds_the_loop_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = seen_of(lambda: compute_for(0.06))
    assert seen.count == 1
    assert seen.longest_s >= 0.06
    (line,) = lines_of(caplog)
    assert line["ran_ms"] >= 60
    assert f"{__name__}:compute_for:" in str(line["at"])


def test_in_a_terminal_of_a_trainer_a_hold_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        for warns, level in ((True, "WARNING"), (False, "DEBUG")):
            caplog.clear()
            seen_of(lambda: compute_for(0.06), warns=warns)
            assert [line.levelname for line in caplog.records if "took_ms" in str(line.msg)] == [
                level
            ]


def begin_to_read(places: Counter[str]) -> Any:
    """Begin to iterate, just before the sampling thread adds a place."""
    begun = iter(dict.items(places))
    places[f"place {len(places)}"] += 1
    return begun


def test_a_sample_may_be_added_while_the_loop_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, growing = watchdog._Samples, type("Growing", (Counter,), {"items": begin_to_read})
    monkeypatch.setattr(
        watchdog, "_Samples", lambda turn, queued_s: usual(turn, queued_s, 0.0, growing())
    )
    assert seen_of(lambda: compute_for(0.06)).count == 1


def test_a_call_that_blocks_holds_the_loop_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    seen = seen_of(lambda: wait_for_a_file_server(0.1))
    (line,) = lines_of(caplog)
    assert seen.count == 1
    assert line["ran_ms"] < line["waited_ms"]
    assert f"{__name__}:wait_for_a_file_server:" in str(line["at"])


def test_holds_that_follow_each_other_make_one_line(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.03, 0.05, 0.08, 0.03))
    seen = seen_of(lambda: compute_for(next(times)), count=4)
    assert seen.count == 4
    lines = lines_of(caplog)
    assert len(lines) <= 2, "the first one at once, all others when the watch ends"
    assert sum(int(str(line.get("count", 1))) for line in lines) == 4
    assert max(line["ran_ms"] + line["waited_ms"] for line in lines) >= 80


@pytest.mark.parametrize(
    ("ran_s", "waited_s", "at", "matters"),
    [
        (0.001, 0.03, "a:b:1", False),
        (0.049, 0.4, "a:b:1", False),
        (0.05, 0.0, "a:b:1", True),
        (0.2, 0.0, "unknown", False),
        (0.25, 0.0, "unknown", True),
        (0.0, 0.5, "unknown", True),
    ],
)
def test_people_hear_only_of_holds_for_which_a_batch_may_have_been_late(
    ran_s: float, waited_s: float, at: str, matters: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dog = Watchdog(Trace("test"))
    dog._keep(Hold(ran_s, waited_s, at))
    dog._log()
    assert [one.levelname for one in caplog.records] == ["WARNING" if matters else "DEBUG"]


def test_many_short_callbacks_are_not_reported_as_a_hold() -> None:
    assert seen_of(lambda: compute_for(0.002), count=50) == LoopHolds()


def test_a_loop_that_shares_its_processor_is_not_held() -> None:
    """Turns of 8 ms that take much longer, since three other processes want the same processor."""
    script = f"""
import asyncio, json, os, sys, time
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from test_watchdog import *
import os
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
took = []
def turn():
    began = time.monotonic()
    compute_for({_QUIET_TURN_S})
    took.append(time.monotonic() - began)
try:
    seen = seen_of(turn, {_QUIET_TURNS})
finally:
    for each in others:
        each.kill()
        each.wait()
print(json.dumps([max(took), seen.count, seen.longest_s]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=60
    )
    longest_turn_s, count, longest_s = json.loads(done.stdout)
    assert longest_turn_s > watchdog.HOLD_S, "the machine was not busy: nothing is shown"
    assert (count, longest_s) == (0, 0.0)


def test_the_watchdog_rests_while_the_loop_does() -> None:
    """A node without trainers costs nothing: the watching thread is not even scheduled."""

    def scheduled(dog: Watchdog) -> tuple[int, int]:
        deadline = time.monotonic() + _SEEN_S
        while not dog._is_resting and time.monotonic() < deadline:
            select.select([], [], [], 0.01)
        thread = dog._thread
        assert thread is not None
        assert thread.native_id is not None
        select.select([], [], [], 0.05)  # until it has lain down
        before = times_scheduled(thread.native_id)
        select.select([], [], [], 0.2)
        return before, times_scheduled(thread.native_id)

    async def play() -> tuple[int, int]:
        dog = Watchdog(Trace("test"))
        dog.start()
        try:
            return await asyncio.to_thread(scheduled, dog)
        finally:
            dog.close()

    before, after = asyncio.run(play())
    assert after == before


def times_scheduled(thread: int) -> int:
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text("ascii").split()[2])


async def test_a_loop_is_restored_when_it_is_no_longer_watched() -> None:
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    before = selector.select
    dog = Watchdog(Trace("test"))
    dog.start()
    assert selector.select != before
    dog.close()
    dog.close()
    assert selector.select == before
