"""Certificates, their CA and the token of a service are replaced in the middle of an epoch.

The files of a coordinator and a node in this process are looked at when the test says so; those of
processes, in the slow test, every second.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from certificates import Authority
from fleet import Run, Service, wait_until
from service_here import FileClock, service_here
from small_nodes import alone_and_small

from dataplane.base.trace import Trace
from dataplane.cli import run as dataplane
from dataplane.model.errors import AccessDenied, PeerLost
from dataplane.rpc import receiving
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.membership import StatusRequest
from dataplane.security import private_file, tokens
from dataplane.security.security import Security
from dataplane.security.tls import Certificates, TlsFiles
from dataplane.security.tokens import TokenSource

COUNT = 300
OLD, NEW = "the-old-token-of-this-test", "the-new-token-of-this-test"


class Trust:
    """The files of a coordinator and of a node, each in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.scratch = folder / "scratch"
        self.folders = {side: folder / side for side in ("coordinator", "node")}
        for each in (self.scratch, *self.folders.values()):
            each.mkdir()

    def write(self, authority: Authority, token: str, *trusts: Authority) -> None:
        """Replace all of them, one by one."""
        cas = [Path(one.write(self.scratch, "x").ca).read_text() for one in trusts]
        for folder in self.folders.values():
            authority.write(folder, "tls")
            for name, body in (("tls.ca", "".join(cas)), ("token", f"{token}\n")):
                (folder / "new").write_text(body)
                (folder / "new").replace(folder / name)

    def tls(self, side: str) -> dict[str, str]:
        paths = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "tls.ca"}
        folder = self.folders[side]
        return {f"DATAPLANE_TLS_{name}": str(folder / path) for name, path in paths.items()}

    def security(self, side: str, clock: Callable[[], float]) -> Security:
        """For a part of a service in this process."""
        folder = self.folders[side]
        files = TlsFiles(*(str(folder / f"tls.{kind}") for kind in ("crt", "key", "ca")))
        token = tokens.find({}, str(folder / "token"), str(folder), makes=False, clock=clock)
        return Security(token, tls=Certificates(files, clock))

    def service(self, side: str, *arguments: str) -> Service:
        folder = self.folders[side]
        environ = self.tls(side) | {
            "DATAPLANE_STATE_DIR": str(folder / "state"),
            "DATAPLANE_TOKEN_FILE": str(folder / "token"),
        }
        return Service(f"--{side}", *arguments, environ=environ, log=folder / "log")


