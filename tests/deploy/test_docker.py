"""The Dockerfile: what it copies is there, and what it starts runs under a read-only root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane import settings

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "docker" / "Dockerfile"
READ_ONLY = """
mount --make-rprivate /
mount --rbind {folder} /mnt
mount -o remount,bind,ro /
exec setpriv --inh-caps=-all --bounding-set=-all {command}
"""


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line]


def test_what_is_copied_exists_and_is_not_ignored():
    kept = {line[1:] for line in FILE.with_name("Dockerfile.dockerignore").read_text().split()}
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in kept


def test_only_known_instructions_settings_and_no_root():
    allowed = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE"}
    assert {name for name, _ in instructions()} <= allowed | {"ENTRYPOINT", "CMD"}
    assert dict(instructions())["USER"] == "1000:1000"
    named = set(re.findall(r"\bDATAPLANE_\w+", FILE.read_text()))
    assert named <= {setting.variable for setting in settings.SETTINGS}
    constraints = (ROOT / "requirements.lock").read_text()
    assert "--hash" not in constraints  # pip takes none in constraints


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root for a mount"
)
def test_the_service_runs_under_a_read_only_root_without_capabilities(tmp_path):
    for name in ("state", "cache"):
        (tmp_path / name).mkdir(0o700)
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT),
        "DATAPLANE_STATE_DIR": "/mnt/state",
        "DATAPLANE_CACHE_DIR": "/mnt/cache",
    }
    serve = f"{sys.executable} -m dataplane serve --listen 127.0.0.1:0 --worker-count 1"
    script = READ_ONLY.format(folder=tmp_path, command=f"{serve} --block-arena-bytes 16MiB")
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-euc", script],
        env=environ, cwd="/", stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready: coordinator ")
            assert process.stdout.readline().startswith("ready: node ")
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
