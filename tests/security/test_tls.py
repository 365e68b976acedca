"""TLS and mTLS between real servers and clients: who is let in, and certificates that change."""

from __future__ import annotations

import asyncio
import datetime as dt
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from certificates import Authority
from cryptography import x509
from membership import VERSION, progress
from trusted import OWN, STRANGER, TRUSTED, beat, join

from dataplane.coordinator.front import CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.model.errors import AccessDenied, ConfigError, PeerLost
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import StatusRequest
from dataplane.security.security import Security, security_of
from dataplane.security.tls import Certificates, TlsFiles, why_not_valid

CONFIG = CoordinatorConfig(version=VERSION, lease_s=60.0)
NODE = "spiffe://cluster/ns/training/sa/node"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def secured(files, peers=(), clock=None):
    tls = Certificates(files) if clock is None else Certificates(files, clock)
    return Security(TRUSTED.tokens, tls=tls, peers=peers)


@asynccontextmanager
async def serving(security, address="127.0.0.1:0"):
    server = CoordinatorServer(CONFIG, address, security)
    try:
        yield await server.start()
    finally:
        await server.stop(0.0)


async def asked(address, security):
    client = CoordinatorClient(address, security, patience_s=0.0)
    try:
        return await client.status(StatusRequest())
    finally:
        await client.close()


def test_a_client_with_a_certificate_of_the_ca_and_the_token_is_let_in(tmp_path):
    ca = Authority.made()
    server, node = ca.write(tmp_path, "server"), ca.write(tmp_path, "node", uri=NODE)

    async def main():
        async with serving(secured(server)) as address:
            assert (await asked(address, secured(node))).version == VERSION
            without_token = Security(STRANGER.tokens, tls=Certificates(node))
            with pytest.raises(AccessDenied, match="no token was sent"):
                await asked(address, without_token)

    asyncio.run(main())


def test_without_a_ca_the_server_asks_for_no_certificate(tmp_path):
    files = Authority.made().write(tmp_path, "server")

    async def main():
        async with serving(secured(TlsFiles(files.cert, files.key))) as address:
            assert (await asked(address, secured(TlsFiles(ca=files.ca)))).version == VERSION

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["of another CA", "expired", "missing", "in plain text"])
def test_a_client_whose_certificate_is_not_right_is_refused(tmp_path, kind):
    ca, other = Authority.made(), Authority.made("others")
    server = ca.write(tmp_path, "server")
    clients = {
        "of another CA": lambda: secured(other.write(tmp_path, "client", trusts=ca)),
        "expired": lambda: secured(ca.write(tmp_path, "client", lasts=-dt.timedelta(hours=1))),
        "missing": lambda: secured(TlsFiles(ca=server.ca)),
        "in plain text": lambda: TRUSTED,
    }

    async def main():
        async with serving(secured(server)) as address:
            with pytest.raises(PeerLost, match=r"hangs up at once: .*--tls-ca.*--tls-cert"):
                await asked(address, clients[kind]())
            good = secured(ca.write(tmp_path, "good"))
            assert (await asked(address, good)).version == VERSION

    asyncio.run(main())


@pytest.mark.parametrize(
    ("begins", "lasts", "said"),
    [(-48, -1, r"client\.crt, is not valid now: it ended at 2"), (1, 9, r"now: it begins at 2")],
)
def test_a_client_is_told_that_its_own_certificate_is_not_valid_now(tmp_path, begins, lasts, said):
    ca, hour = Authority.made(), dt.timedelta(hours=1)
    server = secured(ca.write(tmp_path, "server"))
    client = ca.write(tmp_path, "client", begins=begins * hour, lasts=lasts * hour)

    async def main():
        async with serving(server) as address:
            with pytest.raises(PeerLost, match=said):
                await asked(address, secured(client))

    asyncio.run(main())


@pytest.mark.parametrize(("begins", "lasts"), [(-48, -1), (1, 9)])
def test_a_server_with_a_certificate_that_is_not_valid_now_says_so(tmp_path, caplog, begins, lasts):
    ca, hour = Authority.made(), dt.timedelta(hours=1)
    server = ca.write(tmp_path, "server", begins=begins * hour, lasts=lasts * hour)
    client = ca.write(tmp_path, "client")

    async def main():
        async with serving(secured(server)) as address:
            assert "server.crt, is not valid now" in caplog.text
            with pytest.raises(PeerLost, match="not valid now, by the clock of this host"):
                await asked(address, secured(client))

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["of another CA", "expired"])
def test_a_server_whose_certificate_is_not_right_gets_no_token(tmp_path, kind):
    ca, other = Authority.made(), Authority.made("others")
    client = ca.write(tmp_path, "client")
    lasts = dt.timedelta(hours=-1 if kind == "expired" else 1)
    maker = ca if kind == "expired" else other
    server = maker.write(tmp_path, "server", lasts=lasts, trusts=ca)

    async def main():
        async with serving(secured(server)) as address:
            with pytest.raises(PeerLost, match=r"not trusted here.*--tls-ca|not valid now"):
                await asked(address, secured(client))

    asyncio.run(main())


