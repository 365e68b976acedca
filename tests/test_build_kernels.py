"""The C sources compile and are found again, and what cannot be compiled says what to do."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin.utils import load_plugin_from_script
from kernels import without

from dataplane.base import bytecode, compiled
from dataplane.base.build_kernels import (
    FOOTER,
    KERNEL,
    LIBRARIES,
    LOOPS,
    PIXELS,
    RECEIVE,
    ZIG,
    BuildKernels,
    Library,
    NotCompiled,
    compile_library,
)
from dataplane.base.compiled import Signature
from dataplane.client.launch import node_command, start_node
from dataplane.formats import parquet_footers
from dataplane.model.errors import ConfigError
from dataplane.plan import loops
from dataplane.rpc.messages import DatasetSource
from dataplane.store import receiving
from dataplane.transforms import pixels_library
from dataplane.worker import kernel

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A library, how it is loaded (path, sources -> what is wrong), and its message."""

    library: Library
    load: Callable[[Path, Path], str]
    another: str


def _needed(crc_function: str, signatures: Mapping[str, Signature]) -> Callable[[Path, Path], str]:
    """As a library without which nothing works is loaded: the error says what to do."""

    def load(path: Path, sources: Path) -> str:
        try:
            compiled.load(path, sources, crc_function, signatures)
        except ConfigError as error:
            return str(error)
        return ""

    return load


