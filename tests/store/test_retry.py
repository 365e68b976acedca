"""Retries with a clock that the test moves: what is tried again, for how long, and by whom."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import (
    CorruptShard,
    DataplaneError,
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TruncatedRead,
)
from dataplane.model import ObjectInfo
from dataplane.store.pieces import PIECE_BYTES
from dataplane.store.retry import RETRY_TABLE, Clock, Retrying, Rule, SlowDown

URL = "s3://bucket/key"


@dataclass
class Time:
    """A clock that moves by sleeping only. `chance` is what every draw gives."""

    now: float = 1000.0
    chance: float = 1.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds

    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.sleep, lambda: self.chance)


@dataclass
class Failing:
    """A store that raises what it is told, one a call, and then serves `body`."""

    failures: list[DataplaneError]
    body: bytes = b"0123456789"
    cost_s: float = 0.0
    time: Time = field(default_factory=Time)
    asked: list[tuple[int, int]] = field(default_factory=list)

    def _fail(self) -> None:
        self.time.now += self.cost_s
        if self.failures:
            raise self.failures.pop(0)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield self._info()
        self._fail()

    def head(self, url: str) -> ObjectInfo:
        return self._info()

    def read(self, url: str, offset: int, length: int, etag: str) -> bytes:
        self.asked.append((offset, length))
        self._fail()
        return self.body[offset : offset + length]

    def stream(self, url: str, etag: str) -> Iterator[bytes]:
        raise AssertionError("a retrying store streams by reads of its own")

    def _info(self) -> ObjectInfo:
        return ObjectInfo(URL, len(self.body), "etag")


def retrying(inner: Failing, budget_s: float = 60.0) -> Retrying:
    return Retrying(inner, RETRY_TABLE, budget_s, inner.time.clock())


@pytest.mark.parametrize("kind", RETRY_TABLE)
def test_what_is_in_the_table_is_tried_again(kind: type[StoreError]) -> None:
    store = Failing([kind("once"), kind("twice")])

    assert retrying(store).read(URL, 2, 3, "etag") == b"234"
    assert store.asked == [(2, 3)] * 3


@pytest.mark.parametrize(
    "kind", [ShardNotFound, StoreDenied, StoreError, DatasetChangedError, CorruptShard]
)
def test_what_is_not_in_the_table_is_raised_at_once(kind: type[DataplaneError]) -> None:
    failure = kind("for good", shard=URL)
    store = Failing([failure])

    with pytest.raises(kind) as raised:
        retrying(store).read(URL, 0, 1, "etag")
    assert raised.value is failure
    assert len(store.asked) == 1
    assert store.time.slept == []


def test_the_last_error_says_what_was_asked_and_how_often() -> None:
    attempts = RETRY_TABLE[TruncatedRead].attempts
    store = Failing([TruncatedRead(f"cut {i}", shard=URL, offset=7) for i in range(99)])

    with pytest.raises(TruncatedRead) as raised:
        retrying(store).read(URL, 7, 3, "etag")
    for part in (URL, "[7, 10)", f"{attempts} attempts", f"cut {attempts - 1}"):
        assert part in str(raised.value)
    assert raised.value.attempts == attempts
    assert raised.value.offset == 7
    assert isinstance(raised.value.__cause__, TruncatedRead)
    assert len(store.asked) == attempts


def test_waits_grow_to_the_cap_and_are_drawn_from_zero() -> None:
    rule = RETRY_TABLE[StoreUnavailable]
    longest, shortest = Time(chance=1.0), Time(chance=0.0)
    for time in (longest, shortest):
        store = Failing([StoreUnavailable("down")] * (rule.attempts - 1), time=time)
        assert retrying(store, budget_s=1e6).read(URL, 0, 1, "etag") == b"0"

    assert longest.slept == [rule.span_s(n) for n in range(1, rule.attempts)]
    assert longest.slept[0] == rule.base_s
    assert max(longest.slept) <= rule.cap_s
    assert shortest.slept == [0.0] * (rule.attempts - 1)


@given(
    kinds=st.lists(
        st.sampled_from(sorted(RETRY_TABLE, key=lambda kind: kind.__name__)), max_size=30
    ),
    chance=st.floats(0, 1),
    cost_s=st.floats(0, 10),
    budget_s=st.floats(0.1, 100),
)
def test_no_call_outlives_its_budget_by_more_than_one_request(
    kinds: list[type[StoreError]], chance: float, cost_s: float, budget_s: float
) -> None:
    time = Time(chance=chance)
    store = Failing([kind("no") for kind in kinds], cost_s=cost_s, time=time)
    started = time.now

    with contextlib.suppress(StoreError):
        retrying(store, budget_s).read(URL, 0, 1, "etag")
    assert time.now - started <= budget_s + cost_s + 1e-6


def test_a_stream_resumes_where_it_broke() -> None:
    body = bytes(2 * PIECE_BYTES + 5)
    store = Failing([], body=body)
    pieces = retrying(store).stream(URL, "etag")

    assert len(next(pieces)) == PIECE_BYTES
    store.failures = [StoreUnavailable("reset"), TruncatedRead("cut", shard=URL)]
    assert sum(len(piece) for piece in pieces) == PIECE_BYTES + 5
    assert store.asked == [
        (0, PIECE_BYTES),
        *[(PIECE_BYTES, PIECE_BYTES)] * 3,
        (2 * PIECE_BYTES, 5),
    ]


def test_a_stream_of_a_changed_object_is_refused_before_its_first_byte() -> None:
    store = Failing([])

    with pytest.raises(DatasetChangedError):
        next(retrying(store).stream(URL, "another"))
    assert store.asked == []


def test_a_listing_that_breaks_off_is_taken_anew() -> None:
    store = Failing([StoreUnavailable("reset")])

    assert [info.url for info in retrying(store).list("s3://bucket/")] == [URL]


def test_one_refusal_slows_every_call_to_the_store() -> None:
    store = Failing([StoreThrottled("slow down")])
    asking = retrying(store)
    rule = RETRY_TABLE[StoreThrottled]

    asking.read(URL, 0, 1, "etag")
    waited = [seconds for seconds in store.time.slept if seconds]
    assert waited == [2 * rule.span_s(1)]  # the shared pause, then a moment of its own

    gate = SlowDown(rule, store.time.clock())
    began_in, wait_s = gate.enter()
    assert wait_s == 0
    gate.refused(began_in)
    assert gate.enter()[1] > 0


def test_refusals_that_arrive_together_count_once() -> None:
    time = Time()
    rule = Rule(attempts=5, base_s=1.0, cap_s=100.0)
    gate = SlowDown(rule, time.clock())
    rounds = [gate.enter()[0] for _ in range(16)]
    for began_in in rounds:
        gate.refused(began_in)

    first = gate.enter()[1]
    assert first == 2 * rule.span_s(1)

    time.now += first
    gate.refused(gate.enter()[0])
    assert gate.enter()[1] == 2 * rule.span_s(2)


def test_a_store_that_serves_again_is_asked_at_full_speed_again() -> None:
    time = Time()
    rule = Rule(attempts=5, base_s=1.0, cap_s=100.0)
    gate = SlowDown(rule, time.clock())
    for _ in range(4):
        gate.refused(gate.enter()[0])
        time.now += 1000
    for _ in range(4):
        gate.served()
    gate.refused(gate.enter()[0])

    assert gate.enter()[1] == 2 * rule.span_s(1)


def test_throttling_for_good_ends_within_the_budget() -> None:
    store = Failing([StoreThrottled("slow down", shard=URL)] * 999)
    started = store.time.now

    with pytest.raises(StoreThrottled) as raised:
        retrying(store, budget_s=30.0).read(URL, 0, 4, "etag")
    assert store.time.now - started <= 30.0
    assert URL in str(raised.value)
    assert 1 < len(store.asked) < 20


def test_threads_share_the_pause() -> None:
    """Sixteen threads are refused once each; the gate counts one round of refusals."""
    time = Time(chance=0.5)
    barrier = threading.Barrier(16)
    asking = Retrying(_RefusesFirst(barrier), RETRY_TABLE, 1e6, time.clock())
    results: list[bytes] = []

    def read() -> None:
        results.append(bytes(asking.read(URL, 0, 1, "etag")))

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"x"] * 16
    assert asking._slow_down._round == 1


class _RefusesFirst:
    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier
        self._seen = threading.local()

    def _unused(self, *_: object) -> Iterator[ObjectInfo]:
        raise AssertionError

    list: Callable[[str], Iterator[ObjectInfo]] = _unused
    stream: Callable[..., Iterator[bytes]] = _unused  # type: ignore[assignment]
    head: Callable[[str], ObjectInfo] = _unused  # type: ignore[assignment]

    def read(self, url: str, offset: int, length: int, etag: str) -> bytes:
        if not getattr(self._seen, "refused", False):
            self._seen.refused = True
            self._barrier.wait(timeout=30)
            raise StoreThrottled("all at once")
        return b"x"
