"""Refusals of stores mean the same for all ways to ask."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from awry import Awry, Mood, awry_server, etag_of
from fake_clock import Time
from hypothesis import given
from hypothesis import strategies as st
from servers import S3Server, reach

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
from dataplane.store.base import Reconnecting, Store
from dataplane.store.connect import Stores, open_store
from dataplane.store.faults import FAULTS, fault_of, kind_of
from dataplane.store.outage import Outage, Outages
from dataplane.store.reads import PIECE_BYTES, fill
from dataplane.store.retry import PROBE, SLOW_DOWN, Retrying
from dataplane.store.url_policy import UrlPolicy

BODY = bytes(i % 251 for i in range(300_000))
URL = "s3://bucket/shard.bin"
TOKEN = "FwoGZXIvYXdzEXAMPLETOKEN"
Ask = Callable[[], None]
WAYS = ["s3", "s3 directly", "http", "http with a query", "checked http"]


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    with awry_server({"bucket/shard.bin": BODY}) as server:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                monkeypatch.delenv(name)
        reach(server, monkeypatch)
        yield server


def _place(awry: Awry, way: str) -> tuple[Store, str]:
    """A store that is asked in this way, and the url of its object."""
    policy = UrlPolicy() if way == "checked http" else None
    if way.startswith("s3"):
        return open_store("s3://bucket", 5.0, policy), URL
    query = "?token=any" if way == "http with a query" else ""
    return open_store(awry.endpoint, 5.0, policy), f"{awry.endpoint}/bucket/shard.bin{query}"


@pytest.fixture(params=WAYS)
def ask(request: pytest.FixtureRequest, awry: Awry) -> Iterator[Ask]:
    """Asks for a range in one of the ways that there are."""
    store, url = _place(awry, request.param)
    yield lambda: _fill(store, url, 1000 if request.param == "s3" else 200_000)
    assert isinstance(store, Reconnecting)
    store.reconnect()  # closes its idle connections


def _fill(store: Store, url: str = URL, length: int = 1000) -> None:
    into = bytearray(length)
    fill(store, url, 10, etag_of(BODY), memoryview(into))
    assert into == BODY[10 : 10 + length]


_MEANINGS: dict[type[StoreError], tuple[int, ...]] = {
    StoreThrottled: (429, 503),
    StoreUnavailable: (408, 425, 500, 502, 504, 507, 520, 529),
    StoreDenied: (401, 403, 407),
    ShardNotFound: (404, 410),
    StoreError: (400, 402, 405, 409, 414, 451, 501, 505),
}


@pytest.mark.parametrize("kind", _MEANINGS, ids=lambda kind: kind.__name__)
def test_a_status_means_the_same_however_it_was_asked(
    awry: Awry, ask: Ask, kind: type[StoreError]
) -> None:
    for status in _MEANINGS[kind]:
        awry.refusal = (status, "no")
        awry.be(then=Mood.REFUSED)
        with pytest.raises(StoreError) as raised:
            ask()
        assert type(raised.value) is kind, status


_XML = (
    '<?xml version="1.0"?>\n<Error><Code>InvalidArgument</Code>'
    f"<Message>That is &lt;odd&gt;</Message><Token-0>{TOKEN}</Token-0></Error>"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (_XML, r"HTTP 400 InvalidArgument: That is <odd>\)"),
        (
            f"<html><head><title>400 Bad Request</title>{TOKEN}</head>{'<p>no</p>' * 9999}</html>",
            r"HTTP 400: 400 Bad Request\)",
        ),
        (f"{'no ' * 9999}{TOKEN}", r"HTTP 400: no no no"),
        ('{"error": {"code": 400, "message": "A bad one."}}', r"HTTP 400: A bad one\.\)"),
        ("", r"HTTP 400\)"),
    ],
    ids=["xml", "html", "long", "json", "empty"],
)
def test_an_error_shows_what_a_store_says_and_not_its_whole_answer(
    awry: Awry, text: str, says: str
) -> None:
    awry.refusal = (400, text)
    for length in (1000, 200_000):
        awry.be(then=Mood.REFUSED)
        with pytest.raises(StoreError, match=says) as raised:
            _fill(open_store("s3://bucket"), length=length)
        assert len(str(raised.value)) < 500
        assert TOKEN not in "".join(traceback.format_exception(raised.value))


def test_a_span_of_many_digits_is_not_shown_whole(awry: Awry, ask: Ask) -> None:
    awry.altered = {"Content-Range": f"bytes {'9' * 5000}-{'9' * 5000}/1"}
    with pytest.raises(StoreError) as raised:
        ask()
    assert len(str(raised.value)) < 500
    assert "limit" not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (301, "<Error><Code>PermanentRedirect</Code></Error>", "the bucket's region"),
        (
            400,
            "<Error><Message>it is wrong</Message><Region>eu-west-1</Region></Error>",
            "eu-west-1",
        ),
    ],
)
def test_a_bucket_in_another_region_is_told_with_the_setting(
    awry: Awry, status: int, text: str, says: str
) -> None:
    awry.refusal = (status, text)
    awry.be(then=Mood.REFUSED)
    for length in (1000, 200_000):
        with pytest.raises(StoreError, match=f"set AWS_REGION to {says}") as raised:
            _fill(open_store("s3://bucket"), length=length)
        assert type(raised.value) is StoreError


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("/bucket/shard.bin", "redirects (more than|too often)"),
        ("http://[", "redirects to what is not a"),
        ("ftp://host/file", "redirects to (ftp|what is not an http url)"),
    ],
)
def test_a_redirect_that_leads_nowhere_is_an_error_at_once(
    awry: Awry, ask: Ask, location: str, says: str
) -> None:
    awry.altered = {"Location": location}
    awry.be(then=Mood.ELSEWHERE)
    with pytest.raises(StoreError, match=says) as raised:
        ask()
    assert not isinstance(raised.value, StoreUnavailable)


def test_a_server_that_ignores_ranges_is_told_as_such(awry: Awry, ask: Ask) -> None:
    awry.be(then=Mood.WHOLE)
    with pytest.raises(StoreError, match=r"ignores Range|must support ranges"):
        ask()


def test_what_comes_before_an_answer_is_skipped(awry: Awry, ask: Ask) -> None:
    awry.be(then=Mood.HINTED)
    ask()
    assert len(awry.seen) == 1


def test_credentials_that_expire_in_a_file_are_read_from_it_again(
    awry: Awry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(key: str) -> None:
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = any\n"
        (tmp_path / "credentials").write_text(text)

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    awry.expired = "EXPIREDKEY"
    write("EXPIREDKEY")
    with pytest.raises(StoreDenied, match=r"HTTP 400 ExpiredToken: no.*renew the credentials"):
        _fill(Stores(clock=Time().clock()).connect(URL))

    awry.expired = "no key"
    for length in (1000, 200_000):
        awry.expired = "no key"
        write("EXPIREDKEY")
        store = Stores(clock=Time().clock()).connect(URL)
        _fill(store, length=length)
        awry.expired = "EXPIREDKEY"
        write("RENEWEDKEY")
        _fill(store, length=length)


def test_credentials_of_the_environment_that_expire_are_an_error_at_once(awry: Awry) -> None:
    store = Stores(clock=Time().clock()).connect(URL)
    _fill(store)
    awry.expired = "any"
    awry.be()
    with pytest.raises(StoreDenied, match="renew the credentials"):
        _fill(store)
    assert len(awry.seen) == 1


def test_a_key_that_the_store_never_knew_is_not_to_be_renewed(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3_server.environment(), "AWS_ACCESS_KEY_ID": "nobody"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreDenied, match=r"InvalidAccessKeyId: .*: check the credentials"):
        open_store("s3://bucket").head(URL)


def test_a_machine_without_a_role_has_no_credentials(
    awry: Awry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", awry.endpoint)
    with pytest.raises(StoreDenied, match=r"no credentials found \(HTTP 404"):
        _fill(open_store("s3://bucket"))


def test_an_object_named_like_a_service_for_credentials_is_an_object(awry: Awry) -> None:
    url = "s3://bucket/credentials/shard.bin"
    awry.be(then=Mood.SLOW_DOWN)
    with pytest.raises(StoreThrottled):
        _fill(open_store("s3://bucket"), url)


@pytest.mark.parametrize("way", ["s3", "http"])
@pytest.mark.parametrize("status", [400, 403, 405, 501])
def test_an_object_is_described_by_get_where_head_is_refused(
    awry: Awry, way: str, status: int
) -> None:
    store, url = _place(awry, way)
    awry.refusal = (status, "")
    awry.be(Mood.REFUSED)
    info = store.head(url)
    assert (info.size_bytes, info.etag) == (len(BODY), etag_of(BODY))
    assert awry.seen == [("HEAD", None), ("GET", "bytes=0-0")]


def test_a_refused_head_says_why(awry: Awry) -> None:
    awry.refusal = (403, _XML.replace("InvalidArgument", "ExpiredToken"))
    awry.be(then=Mood.REFUSED)
    with pytest.raises(StoreDenied, match=r"HTTP 403 ExpiredToken: That is <odd>.*renew"):
        open_store("s3://bucket").head(URL)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mood", [Mood.WELL, Mood.WHOLE], ids=["416", "200"])
def test_an_empty_object_is_one_though_it_has_no_range(awry: Awry, way: str, mood: Mood) -> None:
    awry.objects["bucket/shard.bin"] = b""
    awry.be(then=mood)
    store, url = _place(awry, way)
    info = store.head(url)
    assert (info.size_bytes, info.etag) == (0, etag_of(b""))
    assert bytes(store.read(url, 0, 0, info.etag)) == b""


RETRIED_URL = "s3://bucket/key"
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
        return ObjectInfo(RETRIED_URL, len(self.body), "etag")


def retrying(inner: Failing, budget_s: float = 60.0, *, is_known: bool = True) -> Retrying:
    """`is_known`: the store has answered before."""
    made = Retrying(
        inner, "s3://bucket", budget_s, inner.time.clock(), Outages(lambda _: None).note
    )
    if is_known:
        made.head(RETRIED_URL)
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

    assert retrying(store, is_known=is_known).read(RETRIED_URL, 2, 3, "etag") == b"234"
    assert store.asked == [(2, 3)] * 3


@pytest.mark.parametrize(
    "kind", [ShardNotFound, StoreDenied, StoreError, DatasetChangedError, CorruptShard]
)
@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_not_in_the_table_is_raised_at_once(
    kind: type[DataplaneError], is_known: bool
) -> None:
    failure = kind("for good", shard=RETRIED_URL)
    store = Failing([failure])

    with pytest.raises(kind) as raised:
        retrying(store, is_known=is_known).read(RETRIED_URL, 0, 1, "etag")
    assert raised.value is failure
    assert len(store.asked) == 1
    assert store.time.waited == []


def test_an_answer_that_stays_too_short_is_an_error_after_a_few_tries() -> None:
    store = Failing([TruncatedRead(f"cut {i}", shard=RETRIED_URL, offset=7) for i in range(99)])

    with pytest.raises(TruncatedRead) as raised:
        retrying(store).read(RETRIED_URL, 7, 3, "etag")
    for part in (
        RETRIED_URL,
        "[7, 10)",
        f"{SHORT_ANSWERS_MAX} attempts",
        f"cut {SHORT_ANSWERS_MAX - 1}",
    ):
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
            return kind("away", shard=RETRIED_URL)

    store.failures = Away()
    assert asking.read(RETRIED_URL, 0, 4, "etag") == b"0123"
    assert time.now - until < PROBE.cap_s + SLOW_DOWN.cap_s
    assert len(store.asked) > 8


@pytest.mark.parametrize("kind", [StoreUnavailable, StoreThrottled])
def test_a_store_that_stays_away_is_an_error_once_the_budget_of_a_call_is_spent(
    kind: type[StoreError],
) -> None:
    store = Failing([kind("away", shard=RETRIED_URL) for _ in range(999)], cost_s=2.0)
    asking = retrying(store, budget_s=30.0)
    started = store.time.now

    with pytest.raises(kind, match=r"gave up after \d+ attempts in \d+\.\d s\. The last: away"):
        asking.read(RETRIED_URL, 0, 4, "etag")
    assert 20.0 < store.time.now - started <= 34.0


def test_pauses_of_a_call_that_fails_alone_grow_to_the_cap_and_are_drawn_from_zero() -> None:
    wait = RETRIED[StoreUnavailable]
    for chance in (1.0, 0.0):
        time = Time(chance=chance)
        store = Failing([], time=time)
        asking = retrying(store, budget_s=1e6)
        # Another request is served after the start of each attempt, so the store is not away.
        store.failures = Served([StoreUnavailable("down") for _ in range(9)], asking, time)

        assert asking.read(RETRIED_URL, 0, 1, "etag") == b"0"
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
        self._asking.head(RETRIED_URL)
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
        asking.read(RETRIED_URL, 0, 1, "etag")
    assert time.now - started <= budget_s + 2 * cost_s + 1e-6


def test_a_probe_goes_out_over_new_connections() -> None:
    store = Failing([StoreUnavailable("away") for _ in range(3)])

    retrying(store, is_known=False).read(RETRIED_URL, 0, 1, "etag")
    assert (len(store.asked), store.reconnected) == (4, 3)


def test_a_failed_call_says_why_it_waits_until_it_is_served() -> None:
    time = Time()
    store = Failing([], time=time)
    asking = retrying(store)
    reasons = []

    class Telling(Served):
        def pop(self, _: int = 0) -> DataplaneError:
            reasons.append(asking.trouble(RETRIED_URL))
            return super().pop(0)

    store.failures = Telling([StoreUnavailable("first"), StoreUnavailable("second")], asking, time)
    asking.read(RETRIED_URL, 0, 1, "etag")
    assert [str(error) for error in reasons] == ["None", "first"]
    assert asking.trouble(RETRIED_URL) is None


def test_an_outage_is_observed_from_its_first_failure_to_the_first_answer() -> None:
    seen: list[Outage] = []
    time = Time(chance=0.5)
    store = Failing(
        [StoreUnavailable(f"{RETRIED_URL}: gone", shard=RETRIED_URL)] * 5, time=time, cost_s=0.25
    )
    asking = Retrying(store, "s3://bucket", 60.0, time.clock(), seen.append)
    asking.head(RETRIED_URL)
    began = time.now

    asking.read(RETRIED_URL, 0, 1, "etag")
    first, last = seen[0], seen[-1]
    assert (first.store, first.since, first.error) == ("s3://bucket", began, "gone")
    assert not first.is_over
    assert (last.since, last.until) == (began, time.now)
    assert began < last.last_request_at < last.until
    assert [outage.is_over for outage in seen].count(True) == 1


def test_a_stream_resumes_where_it_broke() -> None:
    body = bytes(2 * PIECE_BYTES + 5)
    store = Failing([], body=body)
    pieces = retrying(store).stream(RETRIED_URL, "etag")

    assert len(next(pieces)) == PIECE_BYTES
    store.failures = [StoreUnavailable("reset"), TruncatedRead("cut", shard=RETRIED_URL)]
    assert sum(len(piece) for piece in pieces) == PIECE_BYTES + 5
    assert store.asked == [
        (0, PIECE_BYTES),
        *[(PIECE_BYTES, PIECE_BYTES)] * 3,
        (2 * PIECE_BYTES, 5),
    ]


def test_a_stream_of_a_changed_object_is_refused_before_its_first_byte() -> None:
    store = Failing([])

    with pytest.raises(DatasetChangedError):
        next(retrying(store).stream(RETRIED_URL, "another"))
    assert store.asked == []


def test_an_interrupted_listing_starts_over() -> None:
    store = Failing([StoreUnavailable("reset")])

    assert [info.url for info in retrying(store).list("s3://bucket/")] == [RETRIED_URL]


def test_one_refusal_slows_every_call_to_the_store() -> None:
    store = Failing([StoreThrottled("slow down")])
    asking = retrying(store)

    asking.read(RETRIED_URL, 0, 1, "etag")
    assert store.time.waited == [2 * SLOW_DOWN.span_s(1)]  # the pause, then the request's own time
