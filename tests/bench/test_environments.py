"""Environments of peers: complete or absent, with the peer's packages before ours."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
from dataplane_bench.environments import Environment, environment
from dataplane_bench.machine import bench_folder

from dataplane.model.errors import ConfigError


@pytest.fixture(autouse=True)
def offline(monkeypatch) -> None:
    """pip finds only packages that a test made."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


@dataclass(frozen=True)
class Peer:
    """The parts of an adapter that concern its environment."""

    requirements: tuple[str, ...]
    name: str = "tiny"
    distribution: str = "tiny-loader"
    lacking: str = ""

    def lacks(self) -> str:
        return self.lacking


def wheel(folder: Path, name: str, number: str, needs: str = "") -> str:
    """A wheel with one module, which contains its version number."""
    module = name.replace("-", "_")
    path = folder / f"{module}-{number}-py3-none-any.whl"
    info = f"{module}-{number}.dist-info"
    needed = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}.py", f"NUMBER = {number!r}\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n{needed}"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    return str(path)


def run(python: str | None, code: str) -> str:
    assert python is not None
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def said(_line: str) -> None:
    """Ignore a line of progress."""


def test_packages_of_a_peer_come_first_and_ours_are_available(tmp_path) -> None:
    # We have another tenacity; the peer's own counts.
    brought = wheel(tmp_path, "tenacity", "0.1")
    peer = Peer((wheel(tmp_path, "tiny-loader", "1.5", "tenacity<1"), brought))
    made = Environment.of(peer, tmp_path / "peers")
    assert made.python is None
    lines: list[str] = []

    made.install(lines.append)

    code = (
        "import tiny_loader, tenacity, numpy, dataplane, dataplane_bench, importlib.util as there;"
        "assert there.find_spec('torch') and there.find_spec('dataplane_torch');"
        "print(tiny_loader.NUMBER, tenacity.NUMBER, numpy.__version__)"
    )
    assert run(made.python, code) == f"1.5 0.1 {version('numpy')}"
    torch, arrow = version("torch"), version("pyarrow")
    told = {"tiny-loader": "1.5", "torch": torch, "numpy": version("numpy"), "pyarrow": arrow}
    assert made.versions() == told
    assert any(line.startswith("Successfully installed") for line in lines)
    assert not (made.folder / "tmp").exists()

    made.install(lambda line: pytest.fail(f"made again: {line}"))


def test_an_environment_made_for_other_requirements_is_not_used(tmp_path) -> None:
    one = wheel(tmp_path, "tiny-loader", "1")
    made = Environment.of(Peer((one,)), tmp_path / "peers")
    made.install(said)
    assert made.python is not None
    two = wheel(tmp_path, "tiny-loader", "2")
    assert Environment.of(Peer((two,)), tmp_path / "peers").python is None

    note = made.folder / "made.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "torch": "1.0"}))
    assert made.python is None
    note.unlink()  # as left by a process that was killed before the end
    assert made.python is None


def test_a_failed_installation_shows_pips_output_and_leaves_nothing_behind(tmp_path) -> None:
    other_torch = wheel(tmp_path, "tiny-loader", "1", "torch==1.0")
    for requirement, words in ((other_torch, "torch"), ("not-a-package==1", "not-a-package")):
        made = Environment.of(Peer((requirement,)), tmp_path / "peers")
        with pytest.raises(ConfigError, match=f"(?s)could not install.*ERROR.*{words}"):
            made.install(said)
        assert made.python is None
        assert not list((tmp_path / "peers").iterdir())


def test_what_the_system_lacks_is_told_before_pip_is_asked(tmp_path) -> None:
    peer = Peer(("anything",), lacking="there is no compiler: apt-get install g++")
    made = Environment.of(peer, tmp_path / "peers")
    with pytest.raises(ConfigError, match="tiny cannot be built: there is no compiler: apt-get"):
        made.install(said)
    assert not (tmp_path / "peers").exists()


def test_an_interrupted_installation_leaves_nothing(tmp_path) -> None:
    made = Environment.of(Peer((wheel(tmp_path, "tiny-loader", "1"),)), tmp_path / "peers")

    def interrupt(line: str) -> None:
        if line.startswith("Installing collected"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.install(interrupt)
    assert made.python is None
    assert not list((tmp_path / "peers").iterdir())


def test_concurrent_installations_make_one_environment(tmp_path) -> None:
    made = Environment.of(Peer((wheel(tmp_path, "tiny-loader", "1"),)), tmp_path / "peers")
    lines: list[str] = []
    begun, other_waits = threading.Event(), threading.Event()

    def say_slowly(line: str) -> None:
        lines.append(line)
        begun.set()
        other_waits.wait(60)

    def say(line: str) -> None:
        lines.append(line)
        other_waits.set()

    first = threading.Thread(target=made.install, args=(say_slowly,))
    first.start()
    assert begun.wait(60)
    made.install(say)
    first.join()
    assert run(made.python, "import tiny_loader; print(tiny_loader.NUMBER)") == "1"
    assert sum(line.startswith("making") for line in lines) == 1
    assert "waiting for another installation" in lines


def test_systems_without_requirements_run_in_ours(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bench_folder() == tmp_path / "dataplane" / "bench"
    assert environment("dataplane").python == sys.executable
    assert environment("dataplane").versions()["dataplane-loader"] == version("dataplane-loader")
    assert Environment.of(Peer(("six",)), bench_folder()).python is None
    assert not list(tmp_path.iterdir())
