"""The gate of a store: which requests may go out during outages, throttling and recovery."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from fake_clock import Time

from dataplane.model.errors import ClosedError, StoreThrottled, StoreUnavailable
from dataplane.model.records import StorePause
from dataplane.store.faults import Clock
from dataplane.store.outage import Outage
from dataplane.store.retry import AWAY_AFTER_S, PROBE, RETURN_S, SLOW_DOWN, Gate, SlowDown

FAR = 1e9
STORE = "s3://bucket"


def gate_of(time: Time, seen: list[Outage] | None = None) -> Gate:
    return Gate("s3://bucket", time.clock(), (seen if seen is not None else []).append)


def known(time: Time, seen: list[Outage] | None = None) -> Gate:
    """The gate of a store that has answered."""
    gate = gate_of(time, seen)
    turn = gate.enter(FAR)
    assert turn is not None
    gate.answered(turn)
    time.now += 1.0
    return gate


def down() -> StoreUnavailable:
    return StoreUnavailable("no answer")


def test_a_store_that_never_answered_is_away_at_once() -> None:
    seen: list[Outage] = []
    gate = gate_of(Time(), seen)
    turn = gate.enter(FAR)
    assert turn is not None
    gate.failed(turn, down())
    assert [(outage.store, outage.error) for outage in seen] == [("s3://bucket", "no answer")]


def test_a_single_failure_is_not_an_outage() -> None:
    time, seen = Time(), list[Outage]()
    gate = known(time, seen)
    turns = [gate.enter(FAR) for _ in range(16)]
    for turn in turns:
        assert turn is not None
        gate.failed(turn, down())
    time.now += AWAY_AFTER_S / 2
    again = gate.enter(FAR)
    assert again is not None
    assert not again.is_probe
    gate.answered(again)
    assert seen == []


def test_failures_without_an_answer_for_a_second_are_one_outage() -> None:
    time, seen = Time(), list[Outage]()
    gate = known(time, seen)
    began = time.now
    for _ in range(8):
        turn = gate.enter(FAR)
        assert turn is not None
        gate.failed(turn, down())
        time.now += AWAY_AFTER_S / 4
    assert {outage.since for outage in seen} == {began}
    assert seen[0].last_request_at == began + AWAY_AFTER_S


def test_a_request_that_hung_has_been_away_since_it_began() -> None:
    time, seen = Time(), list[Outage]()
    gate = known(time, seen)
    turn, began = gate.enter(FAR), time.now
    assert turn is not None
    time.now += 30.0
    gate.failed(turn, down())
    assert [outage.since for outage in seen] == [began]


def test_one_object_that_cannot_be_had_is_no_outage_of_a_store_that_serves_others() -> None:
    time, seen = Time(), list[Outage]()
    gate = known(time, seen)
    for _ in range(100):
        bad, good = gate.enter(FAR), gate.enter(FAR)
        assert bad is not None
        assert good is not None
        time.now += 1.0
        gate.answered(good)
        gate.failed(bad, down())
    assert seen == []


def test_during_an_outage_one_request_probes_at_a_time_the_longest_waiting_first() -> None:
    line = Line()
    gate = line.gate
    first = gate.enter(FAR)
    assert first is not None
    gate.failed(first, down())
    line.start("a", "b", "c")
    for turns in (("a",), ("b",), ("c",)):
        assert line.asking() == turns
        line.fail()
    line.come_back()
    assert sorted(line.served) == ["a", "b", "c"]
    assert line.most_at_once_while_away == 1


class Line:
    """Threads at a gate, and a store that fails until a test says otherwise."""

    def __init__(self) -> None:
        self.gate = Gate("s3://bucket", Clock(random=lambda: 0.0), lambda _: None)
        self.served: list[str] = []
        self.most_at_once_while_away = 0
        self._is_back = False
        self._inside: list[str] = []
        self._fails = 0
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self, *names: str) -> None:
        for name in names:
            thread = threading.Thread(target=self._send, args=(name,))
            thread.start()
            self._threads.append(thread)
            self._wait(lambda: len(self.gate._queue) + len(self._inside) == len(self._threads))

    def asking(self) -> tuple[str, ...]:
        self._wait(lambda: bool(self._inside))
        return tuple(self._inside)

    def fail(self) -> None:
        with self._changed:
            before = self._inside[:]
            self._fails += 1
            self._changed.notify_all()
        self._wait(lambda: self._inside != before)

    def come_back(self) -> None:
        with self._changed:
            self._is_back = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(60)

    def _send(self, name: str) -> None:
        while True:
            turn = self.gate.enter(FAR)
            assert turn is not None
            with self._changed:
                self._inside.append(name)
                if not self._is_back:
                    self.most_at_once_while_away = max(
                        self.most_at_once_while_away, len(self._inside)
                    )
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._fails or self._is_back, 60)
                self._fails = max(0, self._fails - 1)
                self._inside.remove(name)
                if self._is_back:
                    self.gate.answered(turn)
                    self.served.append(name)
                else:
                    self.gate.failed(turn, down())
                self._changed.notify_all()
                if self._is_back:
                    return

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            while not until():
                self._changed.wait(0.01)


def test_probes_come_less_often_up_to_a_cap_and_at_once_after_the_outage() -> None:
    time = Time()
    gate = gate_of(time)
    turn = gate.enter(FAR)
    for _ in range(8):
        assert turn is not None
        gate.failed(turn, down())
        turn = gate.enter(FAR)
    spans = [PROBE.span_s(1), *(PROBE.span_s(n) for n in range(1, 8))]
    assert time.waited == spans
    assert max(spans) == PROBE.cap_s
    assert turn is not None
    assert turn.is_probe
    gate.answered(turn)
    assert gate.enter(FAR) is not None
    assert time.waited == spans


def test_no_wait_exceeds_the_deadline() -> None:
    time = Time()
    gate = gate_of(time)
    turn = gate.enter(FAR)
    assert turn is not None
    gate.failed(turn, down())
    assert gate.enter(time.now + PROBE.span_s(1) / 2) is None
    assert time.waited == []


def test_after_an_outage_waiting_requests_return_one_by_one() -> None:
    time = Time(chance=0.5)
    gate = gate_of(time)
    turn = gate.enter(FAR)
    assert turn is not None
    gate.failed(turn, down())
    probe = gate.enter(FAR)
    assert probe is not None
    assert probe.is_probe

    def wait(condition: threading.Condition, seconds: float) -> None:
        time.waited.append(seconds)
        if seconds == 100.0:  # while a thread waits, the probe is answered
            condition.release()
            gate.answered(probe)
            condition.acquire()
        else:
            time.now += seconds

    gate._clock = Clock(lambda: time.now, wait, lambda: 0.5, lambda: time.now)
    assert gate.enter(time.now + 100.0) is not None
    assert time.waited[-2:] == [100.0, 0.5 * RETURN_S]


def test_closing_ends_all_waits() -> None:
    gate = Gate("s3://bucket", Clock(random=lambda: 1.0), lambda _: None)
    turn = gate.enter(FAR)
    assert turn is not None
    gate.failed(turn, down())
    probe, ended = gate.enter(FAR), list[str]()
    assert probe is not None

    def enter() -> None:
        with pytest.raises(ClosedError, match="s3://bucket"):
            gate.enter(FAR)
        ended.append("closed")

    threads = [threading.Thread(target=enter) for _ in range(3)]
    for thread in threads:
        thread.start()
    gate.close()
    for thread in threads:
        thread.join(60)
    assert ended == ["closed"] * 3


def test_throttling_of_some_requests_slows_all_and_is_not_an_outage() -> None:
    time, seen = Time(), list[Outage]()
    gate = known(time, seen)
    refused, served = gate.enter(FAR), gate.enter(FAR)
    assert refused is not None
    assert served is not None
    time.now += 0.1
    gate.answered(served)
    gate.failed(refused, StoreThrottled("slow down"))
    assert gate.enter(FAR) is not None
    assert time.waited == [2 * SLOW_DOWN.span_s(1)]
    assert seen == []


def test_refusals_that_arrive_together_count_once() -> None:
    time = Time()
    pause = SlowDown(time.clock())
    rounds = [pause.round for _ in range(16)]
    for began_in in rounds:
        pause.refused(began_in, STORE)

    first = pause.wait_s()
    assert first == 2 * SLOW_DOWN.span_s(1)

    time.now += first
    pause.refused(pause.round, STORE)
    assert pause.wait_s() == 2 * SLOW_DOWN.span_s(2)


def test_a_pause_is_told_once_and_kept_by_the_gates_of_other_processes() -> None:
    time, pauses = Time(), list[StorePause]()
    gate = Gate(STORE, time.clock(), lambda _: None, pauses.append)
    turns = [gate.enter(FAR) for _ in range(4)]
    time.now += 1.0
    answered = gate.enter(FAR)
    assert answered is not None
    gate.answered(answered)
    for turn in turns:
        assert turn is not None
        gate.failed(turn, StoreThrottled("slow down"))
    assert [(pause.store, pause.level) for pause in pauses] == [(STORE, 1)]

    other_time = Time()
    other = known(other_time)
    before = other.enter(FAR)
    assert before is not None
    other.slow_down(pauses[0])
    served = other.enter(FAR)
    assert served is not None
    assert other_time.waited == [pauses[0].left_s + SLOW_DOWN.span_s(1)]
    other.answered(served)
    # Its own refusal of a request from before the pause counts as the same one.
    other.failed(before, StoreThrottled("slow down"))
    assert other.enter(FAR) is not None
    assert len(other_time.waited) == 1


def test_a_store_that_serves_again_is_asked_at_full_speed_again() -> None:
    time = Time()
    pause = SlowDown(time.clock())
    for _ in range(4):
        pause.refused(pause.round, STORE)
        time.now += 1000
    for _ in range(4):
        pause.served()
    pause.refused(pause.round, STORE)

    assert pause.wait_s() == 2 * SLOW_DOWN.span_s(1)


def test_failures_of_a_store_that_answers_other_requests_are_logged_in_summary(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "dataplane.store")
    time = Time()
    gate = known(time)
    for _ in range(100):
        bad, good = gate.enter(FAR), gate.enter(FAR)
        assert bad is not None
        assert good is not None
        gate.failed(bad, down())
        time.now += 1.0
        gate.answered(good)
    lines = [record.msg.facts for record in caplog.records]
    assert [facts["count"] for facts in lines] == [1, 60]
    assert {facts["store"] for facts in lines} == {"s3://bucket"}
