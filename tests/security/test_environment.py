"""Secrets in the environment: hidden from others, and forgotten by who does not need them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dataplane.security.environment import without_secrets

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
