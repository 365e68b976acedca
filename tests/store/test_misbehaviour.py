"""Stores that fail as real ones do, over real HTTP."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from awry import Awry, Mood, awry_server
from fake_clock import Time
from servers import S3Server, only

from dataplane.model.errors import (
    ConfigError,
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TruncatedRead,
)
from dataplane.store.connect import Stores, open_store
from dataplane.store.expand import expand
from dataplane.store.obstore_faults import mapped
from dataplane.store.reads import PIECE_BYTES
from dataplane.store.url_policy import UrlPolicy

BODY = bytes(i % 251 for i in range(200_000))
URL = "s3://bucket/shard.bin"


@pytest.fixture
def awry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Awry]:
    with awry_server({"bucket/shard.bin": BODY}) as server:
        only(monkeypatch, server.environment())
        yield server


@pytest.mark.parametrize(
    ("mood", "error", "says"),
    [
        (Mood.SLOW_DOWN, StoreThrottled, "503"),
        (Mood.TOO_MANY, StoreThrottled, "429"),
        (Mood.INTERNAL, StoreUnavailable, "500"),
        (Mood.DENIED, StoreDenied, "AccessDenied"),
        (Mood.NO_BUCKET, ShardNotFound, "no bucket s3://bucket"),
        (Mood.TRUNCATED, StoreUnavailable, "closed the connection"),
        (Mood.SHORT, TruncatedRead, r"\[10, 100010\)"),
        (Mood.RESET, StoreUnavailable, "closed the connection"),
        (Mood.WHOLE, StoreError, "ignores Range"),
    ],
)
def test_each_failure_of_a_read_has_its_error(
    awry: Awry, mood: Mood, error: type[StoreError], says: str
) -> None:
    store = open_store("s3://bucket")
    etag = store.head(URL).etag
    awry.be(mood)

    with pytest.raises(error, match=says) as raised:
        store.read(URL, 10, 100_000, etag)
    assert type(raised.value) is error
    assert URL in str(raised.value)
    assert raised.value.shard == URL
    assert awry.seen == [("GET", "bytes=10-100009")], "obstore must not retry by itself"


@pytest.mark.parametrize("mood", [Mood.HANG, Mood.STALL, Mood.DRIP, Mood.DRIP_HEAD])
def test_a_server_that_hangs_is_given_up_at_the_deadline(awry: Awry, mood: Mood) -> None:
    etag = open_store("s3://bucket").head(URL).etag
    store = open_store("s3://bucket", request_timeout_s=0.3)
    awry.be(mood)

    with pytest.raises(StoreUnavailable, match="did not answer in time") as raised:
        store.read(URL, 0, 100_000, etag)
    assert awry.endpoint in str(raised.value) or "s3://bucket" in str(raised.value)


@pytest.mark.parametrize(
    "mood",
    [Mood.SLOW_DOWN, Mood.TOO_MANY, Mood.INTERNAL, Mood.TRUNCATED, Mood.SHORT, Mood.RESET],
)
def test_a_passing_failure_is_survived(awry: Awry, mood: Mood) -> None:
    store = Stores(clock=Time().clock()).connect(URL)
    etag = store.head(URL).etag
    awry.be(mood, mood)

    assert bytes(store.read(URL, 5, 1000, etag)) == BODY[5:1005]
    assert len(awry.seen) == 3


def test_throttling_for_good_is_an_error_within_the_budget(awry: Awry) -> None:
    time = Time()
    began = time.now
    store = Stores(clock=time.clock(), budget_s=45.0).connect(URL)
    awry.be(then=Mood.SLOW_DOWN)

    with pytest.raises(StoreThrottled, match="gave up") as raised:
        store.head(URL)
    assert URL in str(raised.value)
    assert 0 < time.now - began <= 45.0
    assert 1 < len(awry.seen) < 20


def test_a_refused_request_is_not_repeated(awry: Awry) -> None:
    store = Stores(clock=Time().clock()).connect(URL)
    awry.be(then=Mood.DENIED)

    with pytest.raises(StoreDenied):
        store.head(URL)
    assert awry.seen == [("HEAD", None), ("GET", "bytes=0-0")], "which says why"


def test_a_stream_goes_on_where_the_connection_broke(awry: Awry) -> None:
    body = bytes(PIECE_BYTES) + b"the second piece"
    awry.objects["bucket/long"] = body
    store = Stores(clock=Time().clock()).connect(URL)
    etag = store.head("s3://bucket/long").etag
    awry.be(Mood.WELL, Mood.RESET, Mood.WELL, Mood.TRUNCATED)

    assert b"".join(bytes(piece) for piece in store.stream("s3://bucket/long", etag)) == body
    first, second = f"bytes=0-{PIECE_BYTES - 1}", f"bytes={PIECE_BYTES}-{len(body) - 1}"
    assert [span for _, span in awry.seen] == [None, first, first, second, second]


def test_a_server_that_ignores_the_pin_is_caught_by_its_own_etag(awry: Awry) -> None:
    store = open_store("s3://bucket")
    old = store.head(URL)
    awry.objects["bucket/shard.bin"] = BODY[::-1]
    awry.be(then=Mood.UNPINNED)

    with pytest.raises(DatasetChangedError) as raised:
        store.read(URL, 0, 10, old.etag)
    assert raised.value.expected == old.etag


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: list(store.list("s3://bucket/")),
        lambda store: store.head(URL),
        lambda store: store.read(URL, 0, 10, "x"),
    ],
    ids=["list", "head", "read"],
)
def test_a_server_for_which_conditions_are_never_met_is_reported(
    awry: Awry, ask: Callable[[object], object]
) -> None:
    awry.be(then=Mood.UNMET)
    with pytest.raises(StoreError, match="412"):
        ask(open_store("s3://bucket"))
    assert len(awry.seen) <= 3


@pytest.mark.parametrize(
    "ask",
    [lambda store: list(store.list("s3://bucket/")), lambda store: store.head(URL)],
    ids=["list", "head"],
)
def test_an_endpoint_that_does_not_answer_is_reported(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[object], object], port_of_nobody: int
) -> None:
    port = port_of_nobody
    only(
        monkeypatch,
        {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        },
    )

    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port} refused the connection"):
        ask(open_store("s3://bucket"))


def test_the_error_about_a_dead_http_server_does_not_mention_settings_of_s3(
    port_of_nobody: int,
) -> None:
    for base, words in (
        (f"http://127.0.0.1:{port_of_nobody}", "refused the connection"),
        ("http://no-such-host.invalid", "has no address"),
    ):
        with pytest.raises(StoreUnavailable, match=f"{base} {words}") as raised:
            open_store(base).head(f"{base}/x.parquet")
        assert "AWS" not in str(raised.value)
        assert "url" in str(raised.value)


@pytest.mark.parametrize("policy", [None, UrlPolicy()])
def test_a_server_without_tls_is_reported_at_once(awry: Awry, policy: UrlPolicy | None) -> None:
    base = awry.endpoint.replace("http://", "https://")
    with pytest.raises(StoreError, match="does not speak TLS: write http://") as raised:
        Stores(clock=Time().clock(), policy=policy).connect(base).head(f"{base}/x.parquet")
    assert type(raised.value) is StoreError


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate")
@pytest.mark.parametrize("policy", [None, UrlPolicy()])
def test_an_untrusted_certificate_is_reported_at_once(
    tmp_path: Path, policy: UrlPolicy | None
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", certificate, "-subj", "/CN=localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        base = f"https://127.0.0.1:{listening.getsockname()[1]}"

        def serve() -> None:
            client, _ = listening.accept()
            with client, contextlib.suppress(OSError):
                context.wrap_socket(client, server_side=True).close()

        server = threading.Thread(target=serve)
        server.start()
        try:
            with pytest.raises(StoreError, match="certificate that is not trusted") as raised:
                Stores(clock=Time().clock(), policy=policy).connect(base).head(f"{base}/x.parquet")
        finally:
            server.join()
    assert type(raised.value) is StoreError


def test_credentials_that_cannot_be_renewed_are_retried_and_missing_ones_are_not(
    awry: Awry,
) -> None:
    said = OSError(
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1s - "
        "HTTP error: error sending request"
    )
    first, later = (mapped(said, URL, "s3://bucket", None, may_renew=had) for had in (False, True))
    assert type(first) is StoreDenied
    assert type(later) is StoreUnavailable
    assert "expired" in str(later)


def test_a_host_without_an_address_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    only(
        monkeypatch,
        {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_ENDPOINT_URL_S3": "http://no-such-host.invalid",
        },
    )

    with pytest.raises(StoreUnavailable, match=r"no-such-host\.invalid has no address"):
        open_store("s3://bucket").head(URL)


def test_missing_credentials_are_said_so(
    awry: Awry, monkeypatch: pytest.MonkeyPatch, tmp_path: object, port_of_nobody: int
) -> None:
    nowhere = f"http://127.0.0.1:{port_of_nobody}"
    only(monkeypatch, {"AWS_ENDPOINT_URL": awry.endpoint, "AWS_METADATA_ENDPOINT": nowhere})
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(StoreDenied, match="no credentials found"):
        open_store("s3://bucket").head(URL)


def test_a_profile_of_the_aws_folder_gives_the_credentials(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bucket = s3_server.bucket()
    s3_server.put(bucket, {"one": b"1"})
    home = tmp_path_factory.mktemp("home")
    (home / ".aws").mkdir()
    (home / ".aws" / "credentials").write_text(
        f"[training]\naws_access_key_id = {s3_server.access_key}\n"
        f"aws_secret_access_key = {s3_server.secret_key}\n"
    )
    (home / ".aws" / "config").write_text(
        f"[profile training]\nregion = us-east-1\nendpoint_url = {s3_server.endpoint}\n"
    )
    only(monkeypatch, {"AWS_PROFILE": "training"})
    monkeypatch.setenv("HOME", str(home))

    assert open_store(f"s3://{bucket}").head(f"s3://{bucket}/one").size_bytes == 1

    monkeypatch.setenv("AWS_PROFILE", "misspelt")
    with pytest.raises(ConfigError, match="misspelt"):
        open_store(f"s3://{bucket}")


def test_a_real_server_that_ignores_range_is_reported(
    careless_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = careless_s3_server.bucket()
    careless_s3_server.put(bucket, {"shard.bin": BODY})
    only(monkeypatch, careless_s3_server.environment())
    store = Stores(clock=Time().clock()).connect(f"s3://{bucket}")
    info = store.head(f"s3://{bucket}/shard.bin")

    with pytest.raises(StoreError, match="ignores Range"):
        store.read(info.url, 0, 100, info.etag)


def test_plain_http_is_read_by_range_and_named_file_by_file(awry: Awry) -> None:
    awry.objects["web/a b%.bin"] = BODY
    stores = Stores(clock=Time().clock())
    url = f"{awry.endpoint}/web/a%20b%25.bin"

    (info,) = expand(url, stores.connect)
    assert info.size_bytes == len(BODY)
    assert bytes(stores.connect(url).read(info.url, 7, 9, info.etag)) == BODY[7:16]
    with pytest.raises(StoreError, match="cannot list files"):
        expand(f"{awry.endpoint}/web/*.bin", stores.connect)
    with pytest.raises(ShardNotFound, match="missing"):
        expand(f"{awry.endpoint}/web/missing", stores.connect)


def test_one_store_serves_all_urls_of_a_bucket_and_environment(
    awry: Awry, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, settled = Stores(), Stores(is_settled=True)

    assert stores.connect("s3://bucket/a") is stores.connect("s3a://bucket/b/c")
    assert stores.connect("s3://bucket") is not stores.connect("s3://another")
    before, kept = stores.connect("s3://bucket"), settled.connect("s3://bucket")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "rotated")
    assert stores.connect("s3://bucket") is not before
    assert settled.connect("s3://bucket") is kept


def test_a_forked_child_is_refused_instead_of_hung(awry: Awry) -> None:
    store = open_store("s3://bucket")
    store.head(URL)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.head(URL)
        except StoreError as refusal:
            os.write(writing, str(refusal).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as answer:
        assert b"forked" in answer.read()


@pytest.mark.parametrize("key", ["a//b", "a/../b", "./a", "a/"])
def test_a_key_that_no_client_can_ask_for_is_refused(awry: Awry, key: str) -> None:
    with pytest.raises(StoreError, match=r"empty, '\.' or '\.\.'"):
        open_store("s3://bucket").head(f"s3://bucket/{key}")


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="nosuch://"):
        Stores().connect("nosuch://place/key")


@pytest.mark.parametrize(
    "endpoint",
    [
        "foo",
        "localhost:9000",
        "http://",
        "http://h:99999999",
        "ftp://x",
        "http://[::1",
        "http://a b",
    ],
)
def test_an_endpoint_that_is_no_url_is_refused(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    only(monkeypatch, {"AWS_ACCESS_KEY_ID": "a", "AWS_ENDPOINT_URL": endpoint})

    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL is") as raised:
        open_store("s3://bucket")
    assert endpoint in str(raised.value)