def test_only_the_uris_that_are_listed_are_let_in(tmp_path, caplog):
    ca = Authority.made()
    server = ca.write(tmp_path, "server")
    peers = ("spiffe://cluster/ns/training/*", "spiffe://cluster/ns/ops/sa/admin")
    tried = {
        NODE: True,
        "spiffe://cluster/ns/ops/sa/admin": True,
        "spiffe://cluster/ns/ops/sa/admin2": False,
        "spiffe://cluster/ns/training-2/sa/node": False,
        "": False,
    }

    async def main():
        async with serving(secured(server, peers)) as address:
            for at, (uri, is_let_in) in enumerate(tried.items()):
                # The common name says anything: nobody looks at it.
                files = ca.write(tmp_path, f"client{at}", uri=uri)
                if is_let_in:
                    assert (await asked(address, secured(files))).version == VERSION
                    continue
                with pytest.raises(AccessDenied, match="not in tls_peers"):
                    await asked(address, secured(files))
                (line,) = [one.getMessage() for one in caplog.records if "refused" in one.message]
                assert "call=Status" in line
                assert uri in line
                caplog.clear()

    asyncio.run(main())


def test_certificates_and_their_ca_are_replaced_while_calls_run(tmp_path):
    old, new = Authority.made("old"), Authority.made("new")
    clock = Clock()
    security = {
        side: secured(old.write(tmp_path, side), clock=clock) for side in ("server", "node")
    }
    calls = 0

    async def beats(client, until):
        nonlocal calls
        while not until.is_set():
            (verdict,) = (await client.heartbeat(beat(progress()))).verdicts
            assert verdict.error is None
            calls += 1

    def rewritten():
        """Change the files in turn; nobody is to see an error of it."""
        both = b"".join((tmp_path / f"{side}.ca").read_bytes() for side in ("server", "bundle"))
        for side in ("server", "node"):
            (tmp_path / f"{side}.ca").write_bytes(both)  # trust both
        yield
        new.write(tmp_path, "server")
        (tmp_path / "server.ca").write_bytes(both)
        yield
        new.write(tmp_path, "node")
        (tmp_path / "node.ca").write_bytes(both)
        yield
        (tmp_path / "node.crt").write_text("half wri")  # one file after the other
        yield
        new.write(tmp_path, "node")  # trust only the new one
        new.write(tmp_path, "server")
        yield

    async def main():
        nonlocal calls
        new.write(tmp_path, "bundle")
        async with serving(security["server"]) as address:
            client = CoordinatorClient(address, security["node"], 60.0, 0.0, identity=OWN)
            await client.join(join(0))
            until = asyncio.Event()
            running = [asyncio.create_task(beats(client, until)) for _ in range(4)]
            for _ in rewritten():
                clock.now += 1
                seen = calls
                async with asyncio.timeout(60):
                    while calls < seen + 40:
                        await asyncio.sleep(0)
                        assert not any(task.done() for task in running)
            until.set()
            await asyncio.gather(*running)
            await client.close()
            # The certificates from before are worth nothing now.
            late = secured(old.write(tmp_path, "late", trusts=new))
            with pytest.raises(PeerLost):
                await asked(address, late)

    asyncio.run(main())
    assert security["server"].tls.current()[1] >= 2
    assert security["node"].tls.current()[1] >= 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tls_key": ""}, "tls_cert is set and tls_key is not"),
        ({"tls_cert": ""}, "tls_key is set and tls_cert is not"),
        ({"tls_cert": "/nowhere"}, "/nowhere cannot be read"),
        ({"tls_key": "{other}/other.key"}, "not a certificate and its key"),
        ({"tls_ca": "{other}/other.key"}, "has no certificates in PEM"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path, change, words):
    files = Authority.made().write(tmp_path, "one")
    Authority.made().write(tmp_path, "other")
    given = {
        "token_file": "", "state_dir": str(tmp_path), "insecure": False, "tls_peers": "",
        "tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca,
    }  # fmt: skip
    given |= {name: value.format(other=tmp_path) for name, value in change.items()}
    with pytest.raises(ConfigError, match=words):
        security_of(given, {}, listens=True)


def test_what_listens_needs_a_certificate_of_its_own_and_a_ca_for_its_peers(tmp_path):
    files = Authority.made().write(tmp_path, "one")

    async def main():
        with pytest.raises(ConfigError, match="needs a certificate of its own"):
            async with serving(secured(TlsFiles(ca=files.ca))):
                pass
        with pytest.raises(ConfigError, match="without --tls-ca clients present no"):
            async with serving(secured(TlsFiles(files.cert, files.key), ("spiffe://x/*",))):
                pass
        # With TLS it may be open to the network.
        async with serving(secured(files), "0.0.0.0:0"):
            pass
        CoordinatorClient("head-node:7077", secured(files))

    asyncio.run(main())


HOUR = dt.timedelta(hours=1)
NOW = dt.datetime.now(dt.UTC)


@pytest.mark.parametrize("years", [1, 40, 300])  # from 2050 on, times are written in another way
def test_a_certificate_is_valid_between_the_times_that_another_library_reads(tmp_path, years):
    files = Authority.made().write(tmp_path, "one", lasts=dt.timedelta(days=365 * years))
    pem = Path(files.cert).read_bytes()
    read = x509.load_pem_x509_certificate(pem)
    for at in (read.not_valid_before_utc, read.not_valid_after_utc, NOW):
        assert why_not_valid(pem, at) == ""
    assert why_not_valid(pem, read.not_valid_before_utc - HOUR).startswith("it begins at")
    assert why_not_valid(pem, read.not_valid_after_utc + HOUR).startswith("it ended at")


def test_what_is_no_certificate_is_nothing_to_complain_about(tmp_path):
    pem = Path(Authority.made().write(tmp_path, "one").cert).read_bytes()
    for cut in (b"", b"no pem", pem[:200], pem[:60] + pem[-60:]):
        assert why_not_valid(cut, NOW) == ""
