"""What a process says of a node that it waits for."""

from __future__ import annotations

import io
import sys

import pytest

from dataplane.client import waiting
from dataplane.client.waiting import Notice
from dataplane.rpc.messages import Working


class Terminal(io.StringIO):
    """A terminal, or another stream."""

    def __init__(self, *, is_one: bool) -> None:
        super().__init__()
        self._is_one = is_one

    def isatty(self) -> bool:
        return self._is_one


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    return now


def counted(notice: Notice, clock: list[float]) -> None:
    """Forty blocks, two seconds each."""
    for done in range(41):
        notice.working(Working("counting packs", done, 40, left_s=2.0 * (40 - done)))
        clock[0] += 2.0


def test_a_script_hears_every_ten_seconds_how_far_its_node_is(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal(is_one=False))
    notice = Notice("a job to be opened", job="j")
    counted(notice, clock)
    notice.tell()  # there is something better to say
    notice.over()
    lines = [one.getMessage() for one in caplog.records]
    assert lines[:2] == [
        "counting packs: 2 of 40 blocks, 2 min left job=j",
        "counting packs: 7 of 40 blocks, 2 min left job=j",
    ]
    assert lines[-1] == "counting packs: 37 of 40 blocks, 6 s left job=j"
    assert len(lines) == 8
    caplog.clear()


def test_a_terminal_has_one_line_that_changes_and_is_gone_at_the_end(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal(is_one=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    notice = Notice("the first batch", work_of="first batch")
    notice.working(Working("reading blocks", 1, 40))
    assert not terminal.getvalue(), "most waits are short"
    clock[0] += 4
    notice.working(Working("reading blocks", 1, 40))
    notice.working(Working("planning the batch"))
    notice.over()
    assert terminal.getvalue().split("\r\x1b[2K") == [
        "",
        "dataplane: first batch: reading blocks: 1 of 40 blocks",
        "dataplane: first batch: planning the batch",
        "",
    ]
    assert not caplog.records


def test_other_ranks_of_the_host_say_nothing(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    counted(Notice("a job", shows_work=False), clock)
    assert not caplog.records
