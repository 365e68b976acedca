"""Retries on a clock that the test moves: which errors are retried, for how long, and by whom."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from fake_clock import Time
from hypothesis import given
from hypothesis import strategies as st

from dataplane.model.errors import (
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
from dataplane.model.records import ObjectInfo
from dataplane.store.faults import FAULTS, fault_of, kind_of
from dataplane.store.outage import Outage, Outages
from dataplane.store.reads import PIECE_BYTES
from dataplane.store.retry import PROBE, SLOW_DOWN, Retrying

URL = "s3://bucket/key"
RETRIED = {fault.error: fault.wait for fault in FAULTS if fault.wait is not None}
SHORT_ANSWERS_MAX = fault_of(TruncatedRead("cut")).attempts_max or 0


@dataclass
class Failing:
    """A store that raises the given errors, one per call, and then serves `body`."""

    failures: list[DataplaneError]
    body: bytes = b"0123456789"
    cost_s: float = 0.0
    time: Time = field(default_factory=Time)
    asked: list[tuple[int, int]] = field(default_factory=list)
    reconnected: int = 0

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

    def reconnect(self) -> None:
        self.reconnected += 1

    def _info(self) -> ObjectInfo:
        return ObjectInfo(URL, len(self.body), "etag")


def retrying(inner: Failing, budget_s: float = 60.0, *, is_known: bool = True) -> Retrying:
    """`is_known`: the store has answered before."""
    made = Retrying(
        inner, "s3://bucket", budget_s, inner.time.clock(), Outages(lambda _: None).note
    )
    if is_known:
        made.head(URL)
    return made


def test_the_table_has_one_row_for_each_error_and_each_status() -> None:
    assert {fault.error for fault in FAULTS} == {StoreError, *StoreError.__subclasses__()}
    statuses = [status for fault in FAULTS for status in fault.statuses]
    assert len(statuses) == len(set(statuses))
    for fault in FAULTS:
        assert fault_of(fault.error("down")) is fault
        assert all(kind_of(status) is fault.error for status in fault.statuses)
        assert all(kind_of(400, code) is fault.error for code in fault.codes)


@pytest.mark.parametrize("kind", RETRIED)
@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_in_the_table_is_tried_again(kind: type[StoreError], is_known: bool) -> None:
    store = Failing([kind("once"), kind("twice")])

    assert retrying(store, is_known=is_known).read(URL, 2, 3, "etag") == b"234"
    assert store.asked == [(2, 3)] * 3


@pytest.mark.parametrize(
    "kind", [ShardNotFound, StoreDenied, StoreError, DatasetChangedError, CorruptShard]
)
@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_not_in_the_table_is_raised_at_once(
    kind: type[DataplaneError], is_known: bool
) -> None:
    failure = kind("for good", shard=URL)
    store = Failing([failure])

    with pytest.raises(kind) as raised:
        retrying(store, is_known=is_known).read(URL, 0, 1, "etag")
    assert raised.value is failure
    assert len(store.asked) == 1
    assert store.time.waited == []


def test_an_answer_that_stays_too_short_is_an_error_after_a_few_tries() -> None:
    store = Failing([TruncatedRead(f"cut {i}", shard=URL, offset=7) for i in range(99)])

    with pytest.raises(TruncatedRead) as raised:
        retrying(store).read(URL, 7, 3, "etag")
    for part in (URL, "[7, 10)", f"{SHORT_ANSWERS_MAX} attempts", f"cut {SHORT_ANSWERS_MAX - 1}"):
        assert part in str(raised.value)
    assert raised.value.attempts == SHORT_ANSWERS_MAX
    assert raised.value.offset == 7
    assert isinstance(raised.value.__cause__, TruncatedRead)
    assert len(store.asked) == SHORT_ANSWERS_MAX


@pytest.mark.parametrize("kind", [StoreUnavailable, StoreThrottled])
@pytest.mark.parametrize("away_s", [5.0, 59.0])
def test_an_outage_is_survived_with_any_number_of_attempts(
    kind: type[StoreError], away_s: float
) -> None:
    time = Time(chance=0.1)
    store = Failing([], time=time)
    asking = retrying(store, budget_s=60.0)
    until = time.now + away_s

    class Away(list):  # type: ignore[type-arg]
        def __bool__(self) -> bool:
            return time.now < until

        def pop(self, _: int = 0) -> DataplaneError:
            return kind("away", shard=URL)

    store.failures = Away()
    assert asking.read(URL, 0, 4, "etag") == b"0123"
    assert time.now - until < PROBE.cap_s + SLOW_DOWN.cap_s
    assert len(store.asked) > 8


@pytest.mark.parametrize("kind", [StoreUnavailable, StoreThrottled])
def test_a_store_that_stays_away_is_an_error_once_the_budget_of_a_call_is_spent(
    kind: type[StoreError],
) -> None:
    store = Failing([kind("away", shard=URL) for _ in range(999)], cost_s=2.0)
    asking = retrying(store, budget_s=30.0)
    started = store.time.now

    with pytest.raises(kind, match=r"gave up after \d+ attempts in \d+\.\d s\. The last: away"):
        asking.read(URL, 0, 4, "etag")
    assert 20.0 < store.time.now - started <= 34.0


def test_pauses_of_a_call_that_fails_alone_grow_to_the_cap_and_are_drawn_from_zero() -> None:
    wait = RETRIED[StoreUnavailable]
    for chance in (1.0, 0.0):
        time = Time(chance=chance)
        store = Failing([], time=time)
        asking = retrying(store, budget_s=1e6)
        # Another request is served after the start of each attempt, so the store is not away.
        store.failures = Served([StoreUnavailable("down") for _ in range(9)], asking, time)

        assert asking.read(URL, 0, 1, "etag") == b"0"
        waited = [seconds for seconds in time.waited if seconds > 1e-9]
        expected = [chance * wait.span_s(n) for n in range(1, 10) if chance]
        assert waited == pytest.approx(expected)


class Served(list):  # type: ignore[type-arg]
    """Failures, each during a successful answer to another request."""

    def __init__(self, failures: list[DataplaneError], asking: Retrying, time: Time) -> None:
        super().__init__(failures)
        self._asking, self._time = asking, time

    def pop(self, _: int = 0) -> DataplaneError:
        failure: DataplaneError = super().pop(0)
        self._time.now += 0.5
        self._asking.head(URL)
        return failure


@given(
    kinds=st.lists(st.sampled_from(sorted(RETRIED, key=lambda kind: kind.__name__)), max_size=30),
    chance=st.floats(0, 1),
    cost_s=st.floats(0, 10),
    budget_s=st.floats(0.1, 100),
    is_known=st.booleans(),
)
def test_no_call_outlives_its_budget_by_more_than_two_requests(
    kinds: list[type[StoreError]], chance: float, cost_s: float, budget_s: float, is_known: bool
) -> None:
    time = Time(chance=chance)
    store = Failing([kind("no") for kind in kinds], cost_s=cost_s, time=time)
    asking = retrying(store, budget_s, is_known=is_known)
    started = time.now

    with contextlib.suppress(StoreError):
        asking.read(URL, 0, 1, "etag")
    assert time.now - started <= budget_s + 2 * cost_s + 1e-6


def test_a_probe_goes_out_over_new_connections() -> None:
    store = Failing([StoreUnavailable("away") for _ in range(3)])

    retrying(store, is_known=False).read(URL, 0, 1, "etag")
    assert (len(store.asked), store.reconnected) == (4, 3)


def test_a_failed_call_says_why_it_waits_until_it_is_served() -> None:
    time = Time()
    store = Failing([], time=time)
    asking = retrying(store)
    reasons = []

    class Telling(Served):
        def pop(self, _: int = 0) -> DataplaneError:
            reasons.append(asking.trouble(URL))
            return super().pop(0)

    store.failures = Telling([StoreUnavailable("first"), StoreUnavailable("second")], asking, time)
    asking.read(URL, 0, 1, "etag")
    assert [str(error) for error in reasons] == ["None", "first"]
    assert asking.trouble(URL) is None


def test_an_outage_is_observed_from_its_first_failure_to_the_first_answer() -> None:
    seen: list[Outage] = []
    time = Time(chance=0.5)
    store = Failing([StoreUnavailable(f"{URL}: gone", shard=URL)] * 5, time=time, cost_s=0.25)
    asking = Retrying(store, "s3://bucket", 60.0, time.clock(), seen.append)
    asking.head(URL)
    began = time.now

    asking.read(URL, 0, 1, "etag")
    first, last = seen[0], seen[-1]
    assert (first.store, first.since, first.error) == ("s3://bucket", began, "gone")
    assert not first.is_over
    assert (last.since, last.until) == (began, time.now)
    assert began < last.last_request_at < last.until
    assert [outage.is_over for outage in seen].count(True) == 1


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


def test_an_interrupted_listing_starts_over() -> None:
    store = Failing([StoreUnavailable("reset")])

    assert [info.url for info in retrying(store).list("s3://bucket/")] == [URL]


def test_one_refusal_slows_every_call_to_the_store() -> None:
    store = Failing([StoreThrottled("slow down")])
    asking = retrying(store)

    asking.read(URL, 0, 1, "etag")
    assert store.time.waited == [2 * SLOW_DOWN.span_s(1)]  # the pause, then the request's own time
