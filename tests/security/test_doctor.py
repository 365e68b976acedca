"""`dataplane doctor --security` says what others could do."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jwt
import pytest
from certificates import Authority
from fleet import Service

from dataplane.cli import run
from dataplane.security.environment import without_secrets


@pytest.fixture
def examined(tmp_path, monkeypatch, capsys):
    """The checks by name, with these options."""
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("DATAPLANE_TOKEN", raising=False)

    def examine(*arguments):
        status = run(["doctor", "--security", *arguments, "--json"])
        found = json.loads(capsys.readouterr().out)["checks"]
        assert status == any(one["advice"] and not one["may_stay"] for one in found)
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
    assert "metrics" not in found
    shown = examined("--metrics-listen", ":9464")["metrics"]
    assert shown == ("127.0.0.1:9464: users of this host, with a token", "")
    assert not (tmp_path / "state").exists()
    assert "of the same user" in examined("--listen", "unix:/run/x.sock")["coordinator"][0]
    assert run(["doctor", "--security"]) == 0
    assert run(["doctor", "--security", "--listen", "unix:/run/x.sock"]) == 0


@pytest.mark.parametrize(
    "given",
    [
        ("--join", "10.0.0.1:7077"),
        ("--listen", "10.0.0.1:7077", "--insecure"),
        ("--data-listen", "10.0.0.1:7078"),
    ],
)
def test_neighbours_in_plain_text_beyond_this_host_are_wrong(examined, given):
    found, advice = examined(*given)["neighbours"]
    assert found.endswith("in plain text")
    assert "peer_tls" in advice
    assert run(["doctor", "--security", *given]) == 1
    assert run(["doctor", "--security", *given, "--allowed-functions", "os:"]) == 1


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
    assert "tls_cert" in examined("--metrics-listen", "0.0.0.0:1", "--insecure")["metrics"][1]
    old = Authority.made().write(tmp_path, "old", lasts=dt.timedelta(hours=-1))
    found = examined(*given, *tls(old))
    assert "it has ended" in found["tls_cert"][1]
    days = dt.timedelta(days=1)
    new = Authority.made().write(tmp_path, "new", begins=days, lasts=100 * days)
    assert "it begins at" in examined(*given, *tls(new))["tls_cert"][1]
    assert "chmod" in found["tls_key"][1]
    assert "tls_peers" in found["clients"][1]
    assert "none beyond this host" in found["neighbours"][0]
    assert "lends no blocks and makes no slabs" in found["neighbours"][0]
    assert "set peer_tls on all nodes" in found["neighbours"][1]
    assert "peer_tls" in examined(*tls(old), "--data-listen", ":0")["neighbours"][1]
    assert "with TLS" in examined(*tls(old), "--peer-tls")["neighbours"][0]
    assert "tls_cert, tls_key, tls_ca" in examined("--peer-tls")["neighbours"][1]


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
        *("--peer-tls", "--allowed-functions", "mine.text: mine.audio:decode"),
    )
    assert [advice for _, advice in found.values() if advice] == []
    assert "spiffe://c/sa/x" in found["tls_cert"][0]
    assert found["coordinator"][0] == "0.0.0.0:7077: the network, with TLS and a token"


HOUR_S = 3600
CLAIMS = {"aud": "dataplane", "roles": ["node"]}


@pytest.mark.parametrize(
    ("claims", "advice"),
    [
        ({"exp": 8 * HOUR_S}, ""),
        ({"exp": -HOUR_S}, "it has ended: renew it"),
        ({"exp": 8 * HOUR_S, "nbf": HOUR_S}, "it is not valid yet"),
        ({"exp": 48 * HOUR_S}, "ends in more than 24 hours"),
        ({"exp": 8 * HOUR_S, "aud": "another"}, "not for the audience 'dataplane'"),
        ({"exp": 8 * HOUR_S, "roles": ["king"]}, "its claim `roles`"),
        ({}, "lacks the claim `exp`"),
    ],
)
def test_a_jwt_that_a_coordinator_would_refuse_is_told(examined, tmp_path, claims, advice):
    now = time.time()
    times = {name: now + claims[name] for name in ("exp", "nbf") if name in claims}
    made = jwt.encode(CLAIMS | claims | times, "s" * 32, "HS256")
    token = tmp_path / "token"
    token.write_text(f"{made}\n")
    token.chmod(0o600)
    found = examined("--token-file", str(token))["token"]
    assert advice in found[1]
    assert bool(advice) == bool(found[1])
    assert made.rpartition(".")[0] not in str(found)
    if times:
        ends = dt.datetime.fromtimestamp(times["exp"], dt.UTC)
        assert f"a JWT until {ends:%Y-%m-%d %H:%M} UTC" in found[0]
    # Also if it is one of several, and if everybody can read it.
    token.write_text(f"a-shared-token-of-this-test\n{made}\n")
    token.chmod(0o644)
    told = examined("--token-file", str(token))["token"][1]
    assert "chmod o-rwx" in told
    assert ("line 2: " in told) == bool(advice)
    assert advice in told


NAN = "eyJhbGciOiJIUzI1NiJ9.eyJhdWQiOiJkYXRhcGxhbmUiLCJleHAiOk5hTn0.x"


@pytest.mark.parametrize(
    "token", ["eyJhbGciOiJub25lIn0.e30.", "eyJ.eyJ.x", "eyJub3RoaW5nIQ.!!.!!!", NAN]
)
def test_what_only_looks_like_a_jwt_is_told(examined, monkeypatch, token):
    monkeypatch.setenv("DATAPLANE_TOKEN", token.ljust(16, "x"))
    assert "it is damaged" in examined()["token"][1]


def test_a_jwt_without_a_signature_is_told(examined, monkeypatch):
    made = jwt.encode(CLAIMS | {"exp": time.time() + HOUR_S}, None, "none")
    monkeypatch.setenv("DATAPLANE_TOKEN", made)
    assert "its algorithm is 'none', not one of HS256" in examined()["token"][1]


def test_every_certificate_of_a_file_counts(examined, tmp_path):
    hours = dt.timedelta(hours=1)
    lasts = 99 * 24 * hours
    sound, ended = Authority.made("sound", lasts), Authority.made("ended", -hours)
    soon = Authority.made("soon", 3 * hours)
    files = sound.write(tmp_path, "a", lasts=lasts)
    assert examined(*tls(files))["tls_ca"][1] == ""
    three = [Path(one.write(tmp_path, "x").ca).read_text() for one in (sound, ended, soon)]
    Path(files.ca).write_text("".join(three))
    found, advice = examined(*tls(files))["tls_ca"]
    assert "3 certificates, the first of them until" in found
    assert "CN=ended has ended, at " in advice
    assert "CN=soon ends soon" in advice
    assert "sound" not in advice
    # So does the chain behind the own one.
    Path(files.cert).write_text(Path(files.cert).read_text() + three[1])
    assert "CN=ended has ended" in examined(*tls(files))["tls_cert"][1]


@pytest.mark.parametrize(
    ("allowed", "advice"),
    [
        ("os:", "os: contains functions of Python itself"),
        ("subprocess:run", "functions of Python itself"),
        ("os.path:", "functions of Python itself"),
        ("mine.text", "mine.text also allows all modules below it: end it with a colon"),
        ("mine.text: os:system", "os:system contains"),
    ],
)
def test_functions_that_trainers_may_name_are_told(examined, allowed, advice):
    assert examined()["allowed_functions"][0].startswith("none")
    found = examined("--allowed-functions", allowed)["allowed_functions"]
    assert found[0] == ", ".join(allowed.split())
    assert advice in found[1]


def test_a_secret_of_neighbours_that_others_can_read_is_told(examined, tmp_path):
    assert "none yet" in examined()["neighbours' keys"][0]
    (tmp_path / "state").mkdir(mode=0o700)
    path = tmp_path / "state" / "neighbours.key"
    path.write_text("5" * 64 + "\n")
    path.chmod(0o600)
    assert examined()["neighbours' keys"] == (f"{path}, mode 0600", "")
    path.chmod(0o640)
    found = examined()["neighbours' keys"]
    assert "mode 0640" in found[0]
    assert "chmod 600" in found[1]
    assert "5" * 64 not in str(found)


def test_settings_that_cannot_be_used_are_told(examined):
    assert "cannot be read" in examined("--token-file", "/nowhere")["settings"][1]


_CODE = """
import ctypes, os
import psutil
from dataplane.security.environment import forget_secrets, hide_secrets
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
shown = lambda: open("/proc/self/environ").read()
names = ("AWS_SECRET_ACCESS_KEY", "DATAPLANE_TOKEN")
print("hush" in shown())
hide_secrets()
print("hush" in shown(), "KEPT=1" in shown(), [getenv(name.encode()) for name in names])
forget_secrets()
print("hush" in str(os.environ), "hush" in shown(), [getenv(name.encode()) for name in names])
print(getenv(b"KEPT"), psutil.Process().environ().get("KEPT"))
"""


def test_the_kernel_shows_no_secrets_and_a_process_can_forget_them() -> None:
    given = {"AWS_SECRET_ACCESS_KEY": "hush", "DATAPLANE_TOKEN": "hush2", "KEPT": "1"}
    command = [sys.executable, "-c", _CODE]
    done = subprocess.run(
        command, env={**os.environ, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "True",
        "False True [b'hush', b'hush2']",
        "False False [None, None]",
        "b'1' 1",
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_CLIENT_ID"),
        *("HF_TOKEN", "GITHUB_TOKEN", "PGPASSWORD_TOKEN", "db_password", "WANDB_API_KEY", "MY_KEY"),
        *("DATAPLANE_TOKEN", "DATAPLANE_TOKEN_FILE", "CONNECTION_STRING", "SECRETS"),
    ],
)
def test_what_names_a_secret_is_one(name: str) -> None:
    assert without_secrets({name: "x"}) == {}


def test_logins_in_urls_are_secrets_and_all_else_is_kept() -> None:
    kept = {
        "PATH": "/bin",
        "PWD": "/",
        "PYTHONPATH": "x",
        "TOKENIZERS_PARALLELISM": "false",
        "HTTP_PROXY": "http://proxy:3128",
        "KEYBOARD": "us",
        "DATAPLANE_CACHE_DIR": "/c",
    }
    assert without_secrets(kept | {"http_proxy": "http://me:hush@proxy:1"}) == kept


TOKEN = "a-token-that-nobody-else-may-read-0123"


def test_the_token_is_found_by_the_same_user_and_stands_in_no_log_and_no_argv(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.delenv("DATAPLANE_STATE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = (*("--log-level", "debug"), *("--listen", "127.0.0.1:0"))
    log = tmp_path / "log"
    # `env` runs it: its command line is no other process's.
    with Service("--coordinator", *given, log=log, within=("env",)) as service:
        own = (tmp_path / ".local/state/dataplane/token").read_text().strip()
        assert run(["status", service.address]) == 0
        monkeypatch.setenv("HOME", "/nowhere")
        assert run(["status", service.address]) == 3
        alone = capfd.readouterr().err
        assert "This process has no token: set DATAPLANE_TOKEN, or --token-file" in alone
        monkeypatch.setenv("DATAPLANE_TOKEN", TOKEN)
        assert run(["status", service.address]) == 3
        refused = capfd.readouterr().err
        assert "the token is not the coordinator's" in refused
        assert "the token of $DATAPLANE_TOKEN" in refused
        argv = Path(f"/proc/{service.process.pid}/cmdline").read_bytes().decode()
        told = log.read_text()
        assert told.count("call refused") == 2
        for text in (argv, told, alone, refused):
            assert own not in text
            assert TOKEN not in text


EMBEDDED = """
import sys, dataplane.node.server, dataplane.node.__main__, dataplane.client.session
import dataplane.coordinator.front, dataplane.settings, dataplane.cli
ours = ("dataplane.security.", "grpc", "jwt", "cryptography")
every = [one for one in sys.modules if one.startswith(ours)]
# Workers need the one, the node's own socket the other.
print([one for one in every if not one.endswith((".environment", ".admission"))])
"""


def test_what_stays_on_one_host_imports_nothing_of_it():
    done = subprocess.run(
        [sys.executable, "-c", EMBEDDED], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
