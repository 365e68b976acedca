"""The gate of a store: which requests may go out during outages, throttling and recovery."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from away import Away, Proxy, proxy_before
from awry import Awry, Mood, awry_server
from fake_clock import Time
from msgspec.structs import replace
from servers import reach

from dataplane.model.errors import ClosedError, StoreError, StoreThrottled, StoreUnavailable
from dataplane.model.records import StorePause
from dataplane.store.connect import Stores
from dataplane.store.faults import Clock
from dataplane.store.outage import FORGOTTEN_S, Outage, Outages, Pauses
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


BEGAN = Outage("s3://lab", 100.0, "refused", last_request_at=100.0)
ENDED = replace(BEGAN, last_request_at=160.0, until=161.0)


def outages() -> tuple[Outages, list[Outage]]:
    reports: list[Outage] = []
    return Outages(reports.append), reports


def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_ends() -> None:
    seen, reports = outages()
    seen.note(BEGAN)
    seen.note(replace(BEGAN, error="reset", last_request_at=130.0))
    assert [outage.error for outage in seen.now(130.0)] == ["reset"]
    seen.note(ENDED)
    assert seen.now(161.0) == ()
    assert [(outage.since, outage.is_over) for outage in reports] == [(100.0, False), (100.0, True)]


def test_a_store_is_away_as_long_as_one_process_says_so() -> None:
    seen, reports = outages()
    seen.note(BEGAN, "fetching")
    seen.note(replace(BEGAN, since=90.0, last_request_at=101.0), "indexing")
    (now,) = seen.now(102.0)
    assert now.since == 90.0
    seen.note(ENDED, "fetching")
    assert len(seen.now(162.0)) == len(reports) == 1
    seen.forget("indexing", 170.0)
    assert (seen.now(170.0), len(reports), reports[1].until) == ((), 2, 170.0)


def test_stores_are_apart_and_an_end_without_a_beginning_is_nothing() -> None:
    seen, reports = outages()
    seen.note(replace(ENDED, store="gs://other"))
    seen.note(BEGAN)
    seen.note(replace(BEGAN, store="az://more"))
    assert [outage.store for outage in seen.now(100.0)] == ["az://more", "s3://lab"]
    assert len(reports) == 2


def test_an_unused_store_is_not_shown_as_away_for_ever() -> None:
    seen, _ = outages()
    seen.note(BEGAN)
    assert seen.now(BEGAN.last_request_at + FORGOTTEN_S - 1)
    assert not seen.now(BEGAN.last_request_at + FORGOTTEN_S)


def test_a_callback_may_ask_which_stores_are_away() -> None:
    answers: list[tuple[Outage, ...]] = []
    seen = Outages(lambda outage: answers.append(seen.now(outage.last_request_at)))
    seen.note(BEGAN)
    assert answers == [(BEGAN,)]


URL = f"{STORE}/a.bin"


class Told(list[StorePause]):
    def hear(self, pause: StorePause) -> None:
        self.append(pause)


def test_all_but_the_source_are_told_and_newcomers_of_what_lasts() -> None:
    time = Time()
    pauses, first, second, late = Pauses(time.clock()), Told(), Told(), Told()
    pauses.join(first.hear)
    pauses.join(second.hear)
    short, long = StorePause(STORE, 1, 2.0), StorePause("s3://another", 3, 8.0)
    pauses.publish(short, first.hear)
    pauses.publish(long)
    assert (first, second) == ([long], [short, long])
    time.now += 3.0
    pauses.join(late.hear)
    assert late == pauses.now() == [StorePause("s3://another", 3, 5.0)]
    pauses.leave(second.hear)
    pauses.leave(second.hear)
    pauses.publish(short)
    assert len(second) == 2
    assert late[1:] == [short]


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    with awry_server({"bucket/a.bin": bytes(100)}) as server:
        reach(server, monkeypatch)
        yield server


def test_stores_tell_of_their_pauses_and_keep_those_of_others(awry: Awry) -> None:
    time, pauses = Time(), Told()
    stores = Stores(clock=time.clock())
    stores.pauses.join(pauses.hear)
    stores.connect(URL).head(URL)
    awry.be(Mood.SLOW_DOWN)
    stores.connect(URL).head(URL)
    assert [(pause.store, pause.level) for pause in pauses] == [(STORE, 1)]

    # A store that is open, and one that is opened during the pause.
    for others in (stores, Stores(clock=time.clock())):
        time.waited.clear()
        others.pauses.publish(StorePause(STORE, 1, 7.0), pauses.hear)
        others.connect(URL).head(URL)
        assert time.waited[0] >= 7.0
        assert time.waited[0] <= 7.0 + SLOW_DOWN.span_s(2)
    assert len(pauses) == 1, "nobody is told what it has told"


BODY = (bytes(range(251)) * 12_000)[:400_000]
AWAY_URL = "s3://bucket/shard.bin"
KINDS = [way for way in Away if way is not Away.WELL]
THREADS = 16


class Seen:
    """The lines that would be on the log."""

    def __init__(self) -> None:
        self.lines: list[Outage] = []
        self._changed = threading.Condition()

    def report(self, outage: Outage) -> None:
        with self._changed:
            self.lines.append(outage)
            self._changed.notify_all()

    def wait(self, count: int) -> list[Outage]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.lines) >= count, 60), self.lines
            return self.lines[:]


@pytest.fixture
def away_server() -> Iterator[Awry]:
    with awry_server({"bucket/shard.bin": BODY}) as server:
        yield server


@pytest.fixture
def proxy(away_server: Awry, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy_before(away_server.port) as made:
        environment = {**away_server.environment(), "AWS_ENDPOINT_URL": made.endpoint}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.mark.parametrize("way", KINDS)
def test_many_readers_ride_out_an_outage_that_is_told_once(proxy: Proxy, way: Away) -> None:
    seen = Seen()
    outages = Outages(seen.report)
    stores = Stores(budget_s=60.0, request_timeout_s=1.0, observe=outages.note)
    store = stores.connect(AWAY_URL)
    etag = store.head(AWAY_URL).etag
    stop = threading.Event()

    def read(first: int) -> int:
        count = 0
        while not stop.is_set():
            into = bytearray(150_000)
            store.read_into(AWAY_URL, first + count, etag, memoryview(into))  # type: ignore[attr-defined]
            assert into == BODY[first + count : first + count + 150_000]
            count += 1
        return count

    with ThreadPoolExecutor(THREADS) as threads:
        readers = [threads.submit(read, 1000 * i) for i in range(THREADS)]
        proxy.be(way)
        (began,) = seen.wait(1)
        assert [outage.store for outage in outages.now(time.time())] == ["s3://bucket"]
        assert isinstance(stores.trouble(AWAY_URL), (StoreUnavailable, StoreThrottled))
        proxy.be(Away.WELL)
        _, ended = seen.wait(2)
        stop.set()
        assert all(reader.result(60) >= 0 for reader in readers)
    assert (began.store, began.is_over, ended.is_over) == ("s3://bucket", False, True)
    assert began.since == ended.since < ended.until
    assert len(seen.lines) == 2
    assert outages.now(time.time()) == ()
    assert stores.trouble(AWAY_URL) is None


@pytest.mark.parametrize("way", KINDS)
def test_a_store_that_is_away_at_the_very_first_contact_is_waited_for(
    proxy: Proxy, way: Away
) -> None:
    proxy.be(way)
    seen = Seen()
    stores = Stores(budget_s=60.0, request_timeout_s=1.0, observe=Outages(seen.report).note)
    with ThreadPoolExecutor(1) as threads:
        size = threads.submit(lambda: stores.connect(AWAY_URL).head(AWAY_URL).size_bytes)
        seen.wait(1)
        proxy.be(Away.WELL)
        assert size.result(60) == len(BODY)


def test_a_store_that_stays_away_is_the_error_of_every_reader(proxy: Proxy) -> None:
    proxy.be(Away.REFUSED)
    stores = Stores(budget_s=0.5, observe=Outages(lambda _: None).note)

    def error() -> StoreError:
        with pytest.raises(StoreUnavailable) as raised:
            stores.connect(AWAY_URL).head(AWAY_URL)
        return raised.value

    with ThreadPoolExecutor(THREADS) as threads:
        for future in [threads.submit(error) for _ in range(THREADS)]:
            assert f"{proxy.endpoint} refused the connection" in str(future.result())


def test_closing_the_stores_ends_all_waits_for_one(proxy: Proxy) -> None:
    proxy.be(Away.REFUSED)
    seen = Seen()
    stores = Stores(budget_s=600.0, observe=Outages(seen.report).note)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(stores.connect(AWAY_URL).head, AWAY_URL) for _ in range(2)]
        seen.wait(1)
        stores.close()
        for future in waiting:
            assert isinstance(future.exception(60), ClosedError)
