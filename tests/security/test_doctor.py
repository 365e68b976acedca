"""`dataplane doctor --security` says what others could do."""

from __future__ import annotations

import datetime as dt
import json

import pytest
from certificates import Authority

from dataplane.cli import run


@pytest.fixture
def examined(tmp_path, monkeypatch, capsys):
    """The checks by name, with these options."""
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("DATAPLANE_TOKEN", raising=False)

    def examine(*arguments):
        assert run(["doctor", "--security", *arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["checks"]
        return {one["name"]: (one["found"], one["advice"]) for one in found}

    return examine


def tls(files):
    return ("--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca)


def test_the_default_is_closed_and_nothing_is_made(examined, tmp_path):
    found = examined()
    assert found["coordinator"] == ("127.0.0.1:7077: users of this host, with a token", "")
    assert "none yet" in found["token"][0]
    assert "a free port: to nodes with the key of the job" in found["neighbours"][0]
    assert "lends blocks at 7078:" in examined("--data-listen", ":7078")["neighbours"][0]
    assert examined("--data-listen", "none")["neighbours"] == ("none", "")
    assert not (tmp_path / "state").exists()
    assert "of the same user" in examined("--listen", "unix:/run/x.sock")["coordinator"][0]


def test_what_is_open_or_old_is_told_with_what_to_do(examined, tmp_path):
    token = tmp_path / "token"
    token.write_text("the-token-of-this-test\n")
    token.chmod(0o644)
    given = ("--listen", "0.0.0.0:7077", "--token-file", str(token))
    found = examined(*given, "--insecure")
    assert "chmod o-rwx" in found["token"][1]
    assert "tls_cert" in found["coordinator"][1]
    assert "the-token" not in str(found)
    assert "does not start" in examined(*given)["coordinator"][0]
    old = Authority.made().write(tmp_path, "old", lasts=dt.timedelta(hours=-1))
    found = examined(*given, *tls(old))
    assert "it has ended" in found["tls_cert"][1]
    days = dt.timedelta(days=1)
    new = Authority.made().write(tmp_path, "new", begins=days, lasts=100 * days)
    assert "it begins at" in examined(*given, *tls(new))["tls_cert"][1]
    assert "chmod" in found["tls_key"][1]
    assert "tls_peers" in found["clients"][1]
    assert "none beyond this host" in found["neighbours"][0]
    assert "with TLS" in examined(*tls(old), "--peer-tls")["neighbours"][0]
    assert "tls_cert and tls_key and tls_ca" in examined("--peer-tls")["neighbours"][1]


def test_a_service_that_is_set_up_needs_no_advice(examined, tmp_path):
    lasts = dt.timedelta(days=9)
    files = Authority.made(lasts=lasts).write(tmp_path, "a", uri="spiffe://c/sa/x", lasts=lasts)
    for path in tmp_path.glob("a.key"):
        path.chmod(0o600)
    (tmp_path / "token").write_text("the-token-of-this-test\n")
    (tmp_path / "token").chmod(0o600)
    found = examined(
        *("--listen", "0.0.0.0:7077", "--token-file", str(tmp_path / "token")),
        *(*tls(files), "--tls-peers", "spiffe://c/sa/*", "--allowed-urls", "s3://bucket/train"),
    )
    assert [advice for _, advice in found.values() if advice] == []
    assert "spiffe://c/sa/x" in found["tls_cert"][0]
    assert found["coordinator"][0] == "0.0.0.0:7077: the network, with TLS and a token"


def test_settings_that_cannot_be_used_are_told(examined):
    assert "cannot be read" in examined("--token-file", "/nowhere")["settings"][1]
