"""Certificates, their CA and the token of a service are replaced in the middle of an epoch.

A small version of it, without processes, is in tests/security/test_tls.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from certificates import Authority
from fleet import Run, Service
from small_nodes import alone_and_small

from dataplane.cli import run as dataplane

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

    def service(self, side: str, *arguments: str) -> Service:
        folder = self.folders[side]
        environ = self.tls(side) | {
            "DATAPLANE_STATE_DIR": str(folder / "state"),
            "DATAPLANE_TOKEN_FILE": str(folder / "token"),
        }
        return Service(f"--{side}", *arguments, environ=environ, log=folder / "log")


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


@pytest.mark.slow
def test_a_node_whose_token_is_wrong_for_a_while_keeps_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone_and_small(monkeypatch, tmp_path)
    pq.write_table(pa.table({"id": range(COUNT)}), tmp_path / "a.parquet", row_group_size=20)
    given = tmp_path / "token"

    def tokens(text: str) -> None:
        given.with_suffix(".new").write_text(text)
        given.with_suffix(".new").replace(given)

    tokens(OLD)
    head = {"DATAPLANE_TOKEN": OLD, "DATAPLANE_LEASE_S": "2"}
    with (
        Service("--coordinator", "--listen", "127.0.0.1:0", environ=head) as coordinator,
        Service(
            *("--node", "--join", coordinator.address, "--token-file", str(given)),
            log=tmp_path / "log",
        ) as node,
        Run(
            tmp_path / "run",
            str(tmp_path / "a.parquet"),
            1,
            {"batch_size": 10, "service": coordinator.address},
        ) as run,
    ):
        run.go(3)
        tokens(NEW)
        assert node.log is not None
        # Longer than the lease: to the coordinator, the rank has left.
        node.log.wait_for("the token is not the coordinator's", 5)
        run.go(3)
        tokens(OLD)
        node.log.wait_for("rejoin")
        run.finish()
        assert run.stream() == [[i] for i in range(COUNT)]
