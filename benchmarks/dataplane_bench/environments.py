"""A virtual environment for each peer, created on demand and kept.

Invariants:
1. An environment is valid only if it has a note, which is written last and lists what it was made
   from, and the note matches what would be installed now.
2. Only a process that holds the lock of their folder creates or removes environments.
3. Packages of a peer take precedence over those of the benchmark's own environment. All others
   (numpy, pyarrow, this package), and always torch, are the benchmark's.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.model.errors import ConfigError
from dataplane_bench import processes
from dataplane_bench.machine import bench_folder
from dataplane_bench.peers.base import adapter

Say = Callable[[str], None]

_NOTE = "made.json"
_OURS = ("dataplane", "dataplane_bench", "dataplane_torch")
_SHARED = ("torch", "numpy", "pyarrow")
_SHOWN = (
    "Collecting", "Downloading", "Using cached", "Building wheel", "Installing collected",
    "Successfully",
)  # fmt: skip
_LAST_LINES = 12


def environment(name: str) -> Environment:
    """The environment of a system, in the benchmark's folder."""
    return Environment.of(adapter(name), bench_folder() / "peers")


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a system runs: the benchmark's own environment if it has no requirements.

    `lacks` says which system package pip will need and not find; "" if none.
    """

    folder: Path
    requirements: tuple[str, ...]
    distribution: str
    lacks: Callable[[], str]

    @classmethod
    def of(cls, peer: Any, folder: Path) -> Environment:
        """The environment of an adapter, below this folder."""
        lacks = getattr(peer, "lacks", lambda: "")
        return cls(folder / peer.name, peer.requirements, peer.distribution, lacks)

    @property
    def python(self) -> str | None:
        """Its interpreter; None if the environment is not valid (1)."""
        if not self.requirements:
            return sys.executable
        try:
            made = json.loads((self.folder / _NOTE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return str(self._python) if made == self._note() and self._python.exists() else None

    def install(self, say: Say) -> None:
        """Create it unless it exists. `say` is called with each line of progress.

        Raises:  ConfigError: it could not be created; the message has the end of pip's output.
        """
        if self.python is not None:
            return
        if lacking := self.lacks():
            raise ConfigError(f"{self.folder.name} cannot be built: {lacking}")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with held(self.folder.parent, lambda: say("waiting for another installation")):
            if self.python is not None:  # another process has created it meanwhile
                return
            shutil.rmtree(self.folder, ignore_errors=True)
            try:
                self._make(say)
            except BaseException:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise

    def versions(self) -> dict[str, str]:
        """The versions of its own packages, and of torch, numpy and pyarrow."""
        own = [str(self._packages)] if self.requirements else []
        known: dict[str, str] = {}
        for path in (own, sys.path):
            for name in (self.distribution, *_SHARED):
                for package in importlib.metadata.distributions(name=name, path=path):
                    known.setdefault(name, package.version)
        return known

    def _make(self, say: Say) -> None:
        say(f"making {self.folder}")
        scratch = self.folder / "tmp"
        try:
            venv.create(self.folder, with_pip=False, symlinks=True)
            (self._packages / "_bench.pth").write_text(_behind(), encoding="utf-8")
            scratch.mkdir()
            constraints = scratch / "constraints.txt"
            # A different torch would cost gigabytes, and results could not be compared.
            constraints.write_text(f"torch=={_torch_version()}\n", encoding="utf-8")
            self._run_pip(constraints, scratch, say)
            shutil.rmtree(scratch)
            new = self.folder / f".{_NOTE}"
            new.write_text(json.dumps(self._note()), encoding="utf-8")
            new.rename(self.folder / _NOTE)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"no environment for {self.folder.name}: {error}") from error

    def _run_pip(self, constraints: Path, scratch: Path, say: Say) -> None:
        if importlib.util.find_spec("pip") is None:
            raise ConfigError(f"pip is missing: {sys.executable} -m ensurepip")
        command = [*(sys.executable, "-m", "pip", "--python", str(self._python), "install")]
        command += ["--no-input", "--no-user", "--disable-pip-version-check"]
        command += ["--progress-bar", "off", "-c", str(constraints), *self.requirements]
        kept = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
        process = subprocess.Popen(
            [*processes.dies_with_us(), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**kept, "TMPDIR": str(scratch)},
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        lines: list[str] = []
        try:
            with process.stdout:
                for line in process.stdout:
                    lines.append(line.rstrip())
                    if line.lstrip().startswith(_SHOWN):
                        say(line.strip())
            process.wait()
        finally:
            processes.kill_family(process)
        if process.returncode:
            last = "\n".join(_last_words(lines))
            raise ConfigError(f"pip could not install {' '.join(self.requirements)}:\n{last}")

    @property
    def _python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def _packages(self) -> Path:
        where = {"base": str(self.folder), "platbase": str(self.folder)}
        return Path(sysconfig.get_path("purelib", "venv", where))

    def _note(self) -> dict[str, Any]:
        return {**_surroundings(), "requirements": list(self.requirements)}


@functools.cache
def _surroundings() -> dict[str, Any]:
    """The facts that every environment depends on."""
    return {
        "python": platform.python_version(),
        "base": sys.base_prefix,
        "torch": _torch_version(),
        "behind": _behind(),
    }


def _torch_version() -> str:
    """The version without the build's suffix after "+", which pip would not find elsewhere."""
    return importlib.metadata.version("torch").partition("+")[0]


def _behind() -> str:
    """A .pth file that appends all folders of the benchmark's own environment to the peer's path.

    Source: the documentation of Python's module `site`. `addsitedir` also reads the .pth files in a
    folder, which point to editable installs.
    """
    folders = [*site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    # If this runs from a checkout, these packages are only on the path.
    for name in (*_OURS, *_SHARED):
        spec = importlib.util.find_spec(name)
        inside = (spec and spec.submodule_search_locations) or ()
        folders += [str(Path(place).parent) for place in inside]
    there = [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]
    return "".join(f"import site; site.addsitedir({folder!r})\n" for folder in there)


def _last_words(lines: list[str]) -> list[str]:
    """The last lines of pip's output, without its warnings."""
    shown = [
        line for line in lines if line.strip() and not line.startswith(("WARNING", "[notice]"))
    ]
    return shown[-_LAST_LINES:]


@contextlib.contextmanager
def held(folder: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a folder. The lock is on the folder itself, so no lock file is left behind.

    Raises:  BlockingIOError: another process holds it, and it is not to be waited for.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise
            waiting()
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)
