"""The units of deploy/systemd: systemd accepts them, and what they start says that it is ready."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from certificates import Authority
from fleet import ANSWER_S, Service, free_address

from dataplane import settings

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
TOKEN = "a-token-of-these-tests-only-0123456789"


def values(unit: Path, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_units(unit, tmp_path):
    text = unit.read_text().replace("/opt/dataplane/bin/dataplane", "/bin/true")
    (tmp_path / unit.name.replace("@", "@root")).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name.replace("@", "@root"))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if "dataplane" in line]
    assert not ours
    assert done.returncode == 0, done.stderr


def test_both_units_start_from_the_one_file_of_settings(tmp_path):
    folder = tmp_path / "etc"
    folder.mkdir()
    address = free_address()
    Authority.made().write(folder, "tls", address=address.rpartition(":")[0])
    (folder / "tls.ca").rename(folder / "ca.crt")
    (folder / "token").write_text(TOKEN)
    text = (FOLDER / "dataplane.toml").read_text().replace("/etc/dataplane", str(folder))
    text = text.replace("0.0.0.0:7077", address).replace("head.cluster:7077", address)
    (folder / "dataplane.toml").write_text(text + 'block_arena_bytes = "16MiB"\nworker_count = 1\n')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(ANSWER_S)
        for unit in UNITS:
            assert "notify" in values(unit, "Type")
            assert values(unit, "ExecReload") == ["/bin/kill -HUP $MAINPID"]
        services = [started(unit, tmp_path) for unit in UNITS]
        with services[0] as coordinator, services[1] as node:
            statuses = {listener.recv(4096).decode().split("\n")[1] for _ in services}
            assert statuses == {f"STATUS=coordinator {address}", f"STATUS=node {address}"}
            assert node.stop() == 0
            assert coordinator.stop() == 0


def started(unit: Path, folder: Path) -> Service:
    """Start the command of a unit in its environment."""
    places = {"%i": "root", "%S": "/state", "%C": "/cache", "/etc/dataplane": "/etc"}
    (command,) = values(unit, "ExecStart")
    environ = dict(line.split("=", 1) for line in values(unit, "Environment"))
    assert environ.keys() <= {setting.variable for setting in settings.SETTINGS} | {
        "DATAPLANE_CONFIG"
    }
    for short, long in places.items():
        real = str(folder) + long if "/" in long else long
        environ = {name: value.replace(short, real) for name, value in environ.items()}
    environ["NOTIFY_SOCKET"] = str(folder / "notify")
    program, _, arguments = command.partition(" serve ")
    assert program == "/opt/dataplane/bin/dataplane"
    return Service(*arguments.split(), environ=environ)
