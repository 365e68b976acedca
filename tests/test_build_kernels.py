"""What is in C compiles, is found again, and is not missed where it cannot be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin.utils import load_plugin_from_script

from dataplane.build_kernels import (
    KERNEL,
    LIBRARIES,
    LOOPS,
    PIXELS,
    BuildKernels,
    Library,
    compile_library,
)
from dataplane.node import kernel
from dataplane.plan import loops
from dataplane.transforms import pixels_library

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A library, how it is loaded (path, sources -> what is missing), and what is said of it."""

    library: Library
    load: Callable[[Path, Path], str]
    another: str


ALL = (
    Loaded(KERNEL, lambda path, at: kernel.load(path, at).missing, "kernel.c"),
    Loaded(PIXELS, lambda path, at: pixels_library.load(path, at).missing, "csrc/"),
    Loaded(LOOPS, lambda path, at: loops.load(path, at).missing, "loops.c"),
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with nothing but the sources in C."""
    for library in LIBRARIES:
        source, place = ROOT / library.sources, tmp_path / library.sources
        place.parent.mkdir(parents=True)
        if source.is_dir():
            shutil.copytree(source, place)
        else:
            shutil.copyfile(source, place)
    return tmp_path


@pytest.fixture
def compiler() -> None:
    """CI must have one."""
    if shutil.which("cc") is None:
        told = "no C compiler: install one, and run `make setup`"
        if os.environ.get("CI"):
            pytest.fail(told)
        pytest.skip(told)


def _hook(root: Path) -> BuildHookInterface[BuilderConfig]:
    """As hatchling finds it: the file is run, and is no module that could be imported."""
    script = str(ROOT / "dataplane" / "build_kernels.py")
    made = load_plugin_from_script(script, "build_kernels", BuildHookInterface, "build_hook")
    assert made.__name__ == BuildKernels.__name__
    return made(str(root), {}, None, None, str(root), "wheel", None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("which", ALL)
def test_the_sources_compile_without_a_warning(
    project: Path, which: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CFLAGS", "-O1 -Werror -Wpedantic -Wshadow")
    library = which.library
    before = sorted((project / library.path).parent.iterdir())
    compile_library(library.sources_in(project), project / library.path)
    assert which.load(project / library.path, project / library.sources) == ""
    assert sorted((project / library.path).parent.iterdir()) == sorted(
        [*before, project / library.path]
    )


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("which", ALL)
def test_a_library_of_other_sources_is_not_used(
    project: Path, which: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CFLAGS", "-O0")
    library = which.library
    sources = library.sources_in(project)
    compile_library(sources, project / library.path)
    with sources[-1].open("a") as source:
        source.write("\n")
    missing = which.load(project / library.path, project / library.sources)
    assert f"was made from another {which.another}" in missing


@pytest.mark.parametrize("which", ALL)
def test_what_is_no_library_is_not_used(project: Path, which: Loaded) -> None:
    path, sources = project / which.library.path, project / which.library.sources
    assert "no C compiler" in which.load(path, sources)
    path.write_bytes(b"something else")
    assert which.load(path, sources).startswith(f"{path.name} cannot be loaded")


@pytest.mark.usefixtures("compiler")
def test_a_build_has_the_libraries_and_the_platform_in_its_name(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CFLAGS", "-O0")
    build: dict[str, Any] = {"artifacts": []}
    _hook(project).initialize("standard", build)
    assert build["artifacts"] == [
        "dataplane/node/libkernel.so",
        "dataplane/transforms/libpixels.so",
        "dataplane/plan/libloops.so",
    ]
    assert build["pure_python"] is False
    assert build["tag"].startswith("py3-none-linux_")


@pytest.mark.parametrize("compiler_name", ["false", "no-such-compiler-anywhere"])
def test_a_build_without_a_compiler_says_so_and_has_no_library(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compiler_name: str,
) -> None:
    monkeypatch.setenv("CC", compiler_name)
    for library in LIBRARIES:
        (project / library.path).write_bytes(b"of an older build")
    build: dict[str, Any] = {"artifacts": []}
    _hook(project).initialize("standard", build)
    assert build == {"artifacts": []}
    assert not any((project / library.path).exists() for library in LIBRARIES)
    told = "".join("".join(capsys.readouterr()).split())
    for library in LIBRARIES:
        said = f"{library.sources} is not compiled, {library.instead} takes its place"
        assert said.replace(" ", "") in told