class Lines:
    """Collect the log of this process from now on."""

    def __init__(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        self._caplog = caplog
        caplog.set_level(logging.INFO, "dataplane")
        for module in (receiving, private_file):  # each test has its own limit of lines a minute
            monkeypatch.setattr(module, "_trace", Trace("security"))

    def with_words(self, *words: str) -> list[str]:
        lines = [one.getMessage() for one in list(self._caplog.records)]
        return [line for line in lines if all(word in line for word in words)]

    def wait_for(self, *words: str) -> None:
        wait_until(lambda: self.with_words(*words))


def asked(address: str, security: Security) -> None:
    """Ask for the status with this."""

    async def ask() -> None:
        client = CoordinatorClient(address, security, patience_s=0.0)
        try:
            await client.status(StatusRequest())
        finally:
            await client.close()

    asyncio.run(ask())


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    alone_and_small(monkeypatch, tmp_path)
    pq.write_table(pa.table({"id": range(COUNT)}), tmp_path / "a.parquet", row_group_size=20)
    return str(tmp_path / "a.parquet")


def test_no_trainer_of_a_small_service_notices_that_trust_is_replaced(
    tmp_path: Path,
    url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, clock, trust = Lines(caplog, monkeypatch), FileClock(), Trust(tmp_path)
    old, new = Authority.made("old"), Authority.made("new")
    trust.write(old, f"{OLD}\n{NEW}", old, new)
    before = trust.security("node", lambda: 0.0)  # never looks again
    coordinator, node = (trust.security(side, clock) for side in trust.folders)

    def replaced(authority: Authority, token: str, *trusts: Authority) -> None:
        """Replace all files, and wait until both sides use them."""
        seen = len(lines.with_words("read again"))
        trust.write(authority, token, *trusts)
        clock.look()
        wait_until(lambda: len(lines.with_words("read again")) >= seen + 4)
        for folder in trust.folders.values():
            assert lines.with_words("certificates read again", str(folder))
            assert lines.with_words("token file read again", str(folder))

    with (
        service_here(coordinator, node, lease_s=1.0) as service,
        Run(tmp_path / "run", url, 1, {"batch_size": 10, "service": service.address}) as run,
    ):
        run.go(3)
        replaced(new, f"{NEW}\n{OLD}", old, new)
        run.go(3)
        replaced(new, NEW, new)
        # Whoever comes with what was valid before is a stranger.
        with pytest.raises(PeerLost):
            asked(service.address, before)
        after = trust.security("node", clock)
        with pytest.raises(AccessDenied, match="the token is not the coordinator's"):
            asked(service.address, Security(TokenSource("a test", (OLD,)), tls=after.tls))
        assert len(lines.with_words("call refused")) == 1
        asked(service.address, after)
        assert service.member_states() == ["joined"]
        run.finish()
        assert run.stream() == [[i] for i in range(COUNT)]
    assert not lines.with_words("does not answer")
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    for token in (OLD, NEW):
        assert token not in caplog.text
    caplog.clear()


def test_a_small_node_whose_token_is_wrong_for_a_while_keeps_its_trainer(
    tmp_path: Path,
    url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, clock, given = Lines(caplog, monkeypatch), FileClock(), tmp_path / "token"

    def replaced(token: str) -> None:
        given.with_suffix(".new").write_text(token)
        given.with_suffix(".new").replace(given)
        clock.look()

    replaced(OLD)
    source = tokens.find({}, str(given), str(tmp_path), makes=False, clock=clock)
    head = Security(TokenSource("the tests", (OLD,)))
    with (
        service_here(head, Security(source), lease_s=0.5) as service,
        Run(tmp_path / "run", url, 1, {"batch_size": 10, "service": service.address}) as run,
    ):
        run.go(3)
        replaced(NEW)
        lines.wait_for("call refused", "call=Heartbeat", "the token is not the coordinator's")
        wait_until(lambda: service.member_states() != ["joined"])  # its lease has ended
        run.go(3)
        replaced(OLD)
        wait_until(lambda: service.member_states() == ["joined"])
        run.finish()
        assert run.stream() == [[i] for i in range(COUNT)]
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert NEW not in caplog.text
    caplog.clear()


@pytest.mark.slow
def test_no_trainer_notices_that_trust_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    alone_and_small(monkeypatch, tmp_path)
    pq.write_table(pa.table({"id": range(COUNT)}), tmp_path / "a.parquet", row_group_size=20)
    trust = Trust(tmp_path)
    old, new = Authority.made("old"), Authority.made("new")
    trust.write(old, OLD, old, new)
    with (
        trust.service("coordinator", "--listen", "127.0.0.1:0") as coordinator,
        trust.service("node", "--join", coordinator.address) as node,
        Run(
            tmp_path / "run",
            str(tmp_path / "a.parquet"),
            1,
            {"batch_size": 10, "service": coordinator.address},
        ) as run,
    ):
        run.go(3)
        trust.write(old, f"{OLD}\n{NEW}", old, new)
        logs = [each.log for each in (coordinator, node) if each.log is not None]
        for log in logs:
            log.wait_for("token file read again", 1)
            log.wait_for("certificates read again", 1)
        trust.write(new, f"{NEW}\n{OLD}", old, new)
        for log in logs:
            log.wait_for("certificates read again", 2)
        run.go(3)
        trust.write(new, NEW, new)
        for log in logs:
            log.wait_for("token file read again", 3)
            log.wait_for("certificates read again", 3)
        run.finish()
        assert run.stream() == [[i] for i in range(COUNT)]
        # Whoever comes with what was valid before is a stranger.
        for name, path in trust.tls("node").items():
            monkeypatch.setenv(name, path)
        monkeypatch.setenv("DATAPLANE_TOKEN", OLD)
        assert dataplane(["status", coordinator.address]) == 2
        monkeypatch.setenv("DATAPLANE_TOKEN", NEW)
        assert dataplane(["status", coordinator.address]) == 0
        assert "the token is not the coordinator's" in capfd.readouterr().err
        for log in logs:
            text = log.read()
            assert "does not answer" not in text
            assert "Traceback" not in text
            assert OLD not in text
            assert NEW not in text
    assert os.environ["DATAPLANE_TOKEN"] not in (tmp_path / "run" / "stderr.log").read_text()