ALL = (
    Loaded(KERNEL, _needed("gather_source_crc", kernel._SIGNATURES), "kernel.c"),
    Loaded(PIXELS, _needed("pixels_source_crc", pixels_library._SIGNATURES), "transforms/"),
    Loaded(LOOPS, _needed("loops_source_crc", loops._SIGNATURES), "loops.c"),
    Loaded(
        FOOTER,
        _needed("parquet_facts_source_crc", parquet_footers._SIGNATURES),
        "parquet_facts.c",
    ),
    Loaded(RECEIVE, _needed("receive_source_crc", receiving._SIGNATURES), "receive.c"),
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with nothing but the sources in C."""
    for library in LIBRARIES:
        for source in library.sources_in(ROOT):
            place = tmp_path / source.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
    return tmp_path


@pytest.fixture
def compiler() -> None:
    """A compiler and libjpeg-turbo's headers, which CI must have."""
    if pixels_library.maker().missing or shutil.which("cc") is None:
        without("no C compiler, or no headers of libjpeg-turbo")


def _hook(root: Path) -> BuildHookInterface[BuilderConfig]:
    """As hatchling finds it: the file is run, and is no module that could be imported."""
    script = str(ROOT / "dataplane" / "base" / "build_kernels.py")
    made = load_plugin_from_script(script, "build_kernels", BuildHookInterface, "build_hook")
    assert made.__name__ == BuildKernels.__name__
    return made(str(root), {}, None, None, str(root), "wheel", None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("which", ALL)
def test_sources_compile_without_a_warning_to_a_library_of_no_other_sources(
    project: Path, which: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CFLAGS", "-O1 -Werror -Wpedantic -Wshadow")
    library = which.library
    before = sorted((project / library.path).parent.iterdir())
    compile_library(library, project)
    assert which.load(project / library.path, project / library.sources) == ""
    assert sorted((project / library.path).parent.iterdir()) == sorted(
        [*before, project / library.path]
    )
    with library.sources_in(project)[-1].open("a") as source:
        source.write("\n")
    missing = which.load(project / library.path, project / library.sources)
    assert f"was compiled from a different {which.another}" in missing


@pytest.mark.parametrize("which", ALL)
def test_what_is_no_library_is_not_used(project: Path, which: Loaded) -> None:
    path, sources = project / which.library.path, project / which.library.sources
    assert f"{path} is missing" in which.load(path, sources)
    path.write_bytes(b"something else")
    message = which.load(path, sources)
    assert message.startswith(f"{path.name} cannot be loaded")
    for way in (": install Dataplane again", "wheel", "pip install", "make -B setup"):
        assert way in message


@pytest.mark.parametrize("compiler_name", ["false", "no-such-compiler-anywhere"])
def test_a_build_without_a_compiler_fails_and_says_why(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compiler_name: str,
) -> None:
    monkeypatch.setenv("CC", compiler_name)
    (project / KERNEL.path).write_bytes(b"of an older build")
    with pytest.raises(SystemExit):
        _hook(project).initialize("standard", {"artifacts": []})
    assert not (project / KERNEL.path).exists()
    message = f"{KERNEL.sources} is not compiled, and Dataplane needs it"
    assert message.replace(" ", "") in "".join("".join(capsys.readouterr()).split())


def test_a_wheel_for_other_machines_has_the_libjpeg_and_the_licence_of_pillow(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pillow = project / "pillow"
    (pillow / "pillow.libs").mkdir(parents=True)
    monkeypatch.setenv("PORTABLE_WHEEL", str(pillow))
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-aarch64")
    compiler = project / "compiler"  # it writes its arguments instead of a library
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo "$@" > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    build: dict[str, Any] = {"artifacts": [], "force_include": {}}
    with pytest.raises(SystemExit):
        _hook(project).initialize("standard", build)
    libjpeg = pillow / "pillow.libs" / "libjpeg-80045241.so.62.4.0"
    libjpeg.touch()
    licence = pillow / "pillow-13.0.0.dist-info" / "licenses" / "LICENSE"
    licence.parent.mkdir(parents=True)
    licence.touch()
    _hook(project).initialize("standard", build)
    assert build["tag"] == "py3-none-linux_aarch64"
    assert build["force_include"] == {str(licence): "dataplane/transforms/libjpeg.LICENSE"}
    assert str(libjpeg) in (project / PIXELS.path).read_text().split()
    assert str(libjpeg) not in (project / KERNEL.path).read_text().split()


def test_without_a_compiler_the_one_of_ziglang_is_installed_and_taken(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is not installed, which says how to."""
    monkeypatch.setenv("PATH", str(project))
    monkeypatch.delenv("CC", raising=False)
    hook = _hook(project)
    assert hook.dependencies() == [ZIG]
    monkeypatch.setattr(sys.modules[compile_library.__module__], "_ZIG_CC", (
        sys.executable, "-I", "-S", "-m", "ziglang", "cc",
    ))  # fmt: skip
    with pytest.raises(NotCompiled, match=f"install a C compiler.*pip install {ZIG}"):
        compile_library(KERNEL, project)
    monkeypatch.setenv("CC", "mine")
    assert hook.dependencies() == []


# A compiler that finds no header of a library, and one that finds a wrong header.
_NO_HEADER = "#!/bin/sh\necho 'jpeg.h:9:10: fatal error: jpeglib.h: No such file' >&2\nexit 1\n"
_WITHOUT_LIBJPEG = _NO_HEADER.replace(
    "echo", 'case "$*" in *WITHOUT_LIBJPEG*) exec cc "$@" -O0;; esac\necho', 1
)
_NO_LIBRARY = "#!/bin/sh\necho '/usr/bin/ld: cannot find -ljpeg' >&2\nexit 1\n"
_LINKS_NO_LIBJPEG = (
    f'#!/bin/sh\ncase "$*" in *-ljpeg*) {_NO_LIBRARY.splitlines()[1]}; exit 1;; esac\n'
    'exec cc "$@" -O0\n'
)
_OTHER_LIBJPEG = "#!/bin/sh\necho 'jpeg.h:14:2: error: #error \"the headers\"' >&2\nexit 1\n"


@pytest.mark.parametrize("script", [_NO_HEADER, _NO_LIBRARY, _OTHER_LIBJPEG])
def test_missing_headers_are_one_line_that_says_what_to_install(
    project: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    compiler = project / "compiler"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(NotCompiled) as caught:
        compile_library(PIXELS, project)
    assert "\n" not in str(caught.value)
    for package in ("libjpeg-dev", "libjpeg-turbo-devel", "conda-forge"):
        assert package in str(caught.value)
    with pytest.raises(NotCompiled, match=r"error|-ljpeg") as caught:
        compile_library(KERNEL, project)
    assert "libjpeg-dev" not in str(caught.value)


@pytest.mark.usefixtures("compiler")
def test_a_build_without_libjpeg_goes_on_and_says_that_pillow_decodes_jpegs(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = project / "compiler"
    compiler.write_text(_LINKS_NO_LIBJPEG)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    build: dict[str, Any] = {"artifacts": []}
    _hook(project).initialize("standard", build)
    assert build["artifacts"] == [
        "dataplane/worker/libkernel.so",
        "dataplane/transforms/libpixels.so",
        "dataplane/plan/libloops.so",
        "dataplane/formats/libparquet_facts.so",
        "dataplane/store/libreceive.so",
    ]
    assert build["pure_python"] is False
    assert build["tag"].startswith("py3-none-linux_")
    assert "Pillow decodes JPEGs".replace(" ", "") in "".join("".join(capsys.readouterr()).split())
    made = pixels_library.load(project / PIXELS.path, project / PIXELS.sources)
    assert made.missing == "libpixels.so: compiled without the headers of libjpeg-turbo"
    assert made.name.startswith("kernels ")
    monkeypatch.setenv("PORTABLE_WHEEL", "1")
    with pytest.raises(SystemExit):
        _hook(project).initialize("standard", build)


@pytest.mark.usefixtures("compiler")
def test_a_libjpeg_of_conda_is_found_and_loaded_from_there(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CFLAGS", "-O0")
    environment = tmp_path / "conda"
    (environment / "include").mkdir(parents=True)
    (environment / "include" / "jpeglib.h").write_text('#error "the one of conda"\n')
    monkeypatch.setenv("CONDA_PREFIX", str(environment))
    with pytest.raises(NotCompiled, match="libjpeg-dev"):
        compile_library(PIXELS, project)
    # Its header is the platform's now, and its library a copy of the platform's.
    (environment / "include" / "jpeglib.h").write_text("#include_next <jpeglib.h>\n")
    path = project / PIXELS.path
    (environment / "lib").mkdir()
    own = ["ldd", ROOT / PIXELS.path]
    linked = subprocess.run(own, check=True, capture_output=True, text=True).stdout
    (found,) = [line.split()[2] for line in linked.splitlines() if "libjpeg" in line]
    (name,) = [line.split()[0] for line in linked.splitlines() if "libjpeg" in line]
    shutil.copy(found, environment / "lib" / name)
    (environment / "lib" / "libjpeg.so").symlink_to(name)
    compile_library(PIXELS, project)
    linked = subprocess.run(["ldd", path], check=True, capture_output=True, text=True).stdout
    assert str(environment / "lib" / name) in linked
    assert pixels_library.load(path, project / PIXELS.sources).missing == ""


def test_setup_says_what_it_could_not_compile(tmp_path: Path) -> None:
    """`make setup` asks for it in a checkout: here in a copy of one."""
    package = tmp_path / "dataplane"
    shutil.copytree(
        ROOT / "dataplane", package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    compiler = tmp_path / "compiler"
    compiler.write_text(_WITHOUT_LIBJPEG)
    compiler.chmod(0o755)
    environment = os.environ | {"CC": str(compiler), "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "dataplane.base.build_kernels"],
        cwd=tmp_path, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 1
    lines = ran.stderr.splitlines()
    assert sum("Dataplane needs it" in line for line in lines) == 4
    (line,) = [line for line in lines if "Pillow decodes JPEGs" in line]
    assert "libjpeg-dev" in line
    assert all(line.endswith("; then run make -B setup") for line in lines)
    assert [path.name for path in package.rglob("*.so")] == ["libpixels.so"]


IMPORT = """
import sys
from dataplane.base import bytecode
bytecode.keep_in(sys.argv[1])
sys.path.insert(0, sys.argv[2])
import module
print(module.value)
"""


def _imported(folder: Path, source: str) -> str:
    """What a process sees that imports this module. Its file has the same time and size always."""
    path = folder / "module.py"
    path.write_text(source)
    os.utime(path, (0, 0))
    command = [sys.executable, "-B", "-c", IMPORT, str(folder / "kept"), str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_kept_bytecode_is_used_for_the_very_source_that_it_was_made_from(tmp_path):
    assert _imported(tmp_path, "value = 1") == "1"
    (kept,) = (tmp_path / "kept").rglob("module.*.pyc")
    content = kept.read_bytes()
    assert _imported(tmp_path, "value = 2") == "2"
    assert kept.read_bytes() != content
    kept.write_bytes(
        content[:16] + kept.read_bytes()[16:]
    )  # that of the other source, as if it fit
    assert _imported(tmp_path, "value = 1") == "2"
    assert not (tmp_path / "__pycache__").exists()


@pytest.fixture
def nothing_is_kept(tmp_path, monkeypatch):
    """A Python that has no bytecode and writes none."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def test_a_folder_is_needed_only_where_python_keeps_nothing(nothing_is_kept, monkeypatch):
    assert bytecode.is_kept_nowhere()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not bytecode.is_kept_nowhere()


def test_a_folder_that_another_user_can_change_is_not_used(tmp_path):
    mine = tmp_path / "mine"
    folder = bytecode.own_folder(str(mine))
    assert folder == str(mine / "bytecode")
    mine.chmod(0o770)
    assert not bytecode.own_folder(str(mine))
    mine.chmod(0o1777)  # as /tmp: nobody can rename what is ours
    assert bytecode.own_folder(str(mine)) == folder
    Path(folder).chmod(0o702)
    assert not bytecode.own_folder(str(mine))
    Path(folder).rmdir()
    (tmp_path / "elsewhere").mkdir()
    Path(folder).symlink_to(tmp_path / "elsewhere")
    assert not bytecode.own_folder(str(mine))
    (tmp_path / "file").touch()
    assert not bytecode.own_folder(str(tmp_path / "file"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_of_another_user_is_not_used(tmp_path):
    folder = Path(bytecode.own_folder(str(tmp_path)))
    os.chown(folder, 4711, 4711)
    assert not bytecode.own_folder(str(tmp_path))
    os.chown(folder, 0, 0)
    os.chown(tmp_path, 4711, 4711)
    assert not bytecode.own_folder(str(tmp_path))


def test_an_embedded_node_keeps_its_bytecode_where_python_keeps_none(
    nothing_is_kept, tmp_path, monkeypatch
):
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONHASHSEED", "1")  # so it is started by exec
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{tmp_path}")
        listener.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trainer:
            trainer.connect(f"\0{tmp_path}")
            node = start_node(listener, node_command(), DatasetSource((str(tmp_path),)))
        assert node.process.wait() == 0  # its trainer has hung up
        node.close()
    own = Path(bytecode.__file__).parents[1]
    kept = tmp_path / "cache" / "bytecode" / own.relative_to("/") / "node"
    assert list(kept.glob("server.*.pyc"))
