"""Lists of many pages, which are read side by side."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from awry import Awry, Mood, awry_server
from dataplane_bench.s3 import make_certificate
from dataplane_torch import DataLoader
from fake_clock import Time
from hypothesis import given
from hypothesis import strategies as st
from servers import reach
from signed_server import SignedServer, signed_server

from dataplane.model.errors import (
    DataplaneError,
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from dataplane.model.records import ObjectInfo
from dataplane.store.base import NotInOrderError, Page, Paged
from dataplane.store.connect import Stores, open_store
from dataplane.store.expand import expand
from dataplane.store.listing import PAGES_AT_ONCE, KeyRange, Listing, listed
from dataplane.store.retry import Retrying
from dataplane.store.url_policy import UrlPolicy

Ask = Callable[[Sequence[str], str | None, int], Page]
PREFIX = "s3://bucket/many/"
SHAPES = {
    "numbers": [f"shard-{i:06d}.tar" for i in range(20_000)],
    "numbers without zeros": [f"shard-{i}.tar" for i in range(20_000)],
    "hashes": [hashlib.sha256(b"%d" % i).hexdigest() for i in range(20_000)],
    "folders": [f"class-{i // 120:04d}/{i % 120:05d}.jpg" for i in range(20_000)],
    "days": [f"2026-{i // 3000 + 1:02d}-{i // 100 % 30:02d}/{i:06d}" for i in range(20_000)],
    "two sets": [f"{'train' if i < 15_000 else 'validation'}-{i:07d}" for i in range(20_000)],
}


def page_of(urls: Sequence[str], after: str | None, size: int) -> Page:
    return page_from(urls, 0 if after is None else bisect_right(urls, after), size)


def page_from(urls: Sequence[str], first: int, size: int) -> Page:
    return Page(
        [ObjectInfo(url, 1, "e") for url in urls[first : first + size]], len(urls) - first < size
    )


def rounds_and_pages(
    urls: Sequence[str], size: int, random_: random.Random | None, ask: Ask = page_of
) -> tuple[int, int]:
    """List each url once, in rounds, in each of which some or all requested pages come in."""
    listing = Listing(PREFIX)
    requests: list[tuple[KeyRange, str | None]] = []
    rounds = pages = 0
    while True:
        while len(requests) < PAGES_AT_ONCE and (due := listing.due()) is not None:
            requests.append((due, f"{PREFIX}{due.after}" if rounds else None))
        if not requests:
            assert [info.url for info in listing.found()] == sorted(urls)
            return rounds, pages
        rounds += 1
        if random_ is not None:
            random_.shuffle(requests)
        for _ in range(len(requests) if random_ is None else random_.randint(1, len(requests))):
            part, after = requests.pop()
            listing.answered(part, ask(urls, after, size))
            pages += 1


@given(
    st.sets(st.text("0189abz/-.é~\U0001f600\U0010ffff", max_size=8), max_size=300),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_each_key_is_listed_once(keys: set[str], size: int, random_: random.Random) -> None:
    rounds_and_pages(sorted(PREFIX + key for key in keys), size, random_)


@given(
    st.dictionaries(
        st.lists(st.sampled_from(["0", "1", "0-", "0a"]), min_size=1, max_size=3).map("/".join),
        st.sampled_from([("", 1), ("", 0), ("/", 0), ("/", 0), ("/", 0)]),
    ),
    st.integers(8, 20),
    st.randoms(use_true_random=False),
)
def test_folders_of_a_console_hide_no_object_wherever_they_are(
    kinds: dict[str, tuple[str, int]], size: int, random_: random.Random
) -> None:
    keys = sorted((PREFIX + key + slash, count) for key, (slash, count) in kinds.items())

    def page(after: str | None) -> Page:
        follow = [pair for pair in keys if after is None or pair[0] > after]
        infos = [ObjectInfo(key.rstrip("/"), count, "e") for key, count in follow[:size]]
        objects, empty = ([info for info in infos if info.size_bytes == count] for count in (1, 0))
        return Page(objects, len(follow) < size, empty)

    listing = Listing(PREFIX)
    requests: list[KeyRange] = []
    while True:
        while (due := listing.due()) is not None:
            requests.append(due)
        if not requests:
            break
        part = requests.pop(random_.randrange(len(requests)))
        listing.answered(part, page(f"{PREFIX}{part.after}"))
    sizes = [(info.url, info.size_bytes) for info in listing.found()]
    assert sizes == sorted((PREFIX + key, count) for key, (_, count) in kinds.items())


def by_folder(url: str) -> list[str]:
    return url.split("/")


def page_by_folder(urls: Sequence[str], after: str | None, size: int) -> Page:
    """As SeaweedFS gives it: a folder comes before its longer namesakes. As a store refuses it."""
    first = 0 if after is None else bisect_right(urls, by_folder(after), key=by_folder)
    page = page_from(urls, first, size)
    if any(url >= other for url, other in pairwise([after or "", *(o.url for o in page.objects)])):
        raise NotInOrderError
    return page


@given(
    st.sets(st.text("0123/-", min_size=1, max_size=8), max_size=300),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_no_key_is_lost_where_a_server_has_another_order(
    keys: set[str], size: int, random_: random.Random
) -> None:
    urls = sorted((PREFIX + key for key in keys), key=by_folder)
    with contextlib.suppress(NotInOrderError):
        rounds_and_pages(urls, size, random_, page_by_folder)


@pytest.mark.parametrize("folder", range(1, 10))
def test_ranges_that_do_not_follow_each_other_are_no_list(folder: int) -> None:
    # The folder fills whole pages, all in order, and comes before the cut that it is to come after.
    names = [f"{i}-{j:04d}" for i in range(10) for j in range(300)]
    names += [f"{folder}/{j:04d}" for j in range(300)]
    urls = sorted((PREFIX + name for name in names), key=by_folder)
    with pytest.raises(NotInOrderError):
        rounds_and_pages(urls, 100, None, page_by_folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_pages_are_read_side_by_side_and_few_in_vain(shape: str) -> None:
    urls = sorted(PREFIX + key for key in SHAPES[shape])
    rounds, pages = rounds_and_pages(urls, 100, None)
    assert pages <= 201 * 1.25 + 6
    assert rounds <= 60
    for random_ in map(random.Random, range(5)):
        assert rounds_and_pages(urls, 100, random_)[1] <= 201 * 1.25 + PAGES_AT_ONCE


def test_keys_that_nothing_can_be_guessed_of_are_still_listed_in_few_pages() -> None:
    random_ = random.Random(7)
    names = [
        "".join(random_.choices("aàé0-_", weights=(90, 1, 1, 5, 2, 1), k=40)) for _ in range(9_000)
    ]
    urls = sorted({f"{PREFIX}{name[:20]}/{name[20:]}" for name in names})
    assert rounds_and_pages(urls, 100, None)[1] <= 91 * 1.25 + 6


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    with awry_server({}) as server:
        reach(server, monkeypatch)
        server.objects = {f"bucket/many/{i:05d}": b"x" for i in range(12_345)}
        yield server


@pytest.fixture
def store(awry: Awry) -> Iterator[Retrying]:
    opened = Retrying(open_store("s3://bucket"), "s3://bucket", budget_s=10.0)
    yield opened
    opened.close()


def urls_of(awry: Awry, prefix: str) -> list[str]:
    return [url for name in awry.objects if (url := f"s3://{name}").startswith(prefix)]


@pytest.mark.parametrize(
    "prefix", ["", "many", "many/", "many/0", "many/12345", "many/09", "many/é", "other/"]
)
def test_a_list_is_that_of_one_request_after_the_other(
    awry: Awry, store: Retrying, prefix: str
) -> None:
    awry.objects = dict(
        sorted(
            {
                **awry.objects,
                "bucket/many": b"",
                "bucket/many-more": b"x",
                "bucket/many/12345": b"x",
                "bucket/many/12345/deep": b"x",
                "bucket/many/é1": b"x",
                "bucket/more/1": b"x",
            }.items()
        )
    )
    infos = list(store.list(f"s3://bucket/{prefix}"))
    assert [info.url for info in infos] == urls_of(awry, f"s3://bucket/{prefix}")
    assert infos == list(open_store("s3://bucket").list(f"s3://bucket/{prefix}"))


def test_google_lists_from_any_key_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {f"bucket/many/{i:05d}": b"x" for i in range(4321)}
    with awry_server(objects, make_certificate(tmp_path)) as google:
        nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        account = {"gcs_base_url": google.endpoint, "disable_oauth": True, **nobody}
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
        monkeypatch.setenv("SSL_CERT_FILE", google.environment()["SSL_CERT_FILE"])
        store = open_store("gs://bucket")
        assert isinstance(store, Paged)
        assert store.has_pages()
        page = store.page("gs://bucket/many/", "gs://bucket/many/0299")
        urls = [f"gs://{name}" for name in objects]
        assert [info.url for info in page.objects] == urls[2990:3990]
        infos = Retrying(store, "gs://bucket").list("gs://bucket/many/")
        assert [info.url for info in infos] == urls


@pytest.mark.parametrize("prefix", ["man", "é"])
def test_a_page_that_ends_in_the_prefix_itself_is_read_once(
    awry: Awry, store: Retrying, prefix: str
) -> None:
    before = [f"bucket/{prefix[:-1]}{chr(ord(prefix[-1]) - 1)}~~{i:04d}" for i in range(999)]
    after = [f"bucket/{prefix}~{i:04d}" for i in range(2000)]
    awry.objects = dict.fromkeys([*before, f"bucket/{prefix}", *after], b"x")
    url = f"s3://bucket/{prefix}"
    assert [info.url for info in store.list(url)] == urls_of(awry, url)


@pytest.mark.parametrize("prefix", ["a//x", "//x", "a\x01", "a\x01x", "many/\n"])
def test_a_prefix_that_no_key_has_is_listed(awry: Awry, store: Retrying, prefix: str) -> None:
    assert not list(store.list(f"s3://bucket/{prefix}"))


@pytest.mark.parametrize("mood", [Mood.WELL, Mood.UNORDERED])
def test_a_folder_of_a_console_does_not_stand_for_the_object_with_its_name(
    awry: Awry, store: Retrying, mood: Mood
) -> None:
    awry.objects = {"bucket/many/a": b"x", "bucket/many/a-b": b"x", "bucket/many/a/": b""}
    awry.be(then=mood)
    sizes = [(info.url, info.size_bytes) for info in store.list(PREFIX)]
    assert sizes == [(f"{PREFIX}a", 1), (f"{PREFIX}a-b", 1)]


def test_folders_of_a_console_cost_nothing_but_their_place_in_the_list(
    awry: Awry, store: Retrying
) -> None:
    names = [f"{i:04d}{more}" for i in range(3_000) for more in ("", "-b")]
    folders = {f"bucket/many/{name}/": b"" for name in names}
    awry.objects = {**folders, **{f"{name}x": b"x" for name in folders if "-b" in name}}
    infos = list(store.list(PREFIX))
    assert [info.url for info in infos if info.size_bytes] == [
        f"{PREFIX}{name}/x" for name in names if "-b" in name
    ]
    assert {info.url for info in infos if not info.size_bytes} == {PREFIX + name for name in names}
    assert {method for method, _ in awry.seen} == {"GET"}
    assert len(awry.seen) <= 10 * 1.25 + 6


def test_a_page_of_nothing_but_folders_is_asked_for_again_alone(
    awry: Awry, store: Retrying
) -> None:
    awry.objects = {f"bucket/many/{i:05d}/": b"" for i in range(12_345)}
    awry.be(*[Mood.INTERNAL, Mood.WELL, Mood.TRUNCATED, Mood.WELL, Mood.RESET] * 2)
    assert [info.url for info in store.list(PREFIX)] == [
        url.removesuffix("/") for url in urls_of(awry, PREFIX)
    ]
    assert len(awry.seen) <= 13 * 1.25 + 6 + 6


def test_what_comes_before_a_prefix_is_not_listed(awry: Awry, store: Retrying) -> None:
    assert len(list(store.list(f"{PREFIX}1200"))) == 10
    assert len(awry.seen) == 1


def test_a_page_that_fails_is_asked_for_again_alone(awry: Awry, store: Retrying) -> None:
    failures = [Mood.INTERNAL, Mood.WELL, Mood.TRUNCATED, Mood.WELL, Mood.RESET] * 2
    awry.be(*failures)
    assert [info.url for info in store.list(PREFIX)] == urls_of(awry, PREFIX)
    assert len(awry.seen) <= 13 * 1.25 + 6 + 6


def test_a_list_that_fails_for_good_ends(awry: Awry, store: Retrying) -> None:
    awry.be(*[Mood.WELL] * 5, then=Mood.DENIED)
    with pytest.raises(StoreDenied):
        store.list(PREFIX)
    awry.be(*[Mood.WELL] * 5, then=Mood.INTERNAL)
    hasty = Retrying(open_store("s3://bucket"), "s3://bucket", budget_s=0.3)
    with pytest.raises(StoreUnavailable, match=f"listing {PREFIX} after {PREFIX}.+: gave up"):
        hasty.list(PREFIX)


def test_a_server_without_order_is_listed_page_by_page(awry: Awry, store: Retrying) -> None:
    awry.be(then=Mood.UNORDERED)
    assert [info.url for info in store.list(PREFIX)] == urls_of(awry, PREFIX)
    assert [info.url for info in store.list(f"{PREFIX}0")] == urls_of(awry, f"{PREFIX}0")


def test_a_server_that_starts_at_no_other_key_is_refused(awry: Awry, store: Retrying) -> None:
    awry.be(then=Mood.AGAIN)
    with pytest.raises(StoreError, match="again and again"):
        store.list(PREFIX)


def test_each_page_is_checked_against_what_may_be_opened(awry: Awry) -> None:
    stores = Stores(policy=UrlPolicy((PREFIX,)))
    assert [info.url for info in stores.connect(PREFIX).list(PREFIX)] == urls_of(awry, PREFIX)
    with pytest.raises(StoreDenied):
        stores.connect(PREFIX).list("s3://bucket/man")
    stores.close()


def test_the_first_error_ends_a_list_of_many_pages() -> None:
    urls = sorted(PREFIX + key for key in SHAPES["numbers"])

    def fail(after: str | None) -> Page:
        if after and after > f"{PREFIX}shard-01":
            raise StoreDenied("no")
        return page_of(urls, after, 100)

    with pytest.raises(StoreDenied):
        listed(PREFIX, fail)


@pytest.mark.parametrize(("count", "asked"), [(999, 1), (1000, 2), (2500, 3)])
def test_a_list_has_all_of_its_pages(awry: Awry, count: int, asked: int) -> None:
    awry.objects = {f"bucket/many/{i:04d}": b"x" for i in range(count)}
    for mood in (Mood.WELL, Mood.NO_TOKEN):
        awry.be(then=mood)
        infos = list(open_store("s3://bucket").list("s3://bucket/many/"))
        assert [info.url for info in infos] == [f"s3://{name}" for name in awry.objects]
        assert len(awry.seen) == asked


def test_a_list_that_repeats_itself_is_refused(awry: Awry) -> None:
    awry.objects = {f"bucket/many/{i:04d}": b"x" for i in range(1001)}
    awry.be(then=Mood.AGAIN)
    with pytest.raises(StoreError, match="again and again") as raised:
        open_store("s3://bucket").list("s3://bucket/many/")
    assert type(raised.value) is StoreError


SECRET = "5ec2e75ec2e7"
BODY = (bytes(range(251)) * 12_000)[:400_000]


@pytest.fixture
def server() -> Iterator[SignedServer]:
    with signed_server() as made:
        yield made


@pytest.fixture
def stores() -> Iterator[Stores]:
    made = Stores(clock=Time().clock())
    yield made
    made.close()


def test_a_loader_reads_shards_that_only_their_own_queries_open(
    server: SignedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CACHE_DIR", "STATE_DIR"):
        monkeypatch.setenv(f"DATAPLANE_{name}", str(tmp_path / name))
    monkeypatch.setenv("DATAPLANE_WORKER_COUNT", "1")
    monkeypatch.setenv("DATAPLANE_LINGER_S", "0.2")
    urls = [
        server.add(f"/{name}.jsonl?token={name}{SECRET}", _lines(range(first, first + 20)))
        for name, first in (("a", 0), ("b", 20))
    ]

    # Together, so that one node serves both.
    with DataLoader(urls, batch_size=4) as both, DataLoader(urls[0], batch_size=4) as single:
        for loader, count in ((both, 40), (single, 20)):
            ids = sorted(number for batch in loader for number in batch["id"].tolist())
            assert ids == list(range(count))
    assert {method for method, _ in server.seen} == {"GET"}


@pytest.mark.parametrize(
    "query",
    [
        f"X-Amz-Credential=A%2F20260101%2Fus-east-1&X-Amz-Signature={SECRET}",
        f"token={SECRET}+/a==",
        f"token={SECRET}/",
        f"token=*{SECRET}[1]",
        f"id=%7e&empty=&flag&token={SECRET}~%2B%20",
    ],
)
def test_a_query_is_sent_unchanged(server: SignedServer, stores: Stores, query: str) -> None:
    url = server.add(f"/folder/a%20b.bin?{query}", BODY)

    (info,) = expand(url, stores.connect)
    store = stores.connect(url)
    into = memoryview(bytearray(len(BODY)))
    store.read_into(url, 0, info.etag, into)

    assert (info.url, info.size_bytes) == (url, len(BODY))
    assert bytes(store.read(url, 7, 9, info.etag)) == BODY[7:16]
    assert bytes(into) == BODY
    assert set(server.seen) == {("GET", f"/folder/a%20b.bin?{query}")}


def test_an_empty_object_behind_a_query_has_no_bytes(server: SignedServer, stores: Stores) -> None:
    url = server.add("/empty.bin?token=x", b"")

    (info,) = expand(url, stores.connect)

    assert info.size_bytes == 0
    assert bytes(stores.connect(url).read(url, 0, 0, info.etag)) == b""


def test_a_changed_object_behind_a_query_is_refused(server: SignedServer, stores: Stores) -> None:
    url = server.add("/a.bin?token=x", BODY)
    (info,) = expand(url, stores.connect)
    server.add("/a.bin?token=x", BODY[::-1])

    with pytest.raises(DatasetChangedError, match="changed since"):
        stores.connect(url).read(url, 0, 10, info.etag)
    with pytest.raises(DatasetChangedError, match="changed since"):
        stores.connect(url).read_into(url, 0, info.etag, memoryview(bytearray(10)))


def test_no_error_shows_the_query_that_opens_a_url(
    server: SignedServer, stores: Stores, port_of_nobody: int
) -> None:
    server.add("/a.bin?token=right", BODY)
    cases: list[tuple[str, type[DataplaneError], str]] = [
        (f"{server.endpoint}/a.bin?token={SECRET}", StoreDenied, "has not expired"),
        (f"{server.endpoint}/b.bin?token={SECRET}", ShardNotFound, "no object"),
        (f"http://127.0.0.1:{port_of_nobody}/a.bin?token={SECRET}", DataplaneError, "refused"),
    ]

    for url, error, says in cases:
        with pytest.raises(error, match=says) as raised:
            expand(url, stores.connect)
        assert SECRET not in "".join(traceback.format_exception(raised.value))
        assert SECRET not in repr(raised.value.nouns)


def _lines(ids: range) -> bytes:
    return b"".join(json.dumps({"id": number}).encode() + b"\n" for number in ids)
