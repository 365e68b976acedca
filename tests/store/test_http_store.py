"""What a node that serves others reads over http, from servers that misbehave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from awry import Awry, Mood, awry_server, etag_of

from dataplane.base.trace import Trace
from dataplane.model.errors import (
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TruncatedRead,
)
from dataplane.model.records import ObjectInfo
from dataplane.store import policy
from dataplane.store.http_store import HttpStore
from dataplane.store.policy import UrlPolicy

BODY = bytes(i % 251 for i in range(200_000))


@pytest.fixture
def awry() -> Iterator[Awry]:
    with awry_server({"web/shard.bin": BODY}) as server:
        yield server


def _url(awry: Awry) -> str:
    return f"{awry.endpoint}/web/shard.bin"


def _head(awry: Awry) -> ObjectInfo:
    return HttpStore(awry.endpoint, 0.5, UrlPolicy()).head(_url(awry))


def _read(awry: Awry) -> bytes:
    store = HttpStore(awry.endpoint, 0.5, UrlPolicy())
    return bytes(store.read(_url(awry), 10, 1000, etag_of(BODY)))


@pytest.mark.parametrize(
    ("mood", "error", "says"),
    [
        (Mood.SLOW_DOWN, StoreThrottled, "503"),
        (Mood.TOO_MANY, StoreThrottled, "429"),
        (Mood.INTERNAL, StoreUnavailable, "500"),
        (Mood.LATE, StoreUnavailable, "408"),
        (Mood.DENIED, StoreDenied, "403"),
        (Mood.NO_BUCKET, ShardNotFound, "404"),
        (Mood.TRUNCATED, StoreUnavailable, "closed the connection"),
        (Mood.RESET, StoreUnavailable, "closed the connection"),
        (Mood.SHORT, TruncatedRead, "gave 999 bytes"),
        (Mood.WHOLE, StoreError, "must support ranges"),
        (Mood.DRIP_HEAD, StoreUnavailable, "did not answer in time"),
    ],
)
def test_each_failure_has_its_error(
    awry: Awry, mood: Mood, error: type[StoreError], says: str
) -> None:
    awry.be(mood)
    with pytest.raises(error, match=says) as raised:
        _read(awry)
    assert type(raised.value) is error
    assert raised.value.shard == _url(awry)
    assert len(awry.seen) == 1
    assert _read(awry) == BODY[10:1010]


@pytest.mark.parametrize(
    ("altered", "error", "says"),
    [
        ({"Content-Range": "bytes 17-1016/200000"}, TruncatedRead, "1000 bytes from 17 on"),
        ({"Content-Range": "bytes 10-2009/200000"}, TruncatedRead, "2000 bytes from 10 on"),
        ({"Content-Range": f"bytes 10-1009/{'9' * 5000}"}, StoreError, "must support ranges"),
        ({"Content-Range": None}, StoreError, "must support ranges"),
        ({"Content-Length": "1001"}, TruncatedRead, "gave 1001 bytes"),
        ({"Content-Length": "500", "Content-Encoding": "gzip"}, StoreError, "compresses"),
        ({"ETag": '"another"'}, DatasetChangedError, "another"),
        ({"ETag": None}, DatasetChangedError, "modified-"),
        ({"ETag": None, "Last-Modified": None}, StoreError, "neither ETag nor Last-Modified"),
        ({"ETag": None, "Last-Modified": "now"}, StoreError, "neither ETag nor Last-Modified"),
    ],
)
def test_an_answer_that_is_not_the_pinned_range_is_refused(
    awry: Awry, altered: dict[str, str | None], error: type[StoreError], says: str
) -> None:
    awry.altered = altered
    with pytest.raises(error, match=says) as raised:
        _read(awry)
    assert type(raised.value) is error


def test_an_object_that_is_stored_compressed_is_read_as_it_is_stored(awry: Awry) -> None:
    awry.altered = {"Content-Encoding": "gzip"}
    assert _head(awry).size_bytes == len(BODY)
    assert _read(awry) == BODY[10:1010]


def test_a_range_beyond_the_end_has_its_error(awry: Awry) -> None:
    awry.altered = {"Content-Range": "bytes */200000"}
    store = HttpStore(awry.endpoint, 0.5, UrlPolicy())
    with pytest.raises(TruncatedRead, match="gave 0 bytes"):
        store.read(_url(awry), len(BODY), 10, etag_of(BODY))


@pytest.mark.parametrize(
    "location", ["http://[", "http://h:99999/", "http://a..b/", f"http://{'a.' * 3000}/", ""]
)
def test_a_redirect_to_what_is_no_url_has_its_error(awry: Awry, location: str) -> None:
    awry.altered = {"Location": location}
    awry.be(Mood.ELSEWHERE)
    with pytest.raises(StoreError, match="redirects to what is not a url"):
        _head(awry)
    assert len(awry.seen) == 1


@pytest.mark.parametrize("scheme", ["file", "gopher", "ftp", "dict", "s3"])
def test_a_redirect_to_another_scheme_leaves_one_line_of_the_log(
    awry: Awry, scheme: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_trace", Trace("security"))
    awry.altered = {"Location": f"{scheme}:///etc/passwd"}
    awry.be(Mood.ELSEWHERE)
    with pytest.raises(StoreDenied, match=f"redirects to {scheme}, which is not followed"):
        _head(awry)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"url refused url={_url(awry)} ")
    assert f"it redirects to {scheme}, which is not followed" in line


def test_a_redirect_to_another_scheme_shows_no_more_than_that(awry: Awry) -> None:
    awry.altered = {"Location": f"data:{'x' * 3000}"}
    awry.be(Mood.ELSEWHERE)
    with pytest.raises(StoreDenied, match="redirects to data, which is not followed"):
        _head(awry)
