"""Log lines: for people and for programs, without secrets, and never without end."""

from __future__ import annotations

import io
import json
import logging
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.base.trace import (
    LINES_A_MINUTE,
    LINES_OF_ALL,
    SOURCES_MAX,
    LogLimits,
    Trace,
    configure,
    tell_suppressed,
)
from dataplane.model.errors import StoreUnavailable


class Stderr:
    """The output so far."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self._before = ""

    @property
    def text(self) -> str:
        self._before += self._capture.readouterr().err
        return self._before

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Stderr]:
    log, ours = logging.getLogger(), logging.getLogger("dataplane")
    before = log.handlers[:], log.level, ours.level
    try:
        yield Stderr(capsys)
    finally:
        log.handlers[:] = before[0]
        log.setLevel(before[1])
        ours.setLevel(before[2])


def test_a_line_of_text_has_time_level_room_event_and_facts(stderr: Stderr) -> None:
    configure("info", "text")
    Trace("store").failed("store does not answer", store="s3://lab", error='it "hung" up', n=3)
    (line,) = stderr.lines
    when, level, room, rest = line.split(maxsplit=3)
    assert when.endswith("Z")
    assert (level, room) == ("WARNING", "dataplane.store:")
    assert rest == 'store does not answer store=s3://lab error="it \\"hung\\" up" n=3'


def test_a_line_of_json_has_the_facts_as_fields(stderr: Stderr) -> None:
    configure("info", "json")
    error = StoreUnavailable("no answer\nfrom it")
    Trace("node").noted("job opened", job="pretrain", rank=0, took_s=0.25, is_new=True, why=error)
    (line,) = stderr.lines
    found = json.loads(line)
    assert found.pop("timestamp").endswith("Z")
    assert found == {
        "level": "info",
        "room": "node",
        "event": "job opened",
        "job": "pretrain",
        "rank": 0,
        "took_s": 0.25,
        "is_new": True,
        "why": "no answer\nfrom it",
    }


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", ["began", "known", "bad"]),
        ("info", ["known", "bad"]),
        ("warning", ["bad"]),
        ("error", []),
    ],
)
def test_the_level_says_what_is_written(stderr: Stderr, level: str, written: list[str]) -> None:
    configure(level, "json")
    trace = Trace("node")
    trace.started("began")
    trace.noted("known")
    trace.failed("bad")
    assert [json.loads(line)["event"] for line in stderr.lines] == written


def test_configuring_again_writes_each_line_once(stderr: Stderr) -> None:
    configure("info", "text")
    configure("info", "json")
    Trace("node").noted("ready")
    (line,) = stderr.lines
    assert json.loads(line)["event"] == "ready"


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_line_has_a_secret_of_a_url(stderr: Stderr, form: str) -> None:
    configure("debug", form)
    url = "https://user:hunter2@host/x?X-Amz-Signature=hunter2"
    trace = Trace("node")
    trace.failed(f"read of {url}", url=url, error=ValueError(url))
    logging.getLogger("a.library").warning("asked %s", url)
    try:
        raise ValueError(url)
    except ValueError:
        trace.broke("a defect", url=url)
    assert "hunter2" not in stderr.text
    assert stderr.text.count("X-Amz-Signature=***") >= 5


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_defect_is_written_with_its_traceback(stderr: Stderr, form: str) -> None:
    configure("info", form)
    try:
        raise ZeroDivisionError("of course")
    except ZeroDivisionError:
        Trace("rpc").broke("a defect", call="Status")
    written = stderr.text
    assert "test_trace.py" in written
    assert "of course" in written
    if form == "json":
        (line,) = stderr.lines
        assert json.loads(line)["call"] == "Status"


class Clock:
    """Log lines of a trace."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_event_that_comes_without_end_is_counted_instead(stderr: Stderr) -> None:
    configure("info", "json")
    clock = Clock()
    trace = Trace("node", clock)
    for _ in range(LINES_A_MINUTE + 70):
        trace.failed("a bad peer", pid=17)
    trace.failed("another event")
    assert len(stderr.lines) == LINES_A_MINUTE + 1
    clock.now += 59.0
    trace.failed("a bad peer", pid=17)
    assert len(stderr.lines) == LINES_A_MINUTE + 1
    clock.now += 1.0
    trace.noted("a third event")
    trace.failed("a bad peer", pid=17)
    *_, told, third, again = map(json.loads, stderr.lines)
    assert (told["level"], told["event"]) == ("warning", "lines suppressed")
    assert (told["of"], told["suppressed"]) == ("a bad peer", 71)
    assert "by" not in told
    assert (third["event"], again["event"]) == ("a third event", "a bad peer")


def test_what_was_suppressed_is_told_when_the_minute_ends_though_nothing_happens(
    stderr: Stderr,
) -> None:
    configure("info", "text")
    clock = Clock()
    trace = Trace("node", clock)
    for _ in range(LINES_A_MINUTE):
        trace.failed("a bad peer")
    assert trace.due_at == math.inf
    trace.failed("a bad peer")
    assert trace.due_at == clock.now + 60.0
    before = stderr.lines
    assert tell_suppressed() <= trace.due_at
    clock.now += 60.0
    for _ in range(2):  # and only once
        tell_suppressed()
        (line,) = stderr.lines[len(before) :]
        assert line.endswith('dataplane.node: lines suppressed of="a bad peer" suppressed=1')
    assert trace.due_at == math.inf


def test_a_process_that_ends_tells_what_it_has_suppressed_so_far(stderr: Stderr) -> None:
    configure("info", "text")
    trace = Trace("node", Clock())
    for _ in range(LINES_A_MINUTE + 2):
        trace.failed("a bad peer")
    tell_suppressed(is_last=True)
    assert "suppressed=2" in stderr.lines[-1]


