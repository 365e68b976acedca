"""Log lines: for people and for programs, without secrets, and never without end."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from dataplane.errors import StoreUnavailable
from dataplane.trace import LINES_A_MINUTE, Trace, configure


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


def test_an_event_that_comes_without_end_is_counted_instead(stderr: Stderr) -> None:
    configure("info", "json")
    now = [0.0]
    trace = Trace("node", lambda: now[0])
    for _ in range(LINES_A_MINUTE + 70):
        trace.failed("a bad peer", pid=17)
    trace.failed("another event")
    assert len(stderr.lines) == LINES_A_MINUTE + 1
    now[0] = 61.0
    trace.failed("a bad peer", pid=17)
    trace.failed("a bad peer", pid=17)
    *_, first, second = map(json.loads, stderr.lines)
    assert first["suppressed"] == 70
    assert "suppressed" not in second


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
