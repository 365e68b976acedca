"""What answers of stores that refuse mean, the same for all ways to ask."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from awry import Awry, Mood, awry_server, etag_of
from fake_clock import Time
from servers import S3Server, reach

from dataplane.model.errors import (
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)
from dataplane.store.base import Reconnecting, Store
from dataplane.store.connect import Stores, open_store
from dataplane.store.policy import UrlPolicy
from dataplane.store.reads import fill

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