def test_nobody_hides_a_refusal_behind_the_refusals_of_others(stderr: Stderr) -> None:
    configure("info", "json")
    clock = Clock()
    trace = Trace("security", clock)

    def written(by: str) -> int:
        return sum(json.loads(line).get("peer") == by for line in stderr.lines)

    noisy = [f"10.0.0.{n}" for n in range(20)]
    for by in noisy:
        for _ in range(1000):
            trace.refused("call refused", by=by, peer=by)
    assert written(noisy[0]) == LINES_A_MINUTE
    # Even many of them together leave room for the first line of others.
    assert all(written(by) for by in noisy)
    for n in range(100):
        trace.refused("call refused", by=f"10.1.0.{n}", peer=f"10.1.0.{n}")
        assert written(f"10.1.0.{n}") == 1
    clock.now += 60.0
    trace.tell_suppressed()
    told = json.loads(stderr.lines[-1])
    assert told["of"] == "call refused"
    assert told["suppressed"] == 1000 * len(noisy) + 100 - (len(stderr.lines) - 1)
    assert told["by"].startswith("10.0.0.5 (999), 10.0.0.6 (999), ")
    assert told["by"].endswith(f", others ({told['suppressed'] - 5 * 999})")


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.floats(0, 30), st.integers(1, 50))
    )
)
def test_every_line_is_written_or_counted_and_there_is_a_limit_for_each_and_for_all(
    steps: list[tuple[str, int, float, int]],
) -> None:
    limits, now = LogLimits(), 0.0
    written, counted, sent = Counter[str](), Counter[str](), Counter[str]()
    lines: list[tuple[str, int, float]] = []
    for event, source, pause, count in steps:
        now += pause
        for _ in range(count):
            for one in limits.ended(now):
                counted[one.event] += one.count
            sent[event] += 1
            if limits.allows(event, 30, str(source), now):
                written[event] += 1
                lines.append((event, source, now))
    for one in limits.ended(math.inf):
        counted[one.event] += one.count
    assert written + counted == sent
    assert limits.due_at == math.inf
    for event, source, at in lines:  # a minute may begin anywhere in two of these
        around = [one for one in lines if one[0] == event and at <= one[2] < at + 60]
        assert len(around) <= 2 * LINES_OF_ALL
        assert sum(one[1] == source for one in around) <= 2 * LINES_A_MINUTE


def test_no_number_of_sources_is_remembered_without_a_limit_or_writes_more_lines() -> None:
    limits = LogLimits()
    written = sum(limits.allows("refused", 30, str(n), 1.0) for n in range(3 * SOURCES_MAX))
    assert written == LINES_OF_ALL
    assert len(limits._minutes["refused"].sources) == SOURCES_MAX
    (suppressed,) = limits.ended(61.0)
    assert suppressed.count == 3 * SOURCES_MAX - LINES_OF_ALL
    assert suppressed.by.endswith(f"others ({suppressed.count - 5})")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_long_fact_is_cut_and_no_secret_with_it(stderr: Stderr, form: str) -> None:
    configure("info", form)
    url = "https://host/" + "x" * 990 + "?X-Amz-Signature=" + "5ec2e7" * 4000
    Trace("node").failed("a bad peer", job="j" * 100_000, url=url)
    (line,) = stderr.lines
    assert len(line) < 5000
    assert "5ec2e7" not in line


def test_debugging_shows_every_line(stderr: Stderr) -> None:
    configure("debug", "text")
    trace = Trace("node")
    for _ in range(5 * LINES_A_MINUTE):
        trace.started("worker")
    assert len(stderr.lines) == 5 * LINES_A_MINUTE


def test_a_stderr_that_is_gone_costs_nothing(
    stderr: Stderr, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("info", "text")
    gone = io.StringIO()
    gone.close()
    for one in (gone, None):
        monkeypatch.setattr(sys, "stderr", one)
        Trace("node").failed("nobody reads this")


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_line_has_what_a_terminal_acts_on(stderr: Stderr, form: str) -> None:
    logging.getLogger().handlers.clear()  # pytest's reports cannot hold half of a character
    configure("info", form)
    hostile = "a\x1b[2J\nb\x9b1m\u202ec\ud800\x7f"
    Trace("test").noted("job opened", job=hostile, plain="é\u3000")
    logging.getLogger("other").warning("%s", hostile)
    text = stderr.text
    assert not set(text) & set("\x1b\x9b\u202e\ud800\x7f")
    assert "\\u001b[2J" in text
    assert "\\ud800" in text
    if form == "json":
        assert json.loads(text.splitlines()[0])["job"] == hostile
    else:
        assert text.splitlines()[0].endswith(
            'job="a\\u001b[2J\\nb\\u009b1m\\u202ec\\ud800\\u007f" plain="é\u3000"'
        )


LAST_WORDS = """
import math, os
from dataplane.base.trace import Trace, configure, wrap_stray_lines
configure("info", "json")
wrap_stray_lines()
Trace("node").noted("measured", rate=math.nan, most=-math.inf)
os.write(2, b"last words")
"""


def test_a_process_that_wraps_its_stderr_has_last_words_in_json() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAST_WORDS],
        check=True,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    lines = {
        line["event"]: line
        for line in (
            json.loads(text, parse_constant=pytest.fail) for text in done.stderr.splitlines()
        )
    }
    assert (lines["measured"]["rate"], lines["measured"]["most"]) == ("nan", "-inf")
    assert lines["last words"]["room"] == "stderr"
