"""The port of metrics: who is let in, what is shown, and what it may cost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest
import scrapes
from certificates import Authority
from trusted import TOKEN, TRUSTED

from dataplane.base.meters import BOUNDS_S, Durations, RequestCounts, StoreMeters
from dataplane.metrics.server import MetricsServer
from dataplane.metrics.table import METRICS, Kind, Reading
from dataplane.model.errors import ConfigError
from dataplane.security.security import Security
from dataplane.security.tls import Certificates, TlsFiles
from dataplane.security.tokens import Caller, Role

LOCAL = "127.0.0.1:0"
NODE = "spiffe://cluster/ns/watching/sa/prometheus"


def shown(do: Callable[[str], object], security: Security = TRUSTED, *readings: Reading) -> None:
    """Call `do` in a thread with the address of a server that shows these readings."""

    async def main() -> None:
        with contextlib.closing(MetricsServer(LOCAL, security)) as server:
            server.add(lambda: readings)
            await asyncio.to_thread(do, server.start())

    asyncio.run(main())


def refused(address: str, token: str = TOKEN, **how: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        scrapes.page(address, token, **how)
    with caught.value as answer:
        return answer.code, answer.read().decode()


def test_values_of_each_kind_are_shown_with_types_and_labels() -> None:
    took = Durations.none()
    for seconds in (0.0005, 0.02, 0.02, 100.0):
        took.add(seconds)
    readings = (
        Reading("dataplane_samples_total", 7, ('a "job"\n', "3")),
        Reading("dataplane_process_memory_bytes", lambda: 2.0, ("worker",)),
        Reading("dataplane_store_request_seconds", took, ("s3://bucket",)),
    )

    def check(address: str) -> None:
        text = scrapes.page(address, TOKEN)
        assert "# TYPE dataplane_samples_total counter" in text
        assert scrapes.values(text, "dataplane_samples_total") == {('a "job"\n', "3"): 7}
        assert scrapes.values(text, "dataplane_process_memory_bytes") == {("worker",): 2}
        buckets = scrapes.values(text, "dataplane_store_request_seconds_bucket")
        assert len(buckets) == len(BOUNDS_S) + 1
        assert [buckets[bound, "s3://bucket"] for bound in ("0.001", "0.01", "0.03", "30.0", "+Inf")] == [
            1, 1, 3, 3, 4,
        ]  # fmt: skip
        assert scrapes.values(text, "process_open_fds")[()] > 0

    shown(check, TRUSTED, *readings)


def test_whoever_has_no_token_is_refused_and_counted() -> None:
    def check(address: str) -> None:
        assert refused(address, "")[0] == 401
        code, words = refused(address, "not-the-token-but-as-long-as-it-is-000")
        assert code == 401
        assert "the token is not the coordinator's" in words
        assert refused(address, path="/")[0] == 404
        assert refused(address, method="POST")[0] == 405
        counts = scrapes.values(scrapes.page(address, TOKEN), "dataplane_refusals_total")
        assert counts["metrics refused",] >= 2

    shown(check)


@pytest.mark.parametrize(
    ("caller", "why"),
    [
        (Caller(frozenset({Role.NODE})), "may not read the status"),
        (Caller(frozenset({Role.TRAINER}), job="mine"), "for one job"),
        (Caller(frozenset({Role.ADMIN}), datasets=("s3://lab/",)), "for one job or some datasets"),
    ],
)
def test_a_token_that_may_not_see_all_jobs_is_refused(
    monkeypatch: pytest.MonkeyPatch, caller: Caller, why: str
) -> None:
    monkeypatch.setattr(Security, "caller", lambda *_: caller)

    def check(address: str) -> None:
        code, words = refused(address)
        assert code == 403
        assert why in words

    shown(check)


def test_with_tls_and_a_ca_only_known_certificates_are_let_in(tmp_path: Path) -> None:
    ca = Authority.made()
    server = ca.write(tmp_path, "server")
    security = Security(TRUSTED.tokens, tls=Certificates(server), peers=(NODE,))

    def context(files: TlsFiles | None) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=server.ca)
        if files is not None:
            made.load_cert_chain(files.cert, files.key)
        return made

    def check(address: str) -> None:
        known = context(ca.write(tmp_path, "known", uri=NODE))
        assert "process_open_fds" in scrapes.page(address, TOKEN, known)
        with pytest.raises(urllib.error.HTTPError, match="403") as caught:
            scrapes.page(address, TOKEN, context(ca.write(tmp_path, "other", uri="spiffe://other")))
        caught.value.close()
        with pytest.raises(OSError):
            scrapes.page(address, TOKEN, context(None))
        with pytest.raises(OSError):
            scrapes.page(address, TOKEN)

    shown(check, security)


def test_it_does_not_listen_where_the_token_would_be_read_by_others() -> None:
    async def start(address: str, security: Security) -> None:
        with contextlib.closing(MetricsServer(address, security)) as server:
            server.start()

    for address, security, why in (
        ("0.0.0.0:0", TRUSTED, "in plain text"),
        (LOCAL, Security(), "no token"),
        ("unix:/tmp/metrics.sock", TRUSTED, "over TCP"),
    ):
        with pytest.raises(ConfigError, match=why):
            asyncio.run(start(address, security))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot listen for metrics"):
            asyncio.run(start(address, TRUSTED))


def test_connections_that_say_nothing_keep_nobody_out() -> None:
    def check(address: str) -> None:
        host, _, port = address.rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection((host, int(port))))
            for _ in range(3):
                assert "process_open_fds" in scrapes.page(address, TOKEN)

    shown(check)


def test_stores_without_end_have_one_name_together() -> None:
    meters, request = StoreMeters(), RequestCounts((1,) + (0,) * len(BOUNDS_S), 0.5, {}, 2)
    for number in range(100):
        meters.add(f"https://{number}.example.com", request)
    assert len(meters.by_store) == 65
    assert meters.by_store["others"].retries == 2 * 36


def test_names_follow_the_rules_of_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("dataplane_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        stem = metric.name.removesuffix("_total")
        assert not metric.unit or stem.endswith(f"_{metric.unit}"), metric.name
